"""Low water: whoever reads much from a socket is woken for a lot at once and not for each piece.

While much passes, the kernel keeps quiet until so much is there (``SO_RCVLOWAT``, socket(7)), and what is less is looked for after a
moment, so nothing waits for longer than that. As soon as little passes every byte is told of at once again: a message on a quiet
connection never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

MUCH_BYTES: Final = 128 * 1024
"""Read in one turn, it is the beginning of a lot."""
WATER_BYTES: Final = 256 * 1024
"""That the reader is woken for then. With less and with more a relay was slower (docs/BENCHMARKS.md, "A relay")."""
LOOK_S: Final = 0.002
"""When what is less is looked for; if less than that has passed meanwhile, it is over."""


class LowWater:
    """The low-water mark of one socket that is read by ``look()``, which tells with ``passed`` how much it has read."""

    __slots__ = ("_look", "_loop", "_passed", "_source", "_timer")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, source: socket.socket, look: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._source = source
        self._look = look
        self._timer: asyncio.TimerHandle | None = None
        self._passed = 0

    def passed(self, size: int) -> None:
        """So much was read in one turn."""
        self._passed += size
        if self._timer is None and size >= MUCH_BYTES:
            self._mark(WATER_BYTES)
            self._wait()

    def close(self) -> None:
        """Look no more; the socket may be gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._passed = 0
        self._timer = self._loop.call_later(LOOK_S, self._due)

    def _due(self) -> None:
        self._look()
        if self._timer is None:
            return  # that was the end
        if self._passed >= WATER_BYTES:
            self._wait()
        else:
            self._timer = None
            self._mark(1)

    def _mark(self, size: int) -> None:
        with contextlib.suppress(OSError):  # a system or a kind of socket without it
            self._source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
