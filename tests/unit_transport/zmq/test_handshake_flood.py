"""Floods of connections: the rate per address, the common rate, and known peers meanwhile."""

import asyncio
import contextlib
import socket
import time

import pytest
from waiting import until

from fsl_transport import TransportSettings
from fsl_transport.loop import run
from fsl_transport.rate_limit import Rate
from fsl_transport.session.access_control import ConnectionLimits, address_prefix
from fsl_transport.zmq.curve import DialerCurve, KeyPair, ListenerCurve
from fsl_transport.zmq.link import ZmqDialer, ZmqListener

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
SLOW = TransportSettings(
    connections_of_an_address=Rate(5.0, 10.0), connections_of_new_addresses=Rate(50.0, 30.0)
)
HERE = "127.0.0.1"


def limits(now=0.0):
    return ConnectionLimits(SLOW, now)


def test_an_address_has_its_own_rate():
    """A flood from one address does not affect the others, and has no effect after its end."""
    one = limits()
    assert sum(one.allows("192.0.2.1", 0.0) for _ in range(1000)) == 10
    assert one.allows("192.0.2.2", 0.0)
    assert sum(one.allows("192.0.2.1", 1.0) for _ in range(1000)) == 5
    assert one.rejected == 990 + 995


def test_known_addresses_do_not_use_the_common_rate():
    """A flood from everywhere must not keep out peers whose key was accepted before."""
    one = limits()
    one.authenticated("192.0.2.1")
    assert sum(one.allows(f"198.51.100.{n}", 0.0) for n in range(200)) == 30
    assert sum(one.allows("192.0.2.1", 0.0) for _ in range(100)) == 10


def test_known_addresses_are_bounded():
    """A peer with a key and many addresses takes little memory; the newest are remembered."""
    one = limits()
    for number in range(10_000):
        one.authenticated(f"10.0.{number >> 8}.{number & 255}")
    assert len(one._known) == 4096
    assert "10.0.39.15" in one._known


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3::9", "2001:0db8:0001:0002"),
        ("2001:db8:1:2:ffff::1%eth0", "2001:0db8:0001:0002"),
        ("fe80::1%lo", "fe80:0000:0000:0000"),
        ("", ""),
        ("/tmp/socket", ""),
        ("1.2.3", ""),
    ],
)
def test_what_counts_as_one_address(address, place):
    """A peer may vary the lower half of its IPv6 address, so that does not count."""
    assert address_prefix(address) == place


def local_addresses():
    """Whether this system answers at all of 127.0.0.0/8."""
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.2", 0))
        except OSError:
            return False
    return True


class Flood:
    """Connections with a CURVE greeting from some addresses, as fast as possible.

    ``cut`` counts those that were closed.
    """

    def __init__(self, port, sources):
        self.port, self.sources = port, sources
        self.cut = self.tries = 0
        self.open = []
        self.task = None

    def start(self):
        """Start."""
        self.task = asyncio.ensure_future(self._run())

    async def _run(self):
        loop = asyncio.get_running_loop()
        while True:
            source = self.sources[self.tries % len(self.sources)]
            connection = socket.socket()
            connection.setblocking(False)
            connection.bind((source, 0))
            self.tries += 1
            self.open.append(connection)
            with contextlib.suppress(OSError):
                await loop.sock_connect(connection, (HERE, self.port))
                await loop.sock_sendall(connection, GREETING)
            if len(self.open) > 100:
                await self._look(self.open.pop(0))
            await asyncio.sleep(0.0005)

    async def _look(self, connection):
        data = b"x"
        with connection, contextlib.suppress(BlockingIOError):
            try:
                while data:
                    data = connection.recv(4096)
            except ConnectionError:
                data = b""
        self.cut += not data

    async def stop(self):
        """Close all connections."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        for connection in self.open:
            connection.close()


@contextlib.asynccontextmanager
async def flooded(sources, settings=SLOW):
    """An encrypted listener and a flood that can be started. Yields (flood, listener, dial).

    ``dial(name)`` waits until an allowed peer is connected.
    """
    server, pair, got, dialers = KeyPair.new(), KeyPair.new(), [], []
    listener = ZmqListener(
        f"{HERE}:0", settings, ListenerCurve(server, lambda key: key == pair.public)
    )
    listener.set_receiver(lambda peer, *_: got.append(peer))

    async def dial(name):
        dialer = ZmqDialer(f"{HERE}:{listener.port}", name, None, DialerCurve(pair, server.public))
        dialers.append(dialer)
        begun = time.monotonic()
        async with asyncio.timeout(30):
            while name not in got:
                dialer.send("", 0, [b"hello"])
                await asyncio.sleep(0.02)
        return time.monotonic() - begun

    flood = Flood(listener.port, sources)
    try:
        yield flood, listener, dial
    finally:
        await flood.stop()
        for one in (*dialers, listener):
            await one.aclose()


@pytest.mark.skipif(not local_addresses(), reason="this system has one loopback address only")
def test_a_new_peer_connects_during_a_flood_from_one_address():
    """The address's own rate closes the flood, and the common rate has room."""

    async def main():
        async with flooded(["127.0.0.2"]) as (flood, listener, dial):
            flood.start()
            await until(lambda: flood.cut > 100)
            assert listener.rejected > 100
            await dial("newcomer")

    run(main())


@pytest.mark.skipif(not local_addresses(), reason="this system has one loopback address only")
def test_a_known_peer_connects_during_a_flood_from_everywhere():
    """It does not use the common rate: a server under attack keeps its run."""

    async def main():
        many = [f"127.0.{number}.9" for number in range(1, 250)]
        settings = TransportSettings(
            connections_of_an_address=Rate(5.0, 50.0),
            connections_of_new_addresses=Rate(0.02, 30.0),  # one in a minute
        )
        async with flooded(many, settings) as (flood, listener, dial):
            await dial("before")
            flood.start()
            await until(lambda: flood.cut > 200)
            turned = listener.rejected
            for number in range(3):
                await dial(f"member-{number}")
            assert listener.rejected > turned, "the flood went on"

    run(main())


def test_without_a_flood_no_connection_is_closed():
    """The defaults allow some hundred dialers of one machine, each with its connections."""

    async def main():
        async with flooded([HERE], TransportSettings()) as (flood, listener, dial):
            flood.start()
            await until(lambda: flood.tries > 300)
            await dial("member")
            assert flood.cut == 0
            assert listener.rejected == 0

    run(main())
