"""Repair: recomputes a damaged file of a version from intact ones, to the bit, or not at all.

    damaged          recomputed from
    any file         the version before and the deltas merged, by the outer step, if both are on
                     disk and codec and rule are the same
    weights          the version before and update.bin, by the addition that every client makes; in
                     a run of zeroth order the version before and the steps in its record

A result counts only if its length, digest and chunk checksums are those of the damaged file in
manifest.json. Other causes need no check: other settings or another damaged file give other bytes,
and no repair.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from fsl_async.store.adapter_aggregator import AdapterAggregator
from fsl_async.store.advance import advance, advance_full, advance_seeds, averaged
from fsl_async.store.checkpoint import MEAN, UPDATE, WEIGHTS, VersionWriter, open_flat
from fsl_async.store.digest import check_chunk
from fsl_async.store.errors import Damage, StoreError
from fsl_async.store.frame_file import each_frame
from fsl_async.store.outer import apply_change
from fsl_async.store.robust_aggregator import RobustAggregator
from fsl_codecs import CodecError, decode_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import DeltaKey, StoredDelta
    from fsl_async.store.checkpoint import Checkpoint, Checkpoints, StoredFile
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.files import Files
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.records import StoreSettings, VersionRecord
    from fsl_async.store.spool import Spool
    from fsl_async.store.vectors import Vectors


@frozen
class Repairer:
    """Repairs the versions of one run directory. Methods raise OSError unchanged."""

    files: Files
    checkpoints: Checkpoints
    spool: Spool
    settings: StoreSettings
    pool: ChunkPool
    report: Callable[[str], None]
    """Receives one line about each damage that was repaired, or that costs only bandwidth."""

    def repair(self, version: int, damage: Damage, manifest: Manifest) -> bool:
        """Restore a damaged file and report it; False when that is impossible."""
        with suppress(Damage):
            damaged, before = self.checkpoints.load(version), self.checkpoints.load(version - 1)
            source = self._recompute(damaged, before, damage.file, manifest)
            if source:
                self.report(
                    f"version {version} was damaged: {damage}; it was recomputed from {source}"
                )
                return True
        return False

    def verified(self, version: int, manifest: Manifest) -> Checkpoint:
        """Return an intact version, after repairs if necessary.

        Without update.bin or the mean if that cannot be repaired. Raises CheckpointDamaged for any
        other file.
        """
        tried: set[str] = set()
        left_out: set[str] = set()
        while True:
            try:
                return self.checkpoints.verify(version, manifest, left_out)
            except Damage as damage:
                is_new = damage.file not in tried
                tried.add(damage.file)
                if is_new and self.repair(version, damage, manifest):
                    continue
                lost = {UPDATE: update_lost, MEAN: mean_lost}.get(damage.file)
                if lost is None:
                    raise self.checkpoints.damaged(version, damage, manifest) from damage
                left_out.add(damage.file)
                self.report(lost(version, damage))

    def _recompute(
        self, damaged: Checkpoint, before: Checkpoint, name: str, manifest: Manifest
    ) -> str:
        """Restore file `name` of `damaged`; return its source, or "" when that is impossible."""
        fits = before.is_whole and before.record.digest == damaged.record.parent
        if not fits or name not in damaged.files or damaged.record.ring is not None:
            return ""
        # The mean before is read only for the mean, so its damage keeps nothing else from repair.
        share = damaged.record.mean_share if name == MEAN else 0.0
        step = partial(self._step, mean_share=share)
        ways: list[tuple[Callable[..., dict[str, StoredFile]], str]]
        ways = [(step, "the version before and the deltas that it merged")]
        if damaged.record.seeds is not None:
            ways = [(self._replay, "the version before and the steps in its record")]
        if name == WEIGHTS and UPDATE in damaged.files:
            ways.append((self._add_update, f"the version before and {UPDATE}"))
        for make, source in ways:
            # The files that this way needs may be damaged or missing too.
            with (
                suppress(Damage, StoreError, CodecError, FileNotFoundError),
                VersionWriter(
                    self.files, self.checkpoints, damaged.record.version, manifest, repairs=True
                ) as writer,
            ):
                made = make(damaged, before, writer, manifest)
                if made.get(name) == damaged.files[name]:
                    writer.replace(name)
                    return source
        return ""

    def _step(
        self,
        damaged: Checkpoint,
        before: Checkpoint,
        writer: VersionWriter,
        manifest: Manifest,
        *,
        mean_share: float,
    ) -> dict[str, StoredFile]:
        """Repeat the outer step of `damaged`. mean_share: 0 without the mean of versions."""
        record = damaged.record
        # A product rule needs vectors in memory, where they are made again (see replay).
        if record.rule != self.settings.rule_name or self.settings.product_rule is not None:
            return {}
        weights = {entry.key: entry.weight for entry in record.merged}
        if self.settings.kind.is_full:
            done = advance_full(
                self.files,
                manifest,
                before,
                writer=writer,
                sums=_sums_again(record, self.settings, self.spool, manifest),
                member_weight=math.fsum(weights.values()),
                scale=record.scale,
                pool=self.pool,
            )
            return dict(done.stored)
        averages = averages_again(record, self.settings, self.spool, self.pool, manifest)
        done = advance(
            self.files,
            manifest,
            before,
            writer=writer,
            averages=averages,
            settings=self.settings,
            step=record.step,
            mean_share=mean_share,
            pool=self.pool,
        )
        return dict(done.stored)

    def _replay(
        self, damaged: Checkpoint, before: Checkpoint, writer: VersionWriter, manifest: Manifest
    ) -> dict[str, StoredFile]:
        """Repeat the steps of `damaged` along its directions."""
        step = damaged.record.seeds
        assert step is not None
        return advance_seeds(self.files, manifest, before, writer=writer, step=step, pool=self.pool)

    def _add_update(
        self, damaged: Checkpoint, before: Checkpoint, writer: VersionWriter, manifest: Manifest
    ) -> dict[str, StoredFile]:
        """Compute the weights of `damaged` as a client does."""
        old, new = open_flat(self.files, before, WEIGHTS, manifest), writer.flat(WEIGHTS)
        assert old is not None, "every version has weights"
        buffer, sent = np.zeros((2, manifest.longest_chunk), np.float32)
        try:
            frames = each_frame(self.files, damaged.path / UPDATE, manifest.chunks)
            for index, frame in enumerate(frames):
                values = manifest.chunk_values(index)
                check_chunk(UPDATE, damaged.files[UPDATE].checks, index, frame)
                old.read_into(index, buffer[:values])
                if manifest.is_buffer(index):
                    decode_into(frame, buffer[:values])
                else:
                    decode_into(frame, sent[:values])
                    apply_change(buffer[:values], sent[:values])
                new.append(buffer[:values])
        finally:
            old.close()
        return writer.seal(self.pool)


def averages_again(
    record: VersionRecord,
    settings: StoreSettings,
    spool: Spool,
    pool: ChunkPool,
    manifest: Manifest,
) -> Iterable[NDArray[np.float32]]:
    """Yield the average that a version was made of, chunk by chunk, from the spooled deltas."""
    if not settings.rule.by_rows:
        weight = math.fsum(one.weight for one in record.merged)
        sums = _sums_again(record, settings, spool, manifest)
        return averaged(manifest, sums, record.scale, weight)
    aggregator = RobustAggregator(manifest, spool, pool, settings.rule, settings.kind)
    if settings.rule.reuses:
        return aggregator.averages_of_all(record.merged, record.reused, record.scale)
    # The record has a weight of 0 for a delta that the rule did not choose.
    aggregator.weights |= {one.key: one.weight for one in record.merged if one.weight}
    return aggregator.averages(aggregator.clients, record.merged)


def products_again(
    record: VersionRecord,
    settings: StoreSettings,
    *,
    spool: Spool,
    pool: ChunkPool,
    manifest: Manifest,
    vectors: Vectors,
    deltas: Mapping[DeltaKey, StoredDelta],
) -> Iterable[NDArray[np.float32]]:
    """Yield the average that a product rule made a version of (`AdapterAggregator.averages`).

    vectors: of the version before. deltas: as accepted, for their facts.
    """
    aggregator = AdapterAggregator(manifest, spool, pool, settings)
    aggregator.weights |= {one.key: one.weight for one in record.merged}
    facts = {one.key: deltas[one.key].delta.facts for one in record.merged if one.weight}
    clips = {one.key: one.clip for one in record.merged}
    return aggregator.averages(vectors, record.version, facts, clips)


def _sums_again(
    record: VersionRecord, settings: StoreSettings, spool: Spool, manifest: Manifest
) -> Iterator[NDArray[Any]]:
    """Yield what the accumulator held: additions in the same order give the same bits."""
    sources = [(spool.frames(one.key, manifest), one.weight, one.clip) for one in record.merged]
    return settings.kind.sums(manifest, sources)


def mean_lost(version: int, damage: Damage) -> str:
    """Return the line for a mean of versions that cannot be recomputed."""
    return f"version {version} was damaged: {damage}; the mean of versions begins again there"


def update_lost(version: int, damage: Damage) -> str:
    """Return the line for an update that cannot be recomputed."""
    return f"version {version} was damaged: {damage}; clients get that version in full"
