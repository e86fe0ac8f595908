"""How long this client's deltas take, from the copy of the weights to the server's word that they are on its disk. Pure.

Deltas of a run are of one size, so what the last ones took is the estimate for the next one: coding, the line as it is today, and the
server's disk are all in it. The slowest of the last few counts, because who estimates too little loses the delta.
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
        """Of the last few; None before the first one arrived."""
        return max(self._last, default=None)

    def begin(self, now: float) -> None:
        """A delta goes on its way."""
        self._began = now

    def arrived(self, now: float) -> None:
        """It was acknowledged."""
        if self._began is not None:
            self._last.append(now - self._began)
            self._began = None

    def interrupt(self) -> None:
        """The session broke, or the server put the delta off: what it takes in all says nothing of the line."""
        self._began = None
