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

from fsl_async.roles.phrasing import counted
from fsl_async.roles.sync.events import Recovered
from fsl_async.store.disk.folders import make_durable_folder
from fsl_async.store.errors import Damage, LedgerLost, StoreError
from fsl_async.store.recovery.run_directory import LEDGER_FILE, MANIFEST_FILE, read_manifest
from fsl_async.store.versions.checkpoint import UPDATE, is_flat, update_lost
from fsl_async.store.versions.global_files import GLOBAL_FOLDER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsl_async.store.book.groups_state import GroupsState
    from fsl_async.store.book.records import VersionRecord
    from fsl_async.store.model.manifest import Manifest
    from fsl_async.store.recovery.run_directory import RunDirectory
    from fsl_async.store.versions.checkpoint import Checkpoint, Checkpoints


def open_run_directory(
    run: RunDirectory,
    from_version: int | None,
    leave_out: Mapping[str, str],
    *,
    only_facts: bool = False,
) -> None:
    """Open and repair a run directory, and find its kept versions.

    leave_out: see `Book.rollback_to`. only_facts: nothing that the settings ask to keep or not to
    keep is changed.

    Raises CheckpointDamaged, LedgerDamaged, LedgerLost, StoreError, OSError; the directory is then
    closed.
    """
    files, checkpoints, ledger = run.files, run.checkpoints, run.ledger
    make_durable_folder(files, run.path)
    files.make_directory(checkpoints.directory)
    run.spool.make_directories()
    files.sync_directory(run.path)
    run.book.since = _since(checkpoints, from_version)

    try:
        torn = ledger.open(run.book.apply, lambda: _refuse_new(run, from_version))
        if torn:
            run.report(torn)
        left = checkpoints.remove_leftovers()
        if left:
            run.report(f"removed what a crash left: {', '.join(left)}")
        if from_version is not None and ledger.is_empty and checkpoints.versions():
            _renew(run, from_version)
        _finish_rollback(run)
        known = run.book.version
        _settle_version(run, from_version, leave_out)
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
        run.close()
        raise


def _since(checkpoints: Checkpoints, from_version: int | None) -> int | None:
    """Return the version after which all deltas may be needed, beside those of the newest ones."""
    whole = [version for version in checkpoints.versions() if checkpoints.is_whole(version)]
    # The newest one may be damaged, and the one before it takes its place.
    bases = whole[-2:] if from_version is None else [*whole[:1], from_version]
    return min(bases, default=None)


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
            run.report(f"version {version} was rolled back; renamed to {name}")


def _settle_version(
    run: RunDirectory, from_version: int | None, leave_out: Mapping[str, str]
) -> None:
    """Do steps 3 to 5, and keep the readable versions up to the chosen one."""
    book, checkpoints = run.book, run.checkpoints
    versions = checkpoints.versions()
    newest = max([*versions, book.version])
    if from_version is not None:
        _check_there(versions, from_version)
        _check_groups(book.groups, from_version)
    target = newest if from_version is None else from_version
    if target < 0:
        return
    run.model = manifest = read_manifest(run.files, run.path)
    chosen = _verify(run, target, manifest, with_vectors=from_version is not None)
    if book.version >= 0 and any(
        version not in versions for version in range(book.version + 1, target)
    ):
        raise StoreError(
            f"{run.path / LEDGER_FILE} ends at version {book.version}, and the versions on disk"
            f" are {', '.join(map(str, versions))}: it is older than they are; restore the newest "
            f"ledger, or move this one away and start with --from-version {target}"
        )
    # More than one can be missing when the disk was too full for the ledger but not for a version.
    for version in range(book.version + 1, target + 1):
        record = _verify(run, version, manifest).record
        _check_cut(run, record)
        book.apply(run.ledger.append("version", record.to_fact()))
        run.report(f"the ledger had no line for version {version}; written from its manifest")
    if newest > target:
        _roll_back(run, chosen.record, newest, leave_out)
    for version in versions:
        if version == target:
            run.kept.add(chosen)
        elif version < target:
            # Its files are checked chunk by chunk when they are used.
            try:
                run.kept.add(checkpoints.load(version))
            except Damage as damage:
                run.report(f"version {version} cannot be used: {damage}")


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
                run.report(update_lost(version, damage))
    checkpoint = run.checkpoints.load(version).without(damaged & {UPDATE})
    if run.book.digests.get(version) not in {None, checkpoint.record.digest}:
        other = Damage(MANIFEST_FILE, "is of another lineage than the ledger")
        raise run.checkpoints.damaged(version, other, manifest)
    return checkpoint


def _check_groups(groups: GroupsState, wanted: int) -> None:
    """Refuse a version before the one of the newest global weights, or of a cut on its way."""
    oldest = max(groups.version, -1 if groups.cut is None else groups.cut.version)
    if wanted < oldest:
        raise StoreError(
            f"version {oldest} is in global weights of all groups, or on its way into the next"
            f" ones, so the run goes back to that one at most: --from-version {oldest} or a newer"
            " one"
        )


def _check_cut(run: RunDirectory, record: VersionRecord) -> None:
    """Refuse a version of global weights that count a cut of which the ledger has no line."""
    groups, cut = record.groups, run.book.groups.cut
    if groups is not None and groups.counted and (cut is None or cut.round != groups.round - 1):
        raise StoreError(
            f"{run.path / LEDGER_FILE} lacks lines about global round {groups.round}, of which"
            f" version {record.version} is made: restore the newest ledger"
        )


def _check_there(versions: list[int], wanted: int) -> None:
    if wanted not in versions:
        there = ", ".join(map(str, versions)) or "none"
        raise StoreError(f"there is no version {wanted} to fall back to; there is {there}")


def _refuse_new(run: RunDirectory, from_version: int | None) -> None:
    """Raise if the ledger is missing or empty, and there must be one."""
    if not run.checkpoints.versions():
        return
    if run.files.exists(run.path / GLOBAL_FOLDER):
        raise StoreError(
            f"{run.path / LEDGER_FILE} of a group is lost, and with it which global rounds count"
            " what the group merged: restore the newest one from a backup; a group other than the"
            " first of the roster may start with an empty run directory instead"
        )
    if from_version is None:
        raise _ledger_lost(run)


def _ledger_lost(run: RunDirectory) -> LedgerLost:
    """Return the error for a ledger that is missing or empty beside versions."""
    versions, spooled = run.checkpoints.versions(), len(run.spool.present())
    named = f"version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions))}"
    there = (
        f"{'are' if len(versions) + spooled > 1 else 'is'} {named} and "
        f"{counted(spooled, 'delta')} in the spool"
    )
    with suppress(StoreError):
        manifest = read_manifest(run.files, run.path)
        for version in reversed(versions):
            with suppress(Damage):
                run.checkpoints.verify(version, manifest)
                return LedgerLost(str(run.path / LEDGER_FILE), there, version)
    return LedgerLost(str(run.path / LEDGER_FILE), there, None)


def _renew(run: RunDirectory, target: int) -> None:
    """Begin a new ledger at version `target`.

    Which deltas were acknowledged is unknown now, so the complete spool is moved to quarantine.
    """
    checkpoints, versions = run.checkpoints, run.checkpoints.versions()
    _check_there(versions, target)
    _verify(run, target, read_manifest(run.files, run.path), with_vectors=True)
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
    run.report(
        f"the ledger was lost: the run goes on from version {target} with a new one; "
        f"{counted(len(spooled), 'delta')} of the spool,"
        " acknowledged or not, moved to quarantine"
    )


def _roll_back(
    run: RunDirectory, record: VersionRecord, newest: int, leave_out: Mapping[str, str]
) -> None:
    target = record.version
    members = run.book.rollback_to(record, run.spool.holds, leave_out)
    run.book.apply(run.ledger.append("rollback", {"from": newest, **members}))
    run.aside += [member["key"] for member in members["aside"]]
    again, gone, aside = (_deltas(len(members[name])) for name in ("pending", "gone", "aside"))
    run.report(
        f"rolled back from version {newest} to {target}: {again} pending again, {gone} gone"
        + (f", {aside} quarantined" if leave_out else "")
    )
    for version in run.checkpoints.versions():
        if version > target:
            run.checkpoints.rename_void(version, run.book.generation)


def _deltas(count: int) -> str:
    return "1 delta is" if count == 1 else f"{count} deltas are"


def recovered(run: RunDirectory, global_base: str) -> Recovered:
    """Return what a start has found. global_base: `GroupsStore.update_base`."""
    book = run.book
    exact = book.groups.adopted is not None and (
        book.digests.get(book.groups.version) == book.groups.adopted.digest
    )
    age_s = run.wall_clock() - book.version_at if book.version_at else 0.0
    return Recovered(
        version=book.version,
        digest=book.digests.get(book.version, ""),
        digests=dict(book.digests),
        pending=tuple(book.pending.values()),
        settled=dict(book.outcomes()),
        tokens_total=book.tokens_total,
        served_s=run.ledger.served_before_s,
        began_s=book.began_s,
        since_version_s=max(0.0, age_s),
        usual=tuple(book.usual),
        arrivals=tuple(book.arrivals),
        decay=book.decay,
        held=tuple(book.held.values()),
        leases=dict(book.leases),
        provisional=frozenset(book.provisional),
        incarnations=dict(book.incarnations),
        run=book.run,
        global_version=book.groups.version if exact else -1,
        global_base=global_base,
        global_versions=book.groups.versions,
        newest_global=tuple(book.groups.newest),
        latest=tuple(run.latest),
        sum=book.sum,
        lost=tuple(run.lost),
        void=dict(book.void),
    )
