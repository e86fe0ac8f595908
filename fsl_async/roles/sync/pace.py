"""Measures how long this client's deltas take, from snapshot to acknowledgement. Pure.

Deltas of a run have one size, so the next one takes about as long as the last ones: that includes
coding, the path's bandwidth and the parameter server's disk. The estimate is the slowest of the
last `KEPT`, because too low an estimate loses the delta.
"""

from __future__ import annotations

from collections import deque

KEPT = 3


class Pace:
    """Measures one delta at a time. Times in seconds of the caller's clock."""

    __slots__ = ("_began", "_last")

    def __init__(self) -> None:
        self._began: float | None = None
        self._last: deque[float] = deque(maxlen=KEPT)

    @property
    def slowest_s(self) -> float | None:
        """The longest of the last few; None before the first one arrived."""
        return max(self._last, default=None)

    def begin(self, now: float) -> None:
        """Start to measure a delta."""
        self._began = now

    def arrived(self, now: float) -> None:
        """Record the time of the acknowledged delta."""
        if self._began is not None:
            self._last.append(now - self._began)
            self._began = None

    def interrupt(self) -> None:
        """Discard the measurement: a lost session or a "later" would distort it."""
        self._began = None
