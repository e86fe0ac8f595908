"""Kinds of deltas: which frames a run's deltas have, how each is checked, and how deltas add up.

    dense    the base minus the client's weights: one frame per chunk of the flat vector, fp32 sums;
             chunks of buffers hold the client's buffers themselves, in fp32, with float64 sums
    full     the client's weights (docs/adr/0045): the same frames, float64 sums
    seeds    projected gradients along directions of signs (fsl_async.store.seed_step): one frame
    mixed    dense deltas of some clients, deltas of seeds of others

Ledger, spool, weights, staleness and quarantine are the same for all kinds. A run has one kind
(`StoreSettings.kind`). To add one: a subclass of DeltaKind, and a Total of its own if its frames
are not chunks of the flat vector.

An arriving frame is decoded once: `check` returns its content, and `Total.add` takes that. A frame
that is added later is read from the spool and decoded there (`Total.add_frame`); both ways give the
same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import frozen

from fsl_async.store.errors import FrameRefused
from fsl_async.store.memory import anonymous
from fsl_async.store.outer import squared_norm
from fsl_codecs import (
    CodecError,
    SeedsFrame,
    decode_accumulate,
    decode_into,
    decode_seeds,
    info,
    is_seeds,
    new_vector,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fsl_async.files.files import BytesLike
    from fsl_async.store.manifest import Manifest
    from fsl_async.store.memory import Allocate
    from fsl_async.store.seed_step import Directions

    Source = tuple[Iterator[bytes], float, float]
    """The frames of a delta, in order, its weight, and the clip by which that was lowered."""


Adder = Callable[["NDArray[np.float32]", float], object]
"""Adds a weight times values to a vector in place."""

_SUBNORMAL, _ONE = np.array([[1e-40], [1.0]], np.float32)


@frozen
class Checked:
    """The decoded content of a frame; valid until the next frame is checked."""

    content: Any
    squared_norm: float
    """The frame's part of the delta's squared norm; not finite when a value is not finite."""
    base: int | None = None
    """The version from which the delta was measured, where the frame says so."""


class Total(ABC):
    """A sum of deltas times their weights. Each frame index has its own part, zero at first."""

    @abstractmethod
    def clear(self, index: int) -> None:
        """Set the part of one frame to zero."""

    @abstractmethod
    def add(self, index: int, content: Any, weight: float) -> bool:
        """Add a checked frame; its content may be changed.

        False: nothing was added, and the caller must use `add_frame`.
        """

    @abstractmethod
    def add_frame(self, index: int, frame: BytesLike, weight: float, clip: float = 1.0) -> None:
        """Add a frame from the spool. Raises CodecError.

        clip: by which the weight was lowered, where a sum is divided by the weights in it. Several
        threads may call it at the same time with different indices.
        """

    @abstractmethod
    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield the sum as chunks of the flat vector, in order; each is valid until the next."""


class DeltaKind(ABC):
    """What a delta consists of. An object belongs to one store and is used in its thread."""

    name: ClassVar[str]
    comparable: ClassVar[bool] = False
    """Whether a rule can compare deltas of clients, part by part."""
    is_full: ClassVar[bool] = False
    """Whether the average of deltas is the next version, instead of a change of the current one."""
    has_seeds: ClassVar[bool] = False
    """Whether a delta may be one frame of scalars (`fsl_codecs.seeds`)."""
    is_scalars: ClassVar[bool] = False
    """Whether all deltas are, and a version is made from their mean alone."""

    @abstractmethod
    def frames(self, manifest: Manifest) -> int:
        """Return the number of frames of a complete delta that is not one of seeds."""

    @abstractmethod
    def check(self, manifest: Manifest, index: int, frame: BytesLike) -> Checked:
        """Decode a peer's frame. FrameRefused: it is not frame `index` of a delta."""

    @abstractmethod
    def total(self, manifest: Manifest, allocate: Allocate = anonymous) -> Total:
        """Return an empty sum."""

    def parts(self, manifest: Manifest) -> list[int]:
        """Return the lengths of the parts in which `adders` adds a delta: here, of the chunks."""
        return [manifest.chunk_values(index) for index in range(manifest.chunks)]

    def adders(self, manifest: Manifest, frames: Iterator[bytes]) -> Iterator[Adder]:
        """Yield for each part, in order, a function that adds weight times its values to a vector.

        frames: all of a delta. This is how a rule gets a delta's dense values, whatever its form.
        Vectors are float32. CodecError: a frame is damaged.
        """
        for frame in frames:
            yield partial(decode_accumulate, frame)

    def sums(self, manifest: Manifest, sources: Sequence[Source]) -> Iterator[NDArray[Any]]:
        """Yield the sum of these deltas, chunk by chunk, with as little memory as possible."""
        total = self.total(manifest)
        for index in range(self.frames(manifest)):
            for frames, weight, clip in sources:
                total.add_frame(index, next(frames), weight, clip)
        return total.chunks()


class Dense(DeltaKind):
    """Pseudo-gradients: one fp32 multiplication and one fp32 addition per value, never fused."""

    name = "dense"
    comparable = True
    dtype: ClassVar[type[np.floating[Any]]] = np.float32

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.float32)

    def frames(self, manifest: Manifest) -> int:
        """One per chunk."""
        return manifest.chunks

    def check(self, manifest: Manifest, index: int, frame: BytesLike) -> Checked:
        """See `DeltaKind.check`; the content is float32, (values of the chunk,)."""
        if not len(self._buffer):
            self._buffer = np.empty(manifest.longest_chunk, np.float32)
        values = decode_checked(frame, index, manifest, self._buffer)
        if not manifest.is_buffer(index):
            return Checked(values, squared_norm(values))
        coding = info(frame).format
        if coding != "fp32":
            raise FrameRefused(f"chunk {index} holds buffers and is coded in {coding}, not in fp32")
        if not manifest.weights:  # a norm of 0 would have no weight in a merge
            return Checked(values, squared_norm(values))
        return Checked(values, 0.0 if np.isfinite(values).all() else np.nan)

    def total(self, manifest: Manifest, allocate: Allocate = anonymous) -> ChunkTotal:
        """One vector of model size."""
        return ChunkTotal(self, manifest, allocate)

    def sums(self, manifest: Manifest, sources: Sequence[Source]) -> Iterator[NDArray[Any]]:
        """See `DeltaKind.sums`. Uses one chunk of memory; the same order gives the same bits."""
        buffer = np.zeros(manifest.longest_chunk, self.dtype)
        for index in range(manifest.chunks):
            kind, total = self, buffer[: manifest.chunk_values(index)]
            if manifest.is_buffer(index):
                kind, total = _BUFFERS, np.empty(len(total), _BUFFERS.dtype)
            total.fill(0.0)
            for frames, weight, _ in sources:
                kind.add_frame(total, next(frames), weight)
            yield total

    def add(self, total: NDArray[Any], values: NDArray[np.float32], weight: float) -> bool:
        """Add weight * values to `total`, in place; `values` is changed. False: see `Total.add`."""
        # A library may have set this thread to flush subnormal numbers to zero. NumPy then does so,
        # the codec does not.
        if not np.multiply(_SUBNORMAL, _ONE)[0]:
            return False
        # A delta that makes the sum infinite or NaN is removed before the sum is read.
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(values, np.float32(weight), out=values)
            np.add(total, values, out=total)
        return True

    def add_frame(self, total: NDArray[Any], frame: BytesLike, weight: float) -> None:
        """Add weight times the values of a coded chunk to `total`, in place. Raises CodecError."""
        decode_accumulate(frame, total, weight)


class FullWeights(Dense):
    """Full weights, summed in float64.

    Weights of opposite sign may cancel almost completely, and the average must be accurate then
    too. A product of two fp32 numbers, and most sums of such products, are exact in float64.
    """

    name = "full"
    comparable = False
    is_full = True
    dtype = np.float64

    def add(self, total: NDArray[Any], values: NDArray[np.float32], weight: float) -> bool:
        """See `Dense.add`."""
        with np.errstate(invalid="ignore"):
            total += np.multiply(values, weight, dtype=np.float64)
        return True

    def add_frame(self, total: NDArray[Any], frame: BytesLike, weight: float) -> None:
        """See `Dense.add_frame`."""
        values = np.empty(len(total), np.float32)
        decode_into(frame, values)
        self.add(total, values, weight)


_BUFFERS: Dense = FullWeights()
"""How buffers are summed in every run: as they are, so that the mean of equal ones is exact."""


class ChunkTotal(Total):
    """A sum held in one flat vector of weights, and one of buffers: float64.

    A chunk is filled with zeros when it is used next: then it is in the cache for that.
    """

    def __init__(self, kind: Dense, manifest: Manifest, allocate: Allocate) -> None:
        self._kind = kind
        self._manifest = manifest
        self.values: NDArray[Any] = allocate(manifest.weights, kind.dtype)
        """The sum over all weights: float32, or float64 for full weights."""
        self._buffers: NDArray[Any] = new_vector(manifest.values - manifest.weights, np.float64)
        self._is_cleared = bytearray(manifest.chunks)

    def _chunk(self, index: int) -> NDArray[Any]:
        start, stop = self._manifest.chunk_range(index)
        chunk = self.values[start:stop]
        if self._manifest.is_buffer(index):
            weights = self._manifest.weights
            chunk = self._buffers[start - weights : stop - weights]
        if self._is_cleared[index]:
            chunk.fill(0.0)
            self._is_cleared[index] = False
        return chunk

    def clear(self, index: int) -> None:
        """See `Total.clear`."""
        self._is_cleared[index] = True

    def add(self, index: int, content: NDArray[np.float32], weight: float) -> bool:
        """See `Total.add`."""
        return self._kind_of(index).add(self._chunk(index), content, weight)

    def add_frame(self, index: int, frame: BytesLike, weight: float, clip: float = 1.0) -> None:
        """See `Total.add_frame`."""
        self._kind_of(index).add_frame(self._chunk(index), frame, weight)

    def _kind_of(self, index: int) -> Dense:
        return _BUFFERS if self._manifest.is_buffer(index) else self._kind

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield views of the vectors."""
        return map(self._chunk, range(self._manifest.chunks))


class SeedsTotal(Total):
    """Weighted sums of scalars, by round: float64 (K, P)."""

    def __init__(self) -> None:
        self.rounds: dict[int, NDArray[np.float64]] = {}
        self.weight = self.counted = 0.0
        """The sum of the weights, without clips and with them."""

    def clear(self, index: int) -> None:
        """See `Total.clear`."""
        self.rounds.clear()
        self.weight = self.counted = 0.0

    def add(self, index: int, content: SeedsFrame, weight: float) -> bool:
        """See `Total.add`."""
        total = self.rounds.setdefault(content.first, np.zeros(content.scalars.shape[1:]))
        # A delta that makes the sum infinite or NaN is removed before the sum is read.
        with np.errstate(over="ignore", invalid="ignore"):
            total += np.multiply(content.scalars[0], weight, dtype=np.float64)
        self.weight += weight
        self.counted += weight
        return True

    def add_frame(self, index: int, frame: BytesLike, weight: float, clip: float = 1.0) -> None:
        """See `Total.add_frame`."""
        self.add(index, decode_seeds(frame), weight)
        self.weight += weight / clip - weight

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield the sums of each round, float64 (K * P,)."""
        return (total.ravel() for total in self.rounds.values())


class Seeds(DeltaKind):
    """Projected gradients of a round: one frame of fp32 scalars, summed in float64.

    A version is made from the mean of its clients' scalars alone. Rules compare scalars.
    """

    name = "seeds"
    comparable = True
    has_seeds = is_scalars = True

    def __init__(self, directions: Directions) -> None:
        self.directions = directions

    def frames(self, manifest: Manifest) -> int:
        """One."""
        return 1

    def check(self, manifest: Manifest, index: int, frame: BytesLike) -> Checked:
        """See `DeltaKind.check`; the content is a SeedsFrame."""
        return check_seeds(self.directions, manifest, index, frame)

    def total(self, manifest: Manifest, allocate: Allocate = anonymous) -> SeedsTotal:
        """The scalars of a round."""
        return SeedsTotal()

    def parts(self, manifest: Manifest) -> list[int]:
        """One, of all scalars."""
        return [self.directions.scalars]

    def adders(self, manifest: Manifest, frames: Iterator[bytes]) -> Iterator[Adder]:
        """See `DeltaKind.adders`: it adds scalars."""
        for frame in frames:
            yield partial(_add_scalars, decode_seeds(frame).scalars.ravel())


class Mixed(Dense):
    """Dense deltas of some clients, and deltas of seeds of others.

    Deltas of seeds are mostly noise, which would drown the others if it had the weight of its
    clients' data. So each form is averaged within itself, and the two averages are added:

        W * (sum of c_i w_i delta_i / sum of w_i over the dense ones
             + the same over those of seeds),           W = sum of all w_i

    which the scale of the round multiplies. w_i is a weight without the clip c_i. Where all have
    one form, it is their weighted sum.
    """

    name = "mixed"
    has_seeds = True

    def __init__(self, directions: Directions) -> None:
        super().__init__()
        self.directions = directions

    def check(self, manifest: Manifest, index: int, frame: BytesLike) -> Checked:
        """See `DeltaKind.check`; the content is a SeedsFrame, or as in `Dense.check`."""
        if not index and is_seeds(frame):
            return check_seeds(self.directions, manifest, index, frame)
        return super().check(manifest, index, frame)

    def total(self, manifest: Manifest, allocate: Allocate = anonymous) -> MixedTotal:
        """One vector of model size, and scalars."""
        return MixedTotal(self, manifest, allocate)

    def adders(self, manifest: Manifest, frames: Iterator[bytes]) -> Iterator[Adder]:
        """See `DeltaKind.adders`."""
        first = next(frames)
        if not is_seeds(first):
            yield from super().adders(manifest, chain((first,), frames))
            return
        found = decode_seeds(first)
        for index in range(manifest.chunks):
            yield partial(self._add_seeds, found, manifest.chunk_range(index)[0])

    def _add_seeds(
        self, found: SeedsFrame, offset: int, total: NDArray[np.float32], weight: float
    ) -> None:
        self.directions.add_delta(total, offset, found.first, found.scalars, weight)

    def sums(self, manifest: Manifest, sources: Sequence[Source]) -> Iterator[NDArray[Any]]:
        """See `DeltaKind.sums`."""
        seeds, dense, dense_weight, counted = SeedsTotal(), [], 0.0, 0.0
        for frames, weight, clip in sources:
            first = next(frames)
            if is_seeds(first):
                seeds.add_frame(0, first, weight, clip)
            else:
                dense.append((chain((first,), frames), weight, clip))
                dense_weight += weight / clip
                counted += weight
        chunks = super().sums(manifest, dense)
        return self.joined(manifest, chunks, dense_weight, counted, seeds)

    def joined(
        self,
        manifest: Manifest,
        chunks: Iterator[NDArray[np.float32]],
        dense_weight: float,
        counted: float,
        seeds: SeedsTotal,
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the sum of both forms, chunk by chunk, as the class describes it.

        chunks: the weighted sum of the dense deltas, dense_weight of their weights, and counted of
        these with clips.
        """
        if not seeds.rounds:
            yield from chunks
            return
        weight = dense_weight + seeds.weight
        room = np.empty(manifest.longest_chunk, np.float32)
        for index, chunk in enumerate(chunks):
            if manifest.is_buffer(index):  # seeds say nothing of them
                yield chunk * ((counted + seeds.counted) / counted) if counted else chunk[:0]
                continue
            total = room[: len(chunk)]
            with np.errstate(over="ignore", invalid="ignore"):
                factor = weight / dense_weight if dense_weight else 0.0
                np.multiply(chunk, np.float32(factor), out=total)
            if seeds.weight:
                offset = manifest.chunk_range(index)[0]
                for number, scalars in seeds.rounds.items():
                    self.directions.add_delta(total, offset, number, scalars, weight / seeds.weight)
            yield total


class MixedTotal(ChunkTotal):
    """The sum of dense deltas in one flat vector, and that of scalars beside it."""

    def __init__(self, kind: Mixed, manifest: Manifest, allocate: Allocate) -> None:
        super().__init__(kind, manifest, allocate)
        self._mixed = kind
        self._seeds = SeedsTotal()
        self._dense_weight = self._counted = 0.0

    def clear(self, index: int) -> None:
        """See `Total.clear`."""
        super().clear(index)
        if not index:
            self._seeds.clear(index)
            self._dense_weight = self._counted = 0.0

    def add(self, index: int, content: Any, weight: float) -> bool:
        """See `Total.add`."""
        if isinstance(content, SeedsFrame):
            return self._seeds.add(index, content, weight)
        done = super().add(index, content, weight)
        if done and not index:
            self._dense_weight += weight
            self._counted += weight
        return done

    def add_frame(self, index: int, frame: BytesLike, weight: float, clip: float = 1.0) -> None:
        """See `Total.add_frame`."""
        if not index and is_seeds(frame):
            self._seeds.add_frame(index, frame, weight, clip)
            return
        super().add_frame(index, frame, weight)
        if not index:
            self._dense_weight += weight / clip
            self._counted += weight

    def chunks(self) -> Iterator[NDArray[Any]]:
        """See `Mixed`."""
        chunks = super().chunks()
        weights = self._dense_weight, self._counted
        return self._mixed.joined(self._manifest, chunks, *weights, self._seeds)


def check_seeds(
    directions: Directions, manifest: Manifest, index: int, frame: BytesLike
) -> Checked:
    """Check a peer's frame of scalars: one round, and the whole delta. Raises FrameRefused."""
    if index:
        raise FrameRefused(f"{index} is past the only frame of a delta of seeds")
    found = directions.check(frame)
    return Checked(found, directions.squared_norm(manifest.values, found.scalars), found.first)


def _add_scalars(scalars: NDArray[np.float32], total: NDArray[np.float32], weight: float) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(total, scalars * np.float32(weight), out=total)


def decode_checked(
    frame: BytesLike, index: int, manifest: Manifest, out: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Decode a peer's frame for chunk `index` into the start of `out`.

    FrameRefused: it is damaged or has the wrong length.
    """
    try:
        expected = manifest.chunk_values(index)
    except IndexError:
        raise FrameRefused(f"{index} is past the last of {manifest.chunks} chunks") from None
    try:
        values = decode_into(frame, out[:expected])
    except CodecError as error:
        with suppress(CodecError):  # a longer frame does not fit
            _check_length(index, info(frame).values, expected)
        raise FrameRefused(f"chunk {index} cannot be decoded: {error}") from error
    _check_length(index, values, expected)
    return out[:expected]


def _check_length(index: int, values: int, expected: int) -> None:
    if values != expected:
        raise FrameRefused(f"chunk {index} has {values} values, expected {expected}")
