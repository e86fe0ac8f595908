"""Forwards one direction of a connection pair: bytes from one socket to the other, unread.

At most one buffer's worth waits in between. While it does, nothing more is read, and TCP's own
window stops the sender: no queue grows, and no connection waits for another one's target.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final

from fsl_transport.relay.buffer import Buffer, CopyBuffer, PipeBuffer, PipePool

_TURN_BYTES: Final = 2 * 1024 * 1024
"""One forwarder moves at most this (and one buffer) before the event loop serves the others."""


class Forwarder:
    """Moves bytes from `source` to `target` until the source ends or either breaks.

    The target then gets the end of the stream as well, and `over` becomes None, or the error.
    Both sockets are non-blocking, and stay the caller's to close, after `close`.
    """

    __slots__ = ("_blocked", "_buffer", "_loop", "_pipes", "_source", "_target", "carried", "over")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pipes: PipePool,
        source: socket.socket,
        target: socket.socket,
    ) -> None:
        self._loop = loop
        self._pipes = pipes
        self._source = source
        self._target = target
        self._buffer: Buffer | None = None
        self._blocked = False  # waits for the target to take more, instead of for the source
        self.carried = 0
        self.over: asyncio.Future[OSError | None] = loop.create_future()
        loop.add_reader(source.fileno(), self._move)

    @property
    def held(self) -> int:
        """Bytes that were read and are not written yet."""
        return 0 if self._buffer is None else self._buffer.held

    def close(self) -> None:
        """Stop; what is held is lost."""
        self._loop.remove_reader(self._source.fileno())
        self._loop.remove_writer(self._target.fileno())
        self._release()

    def _move(self) -> None:
        begun = self.carried
        try:
            while self.carried < begun + _TURN_BYTES:
                buffer = self._buffer
                if buffer is None or not buffer.held:
                    buffer = self._fill(has_moved=self.carried > begun)
                self.carried += buffer.drain(self._target)
        except BlockingIOError:
            pass
        except EOFError:
            self._end(None)
            return
        except OSError as error:
            self._end(error)
            return
        # After an error on a socket libuv watches it no more, although more can be read from it.
        self._watch(blocked=self.held > 0, anew=self.carried >= begun + _TURN_BYTES)
        if not self._blocked:
            self._release()

    def _fill(self, *, has_moved: bool) -> Buffer:
        """Read into a buffer. Raises EOFError at the end, BlockingIOError if nothing is there."""
        if self._buffer is None:
            self._buffer = self._pipes.take()
        try:
            size = self._buffer.fill(self._source)
        except BlockingIOError:
            if has_moved or not isinstance(self._buffer, PipeBuffer):
                raise
            size = 0
        if not size and isinstance(self._buffer, PipeBuffer):
            # Urgent data (MSG_OOB) stops splice where it is: nothing there, or the end, while more
            # waits behind it and the event loop would spin. Receiving goes past it, leaving it out.
            self._release()
            self._buffer = CopyBuffer()
            size = self._buffer.fill(self._source)
        if not size:
            raise EOFError
        return self._buffer

    def _watch(self, *, blocked: bool, anew: bool) -> None:
        if blocked == self._blocked and not anew:
            return
        self._blocked = blocked
        self._loop.remove_reader(self._source.fileno())
        self._loop.remove_writer(self._target.fileno())
        if blocked:
            self._loop.add_writer(self._target.fileno(), self._move)
        else:
            self._loop.add_reader(self._source.fileno(), self._move)

    def _end(self, error: OSError | None) -> None:
        self.close()
        with contextlib.suppress(OSError):  # the target may be what broke
            self._target.shutdown(socket.SHUT_WR)
        if not self.over.done():
            self.over.set_result(error)

    def _release(self) -> None:
        if self._buffer is not None:
            self._pipes.give(self._buffer)
            self._buffer = None
