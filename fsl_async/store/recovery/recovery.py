"""Recovery: restores a run directory after a crash, so that all rules of the store hold.

In this order, so that recovery may itself be interrupted anywhere and restarted:
1. open, lock and read the ledger; cut off a torn last line. Refuse one that is missing or empty
   beside versions (LedgerLost), unless `from_version` says where to continue: then move the spool
   to quarantine and begin a new ledger with one line, `renewed`
2. remove temporary folders; rename versions that a rollback made void but a crash left in place
3. choose the version: the newest folder, or `from_version`, and verify it; its vectors are verified
   when they are loaded, after these steps (fsl_async.store.commit.newest), or now for
   `from_version`
4. a version without its ledger line (the crash fell between rename and line): write the line
5. `from_version` below the newest: write the rollback line, then rename the later versions
6. verify the spool file of every pending delta; record those that are missing or damaged as lost,
   and move the latter to quarantine; and
   of every merged delta that may be used again, which is not if it is damaged
7. when the newest version is loaded: finish moves into quarantine; remove old versions and unneeded
   files
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from attrs import define, field

from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.roles.phrasing import counted
from fsl_async.store.book.book import Book
from fsl_async.store.book.records import to_fact
from fsl_async.store.book.ring_book import RingBook
from fsl_async.store.deltas.spool import Spool
from fsl_async.store.disk.ledger import Ledger
from fsl_async.store.errors import Damage, LedgerLost, ManifestError, StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.versions.checkpoint import UPDATE, Checkpoints, is_flat, update_lost
from fsl_async.store.versions.global_files import GlobalFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from fsl_async.files.files import Files
    from fsl_async.roles.sync.delta import MergedDelta
    from fsl_async.store.book.records import VersionRecord
    from fsl_async.store.settings import StoreSettings
    from fsl_async.store.versions.checkpoint import Checkpoint

LEDGER_FILE = "ledger.jsonl"
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 256 * 1024 * 1024


@define
class RunDirectory:
    """An open run directory: its parts and their state."""

    ledger: Ledger
    book: Book
    checkpoints: Checkpoints
    spool: Spool
    notices: list[str]
    """What was found and repaired, one line each."""
    manifest: Manifest | None = None
    leave_out: Mapping[str, str] = field(factory=dict)  # see Book.rollback_to
    lost: list[str] = field(factory=list)
    """One line about each acknowledged delta whose file is missing or damaged."""
    aside: list[str] = field(factory=list)
    """Keys of deltas that a rollback has quarantined."""
    latest: list[MergedDelta] = field(factory=list)
    """What the next version may use again, as it is in the spool at the start."""

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
        if self.manifest is None:
            return
        unknown = sorted(key for key in self.spool.present() if self.book.known(key) is None)
        for key in [key for key in unknown if self.spool.is_complete(key, self.manifest)]:
            self.spool.quarantine(key, self.book.held)
            self.notices.append(
                f"delta {key.text} is in no line of the ledger; moved to quarantine"
            )

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
                self.notices.append(text)
            else:
                self.latest.append(one.merged)


def open_run_directory(
    files: Files,
    run_dir: Path,
    settings: StoreSettings,
    from_version: int | None,
    *,
    leave_out: Mapping[str, str],
    only_facts: bool = False,
    wall_clock: Callable[[], float],
    clock: Callable[[], float],
) -> tuple[RunDirectory, list[Checkpoint]]:
    """Open and repair; return the directory and the kept checkpoints, oldest first.

    only_facts: nothing that the settings ask to keep or not to keep is changed.

    Raises CheckpointDamaged, LedgerDamaged, LedgerLost, StoreError, OSError; the directory is then
    closed.
    """
    make_durable_folder(files, run_dir)
    checkpoints, spool = Checkpoints(files, run_dir), Spool(files, run_dir, settings.kind)
    files.make_directory(checkpoints.directory)
    spool.make_directories()
    files.sync_directory(run_dir)
    ledger = Ledger(files, run_dir / LEDGER_FILE, wall_clock, clock)
    notices: list[str] = []
    # A rollback's line has all that any settings may use again.
    reuse = 2**31 if only_facts else settings.reuse
    book = Book(settings.remembered_versions, settings.history, reuse)
    book.since = _since(checkpoints, from_version)
    run = RunDirectory(ledger, book, checkpoints, spool, notices, leave_out=leave_out)

    def may_be_new() -> None:
        if not checkpoints.versions():
            return
        if files.exists(GlobalFiles(files, run_dir).directory):
            raise StoreError(
                f"{run_dir / LEDGER_FILE} of a group is lost, and with it which global rounds count"
                " what the group merged: restore it from a backup, or start with an empty run"
                " directory"
            )
        if from_version is None:
            raise _ledger_lost(files, run_dir, run)

    try:
        torn = ledger.open(book.apply, may_be_new)
        if torn:
            run.notices.append(torn)
        left = checkpoints.remove_leftovers()
        if left:
            run.notices.append(f"removed what a crash left: {', '.join(left)}")
        if from_version is not None and ledger.is_empty and checkpoints.versions():
            _renew(files, run_dir, run, from_version)
        _finish_rollback(run)
        known = run.book.version
        kept = _settle_version(files, run_dir, run, from_version)
        run.check_pending()
        # A crash loses one version's line. If more are missing, the ledger may be a backup that
        # lacks other lines too.
        if from_version is None and run.book.version > known + 1:
            run.quarantine_unknown()
        if only_facts:
            run.finish_quarantine()
        else:
            run.check_latest()
    except BaseException:
        ledger.close()
        raise
    return run, kept


def _since(checkpoints: Checkpoints, from_version: int | None) -> int | None:
    """Return the version after which all deltas may be needed, beside those of the newest ones."""
    whole = [version for version in checkpoints.versions() if checkpoints.is_whole(version)]
    # The newest one may be damaged, and the one before it takes its place.
    bases = whole[-2:] if from_version is None else [*whole[:1], from_version]
    return min(bases, default=None)


def make_durable_folder(files: Files, folder: Path) -> None:
    """Create `folder` and its parents, and make their names durable.

    An existing folder is synced too: its creator may have been a shell, or died before the sync.
    """
    missing = [one for one in folder.parents if not files.exists(one)]
    for one in (*reversed(missing), folder):
        files.make_directory(one)
    for one in (folder, *missing):
        with suppress(PermissionError):  # a parent that this user may pass, but not read
            files.sync_directory(one.parent)


def _finish_rollback(run: RunDirectory) -> None:
    """Rename the versions that a recorded rollback made void, if a crash prevented that."""
    book = run.book
    for version in run.checkpoints.versions():
        try:
            made_in = run.checkpoints.load(version).record.generation
        except Damage:
            continue  # if that version is needed, `_settle_version` reports it
        void = any(version > target for target in book.rollback_targets[made_in:])
        if void:
            name = run.checkpoints.rename_void(version, book.generation)
            run.notices.append(f"version {version} was rolled back; renamed to {name}")


def _settle_version(
    files: Files, run_dir: Path, run: RunDirectory, from_version: int | None
) -> list[Checkpoint]:
    """Do steps 3 to 5; return the readable checkpoints up to the chosen version, oldest first."""
    book, checkpoints = run.book, run.checkpoints
    versions = checkpoints.versions()
    newest = max([*versions, book.version])
    if from_version is not None:
        _check_there(versions, from_version)
        _check_ring(book.ring, from_version)
    target = newest if from_version is None else from_version
    if target < 0:
        return []
    run.manifest = read_manifest(files, run_dir)
    chosen = _verify(run, target, run.manifest, with_vectors=from_version is not None)
    if book.version >= 0 and any(
        version not in versions for version in range(book.version + 1, target)
    ):
        raise StoreError(
            f"{run_dir / LEDGER_FILE} ends at version {book.version}, and the versions on disk are "
            f"{', '.join(map(str, versions))}: it is older than they are; restore the newest "
            f"ledger, or move this one away and start with --from-version {target}"
        )
    # More than one can be missing when the disk was too full for the ledger but not for a version.
    for version in range(book.version + 1, target + 1):
        record = _verify(run, version, run.manifest).record
        book.apply(run.ledger.append("version", record.to_fact()))
        run.notices.append(
            f"the ledger had no line for version {version}; written from its manifest"
        )
    if newest > target:
        _roll_back(run, chosen.record, newest)
    kept = []
    for version in versions:
        if version == target:
            kept.append(chosen)
        elif version < target:
            # Its files are checked chunk by chunk when they are used.
            try:
                kept.append(checkpoints.load(version))
            except Damage as damage:
                run.notices.append(f"version {version} cannot be used: {damage}")
    return kept


def _verify(
    run: RunDirectory, version: int, manifest: Manifest, *, with_vectors: bool = False
) -> Checkpoint:
    """Return a version of the ledger's lineage, without its coded change if that is damaged.

    Vectors are checked as they are loaded (fsl_async.store.commit.newest). with_vectors: check them
    now; they may be damaged where an older version has some. Raises CheckpointDamaged.
    """
    damaged: set[str] = set()
    while True:
        try:
            run.checkpoints.verify(version, manifest, damaged, with_vectors=with_vectors)
            break
        except Damage as damage:
            older = any(run.checkpoints.is_whole(one) for one in range(version))
            if damage.file != UPDATE and not (is_flat(damage.file) and older):
                raise run.checkpoints.damaged(version, damage, manifest) from damage
            damaged.add(damage.file)
            if damage.file == UPDATE:
                run.notices.append(update_lost(version, damage))
    checkpoint = run.checkpoints.load(version).without(damaged & {UPDATE})
    if run.book.digests.get(version) not in {None, checkpoint.record.digest}:
        other = Damage(MANIFEST_FILE, "is of another lineage than the ledger")
        raise run.checkpoints.damaged(version, other, manifest)
    return checkpoint


def _check_ring(ring: RingBook, wanted: int) -> None:
    """Refuse a version before the one of the newest global weights, or of a cut on its way."""
    oldest = max(ring.version, -1 if ring.cut is None else ring.cut.version)
    if wanted < oldest:
        raise StoreError(
            f"version {oldest} is in global weights of all groups, or on its way into the next"
            f" ones, so the run goes back to that one at most: --from-version {oldest} or a newer"
            " one"
        )


def _check_there(versions: list[int], wanted: int) -> None:
    if wanted not in versions:
        there = ", ".join(map(str, versions)) or "none"
        raise StoreError(f"there is no version {wanted} to fall back to; there is {there}")


def _ledger_lost(files: Files, run_dir: Path, run: RunDirectory) -> LedgerLost:
    """Return the error for a ledger that is missing or empty beside versions."""
    versions, spooled = run.checkpoints.versions(), len(run.spool.present())
    named = f"version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions))}"
    there = (
        f"{'are' if len(versions) + spooled > 1 else 'is'} {named} and "
        f"{counted(spooled, 'delta')} in the spool"
    )
    with suppress(StoreError):
        manifest = read_manifest(files, run_dir)
        for version in reversed(versions):
            with suppress(Damage):
                run.checkpoints.verify(version, manifest)
                return LedgerLost(str(run_dir / LEDGER_FILE), there, version)
    return LedgerLost(str(run_dir / LEDGER_FILE), there, None)


def _renew(files: Files, run_dir: Path, run: RunDirectory, target: int) -> None:
    """Begin a new ledger at version `target`.

    Which deltas were acknowledged is unknown now, so the complete spool is moved to quarantine.
    """
    checkpoints, versions = run.checkpoints, run.checkpoints.versions()
    _check_there(versions, target)
    _verify(run, target, read_manifest(files, run_dir), with_vectors=True)
    records, newest_generation = [], 0
    for version in versions:
        with suppress(Damage):
            record = checkpoints.load(version).record
            newest_generation = max(newest_generation, record.generation)
            if version <= target:
                records.append(record.to_fact())
    spooled = sorted(run.spool.present())
    for key in spooled:  # before the line: a file without a ledger line would be removed
        run.spool.quarantine(key, run.book.held)
    fact = {
        "to": target,
        "generation": newest_generation + 1,
        "versions": records,
        "aside": [key.text for key in spooled],
    }
    run.book.apply(run.ledger.append("renewed", fact))
    run.notices.append(
        f"the ledger was lost: the run goes on from version {target} with a new one; "
        f"{counted(len(spooled), 'delta')} of the spool,"
        " acknowledged or not, moved to quarantine"
    )


def _roll_back(run: RunDirectory, record: VersionRecord, newest: int) -> None:
    target = record.version
    members = run.book.rollback_to(record, run.spool.holds, run.leave_out)
    run.book.apply(run.ledger.append("rollback", {"from": newest, **members}))
    run.aside += [member["key"] for member in members["aside"]]
    again, gone, aside = (_deltas(len(members[name])) for name in ("pending", "gone", "aside"))
    run.notices.append(
        f"rolled back from version {newest} to {target}: {again} pending again, {gone} gone"
        + (f", {aside} quarantined" if run.leave_out else "")
    )
    for version in run.checkpoints.versions():
        if version > target:
            run.checkpoints.rename_void(version, run.book.generation)


def _deltas(count: int) -> str:
    return "1 delta is" if count == 1 else f"{count} deltas are"


def write_manifest(files: Files, run_dir: Path, manifest: Manifest) -> None:
    """Write the run's model, durably; no version refers to it yet. Raises OSError."""
    members = {"format": 1, "tensors": manifest.to_wire(), "frozen": manifest.frozen_to_wire()}
    files.write_whole(run_dir / MANIFEST_FILE, to_checksummed(members) + b"\n")
    files.sync_directory(run_dir)


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
