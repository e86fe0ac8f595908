"""Replay: from a whole version to a later one, by the spooled deltas and the coded changes.

A version is a function of the version before, of the deltas that it merged, and of the change that
clients received. So the vectors of any version after a checkpoint are made again, to the bit.

A version of a run of zeroth order is one of the version before and of the steps in its record.

Where a delta that was merged cannot be read any more, the coded change still gives the weights, to
the bit. Momentum and coding error are then estimated from it: the change counts as what was wanted,
so the coding error begins again at zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from fsl_async.store.checkpoint import UPDATE
from fsl_async.store.digest import check_chunk
from fsl_async.store.errors import Damage, StoreError
from fsl_async.store.folders import MANIFEST
from fsl_async.store.frame_file import each_frame
from fsl_async.store.repair import averages_again, products_again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fsl_async.files.files import Files
    from fsl_async.roles.sync.delta import DeltaKey, StoredDelta
    from fsl_async.store.checkpoint import Checkpoint
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.records import StoreSettings
    from fsl_async.store.spool import Spool
    from fsl_async.store.vectors import Vectors


@frozen
class Replay:
    """Advances vectors by versions on disk. Methods raise OSError unchanged."""

    files: Files
    spool: Spool
    settings: StoreSettings
    pool: ChunkPool
    deltas: Mapping[DeltaKey, StoredDelta]
    """Those that the versions merged, as the ledger has them."""
    report: Callable[[str], None]
    """Receives one line about each version that could only be estimated."""
    may_estimate: bool = True

    def advance(self, vectors: Vectors, checkpoint: Checkpoint, manifest: Manifest) -> None:
        """Advance the vectors of the version before to those of `checkpoint`.

        Damage: the coded change cannot be read, or the weights become others than recorded; the
        vectors are then of no version.
        """
        record = checkpoint.record
        if record.seeds is not None:
            if vectors.replay(record.seeds) != record.digest:
                vectors.version = -1
                raise Damage(MANIFEST, "leads to other weights than recorded")
            return
        step = record.step
        frames = self._frames(checkpoint, manifest)
        missing = self._missing(checkpoint)
        if missing and not self.may_estimate:
            raise Damage(UPDATE, f"does not do alone: {missing}")
        if missing:
            self.report(
                f"version {record.version}: {missing}; momentum and coding error were estimated"
                " from the coded change"
            )
            vectors.follow(record.version, frames, step, record.mean_share)
        else:
            if self.settings.product_rule is None:
                averages = averages_again(record, self.settings, self.spool, self.pool, manifest)
            else:
                averages = products_again(
                    record,
                    self.settings,
                    spool=self.spool,
                    pool=self.pool,
                    manifest=manifest,
                    vectors=vectors,
                    deltas=self.deltas,
                )
            vectors.repeat(record.version, averages, frames, step, record.mean_share)
        if vectors.digest() != record.digest:
            vectors.version = -1
            raise Damage(UPDATE, "leads to other weights than recorded")

    def _frames(self, checkpoint: Checkpoint, manifest: Manifest) -> Iterator[bytes]:
        """Yield the frames of the coded change, each of which was checked. Raises Damage."""
        try:
            frames = each_frame(self.files, checkpoint.path / UPDATE, manifest.chunks)
            for index, frame in enumerate(frames):
                check_chunk(UPDATE, checkpoint.files[UPDATE].checks, index, frame)
                yield frame
        except (KeyError, FileNotFoundError):
            raise Damage(UPDATE, "is missing") from None
        except StoreError:
            raise Damage(UPDATE, "holds an incomplete frame") from None

    def _missing(self, checkpoint: Checkpoint) -> str:
        """Why the average cannot be made again; empty if it can."""
        record, rule = checkpoint.record, self.settings.rule_name
        if record.rule != rule:
            return f"it was aggregated by {record.rule}, not by {rule}"
        for one in (*record.merged, *record.reused):
            stored = self.deltas.get(one.key)
            if not one.weight and self.settings.leaves_out:
                continue
            problem = "is in no line of the ledger" if stored is None else self.spool.check(stored)
            if problem:
                return f"the spooled delta {one.key.text} {problem}"
        return ""
