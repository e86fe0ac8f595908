"""The frame around the chunks: headers, checksums and limits.

    frame = header, chunk, chunk, ...                       all numbers little-endian
    header (28 bytes)   magic "FSLC", version u8, format u8, reserved u16 = 0, block_values u32,
                        chunk_values u32, values u64, crc32 of the 24 bytes before
    chunk head (16)     payload_bytes u32, index u32, mode u8, flags u8, reserved u16 = 0, crc32

A chunk's checksum continues the header's (as the running value of CRC-32), so that a chunk belongs
to one header. It covers the payload and then the first 12 bytes of the chunk head, because an
encoder learns the payload's size last. It detects damage and does not authenticate.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from .errors import CodecUsageError, FrameError, LimitError
from .formats import FORMATS_BY_WIRE_ID, ByteArray, Format, format_named
from .uniform import MAXIMUM_STEP_LOG2, MINIMUM_STEP_LOG2

VERSION: Final = 6
MAGIC: Final = b"FSLC"
HEADER_BYTES: Final = 28
_FORMAT_AT: Final = 5
CHUNK_HEAD_BYTES: Final = 16
_HEADER: Final = struct.Struct("<4sBBHIIQ")
_CHUNK_HEAD: Final = struct.Struct("<IIBBH")
_CHECKSUM: Final = struct.Struct("<I")

RAW_FP32: Final = 0
CONSTANT: Final = 1
RAW_CODES: Final = 2
CODED: Final = 3
NONFINITE_FLAG: Final = 1

MINIMUM_BLOCK_VALUES: Final = 16
MAXIMUM_BLOCK_VALUES: Final = 1024
MAXIMUM_CHUNK_VALUES: Final = 1 << 20

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


def _grid_problem(block_values: int, chunk_values: int) -> str | None:
    """Why these sizes are not allowed, or None."""
    if not MINIMUM_BLOCK_VALUES <= block_values <= MAXIMUM_BLOCK_VALUES or block_values & (
        block_values - 1
    ):
        return (
            f"block_values is {block_values}: it must be a power of two from "
            f"{MINIMUM_BLOCK_VALUES} to {MAXIMUM_BLOCK_VALUES}"
        )
    if not block_values <= chunk_values <= MAXIMUM_CHUNK_VALUES or chunk_values % block_values:
        return (
            f"chunk_values is {chunk_values}: it must be a multiple of block_values "
            f"({block_values}) up to {MAXIMUM_CHUNK_VALUES}"
        )
    return None


@frozen
class CodecSpec:
    """Settings of an encoder. Raises CodecUsageError if they are impossible.

    format: "fp32", "bf16", "e4m3", "e5m2" or "uniform". block_values: values that share a scale;
    fp32 and bf16 have no scales, but it must divide chunk_values. entropy: False leaves out the
    Huffman stage. step_log2: uniform's step is about 2**(-step_log2 / 4) times a block's root mean
    square (in a chunk of mostly zeros, that of the other values), -8 to 40; the default has the
    mean square error of e4m3.
    """

    format: str = "fp32"
    block_values: int = 128
    chunk_values: int = 131072
    entropy: bool = True
    step_log2: int = 14

    def __attrs_post_init__(self) -> None:
        format_named(self.format)
        for name in ("block_values", "chunk_values", "step_log2"):
            if not isinstance(getattr(self, name), int):
                raise CodecUsageError(f"{name} must be an integer")
        if not MINIMUM_STEP_LOG2 <= self.step_log2 <= MAXIMUM_STEP_LOG2:
            raise CodecUsageError(
                f"step_log2 is {self.step_log2}: it must be from {MINIMUM_STEP_LOG2} to"
                f" {MAXIMUM_STEP_LOG2}"
            )
        if problem := _grid_problem(self.block_values, self.chunk_values):
            raise CodecUsageError(problem)


def format_of(frame: Buffer) -> str:
    """Return the number format that a frame's header names; nothing else is looked at.

    FrameError: it is too short, or the format is unknown.
    """
    found = FORMATS_BY_WIRE_ID.get(frame[_FORMAT_AT]) if len(frame) >= HEADER_BYTES else None
    if found is None:
        raise FrameError("the frame names no known format")
    return found.name


@frozen
class Limits:
    """The most that a caller accepts; checked before anything is allocated."""

    max_values: int = 1 << 27
    max_frame_bytes: int = 1 << 30


@frozen
class FrameInfo:
    """A frame's header and its chunks' modes; its checksums were verified."""

    format: str
    values: int
    block_values: int
    chunk_values: int
    chunks: int
    frame_bytes: int
    nonfinite: bool
    """Some value is NaN or infinite."""
    raw_fp32_chunks: int
    constant_chunks: int
    raw_code_chunks: int
    coded_chunks: int

    @property
    def bits_per_value(self) -> float:
        """Frame size in bits over the number of values; 0.0 for an empty frame."""
        return 8 * self.frame_bytes / self.values if self.values else 0.0


@frozen
class Header:
    """The parsed frame header."""

    number_format: Format
    block_values: int
    chunk_values: int
    values: int
    checksum: int = field(eq=False, default=0)

    @property
    def chunks(self) -> int:
        """Number of chunks; the last may be shorter."""
        return -(-self.values // self.chunk_values)

    def values_of(self, index: int) -> int:
        """Number of values of chunk `index`."""
        return min(self.chunk_values, self.values - index * self.chunk_values)


@frozen(eq=False)
class Chunk:
    """One chunk of a frame, its checksum verified."""

    index: int
    values: int
    mode: int
    nonfinite: bool
    payload: ByteArray


def pack_header(spec: CodecSpec, values: int) -> bytes:
    """The 28 header bytes; the last four are their checksum."""
    wire_id = format_named(spec.format).wire_id
    head = _HEADER.pack(MAGIC, VERSION, wire_id, 0, spec.block_values, spec.chunk_values, values)
    return head + _CHECKSUM.pack(zlib.crc32(head))


def pack_chunk_head(
    header: bytes, index: int, mode: int, payload: bytes, *, nonfinite: bool
) -> bytes:
    """The 16 bytes in front of a chunk's payload."""
    head = _CHUNK_HEAD.pack(len(payload), index, mode, NONFINITE_FLAG if nonfinite else 0, 0)
    (seed,) = _CHECKSUM.unpack_from(header, HEADER_BYTES - 4)
    return head + _CHECKSUM.pack(zlib.crc32(head, zlib.crc32(payload, seed)))


def memory_of(buffer: Buffer) -> memoryview:
    """The buffer as single bytes, without a copy; TypeError if it is not contiguous."""
    memory = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    # memoryview refuses to cast an empty buffer.
    return memory.cast("B") if memory.nbytes else memoryview(b"")


def frame_bytes_view(frame: Buffer) -> ByteArray:
    """The frame's bytes (n,) without a copy; CodecUsageError if the buffer is not contiguous."""
    try:
        return np.frombuffer(memory_of(frame), dtype=np.uint8)
    except (TypeError, ValueError) as error:
        raise CodecUsageError(f"a frame must be a contiguous bytes-like object: {error}") from None


def parse_header(data: ByteArray, limits: Limits) -> Header:
    """Parse the header of frame bytes (n,); FrameError or LimitError if it is refused.

    It is checked against the format, the limits and the number of bytes.
    """
    if data.size > limits.max_frame_bytes:
        raise LimitError(f"frame of {data.size} bytes, {limits.max_frame_bytes} allowed")
    if data.size < HEADER_BYTES:
        raise FrameError(f"frame of {data.size} bytes is shorter than its header")
    head = data[: HEADER_BYTES - 4].tobytes()
    magic, version, wire_id, reserved, block_values, chunk_values, values = _HEADER.unpack(head)
    if magic != MAGIC:
        raise FrameError("not a codec frame: wrong magic")
    if version != VERSION:
        raise FrameError(f"frame version {version}, this package reads {VERSION}")
    (checksum,) = _CHECKSUM.unpack(data[HEADER_BYTES - 4 : HEADER_BYTES].tobytes())
    if zlib.crc32(head) != checksum:
        raise FrameError("header checksum does not match")
    if wire_id not in FORMATS_BY_WIRE_ID or reserved:
        raise FrameError(f"unknown format {wire_id} or reserved bits set")
    if problem := _grid_problem(block_values, chunk_values):
        raise FrameError(problem)
    if values > limits.max_values:
        raise LimitError(f"frame of {values} values, {limits.max_values} allowed")
    header = Header(FORMATS_BY_WIRE_ID[wire_id], block_values, chunk_values, values, checksum)
    if HEADER_BYTES + header.chunks * CHUNK_HEAD_BYTES > data.size:
        raise FrameError(f"frame of {data.size} bytes cannot hold {header.chunks} chunks")
    return header


def iterate_chunks(data: ByteArray, header: Header) -> Iterator[Chunk]:
    """The chunks of frame bytes (n,) in order, each checked.

    FrameError also if bytes follow the last.
    """
    position = HEADER_BYTES
    for index in range(header.chunks):
        head_end = position + CHUNK_HEAD_BYTES
        head = data[position : head_end - 4].tobytes()
        if head_end > data.size:
            raise FrameError(f"frame ends inside the head of chunk {index}")
        payload_bytes, written_index, mode, flags, reserved = _CHUNK_HEAD.unpack(head)
        (checksum,) = _CHECKSUM.unpack(data[head_end - 4 : head_end].tobytes())
        position = head_end + payload_bytes
        if position > data.size:
            raise FrameError(f"frame ends inside chunk {index}")
        payload = data[head_end:position]
        if zlib.crc32(head, zlib.crc32(payload.data, header.checksum)) != checksum:
            raise FrameError(f"checksum of chunk {index} does not match")
        if written_index != index or mode > CODED or flags & ~NONFINITE_FLAG or reserved:
            raise FrameError(f"head of chunk {index} is not valid")
        yield Chunk(index, header.values_of(index), mode, bool(flags & NONFINITE_FLAG), payload)
    if position != data.size:
        raise FrameError(f"{data.size - position} bytes after the last chunk")
