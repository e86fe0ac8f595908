"""Channel merge: the mean of deltas that a channel adds up (fsl_async.store.rules.air).

The sites' vectors are the deltas as decoded, times their weights. What the channel delivers is
written to sums/ once, and recorded, before the version is made: the version and its replays read
it, because a real radio does not deliver the same sum twice. If the process dies in between, the
kept sum is used where the round is still of the same deltas, else they are sent again. The deltas
are read twice, for the largest root mean square and for the sum: O(sites x chunk) memory.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from fsl_async.store.book.records import Received
from fsl_async.store.merge.merge import Average, reading
from fsl_async.store.merge.merge_rows import SpooledMerge, by_client
from fsl_async.store.rules.adapters.layout import A_SUFFIX, B_SUFFIX
from fsl_async.store.vectors.vectors import LOSSLESS
from fsl_codecs import decode_into, encode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from fsl_async.store.merge.merge import Round
    from fsl_async.store.vectors.vectors import Vectors


class KeptMerge(SpooledMerge, ABC):
    """A merge whose mean comes from elsewhere. It reads what `receive` has kept."""

    @abstractmethod
    def receive(self, a_round: Round, known: Received | None, vectors: Vectors) -> Received:
        """Return what is delivered of a round; its mean is then in sums/.

        known: the newest sum on record, which is returned where it is that of this round. vectors:
        of the version before. StoreError: a delta cannot be read, or nothing is delivered. Raises
        OSError.
        """

    def _average(self, a_round: Round, vectors: Vectors) -> Average:
        counted, key = {one.key for one in a_round.merged}, a_round.merged[0].key
        with reading(key):
            frame = self._spool.sum_reader(a_round.version - 1, self._manifest).frame

        def fill(index: int, room: NDArray[np.float32]) -> NDArray[np.float32]:
            with reading(key):
                decode_into(frame(index), room)
            return room

        if self._kind.is_scalars:
            mean = fill(0, np.empty(sum(self._kind.parts(self._manifest)), np.float32))
            return self._of_scalars(mean, counted, a_round, vectors)
        return Average(self._each(fill), counted)


class ChannelMerge(KeptMerge):
    """The merge of a run whose deltas come by a channel."""

    def receive(self, a_round: Round, known: Received | None, vectors: Vectors) -> Received:
        """See `KeptMerge.receive`. StoreError: also where an own channel fails."""
        channel, version = self._settings.channel, a_round.version
        assert channel is not None, "the run has one"
        weights = {
            one.key: one.weight
            for one in a_round.merged
            if one.weight and self._kind.fits(one.key, version)
        }
        facts = [version, a_round.scale, *((key.text, weights[key]) for key in sorted(weights))]
        of = hashlib.sha256(repr(facts).encode()).hexdigest()
        if known is not None and known.of == of and self._spool.has_sum(version - 1, known):
            return known
        clients = by_client(weights)
        names = [keys[0].client for keys in clients]
        shares = np.array([sum(weights[key] for key in keys) for keys in clients])
        lengths = self._kind.parts(self._manifest)
        live = [self._live(index, version - 1) for index in range(len(lengths))]
        uses, read = sum(int(one.sum()) for one in live), self._rows(clients, weights)
        squares = np.zeros(len(clients))
        for index in range(len(lengths)):
            rows = read(index)
            squares += np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
        rms = math.sqrt(squares.max(initial=0.0) / max(1, uses))
        sends = channel.begin(self._settings.adapter_seed, version, names)
        is_heard = bool(rms and sends.any())
        factor = a_round.scale * rms * shares.sum() / shares[sends].sum() if is_heard else 0.0

        def means() -> Iterator[bytes]:
            for index, values in enumerate(lengths):
                mean = np.zeros(values, np.float32)
                if is_heard:
                    rows = read(index)[sends][:, live[index]] / np.float32(rms)
                    mean[live[index]] = channel.transmit(rows) * np.float32(factor)
                yield encode(mean, LOSSLESS)

        size, digest = self._spool.write_sum(version - 1, means())
        senders = [name for name, is_sent in zip(names, sends, strict=True) if is_sent]
        power, snr_db = channel.power if is_heard else 0.0, channel.settings.snr_db
        return Received(version, of, len(names), senders, rms, snr_db, power, uses, size, digest)

    def _live(self, index: int, base: int) -> NDArray[np.bool_]:
        """Return which values of a part are sent: bool. A factor that rests in a round is not."""
        live = np.ones(self._kind.parts(self._manifest)[index], np.bool_)
        rule = self._settings.adapters
        if rule is not None and not self._kind.is_scalars:
            trains = {A_SUFFIX: rule.trains_a(base), B_SUFFIX: rule.trains_b(base)}
            resting = tuple(suffix for suffix, is_trained in trains.items() if not is_trained)
            for part in self._manifest.parts(index):
                live[part.place] = not part.tensor.name.endswith(resting)
        return live
