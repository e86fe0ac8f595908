"""Measures the event loop's lag, by which a training thread that holds the GIL delays heartbeats.

The lag is the delay of a short timer that is armed repeatedly. The last five minutes are kept.
"""

from __future__ import annotations

import asyncio
from collections import deque

EVERY_S = 0.1
KEPT = 3000


class LoopLag:
    """Measures the lag of a running loop until closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lags_s: deque[float] = deque(maxlen=KEPT)
        self._timer = loop.call_later(EVERY_S, self._fire, loop.time() + EVERY_S)

    def _fire(self, asked_for: float) -> None:
        now = self._loop.time()
        self._lags_s.append(max(0.0, now - asked_for))
        self._timer = self._loop.call_later(EVERY_S, self._fire, now + EVERY_S)

    def summary(self) -> dict[str, float]:
        """Return median, 99th percentile and maximum in milliseconds; empty at the beginning."""
        lags = sorted(self._lags_s)
        if not lags:
            return {}
        parts = {"lag_median_ms": 0.5, "lag_p99_ms": 0.99, "lag_max_ms": 1.0}
        last = len(lags) - 1
        return {
            name: round(1000 * lags[min(last, int(part * len(lags)))], 3)
            for name, part in parts.items()
        }

    def close(self) -> None:
        """Stop measuring."""
        self._timer.cancel()
