"""One ZeroMQ socket on the event loop: reads, writes without waiting, watches handshakes.

* ``Pipe`` owns the socket. A socket's file descriptor only signals that something may have
changed, once, and any call on the socket may consume that signal (libzmq's ``ZMQ_FD`` is
edge-triggered). So after every call the socket is read again, one turn of the loop later, until
nothing is left. ``zmq.asyncio`` does the same with a future and a turn of the loop for each
message; here one turn reads many messages, and sending costs no turn.
* ``SendBudget`` counts the bytes that libzmq holds: handed over and not yet passed to the kernel.
libzmq counts messages, not bytes, and what a peer reports (credit, chunks written) may be
false. So each large frame is sent with a tracker, which is done when libzmq has freed the
frame, because it was sent or its connection is gone. A connection's frames leave in order, so
only its oldest ones are checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from fsl_transport.link import Buffer
from fsl_transport.session.frames import trailer
from fsl_transport.settings import TransportSettings
from fsl_transport.zmq.admission import ConnectionAdmission
from fsl_transport.zmq.curve import DialerCurve, ListenerCurve

HANDSHAKE_MS: Final = 10_000
"""Time after which a connection without a finished handshake is closed."""
LINGER_MS: Final = 500
"""Milliseconds that queued messages (a BYE, a refusal) have to leave after ``close``."""
SWEEP_EVERY_S: Final = 0.05
"""Least seconds between checks of all connections for sent frames at the total limit."""
_TRACKED_BYTES: Final = 4 * 1024
"""Smaller frames are copied and not counted; SNDHWM limits them."""
_MESSAGES_PER_TURN: Final = 32
_UNREAD_MESSAGES: Final = 64
"""Per connection: several times what credit allows in chunks of the usual size."""
_UNCOUNTED_MESSAGES: Final = 64
"""Answers, heartbeats and acknowledgements that may wait besides a full control window."""
_CHECK_CONNECTION_S: Final = 0.5
"""Seconds between a dialer's checks of its connection, in case the signal was consumed."""
_HANDSHAKE_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# As integers: combining enums of flags takes longer than a short message.
_NOW: Final = int(zmq.DONTWAIT)
_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
_ACCEPTED: Final = zmq.EVENT_ACCEPTED
_GONE: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Tracker(Protocol):
    """The part of ``zmq.MessageTracker`` that is used."""

    @property
    def done(self) -> bool:
        """Whether libzmq has freed the frame."""
        ...


class SendBudget:
    """Bytes in libzmq, per connection and in total, and the limits of both."""

    __slots__ = ("_frames", "_sizes", "_swept_at", "limit_bytes", "total", "total_limit_bytes")

    def __init__(self, limit_bytes: int, total_limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total_limit_bytes = total_limit_bytes
        self.total = 0
        self._frames: dict[bytes, deque[tuple[int, Tracker]]] = {}
        self._sizes: dict[bytes, int] = {}
        self._swept_at = -SWEEP_EVERY_S

    def size(self, connection: bytes) -> int:
        """Bytes that wait for one connection."""
        self._release(connection)
        return self._sizes.get(connection, 0)

    def admits(self, connection: bytes, size: int, now: float) -> bool:
        """Whether ``size`` more bytes may be handed to libzmq. ``now`` is monotonic seconds."""
        if self.size(connection) + size > self.limit_bytes:
            return False
        is_full = self.total + size > self.total_limit_bytes
        if is_full and now >= self._swept_at + SWEEP_EVERY_S:
            self._swept_at = now
            for other in list(self._frames):
                self._release(other)
        return self.total + size <= self.total_limit_bytes

    def add(self, connection: bytes, size: int, tracker: Tracker) -> None:
        """A frame of ``size`` bytes was handed to libzmq."""
        self._frames.setdefault(connection, deque()).append((size, tracker))
        self._sizes[connection] = self._sizes.get(connection, 0) + size
        self.total += size

    def _release(self, connection: bytes) -> None:
        frames = self._frames.get(connection)
        if frames is None:
            return
        while frames and frames[0][1].done:
            size, _ = frames.popleft()
            self._sizes[connection] -= size
            self.total -= size
        if not frames:
            del self._frames[connection], self._sizes[connection]


class Pipe:
    """One socket: ROUTER for a listener, DEALER for each connection of a dialer.

    ``waits_for`` is a pipe that must be connected before this one sends. ``keeps_window``: without
    a connection, messages up to a window are kept, instead of only the newest one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.asyncio.Context,
        kind: int,
        settings: TransportSettings,
        on_message: Callable[[list[zmq.Frame]], None],
        *,
        waits_for: Pipe | None = None,
        keeps_window: bool = False,
        curve: ListenerCurve | DialerCurve | None = None,
        on_handshake_failed: Callable[[int, int], None] = lambda _event, _value: None,
    ) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(kind)
        self._on_handshake_failed = on_handshake_failed
        self.failed_handshakes = 0
        self.dropped = 0
        self._on_message = on_message
        self._waits_for = waits_for
        self._keeps_window = keeps_window
        self._keep_limit_bytes = 0  # 0: only the newest message
        self._kept_bytes = 0
        self._send_budget = SendBudget(settings.send_budget_bytes, settings.send_budget_total_bytes)
        self._queue: deque[Sequence[Buffer]] = deque()  # kept until there is a connection
        self._is_listener = kind == zmq.ROUTER
        self._is_blocked = not self._is_listener  # no connection
        self._loop = loop
        self._file = -1
        self._read_is_planned = False
        self._waiting: list[Pipe] = []  # pipes that wait for this one
        self._check: asyncio.TimerHandle | None = None
        self.tasks: list[asyncio.Task[None]] = []
        if waits_for is not None:
            waits_for._waiting.append(self)  # noqa: SLF001 - of the same class
        self._set_options()
        self.adopt(settings)
        if curve is not None:
            curve.prepare(self.socket)
        self.admission = ConnectionAdmission(settings, loop.time()) if self._is_listener else None
        monitor: zmq.asyncio.Socket | None = None
        name = f"inproc://fsl-monitor-{id(self)}"
        try:
            monitor = context.socket(zmq.PAIR)
            monitor.linger = 0
            connections = _ACCEPTED | _GONE if self._is_listener else 0
            self.socket.monitor(name, _HANDSHAKE_FAILED | connections)
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
        """Use these settings: queue limits now, the socket's options from the next connection."""
        if self.socket.closed:
            return
        self._keep_limit_bytes = settings.window_bytes if self._keeps_window else 0
        self._send_budget.limit_bytes = settings.send_budget_bytes
        self._send_budget.total_limit_bytes = settings.send_budget_total_bytes
        socket = self.socket
        # Messages of one connection: a control window, and what does not count in it.
        waiting = settings.control_window + _UNCOUNTED_MESSAGES
        socket.sndhwm = waiting if self._is_listener else 0
        socket.maxmsgsize = max(settings.control_limit_bytes, settings.chunk_limit_bytes)
        socket.tcp_maxrt = max(1, int(settings.expire_after_s * 1000))
        if self._file >= 0:
            self._plan_read()

    def start(self) -> None:
        """Start reading and writing."""
        self._file = self.socket.fileno()
        self._loop.add_reader(self._file, self._read)
        self.add_task(self._watch())
        self._plan_read()
        if self._is_blocked:
            self._plan_check()

    def add_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` until it ends or the pipe closes."""
        self.tasks = [task for task in self.tasks if not task.done()]
        self.tasks.append(self._loop.create_task(work))

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send one message, or keep it until there is a connection."""
        if self.socket.closed:
            return
        if self._is_blocked:
            if self._keep_limit_bytes == 0:
                self._queue.clear()
            else:
                self._kept_bytes += sum(map(len, parts))
                if self._kept_bytes > self._keep_limit_bytes:
                    return
            self._queue.append(parts)
            return
        self._write(parts)

    def close(self) -> None:
        """Send as much of the queue as goes without waiting, then close. Does not await tasks."""
        if self.socket.closed:
            return
        for task in self.tasks:
            task.cancel()
        if self._check is not None:
            self._check.cancel()
        if self._file >= 0:
            self._loop.remove_reader(self._file)
        while self._queue:
            try:
                self.socket.send_multipart(self._framed(self._queue.popleft()), zmq.DONTWAIT)
            except zmq.ZMQError:
                self.dropped += 1
        self._stop_monitor()
        self.socket.close(LINGER_MS)

    def _stop_monitor(self) -> None:
        """End the monitor without a deadlock.

        In a flood of connections libzmq fills the monitor's queue and waits for its reader, which
        is this thread; ending the monitor would wait for libzmq, for ever. So the listener stops
        accepting connections and empties the queue first, which leaves room for 2,000 events of
        connections that close meanwhile.
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

    def _plan_read(self) -> None:
        if not self._read_is_planned:
            self._read_is_planned = True
            self._loop.call_soon(self._planned_read)

    def _planned_read(self) -> None:
        self._read_is_planned = False
        self._read()

    def _read(self) -> None:
        """Read a limited number of messages, so that other callbacks run in between."""
        socket = self.socket
        if socket.closed:
            return
        receive, on_message = socket.recv, self._on_message
        for _ in range(_MESSAGES_PER_TURN):
            try:
                frame = receive(_NOW, copy=False)
            except zmq.Again:
                break
            parts = [frame]
            while frame.more:  # unlike recv_multipart, no call on the socket
                frame = receive(_NOW, copy=False)
                parts.append(frame)
            try:
                on_message(parts)
            except Exception as error:  # noqa: BLE001 - its bug must not stop the reading
                self._report("a receiver of fsl_transport failed", error)
            if socket.closed:
                return
        else:
            self._plan_read()
        if self._is_blocked:
            self._send_kept()

    # Writing.

    def _write(self, parts: Sequence[Buffer]) -> None:
        last = parts[-1]
        size = len(last)
        connection = bytes(parts[0]) if self._is_listener else b""
        try:
            if size < _TRACKED_BYTES:
                self.socket.send_multipart(self._framed(parts), _NOW)
            elif self._send_budget.admits(connection, size, self._loop.time()):
                self._write_large(connection, parts, last)
            else:
                self.dropped += 1  # this peer does not read, or all together read too little
        except zmq.Again:
            if self._is_listener:  # this peer does not read; the others must not wait for it
                self.dropped += 1
            else:  # no connection
                self._is_blocked = True
                self._queue.append(parts)
                self._plan_check()
        except zmq.ZMQError as error:
            self.dropped += 1
            if error.errno != errno.EHOSTUNREACH:  # never seen so far; the pipe must go on
                self._report("a send of fsl_transport failed", error)
        self._plan_read()  # the send may have consumed the signal of an arrival

    def _write_large(self, connection: bytes, parts: Sequence[Buffer], last: Buffer) -> None:
        data = last
        if type(last) is not bytes and not (type(last) is memoryview and last.readonly):
            data = bytes(last)
        # Only the first part of a message can fail: once it is sent, the others follow.
        for part in parts[:-1]:
            self.socket.send(part, _MORE)
        ends = self._framed(parts)[len(parts) :]
        tracker = self.socket.send(data, _MORE if ends else _NOW, copy=False, track=True)
        for end in ends:
            self.socket.send(end, _NOW)
        assert tracker is not None
        self._send_budget.add(connection, len(data), tracker)

    def _framed(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Add the trailer to a message with a payload (``session/frames.py``)."""
        has_payload = len(parts) == (3 if self._is_listener else 2)
        return [*parts, trailer(parts[-2])] if has_payload else parts

    def _report(self, message: str, error: Exception) -> None:
        self._loop.call_exception_handler({"message": message, "exception": error})

    # A dialer's connection.

    @property
    def _is_connected(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def _plan_check(self) -> None:
        if self._check is not None:
            self._check.cancel()
        self._check = self._loop.call_later(_CHECK_CONNECTION_S, self._check_connection)

    def _check_connection(self) -> None:
        self._check = None
        if self.socket.closed or not self._is_blocked:
            return
        self._read()
        if self._is_blocked:
            self._plan_check()

    def _send_kept(self) -> None:
        """Send what was kept, once this pipe and the one it waits for are connected."""
        for pipe in (self, self._waits_for):
            if pipe is not None and (pipe.socket.closed or not pipe._is_connected):  # noqa: SLF001
                return
        self._kept_bytes = 0
        self._is_blocked = False
        for pipe in (self, self._waits_for, *self._waiting):
            if pipe is not None:  # checking the connection may have consumed its signal
                pipe._plan_read()  # noqa: SLF001
        while self._queue and not self._is_blocked:
            self._write(self._queue.popleft())

    async def _watch(self) -> None:
        while True:
            seen = parse_monitor_message(await self._monitor.recv_multipart())
            if seen["event"] & _HANDSHAKE_FAILED:
                self.failed_handshakes += 1
                self._on_handshake_failed(seen["event"], seen["value"])
            elif self.admission is not None and seen["event"] & _ACCEPTED:
                self.admission.accepted(seen["value"], self._loop.time())
            elif self.admission is not None:
                self.admission.closed(seen["value"])
