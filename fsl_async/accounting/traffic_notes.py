"""Writes a node's byte counters to its journal, at most every `EVERY_S` seconds and at its end.

A note "traffic" has the sums since the process started, so only the last one of each process
counts. A client also writes one with each version that its training has moved onto. A killed
process loses at most the counts of its last `EVERY_S` seconds.
"""

from __future__ import annotations

from typing import Any, Protocol

import fsl_transport as tp
from fsl_async.accounting.traffic import Traffic

EVERY_S = 10.0


class _Journal(Protocol):
    def note(self, name: str, now: float, cause: int | None = None, /, **fields: Any) -> int: ...


class TrafficNotes:
    """Writes notes until closed."""

    def __init__(self, loop: tp.Scheduler, journal: _Journal, traffic: Traffic) -> None:
        self._loop, self._journal, self._traffic = loop, journal, traffic
        self._last: dict[str, Any] = {}
        self._timer = loop.call_at(loop.time() + EVERY_S, self._fire)

    def _fire(self) -> None:
        found = self._traffic.as_dict()
        # Heartbeats never stop; only growth of the streams is worth a line.
        if found["payload"] != self._last.get("payload"):
            self._last = found
            self._journal.note("traffic", self._loop.time(), **found)
        self._timer = self._loop.call_at(self._loop.time() + EVERY_S, self._fire)

    def write(self, **facts: Any) -> None:
        """Write a note with further facts."""
        self._journal.note("traffic", self._loop.time(), **self._traffic.as_dict(), **facts)

    def close(self) -> None:
        """Write the last note."""
        self._timer.cancel()
        self.write()
