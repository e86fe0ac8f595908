"""Encodes and decodes frames with NumPy: the reference, and the rules for a chunk's mode.

    raw fp32    some value is NaN, infinite, or would round to infinity; or coding fp32 does not pay
    constant    all values have the same 32 bits; the value is rounded to the format
    raw codes   scales and codes as they are: coding does not pay, or is not wanted
    coded       scales, and the planes of `planes`

A chunk whose flag does not announce NaN or infinity decodes to finite values, or is refused.
"""

# ruff: noqa: D102 - `Implementation` has the documentation

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from . import uniform
from .errors import CodecUsageError, FrameError, LimitError
from .formats import (
    FIRST_NONFINITE,
    MAGNITUDE_MASK,
    Float32Array,
    Format,
    Values,
    WordArray,
    bfloat16_bits,
    bfloat16_codes,
    format_named,
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
)
from .implementation import DEFAULT_SPEC, Implementation
from .planes import (
    BlockReader,
    ChunkPlan,
    ConstantPlaneError,
    Sample,
    plan_chunk,
    read_plan,
    read_streams,
    sample_of,
    write_plan,
    write_streams,
    write_words,
)
from .quantised import (
    BLOCK_SYMBOLS,
    Quantised,
    dequantise,
    quantise,
    read_escaped,
    write_escaped,
)
from .reader import Reader
from .scales import read_scales, write_scales
from .sparse import is_cheap, looks_sparse, plan_sparse, read_sparse, runs_in_use, write_sparse

MAXIMUM_THREADS = 64
"""Most threads that a call may ask for."""

# An encoder that checks the size after each inner block may exceed it by one of them: at worst four
# planes of fp32 all of whose symbols are listed with the highest numbers. The rest is room for
# plane heads, padding, and stores of whole vectors.
_WORKING_BYTES = 196608
# Of several faults in an inner block, the one in the first piece is reported; pieces therefore have
# the size of the native codec's.
_PIECE_SYMBOLS = 4096
_QUIET_NAN = np.uint32(0x0040)


def bound(values_count: int, spec: CodecSpec = DEFAULT_SPEC) -> int:
    """Bytes of output that encoding `values_count` values needs.

    No frame is longer; encoders use the rest as working memory.
    """
    if values_count < 0:
        raise CodecUsageError(f"{values_count} values")
    # Any chunk may have to go out as raw fp32, and no other mode is ever larger.
    chunks = -(-values_count // spec.chunk_values)
    return HEADER_BYTES + chunks * CHUNK_HEAD_BYTES + 4 * values_count + _WORKING_BYTES


class NumpyCodec(Implementation):
    """The reference. It runs on one thread, even if more are allowed."""

    name = "numpy"

    def encode_into(
        self,
        values: Values,
        out: Buffer,
        spec: CodecSpec = DEFAULT_SPEC,
        *,
        reference: Float32Array | None = None,
        residual: Float32Array | None = None,
        threads: int = 1,
    ) -> int:
        check_threads(threads)
        check_values(values, allow_bfloat16=True)
        for name, other in (("reference", reference), ("residual", residual)):
            if other is not None:
                check_values(other, writable=name == "residual")
                if other.size != values.size:
                    raise CodecUsageError(f"{name} of {other.size} values for {values.size} values")
        try:
            target = memory_of(out)
        except TypeError as error:
            raise CodecUsageError(
                f"the output must be a contiguous bytes-like object: {error}"
            ) from None
        if target.readonly or target.nbytes < bound(values.size, spec):
            raise CodecUsageError(
                f"output of {target.nbytes} bytes: "
                f"a writable one of {bound(values.size, spec)} is needed"
            )
        read = {"values": values, "reference": reference, "residual": residual}
        check_apart(read, "output", np.frombuffer(target, np.uint8, bound(values.size, spec)))
        del read["residual"]
        check_apart(read, "residual", residual)
        header = pack_header(spec, values.size)
        target[:HEADER_BYTES] = header
        position = HEADER_BYTES
        for index, start in enumerate(range(0, values.size, spec.chunk_values)):
            part = slice(start, start + spec.chunk_values)
            chunk = _combine(
                values[part],
                None if reference is None else reference[part],
                None if residual is None else residual[part],
            )
            mode, nonfinite, payload = _encode_chunk(chunk, spec)
            head = pack_chunk_head(header, index, mode, payload, nonfinite=nonfinite)
            for piece in (head, payload):
                target[position : position + len(piece)] = piece
                position += len(piece)
            if residual is not None:
                residual[part] = _left_over(chunk, mode, payload, spec)
        return position

    def decode_into(
        self,
        frame: Buffer,
        out: Values,
        limits: Limits | None = None,
        *,
        threads: int = 1,
    ) -> int:
        check_threads(threads)
        check_values(out, writable=True, allow_bfloat16=True)
        data = frame_bytes_view(frame)
        check_apart({"frame": data}, "output", out)
        header = parse_header(data, limits or Limits(out.size, max(data.size, 1)))
        if header.values > out.size:
            raise LimitError(f"frame of {header.values} values, the output holds {out.size}")
        for chunk in iterate_chunks(data, header):
            start = chunk.index * header.chunk_values
            part = out[start : start + chunk.values]
            if out.dtype == np.float32:
                _decode_chunk(chunk, header, part.view(np.float32))
            else:
                values = np.empty(chunk.values, dtype=np.float32)
                _decode_chunk(chunk, header, values)
                part[:] = _rounded_to_bfloat16(values)
        return header.values

    def decode_accumulate(
        self,
        frame: Buffer,
        accumulator: Float32Array,
        weight: float,
        limits: Limits | None = None,
        *,
        threads: int = 1,
    ) -> int:
        check_threads(threads)
        with np.errstate(over="ignore"):
            factor = np.float32(weight)
        if not np.isfinite(factor):
            raise CodecUsageError(f"weight {weight} is not a finite fp32 number")
        check_values(accumulator, writable=True)
        data = frame_bytes_view(frame)
        check_apart({"frame": data}, "accumulator", accumulator)
        header = parse_header(data, limits or Limits(accumulator.size, max(data.size, 1)))
        if header.values > accumulator.size:
            raise LimitError(
                f"frame of {header.values} values, the accumulator holds {accumulator.size}"
            )
        decoded = np.empty(header.values, dtype=np.float32)
        self.decode_into(frame, decoded, limits)
        with np.errstate(all="ignore"):
            decoded *= factor
            accumulator[: header.values] += decoded
        return header.values

    def info(self, frame: Buffer, limits: Limits | None = None) -> FrameInfo:
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


def check_threads(threads: int) -> None:
    """CodecUsageError unless `threads` is from 1 to MAXIMUM_THREADS."""
    if not 1 <= threads <= MAXIMUM_THREADS:
        raise CodecUsageError(f"threads is {threads}: it must be from 1 to {MAXIMUM_THREADS}")


def check_values(values: Values, *, writable: bool = False, allow_bfloat16: bool = False) -> None:
    """CodecUsageError unless `values` is a 1-D, contiguous array of an accepted dtype."""
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        raise CodecUsageError("values must be a one-dimensional NumPy array")
    if values.dtype != np.float32 and not (allow_bfloat16 and values.dtype == np.uint16):
        wanted = "float32, or uint16 for bf16 bits" if allow_bfloat16 else "float32"
        raise CodecUsageError(f"values must be {wanted}, not {values.dtype}")
    if not values.flags.c_contiguous or not values.flags.aligned:
        raise CodecUsageError("values must be contiguous and aligned")
    if writable and not values.flags.writeable:
        raise CodecUsageError("the array to write to is read-only")


def check_apart(
    read: Mapping[str, npt.NDArray[Any] | None], name: str, written: npt.NDArray[Any] | None
) -> None:
    """CodecUsageError if `written` shares memory with an array that is read during the call."""
    for other, memory in read.items():
        if written is not None and memory is not None and np.may_share_memory(memory, written):
            raise CodecUsageError(f"{other} and {name} overlap")


def _combine(
    values: Values, reference: Float32Array | None, residual: Float32Array | None
) -> Float32Array:
    """(values - reference) + residual, (n,) float32: the numbers to encode."""
    if values.dtype != np.float32:
        values = bfloat16_bits(values).view(np.float32)  # type: ignore[arg-type]
    combined: Float32Array = values  # type: ignore[assignment]
    with np.errstate(all="ignore"):
        if reference is not None:
            combined = combined - reference
        if residual is not None:
            combined = combined + residual
    return combined


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
    raw_fp32 = RAW_FP32, nonfinite, values.astype("<f4", copy=False).tobytes()
    if largest >= number_format.escape_magnitude:
        return raw_fp32

    coded = _coded(values, spec) if spec.entropy else None
    if coded is not None:
        return CODED, nonfinite, coded
    blocks = quantise(values, number_format, spec.block_values, spec.step_log2)
    raw_codes = _raw_codes(blocks, number_format)
    if number_format.code_bits == 32 or len(raw_codes) > 4 * values.size:
        return raw_fp32
    return RAW_CODES, nonfinite, raw_codes


def _raw_codes(blocks: list[Quantised], number_format: Format) -> bytes:
    pieces: list[bytes] = []
    for block in blocks:
        if block.scales is not None:
            write_scales(block.scales, number_format, pieces)
        pieces.append(block.words.astype(f"<u{number_format.code_bytes}", copy=False).tobytes())
        write_escaped(block, pieces)
    return b"".join(pieces)


def _coded(values: Float32Array, spec: CodecSpec) -> bytes | None:
    """The payload of mode `coded`; None if coding does not pay."""
    number_format = format_named(spec.format)
    settings = number_format, spec.block_values, spec.step_log2
    is_sparse = looks_sparse(values)
    blocks = quantise(values, *settings, sparse=is_sparse)
    words = np.concatenate([block.words for block in blocks])
    for everything in (False, True):
        plan = _plan(words, number_format, everything, sparse=is_sparse)
        if is_sparse and not is_cheap(plan, words, number_format):
            others = quantise(values, *settings)
            other_words = np.concatenate([block.words for block in others])
            other = _plan(other_words, number_format, everything, sparse=False)
            if plan.cost_bits >= other.cost_bits:
                blocks, words, plan, is_sparse = others, other_words, other, False
        if plan.cost_bits >= number_format.code_bits * words.size:
            return None
        try:
            coded = _coded_as(plan, words, blocks, spec)
        except ConstantPlaneError:
            continue
        raw_codes = _raw_codes(blocks, number_format)
        return coded if len(coded) <= min(len(raw_codes), 4 * values.size) else None
    raise AssertionError("a plan of everything fits everything")


def _plan(words: WordArray, number_format: Format, everything: bool, *, sparse: bool) -> ChunkPlan:
    if sparse:
        return plan_sparse(words, number_format, everything=everything)
    sample = Sample(words, words.size) if everything else sample_of(words)
    return plan_chunk(sample, number_format)


def _coded_as(plan: ChunkPlan, words: WordArray, blocks: list[Quantised], spec: CodecSpec) -> bytes:
    number_format = format_named(spec.format)
    is_sparse = number_format.splits[plan.split_index].sparse
    pieces: list[bytes] = []
    if is_sparse:
        write_sparse(words, number_format, plan, pieces)
    else:
        write_plan(plan, pieces)
        write_streams(words, number_format, plan, pieces)
    for block in blocks:
        scales = block.scales
        if scales is not None and is_sparse:
            scales = scales[runs_in_use(block.words, spec.block_values, number_format)]
        if scales is not None and scales.size:
            write_scales(scales, number_format, pieces)
        if not is_sparse:
            write_words(block.words, number_format, plan, pieces)
        write_escaped(block, pieces)
    return b"".join(pieces)


def _round(values: Float32Array, number_format: Format) -> Float32Array:
    """A constant (1,) rounded to the format; uniform has no fixed grid and keeps it."""
    if number_format.name == "uniform":
        return values
    rounded = np.empty_like(values)
    (block,) = quantise(values, number_format, block_values=1, step_log2=0)
    dequantise(block, number_format, 1, rounded)
    return rounded


def _left_over(
    values: Float32Array, mode: int, payload: bytes, spec: CodecSpec
) -> Float32Array | np.float32:
    """Values (n,) minus the values that a decoder of the chunk gives."""
    number_format = format_named(spec.format)
    if mode == RAW_FP32 or number_format.name == "fp32":
        return np.float32(0)
    if mode == CONSTANT:
        constant = np.frombuffer(payload, "<f4")
        with np.errstate(all="ignore"):
            return values - constant if np.isfinite(constant[0]) else np.float32(0)
    decoded = np.empty_like(values)
    header = Header(number_format, spec.block_values, spec.chunk_values, values.size)
    _decode_chunk(
        Chunk(0, values.size, mode, False, np.frombuffer(payload, np.uint8)), header, decoded
    )
    return values - decoded


def _rounded_to_bfloat16(values: Float32Array) -> npt.NDArray[np.uint16]:
    """bf16 bits (n,) of fp32 values (n,), rounded to nearest even.

    A NaN keeps its upper bits and becomes quiet.
    """
    bits = values.view(np.uint32)
    is_nan = (bits & MAGNITUDE_MASK) > np.uint32(FIRST_NONFINITE)
    quiet = ((bits >> np.uint32(16)) | _QUIET_NAN).astype(np.uint16)
    # Rounding up the largest NaN patterns would wrap around.
    return np.where(is_nan, quiet, bfloat16_codes(np.where(is_nan, np.uint32(0), bits)))


def _decode_chunk(chunk: Chunk, header: Header, out: Float32Array) -> None:
    """Decode one chunk into out (chunk.values,)."""
    reader = Reader(chunk.payload)
    number_format = header.number_format
    if chunk.mode == CONSTANT:
        out.view(np.uint32)[:] = reader.take(4).copy().view("<u4")[0]
    elif chunk.mode == RAW_FP32:
        out.view(np.uint32)[:] = reader.take(4 * chunk.values).view("<u4")
    elif chunk.nonfinite and number_format.name != "fp32":
        raise FrameError(f"chunk {chunk.index} announces NaN or infinity but is quantized")
    elif chunk.mode == RAW_CODES and number_format.name == "fp32":
        raise FrameError(f"chunk {chunk.index} has raw codes of a lossless format")
    else:
        _decode_blocks(reader, chunk, header, out)
    reader.finish()
    if bool(np.isfinite(out).all()) == chunk.nonfinite:
        raise FrameError(f"chunk {chunk.index} and its flag disagree about NaN and infinity")


def _decode_blocks(reader: Reader, chunk: Chunk, header: Header, out: Float32Array) -> None:
    number_format, code_bytes = header.number_format, header.number_format.code_bytes
    is_coded = chunk.mode == CODED
    sparse: WordArray | None = None
    if is_coded:
        plan = read_plan(reader, number_format)
        if number_format.splits[plan.split_index].sparse:
            sparse = read_sparse(reader, number_format, chunk.values)
        else:
            streams = read_streams(reader, number_format, plan, chunk.values)
    for start in range(0, chunk.values, BLOCK_SYMBOLS):
        part = out[start : start + BLOCK_SYMBOLS]
        in_use = np.ones(-(-part.size // header.block_values), dtype=np.bool_)
        if sparse is not None:
            words = sparse[start : start + BLOCK_SYMBOLS]
            in_use = runs_in_use(words, header.block_values, number_format)
        scales = _read_scales(reader, number_format, in_use) if code_bytes == 1 else None
        if sparse is not None:
            escaped = read_escaped(reader, number_format, words)
        elif is_coded:
            block = BlockReader(reader, number_format, plan, streams, part.size)
            words, escaped = _read_pieces(reader, number_format, block, part.size)
        else:
            words = reader.take(code_bytes * part.size).view(f"<u{code_bytes}")
            escaped = read_escaped(reader, number_format, words)
        quantised = Quantised(words, scales, escaped)
        dequantise(quantised, number_format, header.block_values, part)


def _read_scales(
    reader: Reader, number_format: Format, in_use: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """The scales (runs,) of an inner block; those not in use are any valid one."""
    scales = np.full(in_use.size, 127 if number_format.float8 else uniform.STEP_OFFSET, np.int64)
    if in_use.any():
        scales[in_use] = read_scales(reader, number_format, int(np.count_nonzero(in_use)))
    return scales


def _read_pieces(
    reader: Reader, number_format: Format, block: BlockReader, count: int
) -> tuple[WordArray, Float32Array | None]:
    """Code words (count,) of an inner block, and uniform's escaped values after its planes."""
    words, escaped = [], []
    for start in range(0, count, _PIECE_SYMBOLS):
        words.append(block.read(min(_PIECE_SYMBOLS, count - start)))
        values = read_escaped(reader, number_format, words[-1])
        if values is not None:
            escaped.append(values)
    block.finish()
    return np.concatenate(words), np.concatenate(escaped) if escaped else None
