"""Low water: whoever reads much from a socket is woken for a lot at once and not for each piece.

While much passes without a pause, the kernel keeps quiet until so much is there (``SO_RCVLOWAT``, socket(7)), or the source has ended,
or there is no room for more; what is less is looked for after a moment. Where that finds that nothing had come meanwhile, every byte is
told of at once again, and if it was soon, for longer than the last time: requests of which each waits for the other's answer look like
a stream, and lose a moment each while they are taken for one. So a message does not wait, also not one of some megabytes, but for a few
of many that follow each other at once, and the end of a long stream waits once, for about ``LOOK_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

MUCH_BYTES: Final = 8 * 1024 * 1024
"""Passed without a pause of ``PAUSE_S``, it is a stream."""
MOST_BYTES: Final = 1024 * 1024 * 1024
"""What has to pass, at the most, where it has been no stream many times."""
PAUSE_S: Final = 0.01
WATER_BYTES: Final = 256 * 1024
"""That the reader is woken for then."""
LOOK_S: Final = 0.002
"""When what is less is looked for; if less than that has passed meanwhile, the stream is over, or slow."""
STALL_S: Final = LOOK_S / 2
"""Without anything at a look, the sender waits for what is kept back, or has nothing."""
SOON_BYTES: Final = 16 * 1024 * 1024
"""A stall before that was soon."""


class LowWater:
    """The low-water mark of one socket, of which ``look()`` reads what is there, and tells ``passed`` of it, as every reading does."""

    __slots__ = (
        "_look",
        "_loop",
        "_much",
        "_passed",
        "_passed_at",
        "_source",
        "_streamed",
        "_timer",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, source: socket.socket, look: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._source = source
        self._look = look
        self._timer: asyncio.TimerHandle | None = None
        self._much = MUCH_BYTES
        self._passed = 0  # since the last pause, or the last look
        self._streamed = 0  # under the mark
        self._passed_at = 0.0

    def passed(self, size: int) -> None:
        """So much went through in one turn."""
        now = self._loop.time()
        if self._timer is None and now - self._passed_at > PAUSE_S:
            self._passed = 0
        self._passed_at = now
        self._passed += size
        if self._timer is None and self._passed >= self._much:
            self._mark(WATER_BYTES)
            self._streamed = 0
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
        self._streamed += self._passed
        stalls = self._loop.time() - self._passed_at > STALL_S
        if self._passed >= WATER_BYTES and not stalls:
            self._wait()
        else:
            # The mark first: not every system tells what came before it was lowered.
            self._leave()
        self._look()

    def _leave(self) -> None:
        self._timer = None
        self._passed = 0
        self._much = MUCH_BYTES if self._streamed >= SOON_BYTES else min(2 * self._much, MOST_BYTES)
        self._mark(1)

    def _mark(self, size: int) -> None:
        with contextlib.suppress(OSError):  # a system or a kind of socket without it
            self._source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
