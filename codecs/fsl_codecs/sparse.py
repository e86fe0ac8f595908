"""Sparse chunks: a mask in two levels, and the codes that are not zero.

Huffman's code takes at least a bit a symbol, so a code word for each value, or for each group of
four, costs most where nearly all are zero. A sparse split has planes of 8 bits, each with as many
symbols as the ones before announce:

    upper mask   a bit for each byte of the lower mask: whether it is not 0
    lower mask   its bytes that are not 0; a bit for each code: whether it is not zero
    codes        those that are not zero, cut into the split's planes

A plane without symbols takes no bytes. Runs of zeros have no scale, and the other runs' steps of
uniform grow with the share of zeros. docs/WIRE.md has the rules.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from .errors import FrameError
from .formats import ByteArray, Float32Array, Format, Split, WordArray
from .groups import is_listed
from .planes import (
    BlockReader,
    ChunkPlan,
    Counted,
    PlanePlan,
    Sample,
    cut,
    join,
    plan_plane,
    read_plane,
    read_streams,
    sample_of,
    write_streams,
    write_words,
)
from .quantised import BLOCK_SYMBOLS
from .reader import Reader

_BYTES: Final = Format("bytes", -1, 8, (Split(False, (8,)),), 0)
"""A plane of whole bytes, as the rules for planes of codes take it."""

_FEWEST: Final = 1024
"""Values of a chunk: in smaller ones the heads of planes are too large a part."""
_SAMPLED_RUN: Final = 16
_SAMPLED_EVERY: Final = 127
_MANY_LANES_FROM: Final = 4096
"""Number of symbols; of other splits 16,384. Few lanes are slow, many take 224 bytes more."""

Bools = npt.NDArray[np.bool_]


def _planes_of(words: WordArray, number_format: Format) -> list[ByteArray]:
    """The symbols of each plane of a chunk's code words (n,)."""
    is_nonzero = words != number_format.zero_code
    mask = np.packbits(is_nonzero, bitorder="little")
    upper = np.packbits(mask != 0, bitorder="little")
    codes = cut(words[is_nonzero], number_format.splits[-1], number_format.code_bits)
    return [upper, mask[mask != 0], *codes]


def plan_sparse(words: WordArray, number_format: Format, *, everything: bool) -> ChunkPlan:
    """The plan of a chunk's code words (n,) as sparse; each plane's sample is of its symbols."""
    plans = []
    for symbols in _planes_of(words, number_format):
        if not symbols.size:
            plans.append(PlanePlan(8, b"", 0))
            continue
        sample = Sample(symbols, symbols.size) if everything else sample_of(symbols)
        counts = np.bincount(sample.words, minlength=256)
        plans.append(
            plan_plane(Counted(counts, 8, sample.words.size, symbols.size, _MANY_LANES_FROM))
        )
    return ChunkPlan(len(number_format.splits) - 1, tuple(plans))


def looks_sparse(values: Float32Array) -> bool:
    """Whether these are 1,024 or more values (n,), and in every 127th run of 16 most are zero."""
    if values.size < _FEWEST:
        return False
    starts = range(0, values.size, _SAMPLED_EVERY * _SAMPLED_RUN)
    sampled = np.concatenate([values[start : start + _SAMPLED_RUN] for start in starts])
    return 2 * int(np.count_nonzero(sampled)) < sampled.size


def is_cheap(plan: ChunkPlan, words: WordArray, number_format: Format) -> bool:
    """Whether other splits of code words (n,) are not worth a comparison.

    They take at least a bit a symbol; groups of 4 also 10 for a code that they list.
    """
    least = words.size * number_format.code_bytes
    if number_format.name == "uniform":
        least = words.size // 4 + 10 * int(np.count_nonzero(is_listed(words, 4)))
    return plan.cost_bits <= least


def write_sparse(
    words: WordArray, number_format: Format, plan: ChunkPlan, pieces: list[bytes]
) -> None:
    """Append the split and all planes of a chunk's code words (n,).

    ConstantPlaneError if the plan does not fit them.
    """
    pieces.append(bytes((plan.split_index,)))
    for plane, symbols in zip(plan.planes, _planes_of(words, number_format), strict=True):
        if not symbols.size:
            continue
        alone = ChunkPlan(0, (plane,))
        pieces.append(plane.head)
        write_streams(symbols, _BYTES, alone, pieces, _MANY_LANES_FROM)
        for start in range(0, symbols.size, BLOCK_SYMBOLS):
            write_words(symbols[start : start + BLOCK_SYMBOLS], _BYTES, alone, pieces)


def read_sparse(reader: Reader, number_format: Format, count: int) -> WordArray:
    """The code words (count,) that `write_sparse` wrote, after the split's number.

    FrameError for anything that it cannot have written.
    """
    split, code_bits = number_format.splits[-1], number_format.code_bits
    mask = np.zeros(-(-count // 8), dtype=np.uint8)
    is_shown = _mask_of(_read_plane(reader, -(-mask.size // 8)), mask.size)
    mask[is_shown] = _read_plane(reader, int(np.count_nonzero(is_shown)))
    if not mask[is_shown].all():
        raise FrameError("a byte of a mask is zero")
    is_nonzero = _mask_of(mask, count)
    nonzero = int(np.count_nonzero(is_nonzero))
    codes = join([_read_plane(reader, nonzero) for _ in split.widths], split, code_bits)
    if (codes == number_format.zero_code).any():
        raise FrameError("a code that is not zero is zero")
    words = np.full(count, number_format.zero_code, dtype=codes.dtype)
    words[is_nonzero] = codes
    return words


def _mask_of(packed: ByteArray, count: int) -> Bools:
    bits = np.unpackbits(packed, bitorder="little").astype(np.bool_)
    if bits[count:].any():
        raise FrameError("a mask goes on after its last bit")
    return bits[:count]


def _read_plane(reader: Reader, count: int) -> ByteArray:
    """The symbols (count,) of one plane."""
    if count == 0:
        return np.zeros(0, dtype=np.uint8)
    plan = ChunkPlan(0, (read_plane(reader, 8),))
    streams = read_streams(reader, _BYTES, plan, count, _MANY_LANES_FROM)
    blocks = []
    for start in range(0, count, BLOCK_SYMBOLS):
        size = min(BLOCK_SYMBOLS, count - start)
        block = BlockReader(reader, _BYTES, plan, streams, size)
        blocks.append(block.read(size).astype(np.uint8, copy=False))
        block.finish()
    return np.concatenate(blocks)


def runs_in_use(words: WordArray, run_values: int, number_format: Format) -> Bools:
    """Which runs (ceil(n / run_values),) of a sparse chunk's code words (n,) have a scale."""
    starts = range(0, words.size, run_values)
    is_nonzero = words != number_format.zero_code
    return np.array([is_nonzero[at : at + run_values].any() for at in starts])
