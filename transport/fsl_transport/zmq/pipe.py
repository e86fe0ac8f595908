"""One ZeroMQ socket on the event loop: reads what is there, writes without waiting, watches its handshakes.

A socket's file descriptor says only that something may have changed, once, and any call on the socket may take that word away
(libzmq's ``ZMQ_FD`` is edge-triggered). So after everything that touches the socket it is looked at again, one turn of the
loop later, until there is nothing to receive. ``zmq.asyncio`` does the same, with a future and a turn of the loop for each message;
here many messages go in one turn, and a message that is sent costs none.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from fsl_transport.link import Buffer
from fsl_transport.settings import TransportSettings
from fsl_transport.zmq.admission import ConnectionAdmission
from fsl_transport.zmq.curve import DialerCurve, ListenerCurve
from fsl_transport.zmq.frame_trailer import end_of
from fsl_transport.zmq.send_budget import SendBudget

HANDSHAKE_MS: Final = 10_000
"""A connection that has not finished its handshake by then is hung up."""
LINGER_MS: Final = 500
"""How long what is queued (a BYE, a refusal) may take to leave after ``close``."""
_TRACKED_BYTES: Final = 4 * 1024
"""Of smaller frames SNDHWM is limit enough."""
_MESSAGES_PER_TURN: Final = 32
_UNREAD_MESSAGES: Final = 64
"""Per connection: several times what credit lets come in chunks of the usual size."""
_UNCOUNTED_MESSAGES: Final = 64
"""Answers, beats and acknowledgements that may wait besides a full control window."""
_LOOK_AGAIN_S: Final = 0.5
"""How often a dialer that waits for its connection looks whether it stands, should the word of it be lost."""
_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# As numbers: to combine enums of flags takes longer than a short message.
_NOW: Final = int(zmq.DONTWAIT)
_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
_CAME: Final = zmq.EVENT_ACCEPTED
_WENT: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Pipe:
    """One socket: ROUTER for a listener, DEALER for each connection of a dialer."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.asyncio.Context,
        kind: int,
        settings: TransportSettings,
        take: Callable[[list[zmq.Frame]], None],
        *,
        dials_after: Pipe | None = None,
        keeps_window: bool = False,
        curve: ListenerCurve | DialerCurve | None = None,
        handshake_failed: Callable[[int, int], None] = lambda _event, _value: None,
    ) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(kind)
        self._handshake_failed = handshake_failed
        self.failed_handshakes = 0
        self.absent = 0
        self._take = take
        self._dials_after = dials_after
        self._keeps_window = keeps_window
        self._keeps_bytes = 0  # 0: the newest message only
        self._kept_bytes = 0
        self._send_budget = SendBudget(0, 0)  # `adopt` sets its limits
        self._queue: deque[Sequence[Buffer]] = deque()  # what waits for a connection
        self._is_listener = kind == zmq.ROUTER
        self._is_blocked = not self._is_listener
        self._loop = loop
        self._file = -1
        self._looks = False  # a look at the socket is planned
        self._after: list[Pipe] = []  # pipes that dial after this one
        self._poll: asyncio.TimerHandle | None = None
        self.tasks: list[asyncio.Task[None]] = []
        if dials_after is not None:
            dials_after._after.append(self)  # noqa: SLF001 - of the same class
        self._set_options()
        self.adopt(settings)
        if curve is not None:
            curve.prepare(self.socket)
        self.doors = ConnectionAdmission(settings, loop.time()) if self._is_listener else None
        monitor: zmq.asyncio.Socket | None = None
        name = f"inproc://fsl-monitor-{id(self)}"
        try:
            monitor = context.socket(zmq.PAIR)
            monitor.linger = 0
            self.socket.monitor(name, _FAILED | (_CAME | _WENT if self._is_listener else 0))
            monitor.connect(name)
        except zmq.ZMQError:  # no descriptors left
            self.socket.close(0)
            if monitor is not None:
                monitor.close(0)
            raise
        self._monitor: zmq.asyncio.Socket = monitor

    def _set_options(self) -> None:
        socket = self.socket
        socket.linger = LINGER_MS
        socket.copy_threshold = _TRACKED_BYTES
        socket.rcvhwm = _UNREAD_MESSAGES
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = 30
        socket.tcp_keepalive_intvl = 10
        socket.tcp_keepalive_cnt = 3
        socket.handshake_ivl = HANDSHAKE_MS
        socket.backlog = 1024

    def adopt(self, settings: TransportSettings) -> None:
        """Go by these settings: what is kept and what waits inside libzmq at once, the socket's options with the next connection."""
        if self.socket.closed:
            return
        self._keeps_bytes = settings.window_bytes if self._keeps_window else 0
        self._send_budget.limit_bytes = settings.unsent_bytes
        self._send_budget.total_limit_bytes = settings.unsent_total_bytes
        socket = self.socket
        # Messages of one connection. A control window must fit, with what is not counted in it.
        waiting = settings.control_window + _UNCOUNTED_MESSAGES
        socket.sndhwm = waiting if self._is_listener else 0
        socket.maxmsgsize = max(settings.control_limit_bytes, settings.chunk_limit_bytes)
        socket.tcp_maxrt = max(1, int(settings.expire_after_s * 1000))
        if self._file >= 0:
            self._look_soon()

    def start(self) -> None:
        """Begin to read and write."""
        self._file = self.socket.fileno()
        self._loop.add_reader(self._file, self._look)
        self.add_task(self._watch())
        self._look_soon()
        if self._is_blocked:
            self._poll_connection()

    def add_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` until it ends or the pipe closes."""
        self.tasks = [task for task in self.tasks if not task.done()]
        self.tasks.append(self._loop.create_task(work))

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send one message, or keep it for a connection that does not stand."""
        if self.socket.closed:
            return
        if self._is_blocked:
            if self._keeps_bytes == 0:
                self._queue.clear()
            else:
                self._kept_bytes += sum(map(len, parts))
                if self._kept_bytes > self._keeps_bytes:
                    return
            self._queue.append(parts)
            return
        self._write_one(parts)

    def close(self) -> None:
        """Push out what is queued as far as it goes, then close; the tasks end by themselves."""
        if self.socket.closed:
            return
        for task in self.tasks:
            task.cancel()
        if self._poll is not None:
            self._poll.cancel()
        if self._file >= 0:
            self._loop.remove_reader(self._file)
        while self._queue:
            try:
                self.socket.send_multipart(self._whole(self._queue.popleft()), zmq.DONTWAIT)
            except zmq.ZMQError:
                self.absent += 1
        self._stop_watching()
        self.socket.close(LINGER_MS)

    def _stop_watching(self) -> None:
        """End the monitor. In a flood of connections libzmq fills its queue and waits for a reader, which is this thread, and to end it would wait for libzmq, for ever.

        So first nobody comes any more, and what the queue holds is read; room for 2,000 events is left for those who go meanwhile.
        """
        if self._is_listener:
            with contextlib.suppress(zmq.ZMQError):  # it was never bound
                self.socket.unbind(bytes(self.socket.getsockopt(zmq.LAST_ENDPOINT)))
            events: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor.underlying)
            with contextlib.suppress(zmq.Again):
                while True:
                    events.recv_multipart(_NOW)
        self.socket.disable_monitor()
        self._monitor.close(0)

    # Reading.

    def _look_soon(self) -> None:
        if not self._looks:
            self._looks = True
            self._loop.call_soon(self._look_planned)

    def _look_planned(self) -> None:
        self._looks = False
        self._look()

    def _look(self) -> None:
        """Take what is there, so much of it that others have their turn."""
        socket = self.socket
        if socket.closed:
            return
        receive, take = socket.recv, self._take
        for _ in range(_MESSAGES_PER_TURN):
            try:
                frame = receive(_NOW, copy=False)
            except zmq.Again:
                break
            parts = [frame]
            while frame.more:  # asks no socket, as recv_multipart does
                frame = receive(_NOW, copy=False)
                parts.append(frame)
            try:
                take(parts)
            except Exception as error:  # noqa: BLE001 - the owner's bug must not deafen us
                self._report("a receiver of fsl_transport failed", error)
            if socket.closed:
                return
        else:
            self._look_soon()
        if self._is_blocked:
            self._go_on()

    # Writing.

    def _write_one(self, parts: Sequence[Buffer]) -> None:
        last = parts[-1]
        size = len(last)
        connection = bytes(parts[0]) if self._is_listener else b""
        try:
            if size < _TRACKED_BYTES:
                self.socket.send_multipart(self._whole(parts), _NOW)
            elif self._send_budget.fits(connection, size, self._loop.time()):
                self._write_large(connection, parts, last)
            else:
                self.absent += 1  # this peer takes nothing, or all together too little
        except zmq.Again:
            if self._is_listener:  # this peer takes nothing; the others must not wait for it
                self.absent += 1
            else:  # without a connection
                self._is_blocked = True
                self._queue.append(parts)
                self._poll_connection()
        except zmq.ZMQError as error:
            self.absent += 1
            if error.errno != errno.EHOSTUNREACH:  # not seen so far; the pipe must live on
                self._report("a send of fsl_transport failed", error)
        self._look_soon()  # the send may have swallowed the word that something came

    def _write_large(self, connection: bytes, parts: Sequence[Buffer], last: Buffer) -> None:
        data = last
        if type(last) is not bytes and not (type(last) is memoryview and last.readonly):
            data = bytes(last)
        # Where one part went the others follow: only the first one of a message can fail.
        for part in parts[:-1]:
            self.socket.send(part, _MORE)
        ends = self._whole(parts)[len(parts) :]
        tracker = self.socket.send(data, _MORE if ends else _NOW, copy=False, track=True)
        for end in ends:
            self.socket.send(end, _NOW)
        assert tracker is not None
        self._send_budget.add(connection, len(data), tracker)

    def _whole(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """A message as it goes out, with what keeps a payload at its head (``seam.py``)."""
        has_payload = len(parts) == (3 if self._is_listener else 2)
        return [*parts, end_of(parts[-2])] if has_payload else parts

    def _report(self, message: str, error: Exception) -> None:
        self._loop.call_exception_handler({"message": message, "exception": error})

    # A dialer's connection.

    @property
    def _stands(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def _poll_connection(self) -> None:
        if self._poll is not None:
            self._poll.cancel()
        self._poll = self._loop.call_later(_LOOK_AGAIN_S, self._polled)

    def _polled(self) -> None:
        self._poll = None
        if self.socket.closed or not self._is_blocked:
            return
        self._look()
        if self._is_blocked:
            self._poll_connection()

    def _go_on(self) -> None:
        """Send what was kept, once this dialer's connection stands, and the one it comes after."""
        for pipe in (self, self._dials_after):
            if pipe is not None and (pipe.socket.closed or not pipe._stands):  # noqa: SLF001
                return
        self._kept_bytes = 0
        self._is_blocked = False
        for pipe in (self, self._dials_after, *self._after):
            if pipe is not None:  # whoever asked whether it stands may have swallowed its word
                pipe._look_soon()  # noqa: SLF001
        while self._queue and not self._is_blocked:
            self._write_one(self._queue.popleft())

    async def _watch(self) -> None:
        while True:
            seen = parse_monitor_message(await self._monitor.recv_multipart())
            if seen["event"] & _FAILED:
                self.failed_handshakes += 1
                self._handshake_failed(seen["event"], seen["value"])
            elif self.doors is not None and seen["event"] & _CAME:
                self.doors.came(seen["value"], self._loop.time())
            elif self.doors is not None:
                self.doors.went(seen["value"])
