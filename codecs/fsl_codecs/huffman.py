"""Length-limited Huffman code lengths.

Huffman's algorithm with two queues (van Leeuwen, "On the construction of Huffman trees", ICALP
1976). If the tree is deeper than the limit, its deepest leaves are brought up to the limit, and
room is made for them as zlib does: a leaf above goes one down and takes one of them as its sibling.
Package-merge would find the optimum, which is little better here, in more time. The optimum is not
unique either, so ties are part of the wire format: symbols are sorted by (count, symbol), and where
a symbol and a package have equal weights, the symbol comes first.
"""

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from .formats import ByteArray

LENGTH_LIMIT: Final = 8


def code_lengths(counts: npt.NDArray[np.int64], limit: int = LENGTH_LIMIT) -> ByteArray:
    """Huffman code lengths, at most `limit` bits, for symbols that occur `counts` (symbols,) times.

    At least two symbols must occur; those that do not get length 0.
    """
    symbols = np.flatnonzero(counts)
    symbols = symbols[np.argsort(counts[symbols], kind="stable")]
    if not 2 <= len(symbols) <= 1 << limit:
        raise ValueError(f"{len(symbols)} symbols cannot have codes of 1 to {limit} bits")
    leaves_of_length = _limited(_leaves_of_depth(counts[symbols].tolist()), limit)
    lengths = np.zeros(len(counts), dtype=np.uint8)
    # The rarest symbols get the longest codes.
    ascending = np.arange(len(leaves_of_length), dtype=np.uint8)
    lengths[symbols] = np.repeat(ascending, leaves_of_length)[::-1]
    return lengths


def _leaves_of_depth(weights: list[int]) -> list[int]:
    """The number of leaves at each depth of the Huffman tree of ascending weights."""
    leaves = deque((weight, node) for node, weight in enumerate(weights))
    packages: deque[tuple[int, int]] = deque()
    parents: list[int] = [0] * (2 * len(weights) - 1)

    def lightest() -> tuple[int, int]:
        if not packages or (leaves and leaves[0][0] <= packages[0][0]):
            return leaves.popleft()
        return packages.popleft()

    for node in range(len(weights), len(parents)):
        (first_weight, first), (second_weight, second) = lightest(), lightest()
        parents[first] = parents[second] = node
        packages.append((first_weight + second_weight, node))
    depths = [0] * len(parents)
    for node in reversed(range(len(parents) - 1)):
        depths[node] = depths[parents[node]] + 1
    leaves_of_depth = [0] * (1 + max(depths))
    for depth in depths[: len(weights)]:
        leaves_of_depth[depth] += 1
    return leaves_of_depth


def _limited(leaves_of_depth: list[int], limit: int) -> list[int]:
    """Move leaves to depths of at most `limit` so that they fill the code space exactly."""
    limited = leaves_of_depth[: limit + 1] + [0] * (limit + 1 - len(leaves_of_depth))
    limited[limit] += sum(leaves_of_depth[limit + 1 :])
    excess = sum(leaves << (limit - depth) for depth, leaves in enumerate(limited)) - (1 << limit)
    for _ in range(excess):
        depth = max(depth for depth in range(1, limit) if limited[depth])
        limited[depth] -= 1
        limited[depth + 1] += 2
        limited[limit] -= 1
    return limited
