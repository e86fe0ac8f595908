"""Upstream merge: the mean of a cell goes to another parameter server, whose version comes back.

For a summing relay (`fsl_async.nodes.ps.upstream`): the parameter server of a cell, which is one
client of a run. What came back is kept in sums/ before the version is made, as the sum of a channel
is, so the version and its replays do not need the other server again.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

import numpy as np
from attrs import frozen

from fsl_async.store.book.records import Received
from fsl_async.store.merge.merge import SumMerge
from fsl_async.store.merge.merge_channel import KeptMerge
from fsl_async.store.vectors.vectors import LOSSLESS
from fsl_codecs import encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import Delta
    from fsl_async.store.merge.merge import Round
    from fsl_async.store.model.manifest import Manifest
    from fsl_async.store.vectors.vectors import Vectors

    Values = NDArray[np.float32]


@frozen
class CellRound:
    """A round of a cell. version: that it makes; source: version upstream that it began with, or -1
    where that is unknown. base: weights that its clients began with, float32 (values,); mean: of
    their deltas, which leads away from the better weights. deltas: with their work.
    """

    version: int
    source: int
    base: Values
    mean: Values
    deltas: Sequence[Delta]


@frozen
class Returned:
    """weights: of the next version upstream, float32 (values,). version: its number. is_sent:
    whether it was made with the mean at hand; else the cell's round came too late for it.
    """

    weights: Values
    version: int
    is_sent: bool


class Upstream(Protocol):
    """The server above a cell, as the store's thread calls it. Calls wait; StoreError ends them."""

    def begin(self, manifest: Manifest, own: Values) -> Values:
        """Join with a model whose first weights are `own`; return the weights of the run."""

    def exchange(self, a_round: CellRound) -> Returned:
        """Send a cell's mean, and return the version that it is in."""


class UpstreamMerge(KeptMerge):
    """The merge of a cell."""

    def receive(self, a_round: Round, known: Received | None, vectors: Vectors) -> Received:
        """See `KeptMerge.receive`."""
        upstream, manifest, version = self._settings.upstream, self._manifest, a_round.version
        assert upstream is not None, "the store is of a cell"
        facts = [version, a_round.scale, *((one.key.text, one.weight) for one in a_round.merged)]
        of = hashlib.sha256(repr(facts).encode()).hexdigest()
        if known is not None and known.of == of and self._spool.has_sum(version - 1, known):
            return known
        mean, base = (np.empty(manifest.values, np.float32) for _ in range(2))
        merge = SumMerge(manifest, self._spool, self._pool, self._settings)
        for index, fill in enumerate(merge.average(a_round, vectors).chunks):
            start, stop = manifest.chunk_range(index)
            fill(mean[start:stop])
            np.copyto(base[start:stop], vectors.weights_chunk(index))
        source = known.upstream if known is not None and known.version == version - 1 else -1
        deltas = [a_round.deltas[one.key].delta for one in a_round.merged]
        found = upstream.exchange(CellRound(version, source, base, mean, deltas))
        change = np.subtract(base, found.weights, out=base)
        ranges = (manifest.chunk_range(index) for index in range(manifest.chunks))
        frames = (encode(change[start:stop], LOSSLESS) for start, stop in ranges)
        size, digest = self._spool.write_sum(version - 1, frames)
        clients = sorted({one.key.client for one in a_round.merged})
        senders = clients if found.is_sent else []
        return Received(
            version, of, len(clients), senders, 0.0, 0.0, 0.0, 0, size, digest, found.version
        )
