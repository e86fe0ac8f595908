"""What libzmq holds: bytes that were handed to it and have not left for the kernel.

libzmq counts messages, not bytes, and what a peer says of itself (credit, chunks written) may be a lie. So the bytes are counted where
nobody can lie: each large frame is sent with a tracker, which is done when libzmq has given the memory back, because the
frame went out or its connection is gone. A connection's frames leave in order, so only its oldest ones are looked at.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

SWEEP_EVERY_S: Final = 0.05
"""With the common limit reached, all connections are looked at, but no more often than this."""


class Tracker(Protocol):
    """The part of ``zmq.MessageTracker`` that is used."""

    @property
    def done(self) -> bool:
        """Whether libzmq has given the frame back."""
        ...


class SendBudget:
    """Bytes in libzmq, for each connection and for all together, and the limits of both."""

    __slots__ = ("_queues", "_sizes", "_swept_at", "limit_bytes", "total", "total_limit_bytes")

    def __init__(self, limit_bytes: int, total_limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total_limit_bytes = total_limit_bytes
        self.total = 0
        self._queues: dict[bytes, deque[tuple[int, Tracker]]] = {}
        self._sizes: dict[bytes, int] = {}
        self._swept_at = -SWEEP_EVERY_S

    def size(self, connection: bytes) -> int:
        """Bytes that wait for one connection."""
        self._look(connection)
        return self._sizes.get(connection, 0)

    def fits(self, connection: bytes, size: int, now: float) -> bool:
        """Whether ``size`` more bytes may be handed over. ``now``: seconds of a monotonic clock."""
        if self.size(connection) + size > self.limit_bytes:
            return False
        full = self.total + size > self.total_limit_bytes
        if full and now >= self._swept_at + SWEEP_EVERY_S:
            self._swept_at = now
            for other in list(self._queues):
                self._look(other)
        return self.total + size <= self.total_limit_bytes

    def add(self, connection: bytes, size: int, tracker: Tracker) -> None:
        """A frame of ``size`` bytes was handed over."""
        self._queues.setdefault(connection, deque()).append((size, tracker))
        self._sizes[connection] = self._sizes.get(connection, 0) + size
        self.total += size

    def _look(self, connection: bytes) -> None:
        queue = self._queues.get(connection)
        if queue is None:
            return
        while queue and queue[0][1].done:
            size, _ = queue.popleft()
            self._sizes[connection] -= size
            self.total -= size
        if not queue:
            del self._queues[connection], self._sizes[connection]
