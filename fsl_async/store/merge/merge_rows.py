"""Rows merge: applies an aggregation rule to the clients' deltas of a round, chunk by chunk.

For rules that need several clients' deltas at once. Between rounds nothing is held. A merge reads
the deltas from the spool once, twice if the rule needs distances, and holds one chunk per client
and thread: O(threads x clients x chunk) memory. Clients come in the order of their names, and a
client's own deltas are summed in the order of their keys, so a merge that is repeated gives the
same bits.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from fsl_async.store.errors import StoreError, disk
from fsl_async.store.merge.merge import Average, Merge, reading
from fsl_async.store.rules.aggregation import RowClient
from fsl_async.store.rules.outer import squared_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import DeltaKey
    from fsl_async.store.merge.merge import Round
    from fsl_async.store.vectors.vectors import Chunks, Vectors

    Rows = NDArray[np.float32]
    Clients = Sequence[Sequence[DeltaKey]]


def by_client(keys: Iterable[DeltaKey]) -> list[list[DeltaKey]]:
    """Return the keys of each client, in the order of rows."""
    return [list(found) for _, found in groupby(sorted(keys), lambda key: key.client)]


class SpooledMerge(Merge):
    """A merge that reads the clients' deltas side by side."""

    def _rows(self, clients: Clients, factors: Mapping[DeltaKey, float]) -> Callable[[int], Rows]:
        """Return a function that reads the same part of each client's delta: float32 (n, values).

        Parts are chunks of the flat vector, or all scalars (`DeltaKind.parts`). factors: by which
        each delta is multiplied; of buffers the rows are means. StoreError, also later: a delta
        cannot be read. Several threads may call the result.
        """
        lengths = self._kind.parts(self._manifest)
        adders = [[(key, self._adder(key), factors[key]) for key in keys] for keys in clients]

        def read(index: int) -> Rows:
            rows = np.zeros((len(clients), lengths[index]), np.float32)
            for row, deltas in zip(rows, adders, strict=True):
                total = sum(weight for _, _, weight in deltas)
                for key, add, weight in deltas:
                    share = weight
                    if self._are_buffers(index):  # a row of them is their mean
                        share = weight / total if total else 1.0 / len(deltas)
                    with reading(key):
                        add(index, row, share)
            return rows

        return read

    def _are_buffers(self, index: int) -> bool:
        return not self._kind.is_scalars and self._manifest.is_buffer(index)


class RowsMerge(SpooledMerge):
    """The merge of a run with a rule that compares clients, or uses their deltas again."""

    def _average(self, a_round: Round, vectors: Vectors) -> Average:
        if self._settings.rule.reuses:
            return Average(self._of_all(a_round), {one.key for one in a_round.merged})
        weights = {
            one.key: one.weight
            for one in a_round.merged
            if one.weight or not (a_round.is_decided or one.is_refused)
        }
        clients: Clients = by_client(weights)
        if not a_round.is_decided:
            with disk("cannot read the deltas of the round"):
                clients = self._chosen(clients, weights)
        counted = {key for keys in clients for key in keys}
        combined = self._combined(clients, weights, _described(clients, a_round))
        if self._kind.is_scalars:
            return self._of_scalars(combined(0), counted, a_round, vectors)
        return Average(self._each(lambda index, _: combined(index)), counted)

    def _chosen(self, clients: Clients, weights: Mapping[DeltaKey, float]) -> Clients:
        """Return the keys of the clients that the rule uses. StoreError: there are too few."""
        rule = self._settings.rule
        if len(clients) < rule.least:
            raise StoreError(
                f"{rule.name} against {rule.byzantine} attackers needs deltas of {rule.least}"
                f" clients, there are {len(clients)}"
            )
        if not rule.needs_distances:
            return clients
        used = rule.choose(self._squared_distances(clients, weights))
        return [keys for keys, is_used in zip(clients, used, strict=True) if is_used]

    def _squared_distances(
        self, clients: Clients, weights: Mapping[DeltaKey, float]
    ) -> NDArray[np.float64]:
        """Return the squared distances between all rows, float64 (n, n).

        Each chunk's difference is computed in fp32; the sums over chunks are float64.
        """
        read = self._rows(clients, weights)

        def squared(index: int) -> NDArray[np.float64]:
            found, rows = np.zeros((len(clients), len(clients))), read(index)
            for first in range(len(clients)):
                for second in range(first):
                    found[first, second] = squared_norm(rows[first] - rows[second])
            return found

        # Buffers are no part of a change.
        parts = range(len(self._kind.parts(self._manifest)))
        of_parts = self._pool.each(squared, (one for one in parts if not self._are_buffers(one)))
        total = sum(of_parts, np.zeros((len(clients), len(clients))))
        return total + total.T

    def _combined(
        self,
        clients: Clients,
        weights: Mapping[DeltaKey, float],
        described: Sequence[RowClient] = (),
    ) -> Callable[[int], Rows]:
        """Return a function that gives the rule's result for a part. described: the clients.

        Of buffers, the median over the clients, or where the rule uses deltas again their mean.
        """
        rule, read = self._settings.rule, self._rows(clients, weights)

        def combined(index: int) -> Rows:
            rows = read(index)
            if self._are_buffers(index):
                # In double precision, so that equal buffers stay as they are, however large.
                middle = np.mean if rule.reuses else np.median
                return middle(rows.astype(np.float64), axis=0).astype(np.float32)
            parts = () if self._kind.is_scalars else self._manifest.parts(index)
            return rule.combine(rows, described, parts)

        return combined

    def _of_all(self, a_round: Round) -> Chunks:
        """Return `scale` times the sum over all clients, for a rule that uses deltas again.

        A client's row is the mean of its new deltas, or its newest merged one.
        """
        merged, reused = a_round.merged, a_round.reused
        counts = Counter(one.key.client for one in merged)
        weights = {one.key: one.weight / counts[one.key.client] for one in merged}
        weights |= {one.key: one.weight for one in reused}
        combined = self._combined(by_client(weights), weights)

        def fill(index: int, room: NDArray[np.float32]) -> NDArray[np.float32]:
            scale = 1.0 if self._manifest.is_buffer(index) else a_round.scale
            return np.multiply(combined(index), np.float32(scale), out=room)

        return self._each(fill)


def _described(clients: Clients, a_round: Round) -> tuple[RowClient, ...]:
    """Return the client of each row. clients: the keys of each row, in their order."""
    merged = {one.key: one for one in a_round.merged}
    rows = [[merged[key] for key in keys] for keys in clients]
    return tuple(
        RowClient(
            ones[0].key.client,
            math.fsum(one.weight for one in ones),
            sum(one.delta.tokens for one in ones),
            sum(one.delta.steps for one in ones),
            max(one.staleness for one in ones),
            a_round.deltas[ones[-1].key].delta.metrics,
        )
        for ones in rows
    )
