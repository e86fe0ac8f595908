"""Newest: the vectors of the newest version, their recovery, and the snapshots made of them.

A commit advances the vectors, and writes the coded change and the version's record. A snapshot of
them is written until the next commit (fsl_async.store.commit.snapshots). A start, and a commit that
failed, loads the newest snapshot and makes the versions after it again: a version is a function of
the version before and of the deltas that it merged, which are in the spool, so the same loop over
the same average gives the same bits. Where the coded change is on disk, it is not computed again.

Damage. A snapshot that is damaged is passed over for an older one. Where none leads to the newest
version, what is left is used: the coded change alone still gives the weights to the bit, and the
other vectors begin again at zero. One line says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsl_async.store.commit.snapshots import Snapshots
from fsl_async.store.disk.chunk_files import check_frame_file, each_frame
from fsl_async.store.errors import Damage
from fsl_async.store.vectors.vectors import Vectors
from fsl_async.store.versions.checkpoint import UPDATE, WEIGHTS, is_flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fsl_async.roles.sync.delta import DeltaKey, StoredDelta
    from fsl_async.store.merge.merge import Merge
    from fsl_async.store.recovery.run_directory import RunDirectory
    from fsl_async.store.vectors.memory import Allocate
    from fsl_async.store.versions.checkpoint import Checkpoint


class Newest:
    """The vectors of one open run. All methods belong to the store's thread."""

    def __init__(
        self,
        run: RunDirectory,
        merge: Merge,
        allocate: Allocate,
        later: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """later: see `Snapshots`."""
        settings = run.settings
        self._manifest = run.manifest
        self.vectors = Vectors(run.manifest, settings, run.pool, allocate)
        self.snapshots = Snapshots(
            run.files,
            run.checkpoints,
            run.manifest,
            bytes_per_s=settings.snapshot_bytes_per_s,
            report=run.report,
            later=later,
        )
        self._run = run
        self._merge = merge
        self._settings = settings
        self._last_whole = -1
        self._whole_at = run.clock()
        self._newest: Checkpoint | None = None

    # --- recovery ---

    def recover(self) -> None:
        """Load the newest snapshot and make the versions after it again.

        Raises CheckpointDamaged, OSError.
        """
        self.snapshots.make_way()
        kept = self._run.kept.all
        target = kept[-1].record.version
        problem: Damage | None = None
        damaged: set[int] = set()
        for is_last_resort in (False, True):
            for number in reversed(range(len(kept))):
                base, version = kept[number], kept[number].record.version
                try:
                    if not base.is_whole:
                        continue
                    self._load(base, is_last_resort=is_last_resort)
                    self._make_later(base, kept[number + 1 :], is_last_resort=is_last_resort)
                except Damage as damage:
                    problem = problem or damage
                    if is_flat(damage.file):
                        damaged.add(version)
                    if not is_last_resort:
                        self._run.report(
                            f"version {target} cannot be made from version {version}: {damage};"
                            " another way is tried"
                        )
                else:
                    for lost in damaged:
                        self._run.kept.lose(lost)
                    self._last_whole = -1 if version in damaged else version
                    return
        problem = problem or Damage(UPDATE, "there is no whole version before it")
        raise self._run.checkpoints.damaged(target, problem, self._manifest)

    def _load(self, base: Checkpoint, *, is_last_resort: bool) -> None:
        """Load a version; as a last resort without vectors that are damaged. Raises Damage."""
        lost: set[str] = set()
        while True:
            try:
                self.vectors.load(self._run.files, base.without(lost))
                break
            except Damage as damage:
                if not is_last_resort or damage.file == WEIGHTS:
                    raise
                lost.add(damage.file)
                self._run.report(
                    f"version {base.record.version}: {damage}; it begins again at zero"
                )
        if self.vectors.digest() != base.record.digest:
            raise Damage(WEIGHTS, "does not match its digest")

    def _make_later(
        self, base: Checkpoint, later: Sequence[Checkpoint], *, is_last_resort: bool
    ) -> None:
        """Make the versions after `base`, whose vectors are loaded. Raises Damage."""
        version, book = base.record.version, self._run.book
        # Those of a version that is durable and has no line yet are still pending.
        deltas = dict(book.pending)
        deltas |= {delta.key: delta for delta in book.merged_after(version)}
        deltas |= {delta.key: delta for delta in book.latest.needed_from(version)}
        for number, checkpoint in enumerate(later, start=version + 1):
            if checkpoint.record.version != number:
                raise Damage(UPDATE, f"of version {number} is missing")
            if self._make_again(checkpoint, deltas, is_last_resort) != checkpoint.record.digest:
                self.vectors.version = -1
                raise Damage(UPDATE, "leads to other weights than recorded")

    def _make_again(
        self,
        checkpoint: Checkpoint,
        deltas: Mapping[DeltaKey, StoredDelta],
        is_last_resort: bool,
    ) -> str:
        """Advance the vectors to the version of `checkpoint`; return the digest. Raises Damage."""
        record = checkpoint.record
        frames = self._frames(checkpoint)
        missing = self._missing(checkpoint, deltas)
        if missing and (frames is None or not is_last_resort):
            raise Damage(UPDATE, f"does not do alone: {missing}")
        if missing and frames is not None:
            self._run.report(
                f"version {record.version}: {missing}; its weights come from the coded change,"
                " and momentum and coding error begin again at zero"
            )
            self.vectors.follow(record.version, frames, record.mean_share)
            return self.vectors.digest()
        averages = self._merge.again(record, self.vectors, deltas)
        sets = self._settings.sets_weights
        made = self.vectors.advance(
            record.version, averages, record.step, record.mean_share, frames=frames, sets=sets
        )
        return made.digest

    def _frames(self, checkpoint: Checkpoint) -> Iterator[bytes] | None:
        """Return the frames of the coded change; None: there is none, or it is damaged."""
        path, stored = checkpoint.path / UPDATE, checkpoint.files.get(UPDATE)
        if stored is None or check_frame_file(self._run.files, path, stored.bytes, stored.digest):
            return None
        return each_frame(self._run.files, path, self._manifest.chunks)

    def _missing(self, checkpoint: Checkpoint, deltas: Mapping[DeltaKey, StoredDelta]) -> str:
        """Return why the average cannot be made again; empty if it can."""
        record, rule = checkpoint.record, self._settings.rule_name
        if record.seeds is not None:
            return ""
        if record.rule != rule:
            return f"it was aggregated by {record.rule}, not by {rule}"
        for one in (*record.merged, *record.reused):
            stored = deltas.get(one.key)
            if not one.weight and self._settings.leaves_out:
                continue
            problem = (
                "is in no line of the ledger" if stored is None else self._run.spool.check(stored)
            )
            if problem:
                return f"the spooled delta {one.key.text} {problem}"
        return ""

    @property
    def is_intact(self) -> bool:
        """Whether the weights are those of the newest version. Reads all of them."""
        book = self._run.book
        return self.vectors.version == book.version and (
            self.vectors.digest() == book.digests[book.version]
        )

    # --- snapshots ---

    def begin_snapshot(self, newest: Checkpoint) -> None:
        """Start to make the newest version whole, if it is not."""
        self._newest = newest
        if newest.is_whole:
            self._last_whole = newest.record.version
            self._whole_at = self._run.clock()
            return
        if self._last_whole == newest.record.version:  # it was damaged since
            self._last_whole = -1
        if self._holds(newest):
            self.snapshots.begin(newest, self.vectors.named)

    def finish_snapshot(self) -> None:
        """Make the newest version whole now, if the disk lets it be."""
        newest = self._newest
        if newest is not None and newest.record.version > self._last_whole and self._holds(newest):
            self.snapshots.finish(newest, self.vectors.named)

    def _holds(self, checkpoint: Checkpoint) -> bool:
        return self.vectors.version == checkpoint.record.version

    def take_snapshots(self) -> list[Checkpoint]:
        """Return the versions that have become whole since the last call."""
        made = self.snapshots.take()
        for one in made:
            self._last_whole = max(self._last_whole, one.record.version)
            self._whole_at = self._run.clock()
        return made

    def make_way(self, version: int, *, must_finish: bool) -> None:
        """Let the vectors be advanced to `version`, which is not durable yet.

        must_finish: the version before must be whole first. It must be too where too many versions
        are not. If the next version does not become durable, call `recover`.
        """
        settings = self._settings
        late_versions = version - self._last_whole > settings.most_unwhole
        late_s = self._run.clock() - self._whole_at > settings.snapshot_every_s
        if must_finish or late_versions or late_s:
            self.finish_snapshot()
        self.snapshots.make_way()

    def close(self) -> None:
        """Give up the checkpoint under way."""
        self.snapshots.close()


def oldest_needed(kept: Sequence[Checkpoint], keep_versions: int) -> int:
    """Return the oldest version that must stay, so that the newest `keep_versions` can be made.

    Where some are not whole: back to the newest whole one before them all, and to the second
    newest whole one, for the case that the newest is damaged.
    """
    wanted = kept[-1].record.version - keep_versions + 1
    if all(one.is_whole for one in kept if one.record.version >= wanted):
        return wanted
    whole = [one.record.version for one in kept if one.is_whole]
    base = max((version for version in whole if version <= wanted), default=0)
    return min(wanted, base, *whole[-2:-1])
