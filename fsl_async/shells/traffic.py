"""Bytes of a node: payload by category and direction, and what its links handed to the sockets.

Categories and directions are those of `fsl_async.plan`, seen from the client. `payload` counts values in their number format before
the entropy stage, as the planner does; `coded` is what the streams carried. What is sent again is counted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import fsl_transport as tp
from fsl_async.plan.methods import Category, Direction
from fsl_async.plan.sizes import FORMATS


class Traffic:
    """Counters of one node."""

    def __init__(self) -> None:
        self.payload: Counter[tuple[str, str]] = Counter()
        self.coded: Counter[tuple[str, str]] = Counter()
        self.sockets: Counter[str] = Counter()

    def values(
        self, category: Category, direction: Direction, number_format: str, values: int, coded: int
    ) -> None:
        """Count a frame of values."""
        self.payload[category, direction] += FORMATS[number_format].payload(values)
        self.coded[category, direction] += coded

    def plain(self, category: Category, direction: Direction, size: int) -> None:
        """Count bytes that no codec touches."""
        self.payload[category, direction] += size
        self.coded[category, direction] += size

    def as_dict(self) -> dict[str, Any]:
        """For summaries and journals: "activations up" -> bytes."""
        return {
            "payload": {" ".join(key): size for key, size in sorted(self.payload.items())},
            "coded": {" ".join(key): size for key, size in sorted(self.coded.items())},
            "sockets": dict(self.sockets),
        }


class CountedLink:
    """A link whose bytes are counted on their way, heads and control included."""

    def __init__(self, link: Any, traffic: Traffic, *, at_client: bool) -> None:
        self._link = link
        self._sockets = traffic.sockets
        self._out, self._in = ("up", "down") if at_client else ("down", "up")

    def send(self, peer: str, lane: tp.Lane, frames: Sequence[tp.Buffer], *rest: Any) -> None:
        """Count and pass on."""
        self._sockets[self._out] += sum(len(frame) for frame in frames)
        self._link.send(peer, lane, frames, *rest)

    def set_receiver(self, receive: Callable[..., None]) -> None:
        """Count what comes before it is handed over."""

        def counted(peer: str, lane: tp.Lane, frames: Sequence[tp.Buffer], *rest: Any) -> None:
            self._sockets[self._in] += sum(len(frame) for frame in frames)
            receive(peer, lane, frames, *rest)

        self._link.set_receiver(counted)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the link's own."""
        return getattr(self._link, name)
