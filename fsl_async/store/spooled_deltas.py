"""Spooled deltas: those of a round, for a merge that needs several clients' at once.

The counterpart of the accumulator: between rounds only keys and weights are held. A merge reads the
deltas from the spool, and holds one chunk per client: O(clients x chunk) memory. Clients come in
the order of their names, and a client's own deltas are summed in the order of their keys. A merge
that a crash interrupted therefore gives the same bits when it is repeated, in whatever order its
deltas arrived.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from fsl_async.errors import disk_words
from fsl_async.store.errors import DeltaDamaged, StoreError
from fsl_codecs import CodecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import DeltaKey, MergedDelta
    from fsl_async.store.chunk_pool import ChunkPool
    from fsl_async.store.delta_kind import DeltaKind
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.spool import Spool


class SpooledDeltas:
    """The deltas of the round."""

    def __init__(self, manifest: Manifest, spool: Spool, pool: ChunkPool, kind: DeltaKind) -> None:
        self._manifest = manifest
        self._kind = kind
        self._lengths = kind.parts(manifest)
        self._spool = spool
        self._pool = pool
        self.weights: dict[DeltaKey, float] = {}
        """The weight of every delta of the round, in the order of the merge."""

    def assemble(self, merged: Sequence[MergedDelta]) -> None:
        """Make these the deltas of the round. A weight contains the clip."""
        self.weights = {one.key: one.weight for one in merged}

    def clear(self) -> None:
        """Remove all deltas, for the next round."""
        self.weights.clear()

    @property
    def clients(self) -> list[list[DeltaKey]]:
        """The keys of each client, in the order of rows."""
        return [list(keys) for _, keys in groupby(sorted(self.weights), lambda key: key.client)]

    def _chunks(
        self, clients: Sequence[Sequence[DeltaKey]], factors: Mapping[DeltaKey, float]
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the same part of each client's delta, float32 (n, values), valid until the next.

        Parts are chunks of the flat vector, or all scalars (`DeltaKind.parts`). factors: by which
        each delta is multiplied; of buffers the rows are means. Raises StoreError.
        """
        manifest, buffer = self._manifest, np.empty((len(clients), max(self._lengths)), np.float32)
        adders = [
            [
                (
                    key,
                    self._kind.adders(manifest, self._spool.frames(key, manifest)),
                    factors[key],
                )
                for key in keys
            ]
            for keys in clients
        ]
        for index, length in enumerate(self._lengths):
            rows = buffer[:, :length]
            rows.fill(0.0)
            are_buffers = not self._kind.is_scalars and manifest.is_buffer(index)

            def add(
                number: int, rows: NDArray[np.float32] = rows, are_buffers: bool = are_buffers
            ) -> None:
                total = sum(weight for _, _, weight in adders[number])
                for key, source, weight in adders[number]:
                    share = weight
                    if are_buffers:  # a row of them is their mean
                        share = weight / total if total else 1.0 / len(adders[number])
                    try:
                        next(source)(rows[number], share)
                    except (FileNotFoundError, CodecError, StoreError, StopIteration) as error:
                        raise DeltaDamaged(key.text, str(error)) from error

            try:
                self._pool.run(add, range(len(clients)))
            except OSError as error:
                raise StoreError(
                    f"a delta cannot be read back from the spool: {disk_words(error)}"
                ) from error
            yield rows
