"""A relay in front of a server that only accepts connections."""

import asyncio
import contextlib
import socket

import pytest
from waiting import until

from fsl_async.nodes.relay.relay import Admission, Relay, Route

GREETING = b"\xff" + bytes(8) + b"\x7f\3\1" + b"CURVE".ljust(20, b"\0") + bytes(32)


class Setup:
    """A relay, its server's listening socket, the relay's journal and its notes."""

    def __init__(self, limit, server, *, requires_curve):
        self.journal, self.notes, self.opened = [], [], []
        self.relay = Relay(Admission(limit), self, self.notes.append)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        self.server_port = self.server.getsockname()[1]
        place = server or f"127.0.0.1:{self.server_port}"
        _, self.port = self.relay.listen(Route("127.0.0.1:0", place, requires_curve))

    def note(self, name, now, **fields):
        """Record a line, as a journal does."""
        self.journal.append((name, fields))

    def wrote(self, name):
        """The fields of all lines with that name."""
        return [fields for one, fields in self.journal if one == name]

    def keep(self, connection):
        """Close it at the end."""
        connection.setblocking(False)
        self.opened.append(connection)
        return connection

    async def near(self, first=GREETING):
        """A client's connection that has sent its first bytes."""
        near = self.keep(socket.create_connection(("127.0.0.1", self.port)))
        if first:
            near.send(first)
        return near

    async def far(self):
        """The server's end of the next connection."""
        far, _ = await asyncio.get_running_loop().sock_accept(self.server)
        return self.keep(far)

    async def joined(self):
        """Both ends of a connection whose greeting has passed."""
        near = await self.near()
        far = await self.far()
        assert await self.read(far, len(GREETING)) == GREETING
        return near, far

    async def read(self, connection, most=1 << 30):
        """Read at most `most` bytes, or until the end."""
        loop, got = asyncio.get_running_loop(), bytearray()
        while len(got) < most and (
            data := await loop.sock_recv(connection, min(1 << 20, most - len(got)))
        ):
            got += data
        return bytes(got)

    async def fill(self, connection):
        """Send until the connection takes nothing more; returns the number of bytes."""
        sent, more = 0, 1
        while more:
            more = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    more += connection.send(bytes(1 << 16))
            sent += more
            await asyncio.sleep(0.1)
        return sent

    async def ended(self, seconds=10.0):
        """The journal's line about the first connection that ended."""
        await until(lambda: self.wrote("connection_ended"), seconds)
        return self.wrote("connection_ended")[0]


@pytest.fixture
def relayed():
    """A context manager of a ``Setup`` with room for ``limit`` connections, made in a loop."""

    @contextlib.asynccontextmanager
    async def make(limit=100, server="", *, requires_curve=False):
        one = Setup(limit, server, requires_curve=requires_curve)
        try:
            async with asyncio.timeout(60):
                yield one
        finally:
            await one.relay.aclose()
            for connection in (*one.opened, one.server):
                connection.close()

    return make
