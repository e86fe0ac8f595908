"""Manifest: names and shapes of a model's tensors, and their place in the flat vector. Pure.

The parameter server has no model code. It holds one flat fp32 vector, in which the tensors of the
manifest follow each other, row-major, without holes, in the manifest's order: weights first, then
buffers (statistics and constants, which are averaged and not trained). The vector is divided into
chunks of CHUNK_VALUES values; the last one of the weights and the last one of the buffers are
shorter, so a chunk is of one kind. A chunk is what one coded frame carries and what one read or
write of a checkpoint moves.

A manifest from a peer is untrusted until `Manifest.from_wire` has checked it.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from attrs import field, frozen

from fsl_async.store.errors import ManifestError
from fsl_async.store.model.frozen_tensors import (
    FrozenTensor,
    frozen_difference,
    frozen_from_wire,
    settings_difference,
)
from fsl_transport.text import peer_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


CHUNK_VALUES = 393_216
"""Values in a chunk: 1.5 MiB of fp32, of a stream's limit of 2 MiB, and 107 kB at 2.2 bits a value.

Each chunk costs both ends the same work, however few its bytes are. Its frame has three of the
codec's chunks, which fit a processor's cache."""

FINGERPRINT_CHARACTERS = 32

MAX_TENSORS = 100_000
MAX_NAME_BYTES = 512
MAX_DIMENSIONS = 16
MAX_VALUES = 2**40
"""4 TiB of fp32. Rejects nonsense only: it keeps every product below what a C long holds."""

_SHOWN = 80
"""Characters of a tensor's name in an error message."""

_BUFFER = 1 << 8
"""Added to the number of dimensions of a buffer in a fingerprint."""

RESERVED_NAME = "__metadata__"
"""Name of a safetensors file's metadata, which no tensor may have."""


@frozen
class TensorSpec:
    """One tensor: its row-major `shape`, and the `offset` of its first value in the flat vector.

    offset: in values.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    is_buffer: bool = False

    @property
    def values(self) -> int:
        """Number of values: 1 for a scalar, 0 when a dimension is 0."""
        return math.prod(self.shape)


@frozen
class TensorPart:
    """The values of one tensor in a chunk."""

    tensor: TensorSpec
    start: int
    """Offset of the first value within the tensor."""
    place: slice
    """Position of the values within the chunk."""


@frozen
class Manifest:
    """The tensors of a model in flat order.

    ManifestError: they overlap, leave holes or exceed a limit.
    """

    tensors: tuple[TensorSpec, ...] = field()
    frozen: tuple[FrozenTensor, ...] = ()
    """Tensors that clients neither exchange nor train, sorted by name."""
    values: int = field(init=False)
    """Length of the flat vector, in values."""
    weights: int = field(init=False)
    """Number of values that are weights; buffers follow."""
    fingerprint: str = field(init=False)
    """The first 32 hex characters of SHA-256 over names, shapes, offsets and `frozen`."""

    def __attrs_post_init__(self) -> None:
        total, weights = _check(self.tensors)
        object.__setattr__(self, "values", total)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "fingerprint", _fingerprint(self.tensors, self.frozen))

    @classmethod
    def from_shapes(
        cls,
        weights: Iterable[tuple[str, Sequence[int]]],
        buffers: Iterable[tuple[str, Sequence[int]]] = (),
    ) -> Self:
        """Place the named shapes one after the other."""
        tensors: list[TensorSpec] = []
        offset = 0
        for is_buffer, shapes in ((False, weights), (True, buffers)):
            for name, shape in shapes:
                tensors.append(TensorSpec(name, tuple(shape), offset, is_buffer))
                offset += tensors[-1].values
        return cls(tuple(tensors))

    @property
    def chunks(self) -> int:
        """Number of chunks of the flat vector."""
        return self._weight_chunks - (-(self.values - self.weights) // CHUNK_VALUES)

    @property
    def _weight_chunks(self) -> int:
        return -(-self.weights // CHUNK_VALUES)

    @property
    def longest_chunk(self) -> int:
        """Number of values of the longest chunk."""
        return min(CHUNK_VALUES, max(self.weights, self.values - self.weights))

    def is_buffer(self, index: int) -> bool:
        """Whether chunk `index` holds buffers; the others hold weights."""
        return index >= self._weight_chunks

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Return first and one past last value of chunk `index`; IndexError when there is none."""
        if not 0 <= index < self.chunks:
            raise IndexError(f"chunk {index} of {self.chunks}")
        start, stop = index * CHUNK_VALUES, self.weights
        if self.is_buffer(index):
            start, stop = self.weights + (index - self._weight_chunks) * CHUNK_VALUES, self.values
        return start, min(start + CHUNK_VALUES, stop)

    def chunk_values(self, index: int) -> int:
        """Return the number of values of chunk `index`."""
        start, stop = self.chunk_range(index)
        return stop - start

    def parts(self, index: int) -> list[TensorPart]:
        """Return the tensors that chunk `index` holds values of, in order."""
        start, stop = self.chunk_range(index)
        found = []
        first = bisect_right(self.tensors, start, key=_end)
        for tensor in self.tensors[first:]:
            if tensor.offset >= stop:
                break
            begin, end = max(start, tensor.offset), min(stop, _end(tensor))
            if begin < end:
                place = slice(begin - start, end - start)
                found.append(TensorPart(tensor, begin - tensor.offset, place))
        return found

    def tensor_at(self, position: int) -> str:
        """Return the name of the tensor that holds value `position` of the flat vector."""
        for tensor in self.tensors:
            if tensor.offset <= position < tensor.offset + tensor.values:
                return tensor.name
        raise IndexError(f"value {position} of {self.values}")

    def difference(self, other: Manifest) -> str | None:
        """Return the first difference as one sentence, or None if the two are equal.

        The sentence calls `self` "here" and `other` "there".
        """
        if self.tensors == other.tensors:
            return frozen_difference(self.frozen, other.frozen)
        # What an adapter's tensors show too is clearer as its setting.
        setting = settings_difference(self.frozen, other.frozen, shared=True)
        if setting is not None:
            return setting
        for position, (mine, theirs) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            if mine.name != theirs.name:
                return (
                    f"tensor {position} is {mine.name!r} {_shape(mine)} here "
                    f"and {theirs.name!r} {_shape(theirs)} there"
                )
            if mine.is_buffer != theirs.is_buffer:
                kinds = ("a weight", "a buffer")
                return (
                    f"tensor {mine.name!r} is {kinds[mine.is_buffer]} here and"
                    f" {kinds[theirs.is_buffer]} there"
                )
            if mine.shape != theirs.shape:
                return f"tensor {mine.name!r} is {_shape(mine)} here and {_shape(theirs)} there"
        shorter = min(len(self.tensors), len(other.tensors))
        if len(self.tensors) > shorter:
            extra, place = self.tensors[shorter], "only here"
        else:
            extra, place = other.tensors[shorter], "only there"
        return f"tensor {extra.name!r} {_shape(extra)} exists {place}"

    def to_wire(self) -> list[list[Any]]:
        """Return [[name, [dimension, ...], offset, is_buffer], ...], for msgpack or JSON."""
        return [
            [tensor.name, list(tensor.shape), tensor.offset, tensor.is_buffer]
            for tensor in self.tensors
        ]

    def frozen_to_wire(self) -> list[list[str]]:
        """Return [[name, form, digest], ...] of `frozen`, for msgpack or JSON."""
        return [[one.name, one.form, one.digest] for one in self.frozen]

    @classmethod
    def from_wire(cls, wire: object, frozen: object = ()) -> Self:
        """Parse the output of `to_wire` from an untrusted peer. Raises ManifestError.

        frozen: the output of `frozen_to_wire`.
        """
        if not isinstance(wire, list):
            raise ManifestError("a manifest must be a list of tensors")
        if len(wire) > MAX_TENSORS:
            raise ManifestError(f"a manifest may have {MAX_TENSORS} tensors, not {len(wire)}")
        return cls(
            tuple(_tensor_from_wire(position, entry) for position, entry in enumerate(wire)),
            frozen_from_wire(frozen),
        )


def _tensor_from_wire(position: int, entry: object) -> TensorSpec:
    match entry:
        case [str() as name, list() as shape, offset, bool() as kind] if (
            len(shape) <= MAX_DIMENSIONS
        ):
            # bool is an int for Python; a peer that sends one is broken.
            if type(offset) is int and all(type(dimension) is int for dimension in shape):
                return TensorSpec(name, tuple(shape), offset, kind)
    raise ManifestError(
        f"tensor {position} of the manifest is not [name, [dimension, ...], offset, is_buffer]"
    )


def _end(tensor: TensorSpec) -> int:
    return tensor.offset + tensor.values


def _shape(tensor: TensorSpec) -> str:
    return "x".join(map(str, tensor.shape)) if tensor.shape else "scalar"


def _check(tensors: tuple[TensorSpec, ...]) -> tuple[int, int]:
    """Check every rule of the layout and return the numbers of values and of weights."""
    if not tensors:
        raise ManifestError("a manifest needs at least one tensor")
    if len(tensors) > MAX_TENSORS:
        raise ManifestError(f"a manifest may have {MAX_TENSORS} tensors, not {len(tensors)}")
    seen = set()
    total = weights = 0
    for tensor in tensors:
        label = f"'{peer_text(tensor.name, _SHOWN)}'"
        _check_name(tensor.name, label)
        if tensor.name in seen:
            raise ManifestError(f"two tensors are called {label}")
        seen.add(tensor.name)
        values = _checked_values(tensor, label)
        if tensor.offset != total:
            raise ManifestError(f"tensor {label} starts at value {tensor.offset}, expected {total}")
        if weights != total and not tensor.is_buffer:
            raise ManifestError(f"tensor {label} is a weight and comes after a buffer")
        total += values
        weights += 0 if tensor.is_buffer else values
        if total > MAX_VALUES:
            raise ManifestError(
                f"a model may have {MAX_VALUES} values; tensor {label} exceeds that"
            )
    if total == 0:
        raise ManifestError("a manifest needs at least one value")
    return total, weights


def _checked_values(tensor: TensorSpec, label: str) -> int:
    """Return the tensor's number of values.

    Checks after each dimension, because the complete product may be huge.
    """
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise ManifestError(f"tensor {label} has more than {MAX_DIMENSIONS} dimensions")
    values = 0 if 0 in tensor.shape else 1
    for dimension in tensor.shape:
        if not 0 <= dimension <= MAX_VALUES:
            raise ManifestError(f"tensor {label} has a dimension outside 0 ... {MAX_VALUES}")
        values *= dimension
        if values > MAX_VALUES:
            raise ManifestError(f"tensor {label} has more than {MAX_VALUES} values")
    return values


def _check_name(name: str, label: str) -> None:
    try:
        coded = name.encode()
    except UnicodeEncodeError:
        raise ManifestError(f"tensor name {label} is not valid text") from None
    if not 1 <= len(coded) <= MAX_NAME_BYTES:
        raise ManifestError(f"tensor name {label} must have 1 to {MAX_NAME_BYTES} bytes")
    if name == RESERVED_NAME or not name.isprintable():
        raise ManifestError(f"no tensor may be called {label}")


def _fingerprint(tensors: tuple[TensorSpec, ...], frozen: tuple[FrozenTensor, ...]) -> str:
    # Lengths before contents, so that no two manifests give the same bytes.
    hashed = hashlib.sha256(b"fsl-manifest-1")
    for tensor in tensors:
        name = tensor.name.encode()
        dimensions = len(tensor.shape) + _BUFFER * tensor.is_buffer
        numbers = [len(name), dimensions, *tensor.shape, tensor.offset]
        hashed.update(np.array(numbers, dtype="<i8").tobytes() + name)
    for one in frozen:
        name = one.name.encode()
        hashed.update(np.array([len(name)], dtype="<i8").tobytes() + name + one.digest.encode())
    return hashed.hexdigest()[:FINGERPRINT_CHARACTERS]
