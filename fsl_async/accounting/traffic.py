"""Counts a node's bytes by category and direction, its bytes at the sockets, and its coding error.

Categories and directions are those of the planner, seen from the client. `payload` counts values in
their number format before the entropy stage, as the planner does; `coded` counts what the streams
carried. Resent bytes count again. `error` is the RMS of what rounding to the number format changed,
relative to the RMS of the values, over all values that this node has coded.

`TrafficNotes` writes the sums since the process started to the journal, so only the last note of
each process counts. A client also writes one with each version that its training has moved onto. A
killed process loses at most the counts of its last `EVERY_S` seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import fsl_transport as tp
from fsl_async.accounting.sizes import FORMATS, Category, Direction

EVERY_S = 10.0
"""From one note of the sums to the next at most."""


class Traffic:
    """Counters of one node."""

    def __init__(self) -> None:
        self.payload: Counter[tuple[str, str]] = Counter()
        self.coded: Counter[tuple[str, str]] = Counter()
        self.sockets: Counter[str] = Counter()
        self._squares: dict[tuple[str, str], tuple[float, float]] = {}

    def values(
        self, category: Category, direction: Direction, number_format: str, values: int, coded: int
    ) -> None:
        """Count a frame of values."""
        self.payload[category, direction] += FORMATS[number_format].payload(values)
        self.coded[category, direction] += coded

    def plain(self, category: Category, direction: Direction, size: int) -> None:
        """Count bytes that are not coded."""
        self.payload[category, direction] += size
        self.coded[category, direction] += size

    def lost(
        self, category: Category, direction: Direction, error_square: float, value_square: float
    ) -> None:
        """Add a frame's coding error: sums of squares of the differences and of the values."""
        errors, values = self._squares.get((category, direction), (0.0, 0.0))
        self._squares[category, direction] = errors + error_square, values + value_square

    def errors(self) -> dict[str, float]:
        """Relative errors by "category direction"."""
        return {
            " ".join(key): float(f"{math.sqrt(errors / values):.4g}")
            for key, (errors, values) in sorted(self._squares.items())
            if values
        }

    def as_dict(self) -> dict[str, Any]:
        """All counters, for summaries and journals: "activations up" -> bytes."""
        return {
            "payload": {" ".join(key): size for key, size in sorted(self.payload.items())},
            "coded": {" ".join(key): size for key, size in sorted(self.coded.items())},
            "sockets": dict(self.sockets),
            "error": self.errors(),
        }


class CountedLink:
    """A link that counts the bytes it sends and receives, heads and control included."""

    def __init__(self, link: Any, traffic: Traffic, *, at_client: bool) -> None:
        self._link = link
        self._sockets = traffic.sockets
        self._out, self._in = ("up", "down") if at_client else ("down", "up")

    def send(self, peer: str, lane: tp.Lane, frames: Sequence[tp.Buffer], *rest: Any) -> None:
        """Count and send."""
        self._sockets[self._out] += sum(len(frame) for frame in frames)
        self._link.send(peer, lane, frames, *rest)

    def set_receiver(self, receive: Callable[..., None]) -> None:
        """Count what arrives, then pass it to `receive`."""

        def counted(peer: str, lane: tp.Lane, frames: Sequence[tp.Buffer], *rest: Any) -> None:
            self._sockets[self._in] += sum(len(frame) for frame in frames)
            receive(peer, lane, frames, *rest)

        self._link.set_receiver(counted)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the wrapped link's."""
        return getattr(self._link, name)


class _Journal(Protocol):
    def note(self, name: str, now: float, cause: int | None = None, /, **fields: Any) -> int: ...


class TrafficNotes:
    """Writes notes of a node's byte counters to its journal, until closed."""

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
