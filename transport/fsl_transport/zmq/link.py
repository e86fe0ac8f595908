"""The real network: one ROUTER for the listener; a DEALER for control and one for each stripe of bulk at a dialer.

Rules, each from a trap that was met (numbers are libzmq issues):

  * A dialer's connections have the routing ids ``name/c/tag``, ``name/b/tag`` and, from the second stripe on,
    ``name/b1/tag`` to ``name/b63/tag``; the tag is random per dialer. The listener gets the tag with each message as its ``origin`` and names it
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
  * Nobody but ``zmq_pipe.py`` touches a socket: its file descriptor is edge-triggered, and a send behind its back can swallow the
    edge of a receive.
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
  * A payload travels between twice its head (``seam.py``), or whoever holds frames back could give it to another one.
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
from collections.abc import Sequence
from typing import Final

import zmq
import zmq.asyncio

from fsl_transport.errors import LocalError
from fsl_transport.link import TAG_BYTES, Buffer, Lane, Receiver, check_name
from fsl_transport.settings import STRIPES_LIMIT, TransportSettings
from fsl_transport.zmq.admission import descriptors
from fsl_transport.zmq.curve import (
    DialerCurve,
    ListenerCurve,
    Send,
    ZapHandler,
    deny_all,
    dialer_failure,
    listener_failure,
)
from fsl_transport.zmq.frame_trailer import is_whole
from fsl_transport.zmq.pipe import Pipe

_NO_COPY_BYTES: Final = 64 * 1024
_DIAL_AGAIN_S: Final = 2.0
"""After a handshake that the other side has refused."""
_INFIXES: Final = (b"/c/", b"/b/", *(b"/b%d/" % stripe for stripe in range(1, STRIPES_LIMIT)))
"""By lane, or lane and stripe."""
_ROUTING_ID: Final = re.compile(
    rb"([A-Za-z0-9._-]{1,64})/(c|b(?:[1-9]|[1-5][0-9]|6[0-3])?)/([0-9a-f]{8})"
)
_ADDRESS: Final = re.compile(
    r"(?:tcp://)?(?:\[(?P<six>[0-9A-Fa-f:.]+)(?P<zone>%[A-Za-z0-9._-]+)?\]|"
    r"(?P<host>\*|[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})"
)


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
    return match[1].decode(), Lane.CONTROL if match[2] == b"c" else Lane.BULK, match[3]


def _endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class _ZmqLink:
    """What listener and dialer share: a context, its pipes, and their end."""

    def __init__(self) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise LocalError("make a ZeroMQ link inside a running event loop") from None
        self._context = zmq.asyncio.Context()
        self._receive: Receiver | None = None
        self._pipes: list[Pipe] = []
        self._zap: ZapHandler | None = None
        self._ending: threading.Thread | None = None
        self._ended = asyncio.Event()
        self._bad_ids = 0
        self.torn = 0
        """Messages dropped because frames of theirs were left out on the way."""
        self.unwanted = 0
        """Messages dropped because their key is not allowed any more."""

    @property
    def stripes_limit(self) -> int:
        """See ``link.Link``."""
        return STRIPES_LIMIT

    @property
    def garbage(self) -> int:
        """Connections and messages of strangers that speak something else."""
        return self._bad_ids + self.torn + sum(pipe.failed_handshakes for pipe in self._pipes)

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
        if not is_whole(
            [part.buffer if number == 1 else part.bytes for number, part in enumerate(parts)]
        ):
            self.torn += 1
            return
        del parts[2:]
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
        tell: Send = deny_all,
    ) -> None:
        host, port = split_address(address, listening=True)
        super().__init__()
        self._arriving: zmq.Frame | None = None
        self._curve = curve
        self._tell = tell
        if curve is not None:
            self._zap = ZapHandler(self._context, curve.allows, tell, self._let_in)
        pipe = Pipe(
            self._loop,
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

    def send(
        self,
        peer: str,
        lane: Lane,
        frames: Sequence[Buffer],
        origin: bytes = b"",
        stripe: int = 0,
    ) -> None:
        """See ``link.Link``. The origin is the tag of the dialer's routing ids, and its key."""
        if self._ending is None and origin:
            connection = peer.encode() + _INFIXES[lane + stripe] + origin[:TAG_BYTES]
            self._pipes[0].send((connection, *frames))

    def open_stripes(self, count: int) -> None:
        """Nothing to do: dialers open them."""

    def adopt(self, settings: TransportSettings) -> None:
        """Nothing to do: a listener is given its own when it is made, and nobody tells it others."""

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

    def address_of(self) -> str:
        """See ``link.Link``: the address of the machine, without the port."""
        try:
            return "" if self._arriving is None else str(self._arriving.get("Peer-Address"))
        except zmq.ZMQError:
            return ""

    @property
    def turned_away(self) -> int:
        """Connections that were hung up: too many, or too fast."""
        doors = self._pipes[0].doors
        return 0 if doors is None else doors.turned_away

    def _let_in(self, address: str) -> None:
        doors = self._pipes[0].doors
        if doors is not None:
            doors.arrivals.settled(address)

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
        tell: Send = deny_all,
    ) -> None:
        self._host, self._port = split_address(address, listening=False)
        check_name(name)
        super().__init__()
        self._address = _endpoint(self._host, self._port)
        self._tell = tell
        self._is_connected = False
        self._name = name.encode()
        self._tag = secrets.token_hex(4).encode()
        self._settings = settings = settings or TransportSettings()
        self._curve = curve
        self._is_six = False
        bulk = self._pipe(Lane.BULK, 0)
        self._pipes = [self._pipe(Lane.CONTROL, 0, dials_after=bulk), bulk]  # by lane and stripe
        self._pipes[0].add_task(self._connect())

    def _pipe(self, lane: Lane, stripe: int, *, dials_after: Pipe | None = None) -> Pipe:
        pipe = Pipe(
            self._loop,
            self._context,
            zmq.DEALER,
            self._settings,
            lambda parts: self._deliver("", lane, parts),
            dials_after=dials_after,
            keeps_window=lane is Lane.BULK,
            curve=self._curve,
            handshake_failed=lambda *seen: self._failed(pipe, *seen),
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
        """Where it dials."""
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
        if self._ending is None and lane + stripe < len(self._pipes):
            self._pipes[lane + stripe].send(frames)

    def open_stripes(self, count: int) -> None:
        """See ``link.Link``. A stripe takes four descriptors: where this process may not have them there are fewer, as with any that do not come up."""
        if len(self._pipes) < 1 + count:
            descriptors()  # many systems begin with a few hundred, and allow more
        while self._ending is None and len(self._pipes) < 1 + min(count, STRIPES_LIMIT):
            try:
                pipe = self._pipe(Lane.BULK, len(self._pipes) - 1)
            except zmq.ZMQError as error:
                if error.errno not in {errno.EMFILE, errno.ENFILE}:
                    raise
                return
            self._pipes.append(pipe)
            if self._is_connected:
                pipe.socket.ipv6 = self._is_six
                pipe.socket.connect(self._address)

    def adopt(self, settings: TransportSettings) -> None:
        """See ``link.Link``."""
        self._settings = settings
        for pipe in self._pipes:
            pipe.adopt(settings)

    def address_of(self) -> str:
        """See ``link.Link``. It is the listener, always."""
        return ""

    def redial(self) -> None:
        """Give the connections up and make new ones: this one may lead nowhere, or the name may not have been known at first."""
        if self._ending is None and self._is_connected:
            for pipe in self._pipes:
                self._dial_again(pipe)
            self._pipes[0].add_task(self._connect())

    def _failed(self, pipe: Pipe, event: int, value: int) -> None:
        """Dial again where libzmq does not; nobody knows for how long the listener will say no."""
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._loop.call_later(_DIAL_AGAIN_S, self._dial_again, pipe)
        self._tell(dialer_failure(event, value))

    def _dial_again(self, pipe: Pipe) -> None:
        if self._ending is None:
            with contextlib.suppress(zmq.ZMQError):  # libzmq has forgotten it already
                pipe.socket.disconnect(self._address)
            pipe.socket.ipv6 = self._is_six
            pipe.socket.connect(self._address)

    async def _connect(self) -> None:
        was_six = self._is_six
        self._is_six = self._is_six or ":" in self._host
        if ":" not in self._host:
            loop = asyncio.get_running_loop()
            try:
                found = await loop.getaddrinfo(self._host, self._port, type=sockets.SOCK_STREAM)
            except OSError:
                found = []  # libzmq asks again at every attempt
            families = {entry[0] for entry in found}
            if families:  # else as before
                self._is_six = sockets.AF_INET not in families
        if self._is_six != was_six or not self._is_connected:
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
