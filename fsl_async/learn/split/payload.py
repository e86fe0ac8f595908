"""Coding of what crosses the cut. No torch.

Activations and gradients travel in coded frames, labels as the narrowest unsigned integers.

Padding stays at home: of sequences padded at their end only the valid rows are sent, one after
another, and put back where they were.

Labels take 1, 2 or 4 bytes each: as many as hold every class. Where some of them ask for nothing
(IGNORED), the highest number of the width stands for that, so one more value has to fit.
Little-endian.
"""

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from fsl_async.store.errors import LearnError
from fsl_async.store.model.manifest import CHUNK_VALUES
from fsl_codecs import CodecError, CodecSpec, decode_into, encode, info

Values = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

IGNORED = -100
"""A label that asks for nothing (padding, a prompt), as in torch's cross entropy."""

DEFAULT_BLOCK = 128
_SMALLEST_BLOCK = 16
_OWN_PAGES_BYTES = 1 << 16
_WIDTHS: dict[int, npt.DTypeLike] = {1: "<u1", 2: "<u2", 4: "<u4"}


class PayloadError(LearnError):
    """Received data does not decode to what was announced."""


@frozen(eq=False)
class Payload:
    """An upload or an answer as it travels.

    Float32 values of that shape, coded labels, lengths of padded sequences.
    """

    values: Values
    shape: tuple[int, ...]
    labels: bytes = b""
    lengths: tuple[int, ...] = ()


def spec_for(number_format: str, width: int, step_log2: int = 14) -> CodecSpec:
    """Return how values whose last dimension is `width` are coded.

    A block of values that share a scale never spans two tokens if that can be.
    """
    is_power = width >= _SMALLEST_BLOCK and width & (width - 1) == 0
    block = min(width, DEFAULT_BLOCK) if is_power else DEFAULT_BLOCK
    made: Any = number_format
    return CodecSpec(format=made, block_values=block, step_log2=step_log2)


def chunks_of(values: int) -> int:
    """Return the number of frames that hold so many values."""
    return -(-values // CHUNK_VALUES)


def encode_chunk(values: Values, index: int, spec: CodecSpec) -> bytes:
    """Frame number `index` of a flat vector."""
    start = index * CHUNK_VALUES
    return encode(np.ascontiguousarray(values[start : start + CHUNK_VALUES]), spec)


def coding_loss(values: Values, index: int, frame: bytes) -> tuple[float, float]:
    """Return the squared error of frame number `index`, and the square of its values.

    Both are sums; 0 where one is not finite.
    """
    start = index * CHUNK_VALUES
    own = values[start : start + CHUNK_VALUES]
    found = np.empty(len(own), np.float32)
    decode_into(frame, found)
    np.subtract(found, own, out=found)
    squares = (float(np.dot(each, each)) for each in (found, own))
    errors, sizes = squares
    return (errors, sizes) if math.isfinite(errors) and math.isfinite(sizes) else (0.0, 0.0)


def room_for(values: int) -> Values:
    """Zeros that live on pages of their own, float32 (values,).

    Some of what is decoded is kept for many rounds (buffers to align with). Between the short-lived
    blocks of a training step in the heap, each would pin the pages around it, and memory would grow
    by more than what is kept.
    """
    size = 4 * values
    if size < _OWN_PAGES_BYTES:
        return np.zeros(values, np.float32)
    return np.frombuffer(mmap.mmap(-1, size), np.float32)


def decode_chunks(frames: Sequence[bytes], values: int) -> Values:
    """All frames of a flat vector. Raises PayloadError for anything but exactly these values."""
    if len(frames) != chunks_of(values):
        raise PayloadError(f"{len(frames)} frames for {values} values")
    found = room_for(values)
    for index, frame in enumerate(frames):
        room = found[index * CHUNK_VALUES : (index + 1) * CHUNK_VALUES]
        try:
            if info(frame).values != len(room):
                raise PayloadError(f"frame {index} has {info(frame).values} values")
            decode_into(frame, room)
        except CodecError as error:
            raise PayloadError(f"frame {index} cannot be decoded: {error}") from error
    return found


def pack_labels(labels: Labels, classes: int) -> bytes:
    """Labels in 0 ... classes - 1 or IGNORED, any shape. Raises PayloadError for others."""
    flat = labels.reshape(-1)
    ignored = flat == IGNORED
    if bool(((flat < 0) & ~ignored | (flat >= classes)).any()):
        raise PayloadError(f"labels must be in 0 ... {classes - 1}, or {IGNORED}")
    highest = classes if bool(ignored.any()) else classes - 1
    width = 1 if highest < 1 << 8 else 2 if highest < 1 << 16 else 4
    coded: npt.NDArray[Any] = np.where(ignored, (1 << 8 * width) - 1, flat)
    return bytes(coded.astype(_WIDTHS[width]).tobytes())


def unpack_labels(data: bytes, count: int, classes: int) -> Labels:
    """Read `pack_labels` back: int64 (count,). Raises PayloadError."""
    width, rest = divmod(len(data), count)
    if rest or width not in _WIDTHS:
        raise PayloadError(f"{len(data)} bytes of labels for {count}")
    raw: npt.NDArray[Any] = np.frombuffer(data, _WIDTHS[width])
    found: Labels = raw.astype(np.int64)
    top = (1 << 8 * width) - 1
    if top >= classes:
        found[found == top] = IGNORED
    return found


def valid_rows(padded: npt.NDArray[Any], lengths: Sequence[int]) -> npt.NDArray[Any]:
    """Return the real rows of (B, T, ...): (sum of lengths, ...)."""
    return np.concatenate([row[:length] for row, length in zip(padded, lengths, strict=True)])


def put_back(
    rows: npt.NDArray[Any], lengths: Sequence[int], longest: int, fill: float
) -> npt.NDArray[Any]:
    """Undo `valid_rows`: (B, longest, ...) with `fill` where padding was."""
    found = np.full((len(lengths), longest, *rows.shape[1:]), fill, rows.dtype)
    start = 0
    for number, length in enumerate(lengths):
        found[number, :length] = rows[start : start + length]
        start += length
    return found


def size_of(shape: Sequence[int]) -> int:
    """Return the number of values in a shape."""
    return math.prod(shape)
