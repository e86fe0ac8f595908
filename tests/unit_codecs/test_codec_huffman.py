"""Code lengths: optimal, limited, complete, and the same in every implementation."""

import heapq
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_codecs.huffman import LENGTH_LIMIT, code_lengths

UNHURRIED = settings(deadline=None, max_examples=60)
COUNTS = st.lists(st.integers(0, 1 << 17), min_size=2, max_size=256).filter(
    lambda counts: sum(count > 0 for count in counts) >= 2
)


def huffman_lengths(counts):
    """Return plain Huffman lengths by a heap, without a limit."""
    heap = [(count, [symbol]) for symbol, count in enumerate(counts) if count]
    heapq.heapify(heap)
    lengths = [0] * len(counts)
    while len(heap) > 1:
        (left, left_symbols), (right, right_symbols) = heapq.heappop(heap), heapq.heappop(heap)
        for symbol in left_symbols + right_symbols:
            lengths[symbol] += 1
        heapq.heappush(heap, (left + right, left_symbols + right_symbols))
    return lengths


def documented_lengths(counts, limit):
    """Return lengths as docs/WIRE.md describes, with a sorted list instead of queues and lengths
    instead of numbers of leaves.
    """
    leaves = sorted((count, symbol) for symbol, count in enumerate(counts) if count)
    # (weight, leaf before package, order of making, ranks)
    items = [(count, 0, rank, [rank]) for rank, (count, _) in enumerate(leaves)]
    depths = [0] * len(leaves)
    made = 0
    while len(items) > 1:
        items.sort()
        (first_weight, *_, first), (second_weight, *_, second), *items = items
        for rank in first + second:
            depths[rank] += 1
        items.append((first_weight + second_weight, 1, made, first + second))
        made += 1
    depths = sorted((min(depth, limit) for depth in depths), reverse=True)
    while sum(1 << (limit - depth) for depth in depths) > 1 << limit:
        depth = max(depth for depth in depths if depth < limit)
        depths.remove(depth)
        depths.remove(limit)
        depths = sorted([*depths, depth + 1, depth + 1], reverse=True)
    lengths = [0] * len(counts)
    for (_, symbol), depth in zip(leaves, depths, strict=True):
        lengths[symbol] = depth
    return lengths


def optimal_cost(counts, limit):
    """Return package-merge's cost (Larmore and Hirschberg, JACM 1990): the weight of the first 2m -
    2 items of the last list.
    """
    leaves = sorted(count for count in counts if count)
    items = leaves
    for _ in range(limit - 1):
        packages = [left + right for left, right in zip(items[0::2], items[1::2], strict=False)]
        items = sorted(leaves + packages)
    return sum(items[: 2 * len(leaves) - 2])


def cost(counts, lengths):
    return sum(int(count) * int(length) for count, length in zip(counts, lengths, strict=True))


@UNHURRIED
@given(COUNTS)
def test_lengths_are_complete_limited_and_cover_what_occurs(counts):
    """Decoders demand Kraft equality; their tables have lengths up to 8."""
    lengths = code_lengths(np.array(counts))
    assert sum(1 << (LENGTH_LIMIT - int(length)) for length in lengths if length) == 256
    assert [length > 0 for length in lengths] == [count > 0 for count in counts]


@UNHURRIED
@given(COUNTS)
def test_as_good_as_plain_huffman_where_the_limit_does_not_bind(counts):
    """Plain Huffman is an independent optimum; where the limit binds, it is a lower bound."""
    lengths = code_lengths(np.array(counts))
    plain = huffman_lengths(counts)
    if max(plain) <= LENGTH_LIMIT:
        assert cost(counts, lengths) == cost(counts, plain)
    else:
        assert cost(counts, lengths) >= cost(counts, plain)


@UNHURRIED
@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.integers(6, 12))
def test_ties_break_as_documented(counts, limit):
    """Equal counts are common; another implementation must give the same lengths."""
    if sum(count > 0 for count in counts) < 2:
        counts = [1, 1, *counts]
    lengths = code_lengths(np.array(counts), limit)
    assert lengths.tolist() == documented_lengths(counts, limit)


@UNHURRIED
@given(COUNTS)
def test_the_limit_costs_little_more_than_it_must(counts):
    """Leaves are raised without regard to their weights, unlike in the optimum.

    Rarer symbols have no code in a chunk's own table.
    """
    total = sum(counts)
    counts = [count if 768 * count >= total else 0 for count in counts]
    escape = total - sum(counts)
    counts += [max(1, escape)] if 0 in counts else []
    assert cost(counts, code_lengths(np.array(counts))) <= 1.02 * optimal_cost(counts, LENGTH_LIMIT)


@pytest.mark.parametrize("symbols", [13, 30])
def test_fibonacci_counts_meet_the_limit(symbols):
    """Fibonacci counts make plain Huffman deepest; the rarest of thirteen is as rare as a coded
    symbol can be.
    """
    counts = [1, 1]
    while len(counts) < symbols:
        counts.append(counts[-1] + counts[-2])
    lengths = code_lengths(np.array(counts))
    assert max(huffman_lengths(counts)) == symbols - 1
    assert lengths.max() == LENGTH_LIMIT
    assert lengths.tolist() == documented_lengths(counts, LENGTH_LIMIT)
    at_most = 1.02 if symbols == 13 else 1.1
    assert cost(counts, lengths) <= at_most * optimal_cost(counts, LENGTH_LIMIT)
    assert all(left >= right for left, right in pairwise(lengths.tolist()))


@pytest.mark.parametrize("counts", [[0, 5, 0], [0, 0]])
def test_less_than_two_symbols_have_no_code(counts):
    """Such planes are constant; a code of length 0 would be ambiguous."""
    with pytest.raises(ValueError, match="symbols cannot have codes"):
        code_lengths(np.array(counts))
