"""One direction of a relayed connection: bytes from one socket to another, unread, never more than a tank full in between.

What waits here is bounded by the tank. A full one stops the reading, and TCP's own window then holds the sender: no queue grows, and nobody waits
for another's target. Where much passes it is moved in large pieces (``low_water.py``). A tank is borrowed from a ``TankPool`` (``tanks.py``) only while something waits, so that thousands of quiet connections cost none.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from fsl_transport.relay.buffer import PipeTank, Tank, TankPool
from fsl_transport.relay.rcvlowat import LowWater

_TURN_BYTES: Final = 2 * 1024 * 1024
"""What one connection may move before it is the others' turn."""


class Hose:
    """Carries bytes from ``source`` to ``target`` until the source ends or one of them breaks.

    ``ended(error)`` is called once, with ``None`` when the source has ended and everything is written. Both sockets are non-blocking and
    stay the caller's.
    """

    __slots__ = (
        "_ended",
        "_loop",
        "_low_water",
        "_pool",
        "_reads",
        "_source",
        "_tank",
        "_target",
        "_writes",
        "carried",
        "is_over",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: TankPool,
        source: socket.socket,
        target: socket.socket,
        ended: Callable[[OSError | None], None],
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._source = source
        self._target = target
        self._ended = ended
        self._low_water = LowWater(loop, source, self._look)
        self._tank: Tank | None = None
        self._reads = False
        self._writes = False
        self.carried = 0
        self.is_over = False

    @property
    def held(self) -> int:
        """Bytes that were read and not yet written."""
        return 0 if self._tank is None else self._tank.held

    @property
    def weight(self) -> int:
        """Bytes of memory that those take."""
        return 0 if self._tank is None else self._tank.weight

    def start(self) -> None:
        """Begin."""
        self._listen(reads=True)

    def close(self) -> None:
        """Stop without a word; what waits is lost."""
        self._stop()
        self._give_back()

    def _listen(self, *, reads: bool = False, writes: bool = False) -> None:
        if reads != self._reads:
            self._reads = reads
            if reads:
                self._loop.add_reader(self._source.fileno(), self._move)
            else:
                self._loop.remove_reader(self._source.fileno())
        if writes != self._writes:
            self._writes = writes
            if writes:
                self._loop.add_writer(self._target.fileno(), self._move)
            else:
                self._loop.remove_writer(self._target.fileno())

    def _move(self) -> None:
        if self.is_over:
            return
        if self._tank is None:
            self._tank = self._pool.take()
        begun = self.carried
        try:
            self._move_some(self._tank)
        except OSError as error:
            self._end(error)
        if self._tank is not None and not self._tank.held:
            self._give_back()
        if not self.is_over:
            self._low_water.passed(self.carried - begun)

    def _look(self) -> None:
        if self._reads:
            self._move()

    def _move_some(self, tank: Tank) -> None:
        begun = self.carried
        while self.carried < begun + _TURN_BYTES:
            if not tank.held:
                size = self._fill(tank)
                # Splicing does not get past urgent data (MSG_OOB): it says that there is nothing, or that this is the end, while more
                # waits behind it. Receiving does, and leaves the urgent byte out. Nobody here sends any; strangers may.
                if not size and isinstance(tank, PipeTank) and (size == 0 or self.carried == begun):
                    self._give_back()
                    tank = self._tank = self._pool.take_buffer()
                    size = self._fill(tank)
                if size is None:
                    break
                if not size:
                    self._end(None)
                    return
            try:
                while tank.held:
                    self.carried += tank.drain(self._target)
            except BlockingIOError:
                self._listen(writes=True)
                return
        self._listen(reads=True)

    def _fill(self, tank: Tank) -> int | None:
        """Bytes that were read, 0 for the end, None where there is nothing now."""
        try:
            return tank.fill(self._source)
        except BlockingIOError:
            return None

    def _end(self, error: OSError | None) -> None:
        self._stop()
        self._ended(error)

    def _stop(self) -> None:
        self.is_over = True
        self._low_water.close()
        self._listen()

    def _give_back(self) -> None:
        if self._tank is not None:
            self._pool.give(self._tank)
            self._tank = None
