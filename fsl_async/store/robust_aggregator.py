"""Robust aggregator: applies an aggregation rule to a round's spooled deltas, by chunk.

The counterpart of the accumulator for rules that need all deltas at once. Between rounds it holds
only keys and weights. A merge reads the deltas from the spool once (twice if the rule needs
distances) and holds one chunk per client: O(clients x chunk) memory. A client's own deltas are
summed in the order of their keys. A merge that a crash interrupted therefore gives the same bits
when it is repeated, in whatever order its deltas were accumulated.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from fsl_async.errors import disk_words
from fsl_async.store.errors import DeltaDamaged, StoreError
from fsl_async.store.outer import squared_norm
from fsl_codecs import CodecError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import DeltaKey
    from fsl_async.store.aggregation import Rule
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.delta_kind import DeltaKind
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.spool import Spool


class RobustAggregator:
    """The deltas of the round, and their aggregate."""

    def __init__(
        self, manifest: Manifest, spool: Spool, pool: ChunkPool, rule: Rule, kind: DeltaKind
    ) -> None:
        self._manifest = manifest
        self._kind = kind
        self._lengths = kind.parts(manifest)
        self._spool = spool
        self._pool = pool
        self._rule = rule
        self.weights: dict[DeltaKey, float] = {}
        """The weight of every delta of the round, in the order of the calls to `add`."""

    def add_arriving(self, key: DeltaKey, weight: float, index: int, content: Any) -> None:
        """Do nothing: a rule needs complete deltas."""

    def add(self, key: DeltaKey, weight: float) -> None:
        """Include a delta. StoreError: it cannot be read."""
        try:
            next(self._spool.frames(key, self._manifest))
        except (FileNotFoundError, StoreError) as error:
            raise DeltaDamaged(key.text, str(error)) from error
        except OSError as error:
            raise StoreError(
                f"delta {key.text} cannot be read back from the spool: {disk_words(error)}"
            ) from error
        self.weights[key] = weight

    def remove(self, key: DeltaKey) -> None:
        """Remove a delta. Absent keys are ignored."""
        self.weights.pop(key, None)

    def clear(self) -> None:
        """Remove all deltas, for the next round."""
        self.weights.clear()

    @property
    def clients(self) -> list[list[DeltaKey]]:
        """The keys of each client, in the order of rows."""
        return [list(keys) for _, keys in groupby(sorted(self.weights), lambda key: key.client)]

    def squared_distances(self) -> NDArray[np.float64]:
        """Return the squared distances between all rows, float64 (n, n).

        Each chunk's difference is computed in fp32; the sums over chunks are float64.
        """
        count = len(self.clients)
        total = np.zeros((count, count))
        for rows in self._chunks(self.clients):
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

    def averages(self, chosen: list[list[DeltaKey]]) -> Iterator[NDArray[np.float32]]:
        """Yield the change, chunk by chunk; each is valid until the next. Raises StoreError."""
        out = np.empty(max(self._lengths), np.float32)
        for index, rows in enumerate(self._chunks(chosen)):
            parts = () if self._kind.is_scalars else self._manifest.parts(index)
            self._rule.combine(rows, out[: rows.shape[1]], parts)
            yield out[: rows.shape[1]]

    def _chunks(self, clients: list[list[DeltaKey]]) -> Iterator[NDArray[np.float32]]:
        """Yield the same chunk of each client's weighted delta, float32 (n, values)."""
        manifest, buffer = self._manifest, np.empty((len(clients), max(self._lengths)), np.float32)
        adders = [
            [
                (key, self._kind.adders(manifest, self._spool.frames(key, manifest)), weight)
                for key, weight in ((key, self.weights[key]) for key in keys)
            ]
            for keys in clients
        ]
        for length in self._lengths:
            rows = buffer[:, :length]
            rows.fill(0.0)

            def add(number: int, rows: NDArray[np.float32] = rows) -> None:
                for key, source, weight in adders[number]:
                    try:
                        next(source)(rows[number], weight)
                    except (FileNotFoundError, CodecError, StoreError, StopIteration) as error:
                        raise DeltaDamaged(key.text, str(error)) from error

            try:
                self._pool.run(add, range(len(clients)))
            except OSError as error:
                raise StoreError(
                    f"a delta cannot be read back from the spool: {disk_words(error)}"
                ) from error
            yield rows
