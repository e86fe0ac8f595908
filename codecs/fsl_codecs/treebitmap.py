"""The bit layout of the entropy stage: a canonical Huffman code stored by tree node instead of by symbol.

Idea: Huffman-shaped wavelet trees (Grossi, Gupta and Vitter 2003), run as vector code in arXiv 2606.05765. Symbols are ranked by
(code length, symbol), so every node of the canonical tree covers an interval of ranks. A node that splits its interval at `pivot`
stores one bit per symbol that reaches it, rank >= pivot, and hands the symbols, in order, to its children. A node under which all
leaves are equally deep stores its remaining code bits as bit planes, top bit first; a leaf stores nothing. Nodes follow in
preorder: node, left (lower ranks), right. Each bitmap and each plane is padded to whole bytes, first symbol in the lowest bit.

The bits are those of the Huffman code, plus at most 7 per bitmap. Every size follows from the number of symbols and the bitmaps
read so far, so there is no table walk that data could lead astray.
"""

from bisect import bisect_left
from typing import Final

import numpy as np
from attrs import frozen

from .errors import FrameError
from .formats import ByteArray
from .huffman import LENGTH_LIMIT

BLOCK_SYMBOLS: Final = 16384
"""Symbols per inner block: each has its own bitmaps, so that a block's lists stay in the cache."""
MAXIMUM_LEAVES: Final = 256
"""Ranks are bytes."""


@frozen
class Node:
    """Ranks from `first` on: either `planes` equal bits for all (no children), or a split at `pivot`."""

    first: int
    planes: int = 0
    pivot: int = 0
    left: "Node | None" = None
    right: "Node | None" = None


@frozen
class Tree:
    """A canonical code as a tree.

    rank_of_symbol and symbol_of_rank are 256-byte tables, symbols without a code having the escape's rank; escape_rank is None
    when there is no escape leaf; bitmaps counts the bitmaps and planes of a block.
    """

    root: Node
    rank_of_symbol: bytes
    symbol_of_rank: bytes
    escape_rank: int | None
    bitmaps: int


class Reader:
    """Takes bytes off the front of a payload and refuses to read past its end."""

    def __init__(self, data: ByteArray) -> None:
        self._data = data
        self._position = 0

    def take(self, count: int) -> ByteArray:
        """The next `count` bytes, without a copy; FrameError when they are not there."""
        start, self._position = self._position, self._position + count
        if self._position > self._data.size:
            raise FrameError("payload ends too early")
        return self._data[start : self._position]

    def byte(self) -> int:
        """The next byte."""
        return int(self.take(1)[0])

    def finish(self) -> None:
        """Raise FrameError when bytes are left over."""
        if self._position != self._data.size:
            raise FrameError(f"{self._data.size - self._position} bytes too many in a payload")


def build_tree(code_lengths: bytes, escape: int = 0) -> Tree:
    """The tree of complete canonical code lengths (symbols,), 0 for symbols without a code, and that of the escape leaf or 0."""
    lengths = np.frombuffer(code_lengths + bytes((escape,)), np.uint8)
    leaves = np.flatnonzero(lengths)
    # The escape comes last among equals.
    leaves = leaves[np.argsort(lengths[leaves], kind="stable")]
    ranked_lengths = lengths[leaves].tolist()
    # Code words in rank order, left-aligned to LENGTH_LIMIT bits.
    codes = [0]
    for length in ranked_lengths:
        codes.append(codes[-1] + (1 << (LENGTH_LIMIT - length)))
    bitmaps = 0

    def grow(first: int, end: int, depth: int) -> Node:
        nonlocal bitmaps
        if ranked_lengths[first] == ranked_lengths[end - 1]:
            planes = ranked_lengths[first] - depth
            bitmaps += planes
            return Node(first, planes=planes)
        bitmaps += 1
        pivot = bisect_left(codes, codes[first] + (1 << (LENGTH_LIMIT - depth - 1)), first, end)
        return Node(
            first,
            pivot=pivot,
            left=grow(first, pivot, depth + 1),
            right=grow(pivot, end, depth + 1),
        )

    root = grow(0, len(leaves), 0)
    escape_rank = int(np.flatnonzero(leaves == len(code_lengths))[0]) if escape else None
    ranks = np.full(257, escape_rank or 0, dtype=np.uint8)
    ranks[leaves] = np.arange(len(leaves))
    symbols = np.zeros(256, dtype=np.uint8)
    symbols[: len(leaves)] = np.where(leaves == len(code_lengths), 0, leaves)
    return Tree(root, ranks[:256].tobytes(), symbols.tobytes(), escape_rank, bitmaps)


def write_planes(symbols: ByteArray, width: int, pieces: list[bytes]) -> None:
    """Append the lowest `width` bits of each symbol (n,) as bit planes, top bit first."""
    pieces.extend(
        np.packbits(symbols & np.uint8(1 << bit), bitorder="little").tobytes()
        for bit in reversed(range(width))
    )


def read_planes(reader: Reader, count: int, width: int) -> ByteArray:
    """Symbols (count,) from `width` bit planes."""
    symbols = np.zeros(count, dtype=np.uint8)
    for _ in range(width):
        symbols <<= np.uint8(1)
        symbols |= np.unpackbits(reader.take((count + 7) // 8), count=count, bitorder="little")
    return symbols


def write_block(tree: Tree, symbols: ByteArray, pieces: list[bytes]) -> None:
    """Append the bitmaps of symbols (n,), n <= BLOCK_SYMBOLS, and those without a code as they are."""

    def write(node: Node, ranks: ByteArray) -> None:
        if node.left is None or node.right is None:
            write_planes(ranks - np.uint8(node.first), node.planes, pieces)
            return
        goes_right = ranks >= np.uint8(node.pivot)
        pieces.append(np.packbits(goes_right, bitorder="little").tobytes())
        for child, goes in ((node.left, ~goes_right), (node.right, goes_right)):
            if child.planes or child.left is not None:
                write(child, np.compress(goes, ranks))

    ranks = np.frombuffer(symbols.tobytes().translate(tree.rank_of_symbol), np.uint8)
    write(tree.root, ranks)
    if tree.escape_rank is not None:
        pieces.append(symbols[ranks == tree.escape_rank].tobytes())


def read_block(tree: Tree, reader: Reader, count: int) -> ByteArray:
    """Symbols (count,) from what `write_block` wrote."""

    def read(node: Node, count: int) -> ByteArray:
        if node.left is None or node.right is None:
            return read_planes(reader, count, node.planes) + np.uint8(node.first)
        goes_right = np.unpackbits(
            reader.take((count + 7) // 8), count=count, bitorder="little"
        ).view(bool)
        right_count = int(np.count_nonzero(goes_right))
        ranks = np.empty(count, dtype=np.uint8)
        for child, goes, child_count in (
            (node.left, ~goes_right, count - right_count),
            (node.right, goes_right, right_count),
        ):
            if child.planes or child.left is not None:
                ranks[np.flatnonzero(goes)] = read(child, child_count)
            else:
                ranks[goes] = child.first
        return ranks

    ranks = read(tree.root, count)
    symbols = np.frombuffer(bytearray(ranks.tobytes().translate(tree.symbol_of_rank)), np.uint8)
    if tree.escape_rank is not None:
        escaped = np.flatnonzero(ranks == tree.escape_rank)
        symbols[escaped] = reader.take(escaped.size)
    return symbols
