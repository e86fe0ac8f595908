"""Merge: how the deltas of a round become the average that makes the next version.

A run has one merge, by its settings:

    SumMerge         the weighted sum, each chunk by itself                      (here)
    SecureMerge      the mean of a secure sum, which no delta is read for        (here)
    ChannelMerge     the mean that a channel has delivered                       (merge_channel)
    UpstreamMerge    what a server upstream made of the mean of a cell           (merge_upstream)
    RowsMerge        a rule over the clients' rows                               (merge_rows)
    ProductsMerge    a rule of adapters that merges module by module             (merge_products)

All read the deltas of the round from the spool, when the version is made, so between two versions
nothing is held of them. Which frames a delta has, and how one is checked, is in its kind
(fsl_async.store.deltas.delta_kind). Recovery makes a version again by the same merge, from the
record and the spool, so the same bits must follow from the same deltas, in whatever order they
arrived.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, field, frozen

from fsl_async.errors import disk_words
from fsl_async.store.deltas.seed_step import is_finite, keys_of
from fsl_async.store.errors import DeltaDamaged, NotFinite, NoWorkerThread, StoreError
from fsl_async.store.rules.outer import average_full
from fsl_codecs import (
    CodecError,
    add_signs,
    decode_accumulate,
    decode_into,
    decode_seeds,
    is_seeds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from fsl_async.roles.sync.delta import DeltaKey, MergedDelta, StoredDelta
    from fsl_async.store.book.records import VersionRecord
    from fsl_async.store.deltas.delta_kind import Adder
    from fsl_async.store.deltas.seed_step import SeedStep
    from fsl_async.store.deltas.spool import Spool
    from fsl_async.store.disk.chunk_pool import ChunkPool
    from fsl_async.store.model.manifest import Manifest
    from fsl_async.store.settings import StoreSettings
    from fsl_async.store.vectors.vectors import Chunks, Vectors


@frozen
class Round:
    """The deltas that a version is made of.

    merged: in order, with their final weights and clips. reused: merged by earlier versions, and a
    part of this one again. deltas: as they were accepted. is_decided: the version was made before,
    and `merged` has the weight 0 for deltas that the rule did not choose.
    """

    version: int
    merged: Sequence[MergedDelta]
    scale: float
    reused: Sequence[MergedDelta]
    deltas: Mapping[DeltaKey, StoredDelta]
    is_decided: bool = False


@frozen
class Average:
    """The average of a round.

    chunks: in flat order. Of buffers, their mean; empty where they have none. Where the rule keeps
    what it owes, two rows; where a run sets its weights (`StoreSettings.sets_weights`), the next
    version's. counted: the deltas that are in it.
    """

    chunks: Chunks
    counted: Collection[DeltaKey]
    steps: SeedStep | None = None
    """The steps of a version of zeroth order."""
    norm: float = 0.0
    """Their norm as a vector of the model's size."""
    product_norms: Mapping[str, float] = field(factory=dict)
    """Distance, by client, that it moved the products of adapters; complete after all chunks."""


class Merge(ABC):
    """The merge of one run. It belongs to the store's thread."""

    def __init__(
        self, manifest: Manifest, spool: Spool, pool: ChunkPool, settings: StoreSettings
    ) -> None:
        self._manifest = manifest
        self._spool = spool
        self._pool = pool
        self._settings = settings
        self._kind = settings.kind

    def average(self, a_round: Round, vectors: Vectors) -> Average:
        """Return the average of a round. vectors: of the version before.

        StoreError: a delta cannot be read, or there are too few.
        """
        merged = [one for one in a_round.merged if self._kind.fits(one.key, a_round.version)]
        if len(merged) < len(a_round.merged):
            clients = {one.key.client for one in merged}
            if len(clients) < max(1, self._settings.rule.least):
                zeros = np.zeros(sum(self._kind.parts(self._manifest)))
                return self._of_scalars(zeros, (), a_round, vectors)
        return self._average(evolve(a_round, merged=merged), vectors)

    def _adder(self, key: DeltaKey) -> Adder:
        with reading(key):
            return self._kind.adder(self._manifest, self._frames_of(key))

    def _frames_of(self, key: DeltaKey) -> Callable[[int], bytes]:
        with reading(key):
            return self._spool.reader(key, self._manifest).frame

    @abstractmethod
    def _average(self, a_round: Round, vectors: Vectors) -> Average:
        """Return the average of a round whose deltas all can count."""

    def again(
        self, record: VersionRecord, vectors: Vectors, deltas: Mapping[DeltaKey, StoredDelta]
    ) -> Chunks:
        """Return the average that a version was made of."""
        if record.seeds is not None:
            return self._moved(record.seeds, vectors)
        merged, reused = record.merged, record.reused
        made = Round(record.version, merged, record.scale, reused, deltas, is_decided=True)
        return self._average(made, vectors).chunks

    def _of_scalars(
        self, mean: NDArray[Any], counted: Collection[DeltaKey], a_round: Round, vectors: Vectors
    ) -> Average:
        """Return the average of a round of zeroth order, by the mean of its scalars."""
        directions = self._kind.directions
        steps = directions.step(a_round.version - 1, mean)
        if not is_finite(steps):
            raise NotFinite(f"the steps of version {a_round.version} are not finite")
        norm = math.sqrt(directions.squared_norm(self._manifest.values, mean))
        return Average(self._moved(steps, vectors), counted, steps, norm)

    def _moved(self, steps: SeedStep, vectors: Vectors) -> Chunks:
        """Return the weights moved along directions of signs (fsl_async.store.deltas.seed_step)."""
        keys, scalars = keys_of([steps])

        def moved(index: int, room: NDArray[np.float32]) -> NDArray[np.float32]:
            np.copyto(room, vectors.weights_chunk(index))
            add_signs(room, self._manifest.chunk_range(index)[0], keys, scalars)
            return room

        return self._each(moved)

    def _each(self, fill: Callable[[int, NDArray[np.float32]], NDArray[np.float32]]) -> Chunks:
        return (partial(fill, index) for index in range(self._manifest.chunks))

    def too_large(self, moved: float, vectors: Vectors) -> tuple[str, bool] | None:
        """Return why values of a delta must not be merged, and whether the version is at fault.

        None: they may. moved: norm of all that the delta's client moves in this round.
        """
        return None


@frozen
class _Delta:
    """A delta of a round, and how much it counts. clip: by which its weight was lowered."""

    key: DeltaKey
    frame: Callable[[int], bytes]
    weight: float
    clip: float


class SumMerge(Merge):
    """The sum of weight_i * Delta_i, in the order of the round, times its scale.

    One fp32 multiplication and one fp32 addition per value, never fused. Of full weights and of
    buffers, float64: weights of opposite sign may cancel almost completely, and the mean of equal
    buffers must be what they are.

    Deltas of seeds among others are mostly noise, which would drown these if it had the weight of
    its clients' data. So each form is averaged within itself, and the two averages are added:

        W * (sum of c_i w_i delta_i / sum of w_i over the dense ones
             + the same over those of seeds),           W = sum of all w_i

    which the scale of the round multiplies. w_i is a weight without the clip c_i. Where all have
    one form, it is their weighted sum.
    """

    def _average(self, a_round: Round, vectors: Vectors) -> Average:
        counted = {one.key for one in a_round.merged}
        deltas = [
            _Delta(one.key, self._frames_of(one.key), one.weight, one.clip)
            for one in a_round.merged
        ]
        kind, weight = self._kind, math.fsum(one.weight for one in deltas)
        if kind.is_scalars:
            (total,) = _scalars(deltas).values()
            return self._of_scalars(a_round.scale * total, counted, a_round, vectors)
        if kind.is_full:
            return Average(self._full(deltas, vectors, a_round.scale, weight), counted)
        forms: tuple[list[_Delta], list[_Delta]] = [], []
        for one in deltas:
            forms[kind.has_seeds and is_seeds(_first(one))].append(one)
        if forms[True]:
            return Average(self._mixed(*forms, a_round.scale), counted)
        return Average(self._dense(deltas, a_round.scale, weight), counted)

    def _dense(self, deltas: Sequence[_Delta], scale: float, weight: float) -> Chunks:
        def fill(index: int, room: NDArray[np.float32]) -> NDArray[np.float32]:
            if self._manifest.is_buffer(index):
                return _mean(deltas, index, room, weight)
            return np.multiply(_sum(deltas, index, room), np.float32(scale), out=room)

        return self._each(fill)

    def _full(
        self, deltas: Sequence[_Delta], vectors: Vectors, scale: float, weight: float
    ) -> Chunks:
        """Return the average of the clients' weights; see `outer.average_full`."""

        def fill(index: int, room: NDArray[np.float32]) -> NDArray[np.float32]:
            np.copyto(room, vectors.weights_chunk(index))
            average_full(_wide_sum(deltas, index, len(room)), room, weight, scale)
            return room

        return self._each(fill)

    def _mixed(self, dense: Sequence[_Delta], seeds: Sequence[_Delta], scale: float) -> Chunks:
        rounds = _scalars(seeds)
        of_dense, of_seeds = (
            math.fsum(one.weight / one.clip for one in ones) for ones in (dense, seeds)
        )
        weight = of_dense + of_seeds

        def fill(index: int, room: NDArray[np.float32]) -> NDArray[np.float32]:
            if self._manifest.is_buffer(index):  # seeds say nothing of them
                return _mean(dense, index, room, math.fsum(one.weight for one in dense))
            total = _sum(dense, index, room)
            np.multiply(total, np.float32(weight / of_dense if of_dense else 0.0), out=total)
            if of_seeds:
                offset, directions = self._manifest.chunk_range(index)[0], self._kind.directions
                for number, scalars in rounds.items():
                    directions.add_delta(total, offset, number, scalars, weight / of_seeds)
            return np.multiply(total, np.float32(scale), out=total)

        return self._each(fill)


class SecureMerge(Merge):
    """The mean of a secure sum, which was opened before (`Store.open_sum`)."""

    def _average(self, a_round: Round, vectors: Vectors) -> Average:
        counted = {one.key for one in a_round.merged}
        key = a_round.merged[0].key
        with reading(key):
            frame = self._spool.sum_reader(key.base, self._manifest).frame
        if self._kind.is_scalars:
            (values,) = self._kind.parts(self._manifest)
            mean = _decoded(key, frame, 0, np.empty(values, np.float32))
            return self._of_scalars(mean, counted, a_round, vectors)
        return Average(self._each(partial(_decoded, key, frame)), counted)


def _decoded(
    key: DeltaKey, frame: Callable[[int], bytes], index: int, room: NDArray[np.float32]
) -> NDArray[np.float32]:
    with reading(key):
        decode_into(frame(index), room)
    return room


def _first(one: _Delta) -> bytes:
    with reading(one.key):
        return one.frame(0)


def _sum(deltas: Sequence[_Delta], index: int, room: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weighted sum of a chunk, in `room`."""
    room.fill(0.0)
    for one in deltas:
        with reading(one.key):
            decode_accumulate(one.frame(index), room, one.weight)
    return room


def _wide_sum(deltas: Sequence[_Delta], index: int, values: int) -> NDArray[np.float64]:
    """Return the weighted sum of a chunk.

    A product of two fp32 numbers, and most sums of such products, are exact in float64.
    """
    total, decoded = np.zeros(values), np.empty(values, np.float32)
    for one in deltas:
        with reading(one.key):
            decode_into(one.frame(index), decoded)
        total += np.multiply(decoded, one.weight, dtype=np.float64)
    return total


def _mean(
    deltas: Sequence[_Delta], index: int, room: NDArray[np.float32], weight: float
) -> NDArray[np.float32]:
    """Return the mean of a chunk of buffers, which lies between theirs; empty without weights."""
    if not weight:
        return room[:0]
    total = _wide_sum(deltas, index, len(room))
    return np.divide(total, weight, out=room, casting="same_kind")


def _scalars(deltas: Sequence[_Delta]) -> dict[int, NDArray[np.float64]]:
    """Return the weighted sums of scalars, by round: float64 (K, P)."""
    found: dict[int, NDArray[np.float64]] = {}
    for one in deltas:
        with reading(one.key):
            content = decode_seeds(one.frame(0))
        total = found.setdefault(content.first, np.zeros(content.scalars.shape[1:]))
        with np.errstate(over="ignore", invalid="ignore"):
            total += np.multiply(content.scalars[0], one.weight, dtype=np.float64)
    return found


@contextmanager
def reading(key: DeltaKey) -> Iterator[None]:
    """Turn errors of reading a spooled delta into DeltaDamaged, or a StoreError of one line."""
    try:
        yield
    except (NoWorkerThread, DeltaDamaged):
        raise
    except (FileNotFoundError, CodecError, StoreError, StopIteration) as error:
        raise DeltaDamaged(key.text, str(error)) from error
    except OSError as error:
        raise StoreError(
            f"delta {key.text} cannot be read back from the spool: {disk_words(error)}"
        ) from error
