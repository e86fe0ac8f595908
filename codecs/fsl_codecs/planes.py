"""Planes: code words cut into bit fields, each stored in the cheapest of three ways.

A split (formats.Split) cuts each code word into planes of at most 8 bits. The bits of a plane that carry no information go out as
they are, the others through the tree code of `treebitmap`:

    kind 0  raw        width < 8: bit planes, top bit first; width 8: one byte per symbol
    kind 1  constant   one byte, the symbol
    kind 2  tree       a codebook, then the bitmaps

The choice is made from symbol counts in integers only, so that every implementation makes the same. docs/WIRE.md gives the rules.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
from attrs import frozen

from .errors import FrameError
from .formats import ByteArray, Format, Split, WordArray
from .huffman import code_lengths, codebook_bytes, pack_codebook, unpack_codebook
from .treebitmap import (
    BLOCK_SYMBOLS,
    Reader,
    Tree,
    build_tree,
    read_block,
    read_planes,
    write_block,
    write_planes,
)

RAW: Final = 0
CONSTANT: Final = 1
TREE: Final = 2

Counts = npt.NDArray[np.int64]
_WORD_TYPES: Final = {8: np.uint8, 16: np.uint16, 32: np.uint32}


@frozen(eq=False)
class PlanePlan:
    """How one plane of a chunk is stored; cost_bits is an upper bound of its size, exact but for padding."""

    width: int
    kind: int
    cost_bits: int
    constant: int = 0
    lengths: ByteArray | None = None
    tree: Tree | None = None


@frozen(eq=False)
class ChunkPlan:
    """The split of a chunk and the plans of its planes."""

    split_index: int
    planes: tuple[PlanePlan, ...]

    @property
    def cost_bits(self) -> int:
        """Upper bound of the coded size, without scales."""
        return 8 + sum(plane.cost_bits for plane in self.planes)


def _rotate_left(words: WordArray, count: int, code_bits: int) -> WordArray:
    kind = words.dtype.type
    return (words << kind(count)) | (words >> kind(code_bits - count))


def cut(words: WordArray, split: Split, code_bits: int) -> list[ByteArray]:
    """The planes (n,) of code words (n,), top plane first."""
    if split.rotate:
        words = _rotate_left(words, 1, code_bits)
    planes = []
    shift = code_bits
    for width in split.widths:
        shift -= width
        planes.append((np.right_shift(words, shift) & ((1 << width) - 1)).astype(np.uint8))
    return planes


def join(planes: list[ByteArray], split: Split, code_bits: int) -> WordArray:
    """The inverse of `cut`."""
    words: WordArray = np.zeros(planes[0].size, dtype=_WORD_TYPES[code_bits])
    for plane, width in zip(planes, split.widths, strict=True):
        if width < code_bits:
            words <<= width
        words |= plane
    if split.rotate:
        words = _rotate_left(words, code_bits - 1, code_bits)
    return words


def plan_plane(counts: Counts, width: int) -> PlanePlan:
    """The cheapest way to store a plane whose symbols occur `counts` (2**width,) times."""
    values = int(counts.sum())
    largest = int(counts.max())
    present = int(np.count_nonzero(counts))
    if present == 1:
        return PlanePlan(width, CONSTANT, 16, constant=int(counts.argmax()))
    raw_bits = 8 * values if width == 8 else 8 * width * ((values + 7) // 8)
    raw = PlanePlan(width, RAW, 8 + raw_bits)
    # Nearly uniform planes, mantissas above all, are not worth the search for a code.
    if present > 1 << (width - 1) and largest <= values >> (width - 1):
        return raw
    lengths = code_lengths(counts)
    tree = build_tree(lengths)
    blocks = -(-values // BLOCK_SYMBOLS)
    code_bits = int((counts * lengths).sum()) + 7 * tree.bitmaps * blocks
    cost_bits = 8 + 8 * codebook_bytes(lengths) + code_bits
    if cost_bits > raw_bits - (raw_bits >> 6):
        return raw
    return PlanePlan(width, TREE, cost_bits, lengths=lengths, tree=tree)


def plan_chunk(words: WordArray, number_format: Format) -> ChunkPlan:
    """Choose the split of code words (n,), n > 0, and how each of its planes is stored."""
    splits = number_format.splits
    if number_format.code_bits > 8:
        planes = cut(words, splits[0], number_format.code_bits)
        counted = [np.bincount(plane, minlength=256) for plane in planes]
        return ChunkPlan(0, tuple(plan_plane(counts, 8) for counts in counted))

    counts = np.bincount(words, minlength=256)
    # A later split has to promise something before its costs are worked out, and then has to save a sixteenth, because
    # larger alphabets are slower. Sign in the alphabet: when signs and magnitudes go together. Whole codes: when one dominates.
    asymmetry = int(np.abs(counts[:128] - counts[128:]).sum())
    promising = (True, asymmetry > words.size >> 2, int(counts.max()) > words.size >> 2)
    best = None
    for index, split in enumerate(splits):
        if promising[index]:
            plan = ChunkPlan(index, _plan_bytes(counts, split))
            if best is None or plan.cost_bits < best.cost_bits - (best.cost_bits >> 4):
                best = plan
    assert best is not None
    return best


def _plan_bytes(counts: Counts, split: Split) -> tuple[PlanePlan, ...]:
    """Plans for the planes of 8-bit codes, from how often each code occurs (256,)."""
    plans = []
    for width, symbol in zip(
        split.widths, cut(np.arange(256, dtype=np.uint8), split, 8), strict=True
    ):
        plane_counts = np.zeros(1 << width, dtype=np.int64)
        np.add.at(plane_counts, symbol, counts)
        plans.append(plan_plane(plane_counts, width))
    return tuple(plans)


def write_coded(
    words: WordArray, number_format: Format, plan: ChunkPlan, pieces: list[bytes]
) -> None:
    """Append the split, the planes' heads, and the inner blocks of code words (n,)."""
    split = number_format.splits[plan.split_index]
    pieces.append(bytes((plan.split_index,)))
    for plane in plan.planes:
        pieces.append(bytes((plane.kind,)))
        if plane.kind == CONSTANT:
            pieces.append(bytes((plane.constant,)))
        elif plane.lengths is not None:
            pieces.append(pack_codebook(plane.lengths))
    for start in range(0, words.size, BLOCK_SYMBOLS):
        fields = cut(words[start : start + BLOCK_SYMBOLS], split, number_format.code_bits)
        for plane, symbols in zip(plan.planes, fields, strict=True):
            if plane.tree is not None:
                write_block(plane.tree, symbols, pieces)
            elif plane.kind == RAW and plane.width == 8:
                pieces.append(symbols.tobytes())
            elif plane.kind == RAW:
                write_planes(symbols, plane.width, pieces)


def read_coded(reader: Reader, number_format: Format, count: int) -> WordArray:
    """Code words (count,) from what `write_coded` wrote; FrameError when it cannot have written that."""
    split_index = reader.byte()
    if split_index >= len(number_format.splits):
        raise FrameError(f"unknown split {split_index} of format {number_format.name}")
    split = number_format.splits[split_index]
    plans = [_read_plane_head(reader, width) for width in split.widths]
    words: WordArray = np.empty(count, dtype=_WORD_TYPES[number_format.code_bits])
    for start in range(0, count, BLOCK_SYMBOLS):
        block = words[start : start + BLOCK_SYMBOLS]
        fields = [_read_plane_block(reader, plan, block.size) for plan in plans]
        block[:] = join(fields, split, number_format.code_bits)
    return words


def _read_plane_head(reader: Reader, width: int) -> PlanePlan:
    kind = reader.byte()
    if kind == RAW:
        return PlanePlan(width, RAW, 0)
    if kind == CONSTANT:
        constant = reader.byte()
        if constant >> width:
            raise FrameError(f"constant {constant} does not fit a plane of {width} bits")
        return PlanePlan(width, CONSTANT, 0, constant=constant)
    if kind == TREE:
        first, last = reader.byte(), reader.byte()
        nibbles = reader.take((max(last - first, 0) + 2) // 2)
        lengths = unpack_codebook(nibbles, first, last, 1 << width)
        return PlanePlan(width, TREE, 0, lengths=lengths, tree=build_tree(lengths))
    raise FrameError(f"unknown plane kind {kind}")


def _read_plane_block(reader: Reader, plan: PlanePlan, count: int) -> ByteArray:
    if plan.tree is not None:
        return read_block(plan.tree, reader, count)
    if plan.kind == CONSTANT:
        return np.full(count, plan.constant, dtype=np.uint8)
    if plan.width == 8:
        return reader.take(count)
    return read_planes(reader, count, plan.width)
