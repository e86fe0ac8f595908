"""One client's connection through a relay, and the one to the server behind it.

`Pair.run` takes these steps:

  1. The client's first ten bytes must be ZMTP's signature; only then is the server dialed.
  2. The signature goes to the server, and from then on the server's bytes to the client.
  3. The client's complete greeting must name a mechanism, CURVE where the route requires it.
  4. Both directions are forwarded, unread, until one of them ends.
  5. Lingering close: the last bytes of the other direction get `LINGER_S`.

Here "server" is the route's, a parameter server or a split server. Steps 1 to 3 and 5 have time
limits; bad bytes of a peer end at most its own pair. The kernel detects a peer that is gone or that
takes nothing for a minute (`_tune`).
"""

import asyncio
import contextlib
import enum
import errno
import socket
from collections.abc import Callable
from typing import Final

from attrs import define

from fsl_transport.relay import zmtp_greeting as zmtp
from fsl_transport.relay.buffer import PipePool
from fsl_transport.relay.forwarder import Forwarder
from fsl_transport.relay.resolver import Resolver, describe

GREETING_S: Final = 10.0
"""The time limit of step 1, and of step 3. libzmq allows as much for a handshake."""
DIAL_S: Final = 10.0
"""How long a server that is away is dialed; then the client tries again by itself."""
CONNECT_S: Final = 5.0
REDIAL_S: Final = 0.25
REDIAL_LIMIT_S: Final = 2.0
LINGER_S: Final = 5.0
_KEEPALIVE: Final = (
    ("TCP_KEEPIDLE", 30),
    ("TCP_KEEPINTVL", 10),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 60_000),
)


class Drop(enum.StrEnum):
    """Why a relay closes a connection, in the words of its reports."""

    FULL = "full"
    SILENT = "no greeting"
    NOT_ZMTP = "not ZMTP"
    UNENCRYPTED = "unencrypted"
    NO_SERVER = "no server"


class Dropped(Exception):  # noqa: N818 - it ends one pair, and is no bug
    """The relay closes a pair: a Drop, and the reason in words."""


@define(eq=False, slots=False)
class Pair:
    """See the module. dialed: takes the result of each attempt to dial, "" or the problem."""

    _client: socket.socket
    _resolver: Resolver
    _pipes: PipePool
    _requires_curve: bool
    _dialed: Callable[[str], None]

    def __attrs_post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._server: socket.socket | None = None
        self._up: Forwarder | None = None
        self._down: Forwarder | None = None
        self._client.setblocking(False)
        _tune(self._client)

    def carried(self) -> tuple[int, int, int]:
        """Return bytes up (to the server, with the greeting) and down, and those held between."""
        up = zmtp.GREETING_BYTES + self._up.carried if self._up else 0
        down = self._down.carried if self._down else 0
        return up, down, sum(one.held for one in (self._up, self._down) if one)

    def close(self) -> None:
        """Close both connections. Held bytes are lost; the kernel delivers the written ones."""
        for part in (self._up, self._down, self._client, self._server):
            if part is not None:
                part.close()

    async def run(self) -> str:
        """Return why it ended, or raise Dropped. The caller calls `close`."""
        try:
            return await self._forward(*await self._open())
        except OSError as error:
            return describe(error)

    async def _open(self) -> tuple[Forwarder, Forwarder]:
        """Steps 1 to 3. Returns the forwarders, up and down."""
        client = self._client
        signature = await self._receive(zmtp.SIGNATURE_BYTES)
        if not zmtp.is_signature(signature):
            raise Dropped(Drop.NOT_ZMTP, "something else than ZeroMQ")
        self._server = server = await self._dial()
        await self._loop.sock_sendall(server, signature)
        self._down = Forwarder(self._loop, self._pipes, server, client)
        rest = await self._receive(zmtp.GREETING_BYTES - zmtp.SIGNATURE_BYTES)
        mechanism = zmtp.mechanism_of(signature + rest)
        if not mechanism:
            raise Dropped(Drop.NOT_ZMTP, "something else than ZeroMQ")
        if self._requires_curve and mechanism != zmtp.CURVE:
            raise Dropped(Drop.UNENCRYPTED, f"{mechanism}, which does not encrypt")
        await self._loop.sock_sendall(server, rest)
        self._up = Forwarder(self._loop, self._pipes, client, server)
        return self._up, self._down

    async def _receive(self, size: int) -> bytes:
        """Read the next part of the client's greeting."""
        data = b""
        try:
            async with asyncio.timeout(GREETING_S):
                while len(data) < size:
                    part = await self._loop.sock_recv(self._client, size - len(data))
                    if not part:
                        raise ConnectionResetError("the client closed it")
                    data += part
        except TimeoutError:
            raise Dropped(Drop.SILENT, f"no greeting within {GREETING_S:g} s") from None
        return data

    async def _dial(self) -> socket.socket:
        """Connect to the server; try again while it is away."""
        problem, wait_s = "no answer", REDIAL_S
        try:
            async with asyncio.timeout(DIAL_S):
                while True:
                    try:
                        server = await self._connect()
                    except OSError as error:
                        self._dialed(problem := describe(error))
                    else:
                        self._dialed("")
                        return server
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, REDIAL_LIMIT_S)
        except TimeoutError:
            raise Dropped(Drop.NO_SERVER, f"no server: {problem}") from None

    async def _connect(self) -> socket.socket:
        """Connect to the first of the server's addresses that answers. Raises OSError."""
        failed = OSError("no address")
        for family, address in await self._resolver.addresses():
            server = socket.socket(family, socket.SOCK_STREAM)
            try:
                server.setblocking(False)
                async with asyncio.timeout(CONNECT_S):
                    await self._loop.sock_connect(server, address)
                _refuse_itself(server)
                _tune(server)
            except BaseException as error:
                server.close()
                if not isinstance(error, OSError):
                    raise
                failed = error
            else:
                return server
        raise failed

    async def _forward(self, up: Forwarder, down: Forwarder) -> str:
        """Steps 4 and 5. Returns why it ended.

        Closing a connection with unread bytes resets it, and bytes sent before may be lost, such as
        the server's reason for closing. So the client's bytes are discarded until it closes its
        side too.
        """
        await asyncio.wait({up.over, down.over}, return_when=asyncio.FIRST_COMPLETED)
        side, first = ("client", up) if up.over.done() else ("server", down)
        error = first.over.result()
        with contextlib.suppress(OSError):  # a TimeoutError, or a connection that breaks meanwhile
            async with asyncio.timeout(LINGER_S):
                await asyncio.wait({up.over, down.over})
                while await self._loop.sock_recv(self._client, 1 << 16):
                    pass
        return describe(error) if error else f"the {side} closed it"


def _refuse_itself(connection: socket.socket) -> None:
    """Raise for a connection with itself, which can happen on one machine if nothing listens."""
    if connection.getsockname() == connection.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "")


def _tune(connection: socket.socket) -> None:
    """Send without delay, and end a connection whose peer is gone or takes nothing."""
    with contextlib.suppress(OSError):  # a connection that broke meanwhile
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        # BBR paces, which loopback does not need.
        host = str(connection.getpeername()[0]).removeprefix("::ffff:")
        if hasattr(socket, "TCP_CONGESTION") and (host.startswith("127.") or host == "::1"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
