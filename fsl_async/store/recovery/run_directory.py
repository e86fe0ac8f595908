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

from attrs import asdict

from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.files.files import Files
from fsl_async.store.book.book import Book
from fsl_async.store.book.records import sum_fact, to_fact
from fsl_async.store.deltas.spool import Spool
from fsl_async.store.disk.chunk_pool import ChunkPool
from fsl_async.store.disk.ledger import Ledger
from fsl_async.store.errors import ManifestError, StoreError, disk
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.versions.checkpoint import Checkpoints
from fsl_async.store.versions.kept_versions import KeptVersions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from fsl_async.roles.sync.delta import DeltaKey, MergedDelta
    from fsl_async.roles.sync.progress import Decay
    from fsl_async.roles.sync.roster import Roster
    from fsl_async.store.book.records import VersionRecord
    from fsl_async.store.settings import StoreSettings

LEDGER_FILE = "ledger.jsonl"
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 256 * 1024 * 1024


class RunDirectory:
    """The parts of a run directory. Methods raise OSError unchanged, those of facts StoreError.

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

    def start_run(self, name: str) -> str:
        """Name the run, once; return its name, which is the first one it got."""
        if not self.book.run:
            with disk("cannot write the ledger"):
                self.record("run", {"run": name})
        return self.book.run

    def lease(
        self, name: str, limit: int, index: int | None = None, *, provisional: bool = False
    ) -> int | None:
        """Return the shard index of `name`, durably leased, or None when there is no free one.

        The index is its old one, else `index`, else the lowest free one below `limit`. provisional:
        the lease is provisional; another client that asks for this `index` may take it.
        """
        book = self.book
        held = book.leases.get(name)
        if held is not None and held < limit:
            if name in book.provisional and not provisional:
                self._book_lease(name, held, provisional=False)
            return held
        taken = {held for other, held in book.leases.items() if other not in book.provisional}
        used = set(book.leases.values())
        wanted = index is not None and 0 <= index < limit and index not in taken
        unused = (one for one in range(limit) if one not in used)
        free = index if wanted else next(unused, None)
        if free is not None:
            self._book_lease(name, free, provisional=provisional)
        return free

    def _book_lease(self, name: str, index: int, *, provisional: bool) -> None:
        fact: dict[str, Any] = {"name": name, "index": index}
        with disk(f"cannot write the shard of {name} to the ledger"):
            self.record("lease", fact | {"provisional": True} if provisional else fact)

    def record_decay(self, decay: Decay) -> None:
        """Record that learning rates fall from now on."""
        with disk("cannot write the decay to the ledger"):
            self.record("decay", asdict(decay))

    def record_sum(self, roster: Roster, survivors: Sequence[str]) -> None:
        """Record which sites a secure sum will be of, before they are asked to open it."""
        with disk("cannot write the sites of a sum to the ledger"):
            self.record("sum", sum_fact(roster, survivors))

    def position(self, name: str) -> dict[str, float]:
        """Return where a client's newest acknowledged delta ended in its data; empty without one.

        For any thread.
        """
        return dict(self.book.positions.get(name, {}))

    def record_incarnation(self, name: str, incarnation: int) -> None:
        """Record a client's newest incarnation, to detect older ones after a restart."""
        if self.book.incarnations.get(name, -1) < incarnation:
            with disk(f"cannot write the incarnation of {name} to the ledger"):
                self.record("incarnation", {"name": name, "incarnation": incarnation})

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

    def quarantine(self, key: DeltaKey, reason: str, *, held: bool = False) -> None:
        """Exclude a pending delta from merging, until `release` if `held`; its file is kept."""
        if key not in self.book.pending:
            raise StoreError(f"delta {key.text} is not pending, so it cannot be quarantined")
        with disk(f"cannot quarantine delta {key.text}"):
            fact = {**to_fact(self.book.pending[key]), "reason": reason}
            self.record("quarantined", fact | {"held": True} if held else fact)
        with suppress(OSError):  # recovery moves it if this does not
            self.spool.quarantine(key, self.book.held)

    def release(self, key: DeltaKey) -> None:
        """Make a delta that was quarantined as `held` pending again."""
        if key not in self.book.held:
            raise StoreError(f"delta {key.text} is not held, so it cannot be released")
        with disk(f"cannot release delta {key.text}"):
            self.spool.release(key)  # recovery undoes this where the line is missing
            self.record("released", to_fact(self.book.held[key]))

    def retire(self, oldest_kept: int) -> list[Path]:
        """Finish moves into quarantine; return old versions and unneeded spool files, to remove.

        oldest_kept: versions below it are old. A rollback goes back to it at most, so only deltas
        merged above it can be pending again. A rule may use older ones again.
        """
        self.finish_quarantine()
        old = self.checkpoints.retire(oldest_kept)
        wanted = {delta.key for delta in self.book.merged_after(oldest_kept)}
        wanted |= {delta.key for delta in self.book.latest.needed_from(oldest_kept)}
        return old + self.spool.retire(wanted | self.book.pending.keys(), oldest_kept)

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
