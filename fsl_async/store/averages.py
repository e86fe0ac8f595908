"""Averages: the chunks of a round's average, as a merge gives them and as recovery repeats them.

Each is float32, in flat order, and valid until the next. In runs of full weights and of zeroth
order they are the next version's weights themselves (`StoreSettings.sets_weights`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fsl_async.store.adapter_aggregator import AdapterAggregator
from fsl_async.store.outer import average_full
from fsl_async.store.robust_aggregator import RobustAggregator
from fsl_async.store.seed_step import keys_of
from fsl_codecs import add_signs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import DeltaKey, StoredDelta
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.records import StoreSettings, VersionRecord
    from fsl_async.store.seed_step import SeedStep
    from fsl_async.store.spool import Spool
    from fsl_async.store.vectors import Vectors


def averaged(
    manifest: Manifest, sums: Iterable[NDArray[Any]], scale: float, weight: float
) -> Iterator[NDArray[np.float32]]:
    """Yield the average of a round by its sums, chunk by chunk.

    Of weights: `scale` times the sum, with one fp32 multiplication. Of buffers: their mean, which
    lies between theirs whatever the scale is. weight: the sum of the weights in the sums; where it
    is 0, buffers have no mean, and the chunk is empty.
    """
    buffer = np.empty(manifest.longest_chunk, np.float32)
    for index, total in enumerate(sums):
        part = buffer[: len(total)]
        with np.errstate(over="ignore", invalid="ignore"):
            if not manifest.is_buffer(index):
                np.multiply(total, np.float32(scale), out=part)
            elif weight:
                np.divide(total, weight, out=part, casting="same_kind")
            else:
                part = buffer[:0]
        yield part


def full_averaged(
    vectors: Vectors, sums: Iterable[NDArray[np.float64]], scale: float, weight: float
) -> Iterator[NDArray[np.float32]]:
    """Yield the average of clients' weights by their weighted sums; see `outer.average_full`."""
    for index, total in enumerate(sums):
        weights = vectors.weights_chunk(index).copy()
        with np.errstate(over="ignore", invalid="ignore"):
            average_full(total, weights, weight, scale)
        yield weights


def stepped(
    manifest: Manifest, vectors: Vectors, step: SeedStep, pool: ChunkPool
) -> Iterator[NDArray[np.float32]]:
    """Yield the weights moved along directions of signs (fsl_async.store.seed_step)."""
    keys, steps = keys_of([step])

    def moved(index: int) -> NDArray[np.float32]:
        weights = vectors.weights_chunk(index).copy()
        with np.errstate(over="ignore", invalid="ignore"):
            add_signs(weights, manifest.chunk_range(index)[0], keys, steps)
        return weights

    return pool.each(moved, range(manifest.chunks))


def averages_again(
    record: VersionRecord,
    settings: StoreSettings,
    *,
    spool: Spool,
    pool: ChunkPool,
    manifest: Manifest,
    vectors: Vectors,
    deltas: Mapping[DeltaKey, StoredDelta],
) -> Iterable[NDArray[np.float32]]:
    """Yield the average that a version was made of, from the spooled deltas.

    vectors: of the version before. deltas: as accepted, for their facts.
    """
    if record.seeds is not None:
        return stepped(manifest, vectors, record.seeds, pool)
    if settings.product_rule is not None:
        products = AdapterAggregator(manifest, spool, pool, settings)
        products.weights |= {one.key: one.weight for one in record.merged}
        facts = {one.key: deltas[one.key].delta.facts for one in record.merged if one.weight}
        clips = {one.key: one.clip for one in record.merged}
        return products.averages(vectors, record.version, facts, clips)
    if settings.rule.by_rows:
        rows = RobustAggregator(manifest, spool, pool, settings.rule, settings.kind)
        if settings.rule.reuses:
            return rows.averages_of_all(record.merged, record.reused, record.scale)
        # The record has a weight of 0 for a delta that the rule did not choose.
        rows.weights |= {one.key: one.weight for one in record.merged if one.weight}
        return rows.averages(rows.clients, record.merged)
    # Additions in the same order give the same bits.
    sources = [(spool.frames(one.key, manifest), one.weight, one.clip) for one in record.merged]
    sums = settings.kind.sums(manifest, sources)
    weight = math.fsum(one.weight for one in record.merged)
    if settings.kind.is_full:
        return full_averaged(vectors, sums, record.scale, weight)
    return averaged(manifest, sums, record.scale, weight)
