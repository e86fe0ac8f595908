"""Frames from fp32 values and back: the public functions, and how a chunk gets its mode.

    raw fp32    some value is NaN, infinite, or so large that it would round to infinity; or fp32 whose bits cannot be coded
    constant    all values have the same 32 bits; the value is rounded to the format before it is stored
    raw codes   scales and codes as they are, where coding does not pay or is not wanted
    coded       scales, then the planes of `planes`

Decoding guarantees that a chunk whose flag does not announce NaN or infinity decodes to finite values.
"""

from collections import Counter

import numpy as np

from .errors import CodecUsageError, FrameError, LimitError
from .formats import (
    FIRST_NONFINITE,
    MAGNITUDE_MASK,
    ByteArray,
    Float32Array,
    Format,
    WordArray,
    bfloat16_bits,
    bfloat16_codes,
    dequantise_blocks,
    format_named,
    quantise_blocks,
)
from .frame import (
    CHUNK_HEAD_BYTES,
    CODED,
    CONSTANT,
    HEADER_BYTES,
    RAW_CODES,
    RAW_FP32,
    Buffer,
    Chunk,
    CodecSpec,
    FrameInfo,
    Header,
    Limits,
    frame_bytes_view,
    iterate_chunks,
    memory_of,
    pack_chunk_head,
    pack_header,
    parse_header,
    read_scales,
    write_scales,
)
from .planes import plan_chunk, read_coded, write_coded
from .treebitmap import Reader

_DEFAULT_SPEC = CodecSpec()
_DEFAULT_LIMITS = Limits()


def bound(values_count: int, spec: CodecSpec = _DEFAULT_SPEC) -> int:
    """Most bytes a frame of that many values can take, whatever they are."""
    if values_count < 0:
        raise CodecUsageError(f"{values_count} values")
    # Any chunk may have to go out as raw fp32, and no other mode is ever larger.
    return (
        HEADER_BYTES + -(-values_count // spec.chunk_values) * CHUNK_HEAD_BYTES + 4 * values_count
    )


def encode_into(values: Float32Array, out: Buffer, spec: CodecSpec = _DEFAULT_SPEC) -> int:
    """Encode values (n,), C-contiguous float32, into the writable buffer `out`; returns the frame's size in bytes.

    `out` must hold bound(n, spec) bytes, and must not overlap `values`. CodecUsageError otherwise.
    """
    _check_values(values)
    target = memory_of(out)
    if target.readonly or target.nbytes < bound(values.size, spec):
        raise CodecUsageError(
            f"output of {target.nbytes} bytes: a writable one of {bound(values.size, spec)} is needed"
        )
    header = pack_header(spec, values.size)
    target[:HEADER_BYTES] = header
    position = HEADER_BYTES
    for index, start in enumerate(range(0, values.size, spec.chunk_values)):
        part = values[start : start + spec.chunk_values]
        mode, nonfinite, payload = _encode_chunk(part, spec)
        head = pack_chunk_head(header, index, mode, payload, nonfinite=nonfinite)
        for piece in (head, payload):
            target[position : position + len(piece)] = piece
            position += len(piece)
    return position


def encode(values: Float32Array, spec: CodecSpec = _DEFAULT_SPEC) -> bytes:
    """`encode_into` into fresh bytes."""
    _check_values(values)
    out = bytearray(bound(values.size, spec))
    size = encode_into(values, out, spec)
    return bytes(memoryview(out)[:size])


def decode_into(frame: Buffer, out: Float32Array, limits: Limits | None = None) -> int:
    """Decode a frame into the first n values of out, float32 1-D of at least n; returns n.

    FrameError for bytes that are no valid frame, LimitError when `out` or `limits` is too small; what `out` then holds is
    undefined.
    """
    _check_values(out, writable=True)
    data = frame_bytes_view(frame)
    header = parse_header(data, limits or Limits(out.size, max(data.size, 1)))
    if header.values > out.size:
        raise LimitError(f"frame of {header.values} values, the output holds {out.size}")
    for chunk in iterate_chunks(data, header):
        start = chunk.index * header.chunk_values
        _decode_chunk(chunk, header, out[start : start + chunk.values])
    return header.values


def decode(frame: Buffer, limits: Limits = _DEFAULT_LIMITS) -> Float32Array:
    """`decode_into` into a fresh array (n,), allocated after `limits` were checked."""
    header = parse_header(frame_bytes_view(frame), limits)
    out = np.empty(header.values, dtype=np.float32)
    decode_into(frame, out, limits)
    return out


def decode_accumulate(
    frame: Buffer, accumulator: Float32Array, weight: float, limits: Limits | None = None
) -> int:
    """accumulator[:n] += float32(weight) * decoded: one fp32 multiplication, then one fp32 addition, never fused.

    Returns n. The frame is decoded to the end first (into n temporary values), so that a bad one leaves the accumulator as it
    was. Errors as in `decode_into`; CodecUsageError for a weight that is no finite fp32 number.
    """
    with np.errstate(over="ignore"):
        factor = np.float32(weight)
    if not np.isfinite(factor):
        raise CodecUsageError(f"weight {weight} is not a finite fp32 number")
    _check_values(accumulator, writable=True)
    data = frame_bytes_view(frame)
    header = parse_header(data, limits or Limits(accumulator.size, max(data.size, 1)))
    if header.values > accumulator.size:
        raise LimitError(
            f"frame of {header.values} values, the accumulator holds {accumulator.size}"
        )
    decoded = np.empty(header.values, dtype=np.float32)
    decode_into(frame, decoded, limits)
    with np.errstate(all="ignore"):
        decoded *= factor
        accumulator[: header.values] += decoded
    return header.values


def info(frame: Buffer, limits: Limits | None = None) -> FrameInfo:
    """What a frame holds, from its headers; all checksums are verified, payloads are not decoded."""
    data = frame_bytes_view(frame)
    header = parse_header(data, limits or Limits(1 << 64, max(data.size, 1)))
    modes: Counter[int] = Counter()
    nonfinite = False
    for chunk in iterate_chunks(data, header):
        modes[chunk.mode] += 1
        nonfinite |= chunk.nonfinite
    return FrameInfo(
        format=header.number_format.name,
        values=header.values,
        block_values=header.block_values,
        chunk_values=header.chunk_values,
        chunks=header.chunks,
        frame_bytes=data.size,
        nonfinite=nonfinite,
        raw_fp32_chunks=modes[RAW_FP32],
        constant_chunks=modes[CONSTANT],
        raw_code_chunks=modes[RAW_CODES],
        coded_chunks=modes[CODED],
    )


def _check_values(values: Float32Array, *, writable: bool = False) -> None:
    if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.ndim != 1:
        raise CodecUsageError("values must be a one-dimensional NumPy array of float32")
    if not values.flags.c_contiguous or not values.flags.aligned:
        raise CodecUsageError("values must be contiguous and aligned")
    if writable and not values.flags.writeable:
        raise CodecUsageError("the array to write to is read-only")


def _encode_chunk(values: Float32Array, spec: CodecSpec) -> tuple[int, bool, bytes]:
    """Mode, nonfinite flag and payload of one chunk (n,), n > 0."""
    number_format = format_named(spec.format)
    bits = values.view(np.uint32)
    largest = int((bits & MAGNITUDE_MASK).max())
    nonfinite = largest >= FIRST_NONFINITE
    if (bits == bits[0]).all():
        constant = values[:1]
        if largest < number_format.escape_magnitude:
            constant = _round(constant, number_format)
        return CONSTANT, nonfinite, constant.astype("<f4").tobytes()
    if largest >= number_format.escape_magnitude:
        return RAW_FP32, nonfinite, values.astype("<f4", copy=False).tobytes()

    pieces: list[bytes] = []
    words: WordArray
    if number_format.float8 is not None:
        words, scales = quantise_blocks(values, number_format, spec.block_values)
        write_scales(scales, pieces)
    else:
        words = bits if number_format.code_bits == 32 else bfloat16_codes(bits)
    if spec.entropy:
        plan = plan_chunk(words, number_format)
        if plan.cost_bits < number_format.code_bits * words.size:
            write_coded(words, number_format, plan, pieces)
            return CODED, nonfinite, b"".join(pieces)
    pieces.append(words.astype(f"<u{number_format.code_bytes}", copy=False).tobytes())
    mode = RAW_FP32 if number_format.code_bits == 32 else RAW_CODES
    return mode, nonfinite, b"".join(pieces)


def _round(values: Float32Array, number_format: Format) -> Float32Array:
    """What one block of values (n,) becomes when encoded and decoded."""
    if number_format.float8 is not None:
        rounded = np.empty_like(values)
        codes, scales = quantise_blocks(values, number_format, values.size)
        dequantise_blocks(codes, scales, number_format, values.size, rounded)
        return rounded
    if number_format.code_bits == 16:
        return bfloat16_bits(bfloat16_codes(values.view(np.uint32))).view(np.float32)
    return values


def _decode_chunk(chunk: Chunk, header: Header, out: Float32Array) -> None:
    """Decode one chunk into out (chunk.values,)."""
    reader = Reader(chunk.payload)
    number_format = header.number_format
    if chunk.mode == CONSTANT:
        out.view(np.uint32)[:] = reader.take(4).copy().view("<u4")[0]
    elif chunk.mode == RAW_FP32:
        out.view(np.uint32)[:] = _aligned(reader.take(4 * chunk.values), 4)
    elif chunk.nonfinite and number_format.name != "fp32":
        raise FrameError(f"chunk {chunk.index} announces NaN or infinity but is quantised")
    elif chunk.mode == RAW_CODES and number_format.name == "fp32":
        raise FrameError(f"chunk {chunk.index} has raw codes of a lossless format")
    else:
        _decode_codes(reader, chunk, header, out)
    reader.finish()
    if bool(np.isfinite(out).all()) == chunk.nonfinite:
        raise FrameError(f"chunk {chunk.index} and its flag disagree about NaN and infinity")


def _decode_codes(reader: Reader, chunk: Chunk, header: Header, out: Float32Array) -> None:
    number_format: Format = header.number_format
    scales: ByteArray | None = None
    if number_format.float8 is not None:
        scales = read_scales(reader, -(-chunk.values // header.block_values), number_format.float8)
    words: WordArray
    if chunk.mode == CODED:
        words = read_coded(reader, number_format, chunk.values)
    else:
        code_bytes = number_format.code_bytes
        words = _aligned(reader.take(code_bytes * chunk.values), code_bytes)
    if scales is not None:
        dequantise_blocks(
            words.astype(np.uint8, copy=False), scales, number_format, header.block_values, out
        )
    elif number_format.code_bits == 16:
        out.view(np.uint32)[:] = bfloat16_bits(words.astype(np.uint16, copy=False))
    else:
        out.view(np.uint32)[:] = words


def _aligned(data: ByteArray, item_bytes: int) -> WordArray:
    """Little-endian words (n / item_bytes,) of bytes (n,), which may stand at any address."""
    words: WordArray = data.view(f"<u{item_bytes}")
    return words
