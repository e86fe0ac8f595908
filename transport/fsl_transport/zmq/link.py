"""The ZeroMQ link: a ROUTER for a listener; a DEALER for control and one per stripe for a dialer.

Rules, each from a problem that occurred (numbers are libzmq issues)

  * A dialer's connections have the routing ids ``name/c/tag`` for control, and ``name/b/tag``,
    ``name/b1/tag`` to ``name/b63/tag`` for the stripes of bulk. The tag is random per dialer. The
    listener gets it with each message as ``origin`` and passes it to ``send``. So a relaunched
    process is reached at once, an unauthenticated peer under another peer's name gets only messages
    meant for itself, and two processes of one name do not take over each other's connection (which
    would stay open and unresponsive, and its owner would never learn why).
  * ROUTER_HANDOVER lets the same dialer come back while its broken connection is still registered
    (#778, #2019). ROUTER_MANDATORY makes a send to an absent peer an error, which is counted. A
    ROUTER never waits for one peer.
  * Byte credit bounds the memory of honest streams, the session's window that of control. Against
    others: with RCVHWM, a connection whose messages pile up is not read any more, so only its
    sender waits. The bytes that libzmq holds for a connection are counted (``SendBudget``), and a
    listener's SNDHWM limits the messages, so a connection that reads nothing gets no more. An
    honest peer's session repairs what it loses this way. A dialer's SNDHWM is 0. MAXMSGSIZE bounds
    a frame before it is allocated.
  * Only ``pipe.py`` touches a socket: its file descriptor is edge-triggered, and a send from
    elsewhere can consume the edge of a receive.
  * A dialer sets IMMEDIATE, so nothing is queued for a connection that is not established. What was
    unsent when a connection broke is lost, and sessions repair it. Without a connection, only the
    newest control message is kept (a HELLO), and bulk up to one window: the first chunk that
    arrives shows the receiver what is missing. Control waits until bulk is connected as well, so
    that no session starts whose chunks would be lost.
  * ZMTP heartbeats are off: they time out during one large message (#2709). TCP_MAXRT and keepalive
    end dead connections; the session's own heartbeats show that a peer is alive.
  * Frames of 4 KiB and more are sent without a copy, as ``bytes``, which are immutable; trackers
    show when libzmq is done with them. A large received frame stays in libzmq's memory as long as
    its memoryview lives; other frames of the message do not.
  * A payload is followed by a trailer (``session/frames.py``), so that a relay that drops frames
    cannot join a head with another message's payload.
  * Failed handshakes, reported by the socket monitor, and foreign routing ids are counted as
    ``garbage``.
  * On an encrypted link (``curve.py``) a listener checks the key of every message, not only of the
    handshake: once a key is no longer allowed, its connections are ignored. The key is part of the
    ``origin``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import secrets
import socket as sockets
import threading
from collections.abc import Sequence
from typing import Final

import zmq
import zmq.asyncio

from fsl_transport.errors import LocalError
from fsl_transport.link import TAG_BYTES, Buffer, Lane, Receiver, check_name
from fsl_transport.session.frames import is_whole
from fsl_transport.settings import STRIPES_LIMIT, TransportSettings
from fsl_transport.zmq.admission import descriptors
from fsl_transport.zmq.curve import (
    DialerCurve,
    ListenerCurve,
    OnFailure,
    ZapHandler,
    dialer_failure,
    ignore_failure,
    listener_failure,
)
from fsl_transport.zmq.pipe import Pipe

_NO_COPY_BYTES: Final = 64 * 1024
_DIAL_AGAIN_S: Final = 2.0
"""Delay after a handshake that the peer refused."""
_INFIXES: Final = (b"/c/", b"/b/", *(b"/b%d/" % stripe for stripe in range(1, STRIPES_LIMIT)))
"""Parts of routing ids, by lane + stripe."""
_ROUTING_ID: Final = re.compile(
    rb"([A-Za-z0-9._-]{1,64})/(c|b(?:[1-9]|[1-5][0-9]|6[0-3])?)/([0-9a-f]{8})"
)
_ADDRESS: Final = re.compile(
    r"(?:tcp://)?(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)(?P<zone>%[A-Za-z0-9._-]+)?\]|"
    r"(?P<host>\*|[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})"
)


def split_address(address: str, *, listening: bool) -> tuple[str, int]:
    """Parse ``host:port`` or ``tcp://host:port``. Return host (IPv6 without brackets) and port."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        raise LocalError(
            f"{address!r} is no address: write host:port or [ipv6]:port,"
            " for instance 192.0.2.7:7100"
        )
    host = (match["ipv6"] or "") + (match["zone"] or "") or match["host"]
    port = int(match["port"])
    if port > 65535 or (port == 0 and not listening) or (host == "*" and not listening):
        raise LocalError(f"{address!r} cannot be dialed or bound: no such host or port")
    return host, port


def parse_routing_id(data: bytes) -> tuple[str, Lane, bytes] | None:
    """Return name, lane and tag of a dialer's connection; None if it is not one of ours."""
    match = _ROUTING_ID.fullmatch(data)
    if match is None:
        return None
    return match[1].decode(), Lane.CONTROL if match[2] == b"c" else Lane.BULK, match[3]


def _endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class _ZmqLink:
    """Shared by listener and dialer: a context, its pipes, delivery and closing."""

    def __init__(self) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise LocalError("make a ZeroMQ link inside a running event loop") from None
        self._context = zmq.asyncio.Context()
        self._receive: Receiver | None = None
        self._pipes: list[Pipe] = []
        self._zap: ZapHandler | None = None
        self._closing: threading.Thread | None = None
        self._closed = asyncio.Event()
        self._bad_ids = 0
        self.incomplete = 0
        """Messages dropped because frames were missing."""
        self.revoked = 0
        """Messages dropped because their key is no longer allowed."""

    @property
    def stripes_limit(self) -> int:
        """See ``link.Link``."""
        return STRIPES_LIMIT

    @property
    def garbage(self) -> int:
        """Connections and messages that are not of this protocol."""
        return self._bad_ids + self.incomplete + sum(pipe.failed_handshakes for pipe in self._pipes)

    @property
    def dropped(self) -> int:
        """Messages dropped because their peer was not connected, or did not read."""
        return sum(pipe.dropped for pipe in self._pipes)

    def set_receiver(self, receive: Receiver) -> None:
        """See ``link.Link``."""
        self._receive = receive

    def close(self) -> None:
        """See ``link.Link``. The queue has half a second to leave, in the background."""
        if self._closing is not None:
            return
        self._receive = None
        for pipe in self._pipes:
            pipe.close()
        if self._zap is not None:
            self._zap.close()
        # Terminating a context waits until its sockets are empty. The thread is no daemon, so that
        # the last BYE leaves even if the process ends now.
        self._closing = threading.Thread(target=self._terminate, name="fsl-zmq-end")
        try:
            self._closing.start()
        except RuntimeError:  # from 3.12 on Python starts no threads while it ends
            self._terminate()

    async def aclose(self) -> None:
        """See ``link.Link``."""
        self.close()
        tasks = [task for pipe in self._pipes for task in pipe.tasks]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._closed.wait()
        assert self._closing is not None
        if self._closing.ident is not None:
            self._closing.join()

    def _terminate(self) -> None:
        self._context.term()
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(self._closed.set)

    def _deliver(self, peer: str, lane: Lane, parts: list[zmq.Frame], origin: bytes = b"") -> None:
        if self._receive is None:
            return
        if not is_whole(
            [part.buffer if number == 1 else part.bytes for number, part in enumerate(parts)]
        ):
            self.incomplete += 1
            return
        del parts[2:]
        buffers: list[Buffer] = [
            part.buffer if lane and len(part) >= _NO_COPY_BYTES else part.bytes for part in parts
        ]
        self._receive(peer, lane, buffers, origin)


class ZmqListener(_ZmqLink):
    """Binds one port for both lanes of all dialers.

    ``address`` is ``host:port``; host ``*`` is every interface, port ``0`` any free one (read
    ``.address`` back). ``curve`` encrypts and restricts access. ``on_failure`` gets failed
    handshakes. ``LocalError`` if the port is taken or the address is invalid.
    """

    def __init__(
        self,
        address: str,
        settings: TransportSettings | None = None,
        curve: ListenerCurve | None = None,
        on_failure: OnFailure = ignore_failure,
    ) -> None:
        host, port = split_address(address, listening=True)
        super().__init__()
        self._receiving: zmq.Frame | None = None
        self._curve = curve
        self._on_failure = on_failure
        if curve is not None:
            self._zap = ZapHandler(self._context, curve.allows, on_failure, self._on_accepted)
        pipe = Pipe(
            self._loop,
            self._context,
            zmq.ROUTER,
            settings or TransportSettings(),
            self._on_message,
            curve=curve,
            on_handshake_failed=self._on_handshake_failed,
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
        """Return the address at which it listens, with the actual port."""
        return self._address

    @property
    def connections(self) -> int:
        """Number of connections, including those whose handshake is not finished."""
        admission = self._pipes[0].admission
        return 0 if admission is None else len(admission)

    @property
    def rejected(self) -> int:
        """Connections closed because they were too many, or came too fast."""
        admission = self._pipes[0].admission
        return 0 if admission is None else admission.rejected

    @property
    def port(self) -> int:
        """The actual port."""
        return int(self._address.rpartition(":")[2])

    def send(
        self,
        peer: str,
        lane: Lane,
        frames: Sequence[Buffer],
        origin: bytes = b"",
        stripe: int = 0,
    ) -> None:
        """See ``link.Link``. The origin is the tag of the dialer's routing ids, then its key."""
        if self._closing is None and origin:
            connection = peer.encode() + _INFIXES[lane + stripe] + origin[:TAG_BYTES]
            self._pipes[0].send((connection, *frames))

    def open_stripes(self, count: int) -> None:
        """No effect: dialers open stripes."""

    def adopt(self, settings: TransportSettings) -> None:
        """No effect: a listener's settings are fixed when it is made."""

    def redial(self) -> None:
        """No effect: dialers dial."""

    def _on_message(self, parts: list[zmq.Frame]) -> None:
        found = parse_routing_id(parts[0].bytes)
        if found is None or len(parts) == 1:
            self._bad_ids += 1
            return
        peer, lane, origin = found
        if self._curve is not None:
            key = str(parts[0].get("User-Id"))
            if not self._curve.allows(key):
                self.revoked += 1
                return
            origin += key.encode()
        self._receiving = parts[-1]
        self._deliver(peer, lane, parts[1:], origin)

    def remote_address(self) -> str:
        """See ``link.Link``: the IP address, without the port."""
        try:
            return "" if self._receiving is None else str(self._receiving.get("Peer-Address"))
        except zmq.ZMQError:
            return ""

    def _on_accepted(self, address: str) -> None:
        admission = self._pipes[0].admission
        if admission is not None:
            admission.limits.authenticated(address)

    def _on_handshake_failed(self, event: int, value: int) -> None:
        failed = listener_failure(event, value)
        if failed is not None:
            self._on_failure(failed)


class ZmqDialer(_ZmqLink):
    """Dials a listener with two connections or more, and dials again after every loss.

    A host name with addresses of both kinds is dialed over IPv4, because libzmq tries one kind
    only. ``curve`` encrypts and authenticates the listener. ``on_failure`` gets failed handshakes.
    """

    def __init__(
        self,
        address: str,
        name: str,
        settings: TransportSettings | None = None,
        curve: DialerCurve | None = None,
        on_failure: OnFailure = ignore_failure,
    ) -> None:
        self._host, self._port = split_address(address, listening=False)
        check_name(name)
        super().__init__()
        self._address = _endpoint(self._host, self._port)
        self._on_failure = on_failure
        self._is_connected = False
        self._name = name.encode()
        self._tag = secrets.token_hex(4).encode()
        self._settings = settings = settings or TransportSettings()
        self._curve = curve
        self._is_ipv6 = False
        bulk = self._make_pipe(Lane.BULK, 0)
        self._pipes = [self._make_pipe(Lane.CONTROL, 0, waits_for=bulk), bulk]  # by lane and stripe
        self._pipes[0].add_task(self._connect())

    def _make_pipe(self, lane: Lane, stripe: int, *, waits_for: Pipe | None = None) -> Pipe:
        pipe = Pipe(
            self._loop,
            self._context,
            zmq.DEALER,
            self._settings,
            lambda parts: self._deliver("", lane, parts),
            waits_for=waits_for,
            keeps_window=lane is Lane.BULK,
            curve=self._curve,
            on_handshake_failed=lambda *seen: self._on_handshake_failed(pipe, *seen),
        )
        pipe.socket.routing_id = self._name + _INFIXES[lane + stripe] + self._tag
        pipe.socket.immediate = 1
        pipe.socket.reconnect_ivl = 100
        pipe.socket.reconnect_ivl_max = 5000
        pipe.socket.connect_timeout = 10_000
        pipe.start()
        return pipe

    @property
    def address(self) -> str:
        """Return the address that it dials."""
        return self._address

    def send(
        self,
        peer: str,
        lane: Lane,
        frames: Sequence[Buffer],
        origin: bytes = b"",
        stripe: int = 0,
    ) -> None:
        """See ``link.Link``."""
        if self._closing is None and lane + stripe < len(self._pipes):
            self._pipes[lane + stripe].send(frames)

    def open_stripes(self, count: int) -> None:
        """See ``link.Link``. A stripe takes four descriptors.

        Where the process has too few of them, fewer stripes are opened; the sender treats the
        others like connections that do not come up.
        """
        if len(self._pipes) < 1 + count:
            descriptors()  # raise the limit: many systems start with a few hundred and allow more
        while self._closing is None and len(self._pipes) < 1 + min(count, STRIPES_LIMIT):
            try:
                pipe = self._make_pipe(Lane.BULK, len(self._pipes) - 1)
            except zmq.ZMQError as error:
                if error.errno not in {errno.EMFILE, errno.ENFILE}:
                    raise
                return
            self._pipes.append(pipe)
            if self._is_connected:
                pipe.socket.ipv6 = self._is_ipv6
                pipe.socket.connect(self._address)

    def adopt(self, settings: TransportSettings) -> None:
        """See ``link.Link``."""
        self._settings = settings
        for pipe in self._pipes:
            pipe.adopt(settings)

    def remote_address(self) -> str:
        """See ``link.Link``. Empty: the peer is always the listener."""
        return ""

    def redial(self) -> None:
        """See ``link.Link``: connections may be dead, or the name may resolve differently now."""
        if self._closing is None and self._is_connected:
            for pipe in self._pipes:
                self._dial_again(pipe)
            self._pipes[0].add_task(self._connect())

    def _on_handshake_failed(self, pipe: Pipe, event: int, value: int) -> None:
        """Dial again where libzmq does not: the listener may accept the key later."""
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._loop.call_later(_DIAL_AGAIN_S, self._dial_again, pipe)
        self._on_failure(dialer_failure(event, value))

    def _dial_again(self, pipe: Pipe) -> None:
        if self._closing is None:
            with contextlib.suppress(zmq.ZMQError):  # libzmq has given it up already
                pipe.socket.disconnect(self._address)
            pipe.socket.ipv6 = self._is_ipv6
            pipe.socket.connect(self._address)

    async def _connect(self) -> None:
        was_ipv6 = self._is_ipv6
        self._is_ipv6 = self._is_ipv6 or ":" in self._host
        if ":" not in self._host:
            loop = asyncio.get_running_loop()
            try:
                found = await loop.getaddrinfo(self._host, self._port, type=sockets.SOCK_STREAM)
            except OSError:
                found = []  # libzmq resolves the name at every attempt
            families = {entry[0] for entry in found}
            if families:  # otherwise unchanged
                self._is_ipv6 = sockets.AF_INET not in families
        if self._is_ipv6 != was_ipv6 or not self._is_connected:
            for pipe in self._pipes:
                self._dial_again(pipe)
        self._is_connected = True


def _bind_text(address: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port in use: {address} is taken; stop the other process or choose another port"
    if error.errno in {errno.EADDRNOTAVAIL, errno.ENODEV}:
        return f"cannot listen on {address}: this machine has no such address; use *:port"
    if error.errno == errno.EACCES:
        return f"cannot listen on {address}: not allowed; choose a port above 1023"
    return f"cannot listen on {address}: {error.strerror}"
