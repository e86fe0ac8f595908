"""The inner blocks of a quantized chunk: code words, scales, and escaped values on the wire."""

from typing import Final

import numpy as np
import numpy.typing as npt
from attrs import frozen

from . import uniform
from .formats import (
    Float32Array,
    Format,
    WordArray,
    bfloat16_bits,
    bfloat16_codes,
    dequantise_float8,
    quantise_float8,
)
from .reader import Reader

BLOCK_SYMBOLS: Final = 16384
"""Values per inner block. Each has its own scales and lists, so that its values stay in cache."""


@frozen(eq=False)
class Quantised:
    """An inner block: code words (n,), n at most BLOCK_SYMBOLS.

    scales: (runs,) as on the wire, or None. escaped: fp32 values, or None.
    """

    words: WordArray
    scales: npt.NDArray[np.int64] | None = None
    escaped: Float32Array | None = None


def quantise(
    values: Float32Array,
    number_format: Format,
    block_values: int,
    step_log2: int,
    *,
    sparse: bool = False,
) -> list[Quantised]:
    """The inner blocks of a chunk (n,) whose values are below the format's escape magnitude.

    sparse: with uniform's steps of a sparse chunk.
    """
    return [
        _quantise_inner(
            values[start : start + BLOCK_SYMBOLS], number_format, block_values, step_log2, sparse
        )
        for start in range(0, values.size, BLOCK_SYMBOLS)
    ]


def _quantise_inner(
    values: Float32Array, number_format: Format, block_values: int, step_log2: int, sparse: bool
) -> Quantised:
    bits = values.view(np.uint32)
    if number_format.code_bits == 32:
        return Quantised(bits)
    if number_format.code_bits == 16:
        return Quantised(bfloat16_codes(bits))
    starts = range(0, values.size, block_values)
    is_zero = np.array([not values[at : at + block_values].any() for at in starts])
    if number_format.float8 is not None:
        words, bytes_of_scales = quantise_float8(values, number_format, block_values)
        scales = bytes_of_scales.astype(np.int64)
        escaped = None
        lowest = number_format.float8.lowest_scale
    else:
        words, scales = uniform.quantise(values, block_values, step_log2, sparse=sparse)
        escaped = values[words == uniform.ESCAPE]
        scales += uniform.STEP_OFFSET
        lowest = uniform.LOWEST_STEP + uniform.STEP_OFFSET
    # Zeros fit any scale; this one does not widen the stored range.
    scales[is_zero] = lowest if is_zero.all() else scales[~is_zero].min()
    return Quantised(words, scales, escaped)


def dequantise(
    block: Quantised, number_format: Format, block_values: int, out: Float32Array
) -> None:
    """Write the values of an inner block into out (n,)."""
    if number_format.code_bits == 32:
        out.view(np.uint32)[:] = block.words
    elif number_format.code_bits == 16:
        out.view(np.uint32)[:] = bfloat16_bits(block.words.astype(np.uint16, copy=False))
    elif number_format.float8 is not None:
        assert block.scales is not None
        codes, scales = block.words.astype(np.uint8, copy=False), block.scales.astype(np.uint8)
        dequantise_float8(codes, scales, number_format, block_values, out)
    else:
        assert block.scales is not None
        codes = block.words.astype(np.uint8, copy=False)
        uniform.dequantise(codes, block.scales - uniform.STEP_OFFSET, block_values, out)
        if block.escaped is not None:
            out[codes == uniform.ESCAPE] = block.escaped


def write_escaped(block: Quantised, pieces: list[bytes]) -> None:
    """Append the escaped values, in order."""
    if block.escaped is not None:
        pieces.append(block.escaped.astype("<f4", copy=False).tobytes())


def read_escaped(reader: Reader, number_format: Format, words: WordArray) -> Float32Array | None:
    """Read one value for each escape among the codes (n,); None for formats without escapes."""
    if number_format.name != "uniform":
        return None
    count = int(np.count_nonzero(words == uniform.ESCAPE))
    values: Float32Array = reader.take(4 * count).view("<f4")
    return values
