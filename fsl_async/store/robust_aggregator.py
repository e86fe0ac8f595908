"""Robust aggregator: applies an aggregation rule to a round's spooled deltas, by chunk.

For rules that need all deltas at once. A merge reads the deltas from the spool once, twice if the
rule needs distances.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from fsl_async.store.aggregation import RowClient
from fsl_async.store.errors import StoreError
from fsl_async.store.outer import squared_norm
from fsl_async.store.spooled_deltas import SpooledDeltas

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import DeltaKey, MergedDelta
    from fsl_async.store.aggregation import Rule
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.delta_kind import DeltaKind
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.spool import Spool


class RobustAggregator(SpooledDeltas):
    """The deltas of the round, and their aggregate."""

    def __init__(
        self, manifest: Manifest, spool: Spool, pool: ChunkPool, rule: Rule, kind: DeltaKind
    ) -> None:
        super().__init__(manifest, spool, pool, kind)
        self._rule = rule

    def squared_distances(self) -> NDArray[np.float64]:
        """Return the squared distances between all rows, float64 (n, n).

        Each chunk's difference is computed in fp32; the sums over chunks are float64.
        """
        count = len(self.clients)
        total = np.zeros((count, count))
        for index, rows in enumerate(self._chunks(self.clients, self.weights)):
            if not self._kind.is_scalars and self._manifest.is_buffer(index):
                break  # they come last, and are no part of a change
            for first in range(count):
                for second in range(first):
                    found = squared_norm(rows[first] - rows[second])
                    total[first, second] += found
                    total[second, first] += found
        return total

    def chosen(self) -> list[list[DeltaKey]]:
        """Return the keys of the clients that the rule uses. StoreError: there are too few."""
        clients = self.clients
        if len(clients) < self._rule.least:
            raise StoreError(
                f"{self._rule.name} against {self._rule.byzantine} attackers needs deltas of "
                f"{self._rule.least} clients, there are {len(clients)}"
            )
        if not self._rule.needs_distances:
            return clients
        used = self._rule.choose(self.squared_distances())
        return [keys for keys, is_used in zip(clients, used, strict=True) if is_used]

    def averages(
        self, chosen: list[list[DeltaKey]], merged: Iterable[MergedDelta]
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the change, chunk by chunk; each is valid until the next. Raises StoreError.

        merged: the deltas as the version records them. Of buffers, the median over the clients, or
        where the rule uses deltas again their mean.
        """
        clients = row_clients(chosen, merged)
        for index, rows in enumerate(self._chunks(chosen, self.weights)):
            parts = () if self._kind.is_scalars else self._manifest.parts(index)
            if not self._kind.is_scalars and self._manifest.is_buffer(index):
                # In double precision, so that equal buffers stay as they are, however large.
                middle = np.mean if self._rule.reuses else np.median
                yield middle(rows.astype(np.float64), axis=0).astype(np.float32)
            else:
                yield self._rule.combine(rows, clients, parts)

    def averages_of_all(
        self, merged: Sequence[MergedDelta], reused: Sequence[MergedDelta], scale: float
    ) -> Iterator[NDArray[np.float32]]:
        """Yield `scale` times the sum over all clients, for a rule that uses deltas again.

        A client's row is the mean of its new deltas, or its newest merged one. See `averages`.
        """
        counts = Counter(one.key.client for one in merged)
        self.weights = {one.key: one.weight / counts[one.key.client] for one in merged}
        self.weights |= {one.key: one.weight for one in reused}
        for index, average in enumerate(self.averages(self.clients, (*merged, *reused))):
            if not self._manifest.is_buffer(index):
                np.multiply(average, np.float32(scale), out=average)
            yield average


def row_clients(
    chosen: Sequence[Sequence[DeltaKey]], merged: Iterable[MergedDelta]
) -> tuple[RowClient, ...]:
    """Return the client of each row. chosen: the keys of each row, in their order."""
    known = {one.key: one for one in merged}
    rows = [[known[key] for key in keys if key in known] for keys in chosen]
    return tuple(
        RowClient(
            ones[0].key.client,
            math.fsum(one.weight for one in ones),
            sum(one.delta.tokens for one in ones),
            sum(one.delta.steps for one in ones),
            max(one.staleness for one in ones),
            ones[-1].delta.metrics,
        )
        for ones in rows
        if ones
    )
