"""Length-limited Huffman code lengths, and their compact form on the wire.

The lengths come from package-merge (Larmore and Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", JACM
1990). The optimum is not unique, so ties are part of the wire format: symbols are sorted by (count, symbol), and where a symbol
and a package weigh the same, the symbol comes first.

A codebook on the wire is the first and the last symbol that occurs, then one nibble per symbol between them, both included,
low nibble first; nibble 0 means that the symbol does not occur.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from .errors import FrameError
from .formats import ByteArray

LENGTH_LIMIT: Final = 12


def code_lengths(counts: npt.NDArray[np.int64], limit: int = LENGTH_LIMIT) -> ByteArray:
    """Optimal code lengths of at most `limit` bits for symbols that occur `counts` times, shape (symbols,).

    At least two symbols must occur; those that do not get length 0.
    """
    symbols = np.flatnonzero(counts)
    symbols = symbols[np.argsort(counts[symbols], kind="stable")]
    leaves = counts[symbols]
    if not 2 <= len(symbols) <= 1 << limit:
        raise ValueError(f"{len(symbols)} symbols cannot have codes of 1 to {limit} bits")

    # For each level, where the leaves stand in the merged list of leaves and packages.
    leaf_places = []
    packages = leaves[:0]
    for _ in range(limit):
        places = np.arange(len(leaves)) + np.searchsorted(packages, leaves, side="left")
        leaf_places.append(places)
        merged = np.empty(len(leaves) + len(packages), dtype=np.int64)
        is_leaf = np.zeros(len(merged), dtype=bool)
        is_leaf[places] = True
        merged[is_leaf] = leaves
        merged[~is_leaf] = packages
        pairs = len(merged) // 2
        packages = merged[0 : 2 * pairs : 2] + merged[1 : 2 * pairs : 2]

    # The first 2m - 2 items of the last list are bought; a bought package buys its two items of the list before.
    lengths = np.zeros(len(counts), dtype=np.uint8)
    bought = 2 * len(leaves) - 2
    for places in reversed(leaf_places):
        bought_leaves = int(np.searchsorted(places, bought, side="left"))
        lengths[symbols[:bought_leaves]] += 1
        bought = 2 * (bought - bought_leaves)
    return lengths


def codebook_bytes(lengths: ByteArray) -> int:
    """Size of `pack_codebook(lengths)`."""
    present = np.flatnonzero(lengths)
    return 2 + (int(present[-1] - present[0]) + 2) // 2


def pack_codebook(lengths: ByteArray) -> bytes:
    """First symbol, last symbol, nibbles of the code lengths (symbols,) between them."""
    present = np.flatnonzero(lengths)
    first, last = int(present[0]), int(present[-1])
    nibbles = lengths[first : last + 1]
    if len(nibbles) % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    return bytes((first, last)) + (nibbles[0::2] | nibbles[1::2] << np.uint8(4)).tobytes()


def unpack_codebook(packed: ByteArray, first: int, last: int, symbols: int) -> ByteArray:
    """Code lengths (symbols,) from the nibbles in `packed`; FrameError unless they are a complete code."""
    if not first < last < symbols:
        raise FrameError(f"codebook covers symbols {first} to {last} of an alphabet of {symbols}")
    nibbles = np.empty(2 * len(packed), dtype=np.uint8)
    nibbles[0::2] = packed & np.uint8(15)
    nibbles[1::2] = packed >> np.uint8(4)
    count = last - first + 1
    if nibbles[count:].any() or not nibbles[0] or not nibbles[count - 1]:
        raise FrameError("codebook has stray or missing nibbles at its ends")
    lengths = np.zeros(symbols, dtype=np.uint8)
    lengths[first : last + 1] = nibbles[:count]
    check_lengths(lengths)
    return lengths


def check_lengths(lengths: ByteArray) -> None:
    """Raise FrameError unless the lengths are at most LENGTH_LIMIT and fill the code space exactly (Kraft equality)."""
    present = lengths[lengths > 0].astype(np.int64)
    if len(present) < 2 or present.max() > LENGTH_LIMIT:
        raise FrameError(f"code lengths must be 1 to {LENGTH_LIMIT} for at least two symbols")
    if int((1 << (LENGTH_LIMIT - present)).sum()) != 1 << LENGTH_LIMIT:
        raise FrameError("code lengths do not fill the code space exactly")
