"""A scheduler whose clock jumps to the next call: a simulated day costs only its callbacks.

Deterministic: calls run in order of their time, and of insertion for equal times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualCall:
    """One scheduled call. A cancelled one stays in the heap and costs one pop."""

    __slots__ = ("args", "callback")

    def __init__(self, callback: Callable[..., object], args: tuple[object, ...]) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args

    def cancel(self) -> None:
        """Cancel the call; no effect if it already happened."""
        self.callback = None
        self.args = ()


class VirtualScheduler:
    """Implements ``link.Scheduler`` over a heap. Time advances only in ``run_*``."""

    __slots__ = ("_heap", "_now", "_order")

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s
        self._order = 0
        self._heap: list[tuple[float, int, VirtualCall]] = []

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._now

    def call_at(self, when: float, callback: Callable[..., object], *args: object) -> VirtualCall:
        """Schedule a call. One in the past runs next, without setting the clock back."""
        call = VirtualCall(callback, args)
        self._order = order = self._order + 1
        heapq.heappush(self._heap, (when, order, call))
        return call

    def call_in_order(
        self, when: float, order: int, callback: Callable[..., object], *args: object
    ) -> None:
        """Schedule a call whose place among calls of equal times is `order`.

        Other calls have the orders 1, 2, ... No two calls have the same time and order.
        """
        heapq.heappush(self._heap, (when, order, VirtualCall(callback, args)))

    def call_soon(self, callback: Callable[..., object], *args: object) -> VirtualCall:
        """Schedule a call for now, after those already scheduled for now."""
        return self.call_at(self._now, callback, *args)

    def next_time(self) -> float | None:
        """Time of the next call, or None if there is none."""
        heap = self._heap
        while heap and heap[0][2].callback is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def run_next(self) -> bool:
        """Advance the clock to the next call and run it. False if there is none."""
        heap = self._heap
        while heap:
            when, _, call = heapq.heappop(heap)
            callback = call.callback
            if callback is None:
                continue
            self._now = max(self._now, when)
            call.callback = None
            callback(*call.args)
            return True
        return False

    def run_before(self, when: float) -> None:
        """Run every call before ``when``, then set the clock to ``when``."""
        while (at := self.next_time()) is not None and at < when:
            self.run_next()
        self._now = max(self._now, when)

    def run_until(self, when: float) -> None:
        """Run every call up to and including ``when``, then set the clock to ``when``."""
        heap = self._heap
        pop = heapq.heappop
        while heap and heap[0][0] <= when:
            at, _, call = pop(heap)
            callback = call.callback
            if callback is None:
                continue
            self._now = max(self._now, at)
            call.callback = None
            callback(*call.args)
        self._now = max(self._now, when)
