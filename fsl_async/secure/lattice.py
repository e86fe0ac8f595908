"""The lattice of a secure sum: values as whole numbers of a public step, and words of a ring.

A site rounds each value to a multiple of the step and clips it to `Roster.largest` steps; what that
loses stays in its weights, as with any coding (docs/adr/0172). Numbers are added modulo 2^width,
where the sum of all sites fits, so masks that cancel leave exactly the sum of the numbers.

    frame    b"FSM1", width (1 byte), values (4 bytes), CRC-32 of the rest (4 bytes), then for each
             of width // 8 bytes of the words from the lowest that byte of all words, and for each
             bit that is left that bit of all words, 8 in a byte

Integers are little-endian. Masked words are random, so no entropy coder makes them smaller.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsl_async.roles.sync.roster import Roster
from fsl_codecs import CodecError

MAGIC = b"FSM1"
_HEAD = struct.Struct("<4sBII")
Words = NDArray[Any]
"""Ring words, uint16 or uint32 by their width."""
Vector = NDArray[np.float32]


def word_type(width: int) -> np.dtype[Any]:
    """Return the type of ring words of so many bits."""
    return np.dtype("<u2" if width <= 16 else "<u4")


def to_numbers(values: Vector, roster: Roster) -> NDArray[np.int32]:
    """Return the lattice numbers of finite values: int32, (n,)."""
    scaled = np.rint(np.multiply(values, 1.0 / roster.step, dtype=np.float64))
    return np.clip(scaled, -roster.largest, roster.largest).astype(np.int32)


def to_values(numbers: NDArray[Any], step: float) -> Vector:
    """Return the values of lattice numbers, or of their mean with the step of that: float32."""
    made: Vector = np.multiply(numbers, step, dtype=np.float64).astype(np.float32)
    return made


def of_ring(words: Words, width: int) -> NDArray[np.int64]:
    """Return the numbers between -2^(width - 1) and 2^(width - 1) that ring words stand for."""
    found = words.astype(np.int64) & ((1 << width) - 1)
    return found - ((found >> (width - 1)) << width)


def pack(words: Words, width: int) -> bytes:
    """Return the frame of ring words, of which the lowest `width` bits count."""
    planes = words.view(np.uint8).reshape(len(words), -1)
    bits = range(width - width % 8, width)
    body = b"".join(
        [planes[:, byte].tobytes() for byte in range(width // 8)]
        + [np.packbits((planes[:, bit // 8] >> bit % 8) & 1).tobytes() for bit in bits]
    )
    return _HEAD.pack(MAGIC, width, len(words), zlib.crc32(body)) + body


def is_masked(frame: bytes) -> bool:
    """Whether a frame is one of ring words."""
    return frame[:4] == MAGIC


def frame_bytes(values: int, width: int) -> int:
    """Return the length of a frame."""
    return _HEAD.size + values * (width // 8) + (values + 7) // 8 * (width % 8)


def unpack(frame: Any, values: int) -> tuple[Words, int]:
    """Return the words of a peer's frame, and their width. CodecError: it has not so many."""
    data = memoryview(frame).cast("B")
    if len(data) < _HEAD.size:
        raise CodecError("too short for a frame of masked words")
    magic, width, count, crc = _HEAD.unpack_from(data)
    if magic != MAGIC or not 1 <= width <= 32 or count != values:
        raise CodecError(f"no frame of {values} masked words")
    if len(data) != frame_bytes(values, width) or zlib.crc32(data[_HEAD.size :]) != crc:
        raise CodecError("a frame of masked words is damaged")
    kind, at = word_type(width), _HEAD.size
    made = np.zeros((values, kind.itemsize), np.uint8)
    for byte in range(width // 8):
        made[:, byte] = np.frombuffer(data, np.uint8, values, at)
        at += values
    for bit in range(width - width % 8, width):
        plane = np.frombuffer(data, np.uint8, (values + 7) // 8, at)
        made[:, bit // 8] |= np.unpackbits(plane, count=values) << bit % 8
        at += len(plane)
    return made.view(kind).ravel(), width
