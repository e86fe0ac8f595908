"""Spool: deltas on disk as they came, coded, from their first chunk until no kept version could
need them again.

    spool/client@incarnation@base@sequence.frames         being received, pending, or merged in a
                                                          version above the oldest kept
    quarantine/client@incarnation@base@sequence.frames    not finite, or removed from the run; kept
                                                          for a person to look at

A file in spool/ means nothing by itself: the ledger says whether its delta was acknowledged. So a
crash before the ledger line leaves a file that recovery removes, and the client, which keeps a
delta until it is acknowledged, offers it again.

Frames arrive in order. Each is checked when it arrives, as the kind of the run's deltas has it
(fsl_async.store.delta_kind), and only one is ever decoded at a time. A delta that was interrupted
goes on at `next_chunk`, within the life of the process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import define

from fsl_async.store.errors import FrameRefused, StoreError
from fsl_async.store.flat_file import check_content
from fsl_async.store.frame_file import FrameWriter, each_frame, frame_places
from fsl_async.store.records import file_name, key_of_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from fsl_async.roles.sync.delta import Delta, DeltaKey, StoredDelta
    from fsl_async.store.delta_kind import Checked, DeltaKind
    from fsl_async.store.files import BytesLike, Files
    from fsl_async.store.manifest import Manifest


@define
class Part:
    """A delta that is being received, or is complete and waits for its ledger line."""

    writer: FrameWriter
    delta: Delta
    squared_norm: float = 0.0
    durable: bool = False
    weight: float | None = None
    """What it would weigh in the version after `version`."""
    version: int = -1

    @property
    def norm(self) -> float:
        """Euclidean norm of what has arrived; not finite when a value is not finite."""
        return math.sqrt(self.squared_norm)


class Spool:
    """The two folders. Every method that touches them raises OSError as the system gives it."""

    def __init__(self, files: Files, run_dir: Path, kind: DeltaKind) -> None:
        self._files = files
        self._kind = kind
        self._directory = run_dir / "spool"
        self._aside = run_dir / "quarantine"
        self._parts: dict[DeltaKey, Part] = {}

    def make_directories(self) -> None:
        """Create both folders; their names are durable once the run directory is synced."""
        self._files.make_directory(self._directory)
        self._files.make_directory(self._aside)

    # --- receiving ---

    def begin(self, delta: Delta) -> bool:
        """Start receiving, or go on when the same delta was begun before; whether it starts."""
        key = delta.key
        part = self._parts.get(key)
        if part is not None and part.delta == delta:
            return False
        path = self._directory / file_name(key)
        self._parts.pop(key, None)  # creating the writer empties the file
        self._parts[key] = Part(FrameWriter(self._files, path), delta)
        return True

    def part(self, key: DeltaKey) -> Part:
        """The delta that is being received; StoreError when it was not begun."""
        if key not in self._parts:
            raise StoreError(f"delta {key.text} was not begun; call spool_begin first")
        return self._parts[key]

    def next_chunk(self, key: DeltaKey) -> int:
        """The chunk that `write` expects next; 0 for a delta that was not begun."""
        part = self._parts.get(key)
        return part.writer.frames if part else 0

    def write(
        self, key: DeltaKey, index: int, frame: BytesLike, manifest: Manifest
    ) -> Checked | None:
        """Check and append a frame; returns what it holds. One that is there already is left alone:
        None.
        """
        part = self.part(key)
        if index < part.writer.frames:
            return None
        if index > part.writer.frames:
            raise FrameRefused(
                f"chunk {index} of delta {key.text} came before chunk {part.writer.frames}"
            )
        try:
            checked = self._kind.check(manifest, index, frame)
        except FrameRefused as error:
            raise FrameRefused(f"delta {key.text}: {error}") from error
        part.writer.append(frame)
        part.squared_norm += checked.squared_norm
        return checked

    def seal(self, key: DeltaKey, manifest: Manifest) -> Part:
        """Make a complete delta durable. When that fails the delta is given up: it must be sent
        again.

        After a failed fsync(2) the system may have dropped what it could not write, and a second
        call would report success for data that is gone.
        """
        part = self.part(key)
        wanted = self._kind.frames(manifest)
        if part.writer.frames != wanted:
            raise StoreError(
                f"delta {key.text} has {part.writer.frames} of {wanted} chunks; "
                f"finish it when all have come"
            )
        if not part.durable:
            try:
                part.writer.sync()
                self._files.sync_directory(self._directory)
            except OSError:
                self._parts.pop(key)
                raise
            part.durable = True
        return part

    def done(self, key: DeltaKey) -> None:
        """The ledger has the delta: nothing is being received any more."""
        self._parts.pop(key, None)

    def abort(self, key: DeltaKey) -> None:
        """Forget a delta that is being received, and its file; fine when there is none."""
        part = self._parts.pop(key, None)
        if part is not None:
            self._files.remove(part.writer.path)

    def abort_others(self, key: DeltaKey) -> None:
        """Forget what the client of `key` began before and will not go on with: it sends one delta
        at a time.
        """
        for other in [one for one in self._parts if one.client == key.client and one != key]:
            self.abort(other)

    # --- acknowledged deltas ---

    def frames(
        self, key: DeltaKey, count: int, indices: Sequence[int] | None = None
    ) -> Iterator[bytes]:
        """The `count` frames of a delta, or these of them, in order, one in memory at a time."""
        return each_frame(self._files, self._directory / file_name(key), count, indices)

    def holds(self, delta: StoredDelta) -> bool:
        """Whether the delta's file is in the spool; its content is not read."""
        return file_name(delta.key) in self._files.names(self._directory)

    def check(self, delta: StoredDelta) -> str | None:
        """What is wrong with the delta's file, or None. Reads all of it."""
        path = self._directory / file_name(delta.key)
        return check_content(self._files, path, delta.bytes, delta.sha256)

    def is_complete(self, key: DeltaKey, manifest: Manifest) -> bool:
        """Whether the delta's file has all of its frames; their content is not read."""
        count = self._kind.frames(manifest)
        try:
            frame_places(self._files, self._directory / file_name(key), count)
        except StoreError:
            return False
        return True

    def set_aside(self, key: DeltaKey) -> None:
        """Move the delta's file into quarantine; fine when it is there already or nowhere."""
        name = file_name(key)
        if name in self._files.names(self._directory):
            self._files.rename(self._directory / name, self._aside / name)
            self._files.sync_directory(self._aside)
            self._files.sync_directory(self._directory)

    def bring_back(self, key: DeltaKey) -> None:
        """Undo `set_aside`, durably; fine when the file is in the spool already."""
        name = file_name(key)
        if name not in self._files.names(self._directory):
            self._files.rename(self._aside / name, self._directory / name)
            self._files.sync_directory(self._directory)
            self._files.sync_directory(self._aside)

    def present(self) -> set[DeltaKey]:
        """The keys of all files in the spool."""
        return {key for name in self._files.names(self._directory) if (key := key_of_file(name))}

    def prune(self, keep: Collection[DeltaKey]) -> None:
        """Remove every file of the spool that is neither in `keep` nor being received."""
        for name in self._files.names(self._directory):
            key = key_of_file(name)
            if key not in keep and key not in self._parts:
                self._files.remove(self._directory / name)
