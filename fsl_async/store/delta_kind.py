"""Kinds of deltas: which frames a run's deltas have, how each is checked, and how deltas add up.

    dense    the base minus the client's weights: one frame per chunk of the flat vector, fp32 sums
    full     the client's weights (docs/adr/0045): the same frames, float64 sums

Ledger, spool, weights, staleness and quarantine are the same for all kinds. A run has one kind
(`StoreSettings.kind`). To add one: a subclass of DeltaKind, and a Total of its own if its frames
are not chunks of the flat vector.

An arriving frame is decoded once: `check` returns its content, and `Total.add` takes that. A frame
that is added later is read from the spool and decoded there (`Total.add_frame`); both ways give the
same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import frozen

from fsl_async.store.errors import FrameRefused
from fsl_async.store.outer import squared_norm
from fsl_codecs import CodecError, decode_accumulate, decode_into, info, new_vector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from fsl_async.store.files import BytesLike
    from fsl_async.store.manifest import Manifest

    Source = tuple[Iterator[bytes], float]
    """The frames of a delta, in order, and its weight."""


_SUBNORMAL, _ONE = np.array([[1e-40], [1.0]], np.float32)


@frozen
class Checked:
    """The decoded content of a frame; valid until the next frame is checked."""

    content: Any
    squared_norm: float
    """The frame's part of the delta's squared norm; not finite when a value is not finite."""


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
    def add_frame(self, index: int, frame: BytesLike, weight: float) -> None:
        """Add a frame from the spool. Raises CodecError.

        Several threads may call it at the same time with different indices.
        """

    @abstractmethod
    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield the sum as chunks of the flat vector, in order; each is valid until the next."""


class DeltaKind(ABC):
    """What a delta consists of. An object belongs to one store and is used in its thread."""

    name: ClassVar[str]
    comparable: ClassVar[bool] = False
    """Whether frames are chunks of the flat vector, which a rule can compare between clients."""
    is_full: ClassVar[bool] = False
    """Whether the average of deltas is the next version, instead of a change of the current one."""

    @abstractmethod
    def frames(self, manifest: Manifest) -> int:
        """Return the number of frames of a complete delta."""

    @abstractmethod
    def check(self, manifest: Manifest, index: int, frame: BytesLike) -> Checked:
        """Decode a peer's frame. FrameRefused: it is not frame `index` of a delta."""

    @abstractmethod
    def total(self, manifest: Manifest) -> Total:
        """Return an empty sum."""

    def sums(self, manifest: Manifest, sources: Sequence[Source]) -> Iterator[NDArray[Any]]:
        """Yield the sum of these deltas, chunk by chunk, with as little memory as possible."""
        total = self.total(manifest)
        for index in range(self.frames(manifest)):
            for frames, weight in sources:
                total.add_frame(index, next(frames), weight)
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
            self._buffer = np.empty(manifest.chunk_values(0), np.float32)
        values = decode_checked(frame, index, manifest, self._buffer)
        return Checked(values, squared_norm(values))

    def total(self, manifest: Manifest) -> ChunkTotal:
        """One vector of model size."""
        return ChunkTotal(self, manifest)

    def sums(self, manifest: Manifest, sources: Sequence[Source]) -> Iterator[NDArray[Any]]:
        """See `DeltaKind.sums`. Uses one chunk of memory; the same order gives the same bits."""
        buffer = np.zeros(manifest.chunk_values(0), self.dtype)
        for index in range(manifest.chunks):
            total = buffer[: manifest.chunk_values(index)]
            total.fill(0.0)
            for frames, weight in sources:
                self.add_frame(total, next(frames), weight)
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


class ChunkTotal(Total):
    """A sum held in one flat vector.

    A chunk is filled with zeros when it is used next: then it is in the cache for that.
    """

    def __init__(self, kind: Dense, manifest: Manifest) -> None:
        self._kind = kind
        self._manifest = manifest
        self.values: NDArray[Any] = new_vector(manifest.values, kind.dtype)
        """The sum over the complete model: float32, or float64 for full weights."""
        self._is_cleared = bytearray(manifest.chunks)

    def _chunk(self, index: int) -> NDArray[Any]:
        start, stop = self._manifest.chunk_range(index)
        chunk = self.values[start:stop]
        if self._is_cleared[index]:
            chunk.fill(0.0)
            self._is_cleared[index] = False
        return chunk

    def clear(self, index: int) -> None:
        """See `Total.clear`."""
        self._is_cleared[index] = True

    def add(self, index: int, content: NDArray[np.float32], weight: float) -> bool:
        """See `Total.add`."""
        return self._kind.add(self._chunk(index), content, weight)

    def add_frame(self, index: int, frame: BytesLike, weight: float) -> None:
        """See `Total.add_frame`."""
        self._kind.add_frame(self._chunk(index), frame, weight)

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield views of the vector."""
        return map(self._chunk, range(self._manifest.chunks))


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
