"""What to let go where there is too much. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def heaviest(groups: Iterable[list[tuple[int, T]]], limit: int) -> list[tuple[int, T]]:
    """Of groups of `(weight, what)`, which to drop until the others weigh no more than `limit` together.

    Each time it is the heaviest of the group that weighs most. So nothing is taken of a group that weighs no more than an equal share of the limit.
    """
    sorted_groups = [sorted(group, key=lambda one: one[0]) for group in groups]
    weights = [sum(weight for weight, _ in group) for group in sorted_groups]
    left = sum(weights)
    heap = [(-weight, number) for number, weight in enumerate(weights)]
    heapq.heapify(heap)
    dropped = []
    while left > limit:
        negative, number = heap[0]
        one = sorted_groups[number].pop()
        dropped.append(one)
        left -= one[0]
        heapq.heapreplace(heap, (negative + one[0], number))
    return dropped
