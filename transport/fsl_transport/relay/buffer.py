"""Buffers between the two sockets of a forwarder: kernel pipes, or memory where there is none.

A `PipeBuffer` moves bytes with splice(2): the pages that the source received are the pages that the
target sends, and nothing is copied into the process (docs/adr/0067 has what that saves). A pipe
costs two file descriptors, and the kernel limits the pages of one user's pipes (pipe(7)), so a
relay has `PIPES` of them. They are lent while bytes move or wait; a forwarder that finds none, or
runs on a system without splice, gets a `CopyBuffer`.

`fill` reads from a non-blocking socket into the empty buffer, `drain` writes from its front; both
return the count and raise OSError, BlockingIOError where nothing can be read or written now.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from typing import Final

COPY_BYTES: Final = 256 * 1024
"""A `CopyBuffer` holds at most this."""
PIPE_BYTES: Final = 1024 * 1024
"""A pipe holds at most this. With the system's default, 64 KiB, splicing saves nothing."""
PIPES: Final = 32
PIPE_FILES: Final = 2 * PIPES
"""File descriptors that all pipes take."""


class CopyBuffer:
    """Copies through the memory of this process."""

    __slots__ = ("_data", "held")

    def __init__(self) -> None:
        self._data = memoryview(b"")
        self.held = 0

    def fill(self, source: socket.socket) -> int:
        """Read; 0 is the end of the stream."""
        self._data = memoryview(source.recv(COPY_BYTES))
        self.held = len(self._data)
        return self.held

    def drain(self, target: socket.socket) -> int:
        """Write."""
        size = target.send(self._data)
        self._data = self._data[size:]
        self.held -= size
        return size


class PipeBuffer:
    """Splices through a pipe. Linux only. Raises OSError if no file descriptor is left."""

    __slots__ = ("_in", "_out", "held")

    def __init__(self) -> None:
        assert sys.platform == "linux"
        import fcntl

        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.held = 0
        with contextlib.suppress(OSError):  # beyond what one user may have it keeps 64 KiB
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def fill(self, source: socket.socket) -> int:
        """Read; 0 is the end of the stream. Urgent data looks like the end, or like nothing."""
        self.held = _splice(source.fileno(), self._in, PIPE_BYTES)
        return self.held

    def drain(self, target: socket.socket) -> int:
        """Write."""
        size = _splice(self._out, target.fileno(), self.held)
        self.held -= size
        return size

    def close(self) -> None:
        """Close both ends; what is inside is lost."""
        os.close(self._in)
        os.close(self._out)


Buffer = PipeBuffer | CopyBuffer


class PipePool:
    """Lends buffers: pipes while there are some, then memory."""

    def __init__(self) -> None:
        self._free: list[PipeBuffer] = []
        self._to_make = PIPES if can_splice() else 0

    def take(self) -> Buffer:
        """Borrow an empty buffer."""
        if self._free:
            return self._free.pop()
        if self._to_make:
            with contextlib.suppress(OSError):  # no file descriptor is left
                pipe = PipeBuffer()
                self._to_make -= 1
                return pipe
        return CopyBuffer()

    def give(self, buffer: Buffer) -> None:
        """Give a buffer back; what is inside is lost."""
        if isinstance(buffer, PipeBuffer):
            if buffer.held:
                buffer.close()
                self._to_make += 1
            else:
                self._free.append(buffer)

    def close(self) -> None:
        """Close the pipes that are not lent, and make no more."""
        self._to_make = 0
        while self._free:
            self._free.pop().close()


@functools.cache
def can_splice() -> bool:
    """Whether bytes can be spliced from socket to socket; tried, as some sandboxes refuse it."""
    if sys.platform != "linux":
        return False
    near, far = socket.socketpair()
    with near, far, contextlib.suppress(OSError), contextlib.closing(PipeBuffer()) as pipe:
        near.send(b"x")
        return pipe.fill(far) == 1 and pipe.drain(far) == 1 and near.recv(2) == b"x"
    return False


def _splice(source: int, target: int, size: int) -> int:
    assert sys.platform == "linux"
    return os.splice(source, target, size, flags=os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK)
