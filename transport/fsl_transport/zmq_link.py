"""The real network: one ROUTER for the listener, two DEALERs (control, bulk) for each dialer.

Rules, each from a trap that was met (numbers are libzmq issues):

  * A dialer's two connections have the routing ids ``name/c/tag`` and ``name/b/tag``; the tag is
    random per dialer. The listener gets the tag with each message as its ``origin`` and names it
    for each answer, so that a relaunched process is reached at once, a stranger under an honest
    name hears only what is meant for it, and two processes of one name do not throw each other
    out (a handed-over connection stays open and deaf: its owner would never learn why).
  * ROUTER_HANDOVER lets the same dialer come back while its broken connection is still known
    (#778, #2019); ROUTER_MANDATORY makes a send to an absent peer an error that is counted; a
    ROUTER never waits for one peer.
  * Byte credit bounds what honest streams keep in memory, the session's window what control
    does. Against the others: RCVHWM ends the reading of a connection whose messages pile up (only
    its sender waits). What libzmq holds for a connection is counted in bytes (``unsent.py``), and
    the listener's SNDHWM counts the messages, so that a connection that takes nothing and asks for
    ever more gets nothing; sessions mend what an honest peer loses so. A dialer's SNDHWM is 0.
    MAXMSGSIZE bounds one frame before it is allocated.
  * One reader and one writer task per socket, through ``zmq.asyncio`` only: the socket's file
    descriptor is edge-triggered, and a send behind its back can swallow the edge of a receive.
  * A dialer has IMMEDIATE set, so that nothing is queued for a connection that does not stand:
    what was unsent when it broke is lost, and sessions mend it. While nothing stands only the
    newest control message is kept (a HELLO), and bulk up to one window: the first chunk that
    gets through shows the receiver what is missing. Control waits until bulk is connected as
    well, so that no session begins whose chunks would be lost.
  * ZMTP heartbeats are off: they time out during one big message (#2709). TCP_MAXRT and keepalive
    end dead connections; the session's own beats say who is alive.
  * Frames of 4 KiB and more are sent without a copy, as ``bytes``, which nobody can change; their
    trackers say when libzmq is done with them. A large received frame stays in libzmq's memory for as long as its
    memoryview lives, that frame alone.
  * Strangers cost a count (``garbage``): failed handshakes from the socket monitor, and routing
    ids that are no name of ours.
  * Encrypted (``curve.py``), a listener looks at the key of every message, not of the handshake only: a connection whose key is no
    longer allowed is deaf and dumb from that moment. The key is part of the ``origin``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import secrets
import socket as sockets
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from fsl_transport.curve import (
    DialerCurve,
    ListenerCurve,
    Tell,
    ZapHandler,
    dialer_failure,
    listener_failure,
    nobody,
)
from fsl_transport.doorkeeper import Doorkeeper
from fsl_transport.errors import LocalError
from fsl_transport.link import TAG_BYTES, Buffer, Lane, Receiver, check_name
from fsl_transport.settings import TransportSettings
from fsl_transport.unsent import Unsent

LINGER_MS: Final = 500
"""How long what is queued (a BYE, a refusal) may take to leave after ``close``."""
_NO_COPY_BYTES: Final = 64 * 1024
_TRACKED_BYTES: Final = 4 * 1024
"""Of smaller frames SNDHWM is limit enough."""
_MESSAGES_PER_TURN: Final = 32
_UNREAD_MESSAGES: Final = 64
"""Per connection: several times what credit lets come in chunks of the usual size."""
_UNCOUNTED_MESSAGES: Final = 64
"""Answers, beats and acknowledgements that may wait besides a full control window."""
_DIAL_AGAIN_S: Final = 2.0
"""After a handshake that the other side has refused."""
_INFIX: Final = {Lane.CONTROL: b"/c/", Lane.BULK: b"/b/"}
_ROUTING_ID: Final = re.compile(rb"([A-Za-z0-9._-]{1,64})/([cb])/([0-9a-f]{8})")
_ADDRESS: Final = re.compile(
    r"(?:tcp://)?(?:\[(?P<six>[0-9A-Fa-f:.]+)(?P<zone>%[A-Za-z0-9._-]+)?\]|"
    r"(?P<host>\*|[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})"
)
_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_CAME: Final = zmq.EVENT_ACCEPTED
_WENT: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


def split_address(address: str, *, listening: bool) -> tuple[str, int]:
    """Host (IPv6 without brackets) and port of ``host:port`` or ``tcp://host:port``."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        raise LocalError(
            f"{address!r} is no address: write host:port or [ipv6]:port,"
            " for instance 192.0.2.7:7100"
        )
    host = (match["six"] or "") + (match["zone"] or "") or match["host"]
    port = int(match["port"])
    if port > 65535 or (port == 0 and not listening) or (host == "*" and not listening):
        raise LocalError(f"{address!r} cannot be dialed or bound: no such host or port")
    return host, port


def parse_routing_id(data: bytes) -> tuple[str, Lane, bytes] | None:
    """Name, lane and tag of a dialer's connection; None for what no dialer of ours has."""
    match = _ROUTING_ID.fullmatch(data)
    if match is None:
        return None
    return match[1].decode(), Lane.BULK if match[2] == b"b" else Lane.CONTROL, match[3]


def _endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class _Pipe:
    """One socket with its reader, its writer and its monitor."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        kind: int,
        settings: TransportSettings,
        take: Callable[[list[zmq.Frame]], None],
        *,
        dials_after: _Pipe | None = None,
        keeps_bytes: int = 0,
        curve: ListenerCurve | DialerCurve | None = None,
        handshake_failed: Callable[[int, int], None] = lambda _event, _value: None,
    ) -> None:
        self.socket: zmq.asyncio.Socket = context.socket(kind)
        self._handshake_failed = handshake_failed
        self.failed_handshakes = 0
        self.absent = 0
        self._take = take
        self._dials_after = dials_after
        self._keeps_bytes = keeps_bytes  # 0: the newest message only
        self._kept_bytes = 0
        self._unsent = Unsent(settings.unsent_bytes, settings.unsent_total_bytes)
        self._queue: deque[Sequence[Buffer]] = deque()
        self._wake = asyncio.Event()
        self._is_listener = kind == zmq.ROUTER
        self._is_blocked = not self._is_listener
        self._loop = asyncio.get_running_loop()
        self.tasks: list[asyncio.Task[None]] = []
        self._set_options(settings)
        if curve is not None:
            curve.prepare(self.socket)
        self.doors = Doorkeeper(settings.max_connections) if self._is_listener else None
        watched = _FAILED | (_CAME | _WENT if self._is_listener else 0)
        self._monitor: zmq.asyncio.Socket = self.socket.get_monitor_socket(watched)
        self._monitor.linger = 0

    def _set_options(self, settings: TransportSettings) -> None:
        socket = self.socket
        socket.linger = LINGER_MS
        # Messages of one connection. A control window must fit, with what is not counted in it.
        waiting = settings.control_window + _UNCOUNTED_MESSAGES
        socket.sndhwm = waiting if self._is_listener else 0
        socket.rcvhwm = _UNREAD_MESSAGES
        socket.maxmsgsize = max(settings.control_limit_bytes, settings.chunk_limit_bytes)
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = 30
        socket.tcp_keepalive_intvl = 10
        socket.tcp_keepalive_cnt = 3
        socket.tcp_maxrt = max(1, int(settings.expire_after_s * 1000))
        socket.handshake_ivl = 10_000
        socket.backlog = 1024

    def start(self) -> None:
        """Begin to read and write."""
        for work in (self._read(), self._write(), self._watch()):
            self.add_task(work)

    def add_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` until it ends or the pipe closes."""
        self.tasks.append(self._loop.create_task(work))

    def send(self, parts: Sequence[Buffer]) -> None:
        """Queue one message for the writer."""
        if self._is_blocked:
            if self._keeps_bytes == 0:
                self._queue.clear()
            else:
                self._kept_bytes += sum(map(len, parts))
                if self._kept_bytes > self._keeps_bytes:
                    return
        self._queue.append(parts)
        self._wake.set()

    def close(self) -> None:
        """Push out what is queued as far as it goes, then close; the tasks end by themselves."""
        for task in self.tasks:
            task.cancel()
        raw: zmq.Socket[bytes] = zmq.Socket.shadow(self.socket.underlying)
        while self._queue:
            try:
                raw.send_multipart(self._queue.popleft(), zmq.DONTWAIT)
            except zmq.ZMQError:
                self.absent += 1
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(LINGER_MS)

    async def _read(self) -> None:
        while True:
            for _ in range(_MESSAGES_PER_TURN):
                parts = await self.socket.recv_multipart(copy=False)
                try:
                    self._take(parts)
                except Exception as error:  # noqa: BLE001 - the owner's bug must not deafen us
                    self._report("a receiver of fsl_transport failed", error)
            await asyncio.sleep(0)  # waiting for a message that is there does not yield

    async def _write(self) -> None:
        queue = self._queue
        if self._is_blocked:
            await self._connected()
        while True:
            for _ in range(_MESSAGES_PER_TURN):
                if not queue:
                    self._wake.clear()
                    await self._wake.wait()
                await self._write_one(queue.popleft())
            await asyncio.sleep(0)

    async def _write_one(self, parts: Sequence[Buffer]) -> None:
        last = parts[-1]
        size = len(last)
        tracker: zmq.MessageTracker | None = None
        message: Sequence[Any] = parts
        connection = bytes(parts[0]) if self._is_listener else b""
        if size >= _TRACKED_BYTES:
            if not self._unsent.fits(connection, size, self._loop.time()):
                self.absent += 1  # this peer takes nothing, or all together too little
                return
            data = last if type(last) is bytes else bytes(last)
            frame = zmq.Frame(data, track=True, copy=False, copy_threshold=0)
            tracker = frame.tracker
            message = [*parts[:-1], frame]
            del frame
        try:
            await self.socket.send_multipart(message, zmq.DONTWAIT, copy=tracker is None)
            if tracker is not None:
                self._unsent.add(connection, size, tracker)
        except zmq.Again:
            if self._is_listener:  # this peer takes nothing; the others must not wait for it
                self.absent += 1
                return
            self._is_blocked = True  # without a connection
            if self._keeps_bytes or not self._queue:
                self._queue.appendleft(parts)
            await self._connected()
        except zmq.ZMQError as error:
            self.absent += 1
            if error.errno != errno.EHOSTUNREACH:  # not seen so far; the writer must live on
                self._report("a send of fsl_transport failed", error)

    def _report(self, message: str, error: Exception) -> None:
        self._loop.call_exception_handler({"message": message, "exception": error})

    async def _connected(self) -> None:
        """Wait until this dialer's connection stands, and the one it comes after."""
        for pipe in (self, self._dials_after):
            if pipe is not None:
                await pipe.socket.poll(None, zmq.POLLOUT)  # type: ignore[call-arg]
        self._kept_bytes = 0
        self._is_blocked = False

    async def _watch(self) -> None:
        while True:
            seen = parse_monitor_message(await self._monitor.recv_multipart())
            if seen["event"] & _FAILED:
                self.failed_handshakes += 1
                self._handshake_failed(seen["event"], seen["value"])
            elif self.doors is not None and seen["event"] & _CAME:
                self.doors.came(seen["value"])
            elif self.doors is not None:
                self.doors.went(seen["value"])


class _ZmqLink:
    """What listener and dialer share: a context, its pipes, and their end."""

    def __init__(self) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise LocalError("make a ZeroMQ link inside a running event loop") from None
        self._context = zmq.asyncio.Context()
        self._receive: Receiver | None = None
        self._pipes: list[_Pipe] = []
        self._zap: ZapHandler | None = None
        self._ending: threading.Thread | None = None
        self._ended = asyncio.Event()
        self._bad_ids = 0
        self.unwanted = 0
        """Messages dropped because their key is not allowed any more."""

    @property
    def garbage(self) -> int:
        """Connections and messages of strangers that speak something else."""
        return self._bad_ids + sum(pipe.failed_handshakes for pipe in self._pipes)

    @property
    def absent(self) -> int:
        """Messages dropped because their peer was not connected, or took nothing."""
        return sum(pipe.absent for pipe in self._pipes)

    def set_receiver(self, receive: Receiver) -> None:
        """See ``link.Link``."""
        self._receive = receive

    def close(self) -> None:
        """See ``link.Link``. What is queued has half a second to leave, in the background."""
        if self._ending is not None:
            return
        self._receive = None
        for pipe in self._pipes:
            pipe.close()
        if self._zap is not None:
            self._zap.close()
        # Ending a context waits for its sockets to be empty; not a daemon, so that the last
        # BYE leaves even when the process ends right now.
        self._ending = threading.Thread(target=self._end, name="fsl-zmq-end")
        self._ending.start()

    async def aclose(self) -> None:
        """See ``link.Link``."""
        self.close()
        tasks = [task for pipe in self._pipes for task in pipe.tasks]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._ended.wait()
        assert self._ending is not None
        self._ending.join()

    def _end(self) -> None:
        self._context.term()
        with contextlib.suppress(RuntimeError):  # the loop may be gone before us
            self._loop.call_soon_threadsafe(self._ended.set)

    def _deliver(self, peer: str, lane: Lane, parts: list[zmq.Frame], origin: bytes = b"") -> None:
        if self._receive is None:
            return
        buffers: list[Buffer] = [
            part.buffer if lane and len(part) >= _NO_COPY_BYTES else part.bytes for part in parts
        ]
        self._receive(peer, lane, buffers, origin)


class ZmqListener(_ZmqLink):
    """Binds one port for both lanes of all dialers.

    ``address`` is ``host:port``; host ``*`` is every interface, port ``0`` any free one (read
    ``.address`` back). ``curve``: encrypt, and let in whom it allows. ``tell`` hears of handshakes that failed. ``LocalError`` when the port is taken or the address is wrong.
    """

    def __init__(
        self,
        address: str,
        settings: TransportSettings | None = None,
        curve: ListenerCurve | None = None,
        tell: Tell = nobody,
    ) -> None:
        host, port = split_address(address, listening=True)
        super().__init__()
        self._arriving: zmq.Frame | None = None
        self._curve = curve
        self._tell = tell
        if curve is not None:
            self._zap = ZapHandler(self._context, curve.allows, tell)
        pipe = _Pipe(
            self._context,
            zmq.ROUTER,
            settings or TransportSettings(),
            self._take,
            curve=curve,
            handshake_failed=self._failed,
        )
        self._pipes.append(pipe)
        pipe.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        pipe.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        pipe.socket.ipv6 = host == "*" or ":" in host
        try:
            pipe.socket.bind(_endpoint(host, port))
        except zmq.ZMQError as error:
            self.close()
            raise LocalError(_bind_text(address, error)) from error
        self._address = bytes(pipe.socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        pipe.start()
        if self._zap is not None:
            pipe.add_task(self._zap.run())

    @property
    def address(self) -> str:
        """Where it listens, with the real port."""
        return self._address

    @property
    def connections(self) -> int:
        """How many stand, with those whose handshake goes on."""
        doors = self._pipes[0].doors
        return 0 if doors is None else len(doors)

    @property
    def port(self) -> int:
        """The real port."""
        return int(self._address.rpartition(":")[2])

    def send(self, peer: str, lane: Lane, frames: Sequence[Buffer], origin: bytes = b"") -> None:
        """See ``link.Link``. The origin is the tag of the dialer's routing ids, and its key."""
        if self._ending is None and origin:
            self._pipes[0].send((peer.encode() + _INFIX[lane] + origin[:TAG_BYTES], *frames))

    def redial(self) -> None:
        """Nothing to do: dialers dial."""

    def _take(self, parts: list[zmq.Frame]) -> None:
        found = parse_routing_id(parts[0].bytes)
        if found is None or len(parts) == 1:
            self._bad_ids += 1
            return
        peer, lane, origin = found
        if self._curve is not None:
            key = str(parts[0].get("User-Id"))
            if not self._curve.allows(key):
                self.unwanted += 1
                return
            origin += key.encode()
        self._arriving = parts[-1]
        self._deliver(peer, lane, parts[1:], origin)

    def whence(self) -> str:
        """See ``link.Link``: the address of the machine, without the port."""
        try:
            return "" if self._arriving is None else str(self._arriving.get("Peer-Address"))
        except zmq.ZMQError:
            return ""

    def _failed(self, event: int, value: int) -> None:
        failed = listener_failure(event, value)
        if failed is not None:
            self._tell(failed)


class ZmqDialer(_ZmqLink):
    """Dials a listener with two connections and goes on dialing whatever happens.

    A host name with both kinds of address is dialed over IPv4, because libzmq tries one kind only. ``curve``: encrypt, and talk to
    the holder of its server key only. ``tell`` hears of handshakes that failed.
    """

    def __init__(
        self,
        address: str,
        name: str,
        settings: TransportSettings | None = None,
        curve: DialerCurve | None = None,
        tell: Tell = nobody,
    ) -> None:
        self._host, self._port = split_address(address, listening=False)
        check_name(name)
        super().__init__()
        self._address = _endpoint(self._host, self._port)
        self._tell = tell
        self._is_connected = False
        tag = secrets.token_hex(4).encode()
        settings = settings or TransportSettings()
        bulk = _Pipe(
            self._context,
            zmq.DEALER,
            settings,
            lambda parts: self._deliver("", Lane.BULK, parts),
            keeps_bytes=settings.window_bytes,
            curve=curve,
            handshake_failed=lambda *seen: self._failed(bulk, *seen),
        )
        control = _Pipe(
            self._context,
            zmq.DEALER,
            settings,
            lambda parts: self._deliver("", Lane.CONTROL, parts),
            dials_after=bulk,
            curve=curve,
            handshake_failed=lambda *seen: self._failed(control, *seen),
        )
        self._pipes = [control, bulk]  # indexed by Lane
        for lane in Lane:
            pipe = self._pipes[lane]
            pipe.socket.routing_id = name.encode() + _INFIX[lane] + tag
            pipe.socket.immediate = 1
            pipe.socket.reconnect_ivl = 100
            pipe.socket.reconnect_ivl_max = 5000
            pipe.socket.connect_timeout = 10_000
            pipe.start()
        self._pipes[0].add_task(self._connect())

    @property
    def address(self) -> str:
        """Where it dials."""
        return self._address

    def send(self, peer: str, lane: Lane, frames: Sequence[Buffer], origin: bytes = b"") -> None:
        """See ``link.Link``."""
        if self._ending is None:
            self._pipes[lane].send(frames)

    def whence(self) -> str:
        """See ``link.Link``. It is the listener, always."""
        return ""

    def redial(self) -> None:
        """Give the connections up and make new ones: this one may lead nowhere."""
        if self._ending is None and self._is_connected:
            for pipe in self._pipes:
                self._dial_again(pipe)

    def _failed(self, pipe: _Pipe, event: int, value: int) -> None:
        """Dial again where libzmq does not; nobody knows for how long the listener will say no."""
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._loop.call_later(_DIAL_AGAIN_S, self._dial_again, pipe)
        self._tell(dialer_failure(event, value))

    def _dial_again(self, pipe: _Pipe) -> None:
        if self._ending is None:
            with contextlib.suppress(zmq.ZMQError):  # libzmq has forgotten it already
                pipe.socket.disconnect(self._address)
            pipe.socket.connect(self._address)

    async def _connect(self) -> None:
        is_six = ":" in self._host
        if not is_six:
            loop = asyncio.get_running_loop()
            try:
                found = await loop.getaddrinfo(self._host, self._port, type=sockets.SOCK_STREAM)
            except OSError:
                found = []  # libzmq asks again at every attempt
            families = {entry[0] for entry in found}
            is_six = bool(families) and sockets.AF_INET not in families
        for pipe in self._pipes:
            pipe.socket.ipv6 = is_six
            pipe.socket.connect(self._address)
        self._is_connected = True


def _bind_text(address: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port in use: {address} is taken; stop the other process or choose another port"
    if error.errno in {errno.EADDRNOTAVAIL, errno.ENODEV}:
        return f"cannot listen on {address}: this machine has no such address; use *:port"
    if error.errno == errno.EACCES:
        return f"cannot listen on {address}: not allowed; choose a port above 1023"
    return f"cannot listen on {address}: {error.strerror}"
