"""Length-limited Huffman code lengths.

The lengths come from package-merge (Larmore and Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", JACM
1990). The optimum is not unique, so ties are part of the wire format: symbols are sorted by (count, symbol), and where a symbol
and a package weigh the same, the symbol comes first.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

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
