"""Resident: the newest version in memory, and the checkpoints that are written from it.

A commit advances the vectors in memory, and writes the coded change and the version's record. Their
checkpoint is written until the next commit (fsl_async.store.snapshots). A start, and a commit that
failed, loads the newest whole version and replays those after it (fsl_async.store.replay).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fsl_async.store.available_memory import available_bytes
from fsl_async.store.checkpoint import UPDATE
from fsl_async.store.errors import Damage, StoreError
from fsl_async.store.flat_file import VALUE_BYTES
from fsl_async.store.replay import Replay
from fsl_async.store.snapshots import Snapshots
from fsl_async.store.vectors import Vectors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsl_async.files.files import Files
    from fsl_async.store.checkpoint import Checkpoint
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.records import StoreSettings
    from fsl_async.store.recovery import RunDirectory

MODELS_IN_MEMORY = 4.4
"""Fp32 models that a resident store takes: weights, momentum, residual, the sum, a coded change and
chunks. A mean of versions is one more, and so is what a rule of adapters owes.
"""


class Resident:
    """The vectors of one open run. All methods belong to the store's thread."""

    def __init__(
        self,
        files: Files,
        run: RunDirectory,
        settings: StoreSettings,
        pool: ChunkPool,
        report: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        assert run.manifest is not None, "there is a version"
        self.vectors = Vectors(run.manifest, settings, pool)
        self.snapshots = Snapshots(
            files,
            run.checkpoints,
            run.manifest,
            bytes_per_s=settings.snapshot_bytes_per_s,
            report=report,
            has_thread=settings.snapshot_thread,
            later=later,
        )
        self._files = files
        self._run = run
        self._settings = settings
        self._pool = pool
        self._report = report
        self._clock = clock
        self._last_whole = -1
        self._whole_at = clock()
        self._newest: Checkpoint | None = None

    @property
    def _manifest(self) -> Manifest:
        assert self._run.manifest is not None, "there is a version"
        return self._run.manifest

    def recover(self, kept: Sequence[Checkpoint]) -> None:
        """Load the newest whole version and replay to the newest. kept: oldest first.

        Raises CheckpointDamaged, OSError.
        """
        self.snapshots.make_way()
        target = kept[-1]
        problem = Damage(UPDATE, "there is no whole version before it")
        for base in reversed([one for one in kept if one.is_whole]):
            version = base.record.version
            try:
                self._recover_from(base, [one for one in kept if one.record.version > version])
            except Damage as damage:
                self._report(
                    f"version {target.record.version} cannot be made from version {version}:"
                    f" {damage}; an older one is tried"
                )
                problem = damage
            else:
                self._last_whole = version
                self._run.damaged = None
                return
        version = target.record.version
        raise self._run.damaged or self._run.checkpoints.damaged(version, problem, self._manifest)

    def _recover_from(self, base: Checkpoint, later: Sequence[Checkpoint]) -> None:
        """Load `base`, and replay the versions after it. Raises Damage."""
        version = base.record.version
        checked = self._run.checkpoints.verify(version, self._manifest)
        self.vectors.load(self._files, checked)
        # Those of a version that is durable and has no line yet are still pending.
        deltas = dict(self._run.book.pending)
        deltas |= {delta.key: delta for delta in self._run.book.merged_after(version)}
        deltas |= {delta.key: delta for delta in self._run.book.latest.needed_from(version)}
        replay = Replay(
            self._files,
            self._run.spool,
            self._settings,
            self._pool,
            deltas,
            self._report,
            # Where an older version can be gone back to, nothing is estimated.
            may_estimate=self._run.damaged is None,
        )
        for number, checkpoint in enumerate(later, start=version + 1):
            if checkpoint.record.version != number:
                raise Damage(UPDATE, f"of version {number} is missing")
            replay.advance(self.vectors, checkpoint, self._manifest)

    @property
    def is_intact(self) -> bool:
        """Whether the weights in memory are those of the newest version. Reads all of them."""
        book = self._run.book
        return self.vectors.version == book.version and (
            self.vectors.digest() == book.digests[book.version]
        )

    def begin_snapshot(self, newest: Checkpoint) -> None:
        """Start to make the newest version whole, if it is not."""
        self._newest = newest
        if newest.is_whole:
            self._last_whole = newest.record.version
            self._whole_at = self._clock()
        elif self._holds(newest):
            self.snapshots.begin(newest, self.vectors.named)

    def finish_snapshot(self) -> None:
        """Make the newest version whole now, if the disk lets it be."""
        newest = self._newest
        if newest is not None and newest.record.version > self._last_whole and self._holds(newest):
            self.snapshots.finish(newest, self.vectors.named)

    def _holds(self, checkpoint: Checkpoint) -> bool:
        return self.vectors.version == checkpoint.record.version

    def made_whole(self) -> list[Checkpoint]:
        """Make the newest version whole; return what has become so. StoreError: it cannot be."""
        newest = self._newest
        assert newest is not None, "begin_snapshot comes first"
        self.finish_snapshot()
        made = self.take_snapshots()
        if made or newest.is_whole:
            return made
        raise StoreError(
            f"version {newest.record.version} has no checkpoint and none can be written; make"
            " space, or start with store.resident = true"
        )

    def take_snapshots(self) -> list[Checkpoint]:
        """Return the versions that have become whole since the last call."""
        made = self.snapshots.take()
        for one in made:
            self._last_whole = max(self._last_whole, one.record.version)
            self._whole_at = self._clock()
        return made

    def make_way(self, version: int, *, must_finish: bool) -> None:
        """Let the vectors be advanced to `version`, which is not durable yet.

        must_finish: the version before must be whole first. It must be too where too many versions
        are not. If the next version does not become durable, call `recover`.
        """
        settings = self._settings
        late_versions = version - self._last_whole > settings.snapshot_every
        late_s = self._clock() - self._whole_at > settings.snapshot_every_s
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


def memory_lacking(settings: StoreSettings, manifest: Manifest) -> str:
    """Return why the vectors do not stay in memory; empty if they fit, or if that is unknown."""
    models = MODELS_IN_MEMORY + settings.may_keep_mean + settings.keeps_owed
    have, need = available_bytes(), int(models * VALUE_BYTES * manifest.values)
    if have is None or need <= have:
        return ""
    found = (
        f"to keep them in memory takes {need / 1e9:.1f} GB, and {have / 1e9:.1f} GB are available"
    )
    if settings.product_rule is not None:
        return f"rule {settings.rule_name} needs versions in memory: {found}"
    return f"versions go from disk to disk: {found}"
