"""Timing of several actions in turns, so that what disturbs the machine disturbs all of them alike.

A ratio is the median of the ratios within the rounds, not the ratio of the medians: clock, neighbours and page tables change
slowly, so that within a round they are nearly the same for both sides.

Seconds are processor seconds of this process, all its threads together, because other processes that take the core for a while are no
property of what is measured; nothing here waits for anything but memory. Two threads against one are compared by the clock on the wall.
What others took of the time is reported beside (`waited_share`); where it is large, caches and memory were shared as well.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

from attrs import frozen

GB = 1e9

Action = Callable[[], object]


@frozen
class Rounds:
    """Seconds that each action took, one for each round."""

    seconds: Mapping[str, tuple[float, ...]]
    waited_share: float = 0.0
    """Share of the whole time in which this process did not run."""

    @property
    def count(self) -> int:
        """How many rounds there were."""
        return min(map(len, self.seconds.values()), default=0)

    def gb_s(self, name: str, moved_bytes: int) -> float | None:
        """10^9 bytes in a second, by the median; None for an action that was not measured."""
        if name not in self.seconds:
            return None
        return float(f"{moved_bytes / statistics.median(self.seconds[name]) / GB:.4g}")

    def spread(self, name: str) -> float | None:
        """(slowest - fastest) / median."""
        if name not in self.seconds:
            return None
        seconds = self.seconds[name]
        return round((max(seconds) - min(seconds)) / statistics.median(seconds), 3)

    def ratio(self, name: str, other: str) -> float | None:
        """How many times as fast `name` was as `other`, for the same work."""
        if name not in self.seconds or other not in self.seconds:
            return None
        pairs = zip(self.seconds[name], self.seconds[other], strict=True)
        return float(f"{statistics.median(theirs / ours for ours, theirs in pairs):.4g}")


def in_turns(
    actions: Mapping[str, Action], repeats: int, limit_s: float, *, by_wall_clock: bool = False
) -> Rounds:
    """Run all actions once unmeasured, then in turns `repeats` times; fewer, but at least once, when `limit_s` is over."""
    for action in actions.values():
        action()
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    clock = time.perf_counter if by_wall_clock else time.process_time
    begun, begun_running = time.perf_counter(), time.process_time()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, action in actions.items():
                start = clock()
                action()
                seconds[name].append(max(clock() - start, 1e-9))
            if time.perf_counter() - begun > limit_s:
                break
    finally:
        if was_enabled:
            gc.enable()
    passed, running = time.perf_counter() - begun, time.process_time() - begun_running
    waited = 1 - min(running / passed, 1.0)
    return Rounds({name: tuple(values) for name, values in seconds.items()}, round(waited, 3))
