"""Snapshots: makes versions whole, in a thread, from vectors that do not change between commits.

A version of a resident run is its coded change and its record. A snapshot adds its vectors:

    checkpoints/tmp-whole-v00000012/   the vectors, written and synced
    checkpoints/v00000012/             they are renamed into it, and the folder is synced
    checkpoints/v00000012/manifest.json    is replaced by one that lists them: now it is whole

Vectors that no manifest lists do no harm: the next start replaces them or leaves them alone.

Before the vectors change, the store calls `make_way`: an unfinished snapshot is given up. Errors of
the disk never end a run: the snapshot is dropped, one line says so, and the spool is kept until
another succeeds.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, evolve, field

from fsl_async.errors import disk_words
from fsl_async.store.disk.chunk_files import DIGEST_CHARACTERS, FlatWriter
from fsl_async.store.disk.folders import MANIFEST
from fsl_async.store.versions.checkpoint import WEIGHTS, StoredFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from fsl_async.files.files import Files
    from fsl_async.store.model.manifest import Manifest
    from fsl_async.store.vectors.vectors import Vector
    from fsl_async.store.versions.checkpoint import Checkpoint, Checkpoints


SYNC_BYTES = 16 * 1024 * 1024
"""Written of a vector before it is synced.

The fsync of other files waits for dirty pages, so there should be few. The page cache does not need
them: a checkpoint is read at the next start only.
"""


class _GivenUpError(Exception):
    """The vectors are about to change."""


@define
class _Job:
    """One snapshot. `released`: it does not read the vectors."""

    checkpoint: Checkpoint
    thread: threading.Thread | None = None
    released: threading.Event = field(factory=threading.Event)
    give_up: bool = False
    hurry: bool = False
    made: Checkpoint | None = None
    planned: Callable[[], None] | None = None
    """Writes it, where its time has not come."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.planned is None and (self.thread is None or not self.thread.is_alive())

    def begin(self) -> None:
        """Write it, unless that was done or given up."""
        planned, self.planned = self.planned, None
        if planned is not None:
            planned()

    def wait(self) -> None:
        """Wait for its end."""
        self.begin()
        if self.thread is not None:
            self.thread.join()


class Snapshots:
    """Snapshots of one open run, one at a time. All methods belong to the store's thread.

    later: calls a function in the store's thread, now or when it is time to write, instead of a
    thread.
    """

    def __init__(
        self,
        files: Files,
        checkpoints: Checkpoints,
        manifest: Manifest,
        *,
        bytes_per_s: float,
        report: Callable[[str], None],
        later: Callable[[Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._checkpoints = checkpoints
        self._manifest = manifest
        self._bytes_per_s = bytes_per_s
        self._report = report
        self._later = later
        self._clock = clock
        self._job: _Job | None = None
        self._made: list[Checkpoint] = []
        self._left: dict[Path, None] = {}
        """Files and folders to remove, in order. No other file ever gets such a name."""
        self._reported: set[Path] = set()

    def begin(
        self,
        checkpoint: Checkpoint,
        vectors: Mapping[str, Vector],
    ) -> None:
        """Start to make a version whole; not while the snapshot before is being synced.

        vectors: of that version, by the names of their files; they must not change before
        `make_way` has returned.
        """
        self._collect()
        if self._job is not None:
            return
        job = self._job = _Job(checkpoint)
        if self._later is not None:
            job.planned = lambda: self._run(job, vectors)
            self._later(job.begin)
            return
        job.thread = threading.Thread(
            target=self._run, args=(job, dict(vectors)), name="snapshot", daemon=True
        )
        try:
            job.thread.start()
        except RuntimeError as error:  # the system gives no thread
            self._job = None
            self._report(f"version {checkpoint.record.version} has no checkpoint yet: {error}")

    def remove_later(self, paths: Iterable[Path]) -> None:
        """Remove files and folders when the next snapshot begins, or at the end."""
        self._left.update(dict.fromkeys(paths))

    def make_way(self) -> None:
        """Return when the vectors may change: an unfinished snapshot is given up."""
        if self._job is not None:
            self._job.give_up = True
            if self._job.planned is not None:
                self._job.planned = None
                self._job.released.set()
            self._job.released.wait()

    def finish(self, checkpoint: Checkpoint, vectors: Mapping[str, Vector]) -> None:
        """Make a version whole, and return when it is, or when the disk does not let it be."""
        version = checkpoint.record.version
        if self._job is not None:
            self._job.hurry = True
            self._collect(wait=True)
        if any(made.record.version == version for made in self._made):
            return
        self.begin(checkpoint, vectors)
        if self._job is not None:
            self._job.hurry = True
        self._collect(wait=True)

    def take(self) -> list[Checkpoint]:
        """Return the versions that have become whole since the last call."""
        self._collect()
        made, self._made = self._made, []
        return made

    def _collect(self, *, wait: bool = False) -> None:
        """Take over the result of a snapshot that has ended. wait: for its end."""
        job = self._job
        if job is None or (not job.is_done and not wait):
            return
        job.wait()
        self._job = None
        if job.made is not None:
            self._made.append(job.made)

    def close(self) -> None:
        """Give up what is unfinished."""
        self.make_way()
        self._collect(wait=True)
        self._remove_left()

    def _remove_left(self) -> None:
        for path in list(self._left):
            try:
                self._files.remove_any(path)
            except OSError as error:
                if path not in self._reported:
                    self._reported.add(path)
                    self._report(f"{path} cannot be removed yet: {disk_words(error)}")
            else:
                self._left.pop(path, None)

    # --- the thread ---

    def _run(self, job: _Job, vectors: Mapping[str, Vector]) -> None:
        version = job.checkpoint.record.version
        folder = self._checkpoints.temporary(f"whole-v{version:08d}")
        job.released.set()
        self._remove_left()  # takes half a second for gigabytes, so it is no part of a commit
        job.released.clear()
        try:
            stored = self._write(job, vectors, folder)
            if stored[WEIGHTS].digest[:DIGEST_CHARACTERS] != job.checkpoint.record.digest:
                self._report(
                    f"version {version} is not in memory as it was made: it gets no checkpoint; if"
                    " this comes again, test this machine's memory"
                )
                return
            job.made = self._publish(job.checkpoint, stored, folder)
        except _GivenUpError:
            pass
        except OSError as error:
            self._report(
                f"version {version} has no checkpoint yet: {disk_words(error)}; the spool is kept"
                " until one is written"
            )
        finally:
            job.released.set()
            self.remove_later([folder])
            self._remove_left()

    def _write(
        self, job: _Job, vectors: Mapping[str, Vector], folder: Path
    ) -> dict[str, StoredFile]:
        self._files.remove_tree(folder)
        self._files.make_directory(folder)
        writers: dict[str, FlatWriter] = {}
        written, begun_at = 0, self._clock()
        try:
            for name, vector in vectors.items():
                writer = writers[name] = FlatWriter(self._files, folder / name, self._manifest)
                for index in range(self._manifest.chunks):
                    self._wait_for_turn(job, written, begun_at)
                    start, stop = self._manifest.chunk_range(index)
                    writer.append(vector[start:stop])
                    writer.sync_some(SYNC_BYTES)
                    written += 4 * (stop - start)
            job.released.set()
            for writer in writers.values():
                writer.sync_some(1)
            return {
                name: StoredFile(*writer.sync(), writer.checks) for name, writer in writers.items()
            }
        finally:
            for writer in writers.values():
                writer.close()

    def _wait_for_turn(self, job: _Job, written: int, begun_at: float) -> None:
        """Return when the next chunk may be written. Raises _GivenUpError."""
        while True:
            if job.give_up:
                raise _GivenUpError
            if job.hurry or not self._bytes_per_s:
                return
            early_s = begun_at + written / self._bytes_per_s - self._clock()
            if early_s <= 0.0:
                return
            time.sleep(min(early_s, 0.05))

    def _publish(
        self, checkpoint: Checkpoint, stored: Mapping[str, StoredFile], folder: Path
    ) -> Checkpoint:
        path, made = checkpoint.path, {**checkpoint.files, **stored}
        entries: dict[str, Any] = {name: asdict(entry) for name, entry in made.items()}
        members = {**checkpoint.record.to_fact(), "files": entries}
        self._checkpoints.write_manifest(folder, members)
        for name in stored:
            self._files.rename(folder / name, path / name)
        self._files.sync_directory(path)
        self._files.rename(folder / MANIFEST, path / MANIFEST)
        self._files.sync_directory(path)
        return evolve(checkpoint, files=made)
