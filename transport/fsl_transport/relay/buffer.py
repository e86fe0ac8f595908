"""What waits between two sockets of a relay: in a kernel pipe, which no byte is copied for, or in a buffer of ours.

A ``PipeTank`` moves bytes with splice(2): the pages that the source received become the pages that the target sends, and the process
never sees them. Per GB on loopback that took 0.1 to 0.3 s of CPU where copying took 0.3 to 0.5 (docs/adr/0067). It costs two file descriptors
and, while something waits in it, the pages that hold it; so there are ``PIPES`` of them, lent for the moment of moving, and whoever
finds none, or is on a system without splice, gets a ``BufferTank``. So what a relay holds is bounded: by ``PIPE_BYTES`` for that many directions
of connections, by ``TANK_BYTES`` for each other one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from typing import Any, Final, Protocol

TANK_BYTES: Final = 256 * 1024
"""What may wait in one direction of one connection in a buffer of ours, besides what the kernel's sockets hold."""
PIPE_BYTES: Final = 1024 * 1024
"""The same in a pipe. Small ones make many small steps: with 64 KiB splicing was no faster than copying."""
PIPES: Final = 32
PIPE_FILES: Final = 2 * PIPES
"""File descriptors that all pipes together take at the most."""
_KEPT_BUFFERS: Final = 16
_SET_PIPE_SIZE: Final = 1031
"""F_SETPIPE_SZ of linux/fcntl.h; ``fcntl.F_SETPIPE_SZ`` is there on Linux only."""


class Tank(Protocol):
    """Holds what was read and not yet written: filled when it is empty, written from the front. A blocked socket raises ``BlockingIOError``."""

    @property
    def held(self) -> int:
        """Bytes inside."""
        ...

    @property
    def weight(self) -> int:
        """Bytes of memory that it takes."""
        ...

    def fill(self, source: socket.socket) -> int:
        """Read what is there and fits into the empty tank; returns how much, 0 for the end of the stream."""
        ...

    def drain(self, target: socket.socket) -> int:
        """Write what goes; returns how much."""
        ...


class BufferTank:
    """Copies: into our memory and out of it."""

    __slots__ = ("_buffer", "_place", "held")
    weight = TANK_BYTES

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(TANK_BYTES))
        self._place = 0
        self.held = 0

    def fill(self, source: socket.socket) -> int:
        """See ``Tank``."""
        self._place = 0
        self.held = source.recv_into(self._buffer)
        return self.held

    def drain(self, target: socket.socket) -> int:
        """See ``Tank``."""
        size = target.send(self._buffer[self._place : self._place + self.held])
        self._place += size
        self.held -= size
        return size


class PipeTank:
    """Splices: pages pass from socket to pipe to socket. ``OSError`` when there is no pipe to be had."""

    __slots__ = ("_in", "_out", "held")

    def __init__(self) -> None:
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.held = 0
        with contextlib.suppress(OSError):  # beyond what one user may have: it stays at 64 KiB
            import fcntl

            fcntl.fcntl(self._in, _SET_PIPE_SIZE, PIPE_BYTES)

    @property
    def weight(self) -> int:
        """See ``Tank``."""
        return self.held

    def fill(self, source: socket.socket) -> int:
        """See ``Tank``. An empty pipe always takes something, so that what blocks is the source.

        Or urgent data, which looks like it (or, once the source has ended, like the end); only receiving gets past that.
        """
        self.held = _splice(source.fileno(), self._in, PIPE_BYTES)
        return self.held

    def drain(self, target: socket.socket) -> int:
        """See ``Tank``."""
        size = _splice(self._out, target.fileno(), self.held)
        self.held -= size
        return size

    def close(self) -> None:
        """Give both descriptors back, and what is inside with them."""
        os.close(self._in)
        os.close(self._out)


class TankPool:
    """Lends tanks: pipes as long as there are some, then buffers. A few buffers that are free are kept for the next ones, and all pipes."""

    def __init__(self) -> None:
        self._buffers: list[BufferTank] = []
        self._pipes: list[PipeTank] = []
        self._pipes_to_make = PIPES if can_splice() else 0
        self.lent = 0

    def take(self) -> Tank:
        """Borrow an empty tank."""
        if self._pipes:
            self.lent += 1
            return self._pipes.pop()
        if self._pipes_to_make:
            with contextlib.suppress(OSError):  # no descriptor is left
                made = PipeTank()
                self._pipes_to_make -= 1
                self.lent += 1
                return made
        return self.take_buffer()

    def take_buffer(self) -> BufferTank:
        """Borrow an empty tank that copies: for what cannot be spliced."""
        self.lent += 1
        return self._buffers.pop() if self._buffers else BufferTank()

    def give(self, tank: Tank) -> None:
        """Give a tank back; what is inside is lost."""
        self.lent -= 1
        if isinstance(tank, PipeTank):
            if tank.held:
                tank.close()
                self._pipes_to_make += 1
            else:
                self._pipes.append(tank)
        elif isinstance(tank, BufferTank) and len(self._buffers) < _KEPT_BUFFERS:
            tank.held = 0
            self._buffers.append(tank)

    def close(self) -> None:
        """Close the pipes that nobody has; the next ones are buffers."""
        self._pipes_to_make = 0
        while self._pipes:
            self._pipes.pop().close()


@functools.cache
def can_splice() -> bool:
    """Whether this system moves bytes from socket to pipe to socket: tried once, because some have the call and refuse it."""
    if not hasattr(os, "splice") or not hasattr(os, "pipe2"):
        return False
    near, far = socket.socketpair()
    with near, far:
        near.send(b"x")
        try:
            tank = PipeTank()
        except OSError:
            return False
        try:
            return tank.fill(far) == 1 and tank.drain(far) == 1 and near.recv(2) == b"x"
        except OSError:
            return False
        finally:
            tank.close()


def _splice(source: int, target: int, size: int) -> int:
    # mypy checks for systems that have no splice as well.
    system: Any = os
    moved: int = system.splice(
        source, target, size, flags=system.SPLICE_F_MOVE | system.SPLICE_F_NONBLOCK
    )
    return moved
