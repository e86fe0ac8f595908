"""Run directory: the files of one open run, and the facts that they add up to.

After a failed write, two things may be outstanding, and come before anything else is written:

    an unconfirmed version    its folder may exist although its commit failed: it is removed,
                              because after a crash it would count as a version
    lines of versions         the version exists, but its line could not be written
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.files.files import Files
from fsl_async.store.book.book import Book
from fsl_async.store.book.records import to_fact
from fsl_async.store.deltas.spool import Spool
from fsl_async.store.disk.chunk_pool import ChunkPool
from fsl_async.store.disk.ledger import Ledger
from fsl_async.store.errors import ManifestError, StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.versions.checkpoint import Checkpoints
from fsl_async.store.versions.kept_versions import KeptVersions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from fsl_async.roles.sync.delta import MergedDelta
    from fsl_async.store.book.records import VersionRecord
    from fsl_async.store.settings import StoreSettings

LEDGER_FILE = "ledger.jsonl"
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 256 * 1024 * 1024


class RunDirectory:
    """The parts of a run directory. Methods raise OSError unchanged.

    report: receives one line about each damage that was repaired, or that costs only bandwidth.
    gone: receives the line of `Ledger.check` when the run cannot go on. reuse: as in `Book`; None:
    as the settings say.
    """

    def __init__(
        self,
        files: Files,
        path: Path,
        settings: StoreSettings,
        *,
        report: Callable[[str], None],
        gone: Callable[[str], None] = lambda _: None,
        reuse: int | None = None,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files = files
        self.path = path
        self.settings = settings
        self.wall_clock = wall_clock
        self.clock = clock
        self.pool = ChunkPool(settings.threads)
        self.report = report
        self.ledger = Ledger(files, path / LEDGER_FILE, wall_clock, clock, gone=gone)
        reuse = settings.reuse if reuse is None else reuse
        self.book = Book(settings.remembered_versions, settings.history, reuse)
        self.checkpoints = Checkpoints(files, path)
        self.spool = Spool(files, path, settings.kind)
        self.kept = KeptVersions(files, self.checkpoints, report)
        self.model: Manifest | None = None
        """The run's tensors; None before version 0."""
        self.lost: list[str] = []
        """One line about each acknowledged delta whose file is missing or damaged."""
        self.aside: list[str] = []
        """Keys of deltas that a rollback has quarantined."""
        self.latest: list[MergedDelta] = []
        """Spooled deltas that the next version may use again, as the start found them."""
        self._unconfirmed: int | None = None
        self._outstanding: list[VersionRecord] = []

    @property
    def manifest(self) -> Manifest:
        """The run's tensors; StoreError before version 0."""
        if self.model is None:
            raise StoreError(
                "the run has no weights yet; a client must publish its initial ones first"
            )
        return self.model

    # --- facts ---

    def record(self, fact: str, members: Mapping[str, Any]) -> None:
        """Make a fact durable, then apply it to the book."""
        self.write_outstanding()
        self.book.apply(self.ledger.append(fact, members))

    def begin_version(self, version: int) -> None:
        """Note that the version's folder may appear; it counts only after `confirm_version`."""
        self._unconfirmed = version

    def confirm_version(self, record: VersionRecord) -> None:
        """Apply a version that exists to the book; `write_outstanding` writes its line."""
        self._unconfirmed = None
        self.book.apply({"fact": "version", **record.to_fact()})
        self._outstanding.append(record)

    def write_outstanding(self) -> None:
        """Remove an unconfirmed version, and write outstanding lines."""
        if self._unconfirmed is not None:
            self.checkpoints.retract(self._unconfirmed)
            self._unconfirmed = None
        while self._outstanding:
            fact = self.ledger.append("version", self._outstanding[0].to_fact())
            self.book.line_written(fact)
            self._outstanding.pop(0)

    def close(self) -> None:
        """End the threads, try to write outstanding lines, and release the ledger."""
        self.pool.close()
        if self._outstanding:
            with suppress(OSError, StoreError):
                self.write_outstanding()
        with suppress(OSError):
            self.ledger.close()

    # --- the model ---

    def write_model(self, manifest: Manifest) -> None:
        """Write the run's tensors, durably; no version refers to them yet."""
        members = {"format": 1, "tensors": manifest.to_wire(), "frozen": manifest.frozen_to_wire()}
        self.files.write_whole(self.path / MANIFEST_FILE, to_checksummed(members) + b"\n")
        self.files.sync_directory(self.path)

    # --- deltas ---

    def retire(self, oldest_kept: int) -> list[Path]:
        """Finish moves into quarantine; return old versions and unneeded spool files, to remove.

        oldest_kept: versions below it are old. A rollback goes back to it at most, so only deltas
        merged above it can be pending again. A rule may use older ones again.
        """
        self.finish_quarantine()
        old = self.checkpoints.retire(oldest_kept)
        wanted = {delta.key for delta in self.book.merged_after(oldest_kept)}
        wanted |= {delta.key for delta in self.book.latest.needed_from(oldest_kept)}
        return old + self.spool.retire(wanted | self.book.pending.keys())

    def finish_quarantine(self) -> None:
        """Move the files of quarantined deltas that are still in the spool."""
        aside = self.book.quarantined.keys() | self.book.held.keys()
        for key in sorted(self.spool.present() & aside):
            self.spool.quarantine(key, self.book.held)

    def quarantine_unknown(self) -> None:
        """Move complete spooled deltas that are not in the ledger to quarantine.

        A lost line may have acknowledged them.
        """
        if self.model is None:
            return
        unknown = sorted(key for key in self.spool.present() if self.book.known(key) is None)
        for key in [key for key in unknown if self.spool.is_complete(key, self.model)]:
            self.spool.quarantine(key, self.book.held)
            self.report(f"delta {key.text} is in no line of the ledger; moved to quarantine")

    def check_pending(self) -> None:
        """Verify the spool file of every pending delta; record missing and damaged ones as lost."""
        for delta in list(self.book.pending.values()):
            problem = self.spool.check(delta)
            if problem:
                reason = f"its spool file {problem}"
                members = {**to_fact(delta), "reason": reason, "lost": True}
                self.book.apply(self.ledger.append("quarantined", members))
                self.lost.append(f"acknowledged delta {delta.key.text} is lost: {reason}")

    def check_latest(self) -> None:
        """Verify the spool file of every merged delta that the next version may use again."""
        for one in self.book.latest.at(self.book.version).values():
            problem = self.spool.check(one.stored)
            if problem:
                text = f"delta {one.stored.key.text} is not used again: its spool file {problem}"
                self.report(text)
            else:
                self.latest.append(one.merged)


def read_manifest(files: Files, run_dir: Path) -> Manifest:
    """Read the run's model. StoreError: the file is missing or damaged."""
    path = run_dir / MANIFEST_FILE
    advice = "restore it from a backup of the run directory"
    try:
        members = from_checksummed(files.read_whole(path, MAX_MANIFEST_BYTES).rstrip())
    except FileNotFoundError:
        raise StoreError(f"{path} is missing; {advice}") from None
    if members is None:
        raise StoreError(f"{path} does not match its checksum; {advice}")
    try:
        return Manifest.from_wire(members.get("tensors"), members.get("frozen"))
    except ManifestError as error:
        raise StoreError(f"{path}: {error}; {advice}") from error
