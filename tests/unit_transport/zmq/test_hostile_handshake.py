"""A hostile relay between the nodes: replayed, crossed and spliced connections, impersonation.

Each attack is made on encrypted nodes, where nothing of it may be delivered, and on plain ones,
where it succeeds: an attack that fails for another reason proves nothing. ``World.got`` is what
the server's link delivered.
"""

import asyncio
import contextlib
import os

import pytest
from hostile_relay import DOWN, HANDSHAKE, UP, HostileRelay
from waiting import until

from fsl_async.config.address import Address
from fsl_async.keys.dialling import at_client
from fsl_transport import (
    DialerEndpoint,
    HelloReceived,
    ListenerEndpoint,
    MessageReceived,
    PeerUp,
    TransportSettings,
)
from fsl_transport.link import Lane
from fsl_transport.loop import run
from fsl_transport.zmq.curve import CLOSED, DialerCurve, KeyPair, ListenerCurve
from fsl_transport.zmq.link import ZmqDialer, ZmqListener

HERE = "127.0.0.1"
QUIET_S = 0.3 * float(os.environ.get("FSL_TEST_TIME_UNIT", "1"))
"""How long a test waits for the effect of an attack. One that succeeds takes milliseconds."""

both = pytest.mark.parametrize("encrypted", [True, False])


class World:
    """A server, a hostile relay before it, and honest clients that have only the relay's address.

    ``got`` is (client, payload) at the server.
    """

    def __init__(self, *, encrypted):
        self.encrypted = encrypted
        self.server = KeyPair.new()
        self.pairs = {}
        self.got = []
        self.failures = []
        self.links = []

    async def __aenter__(self):
        curve = ListenerCurve(self.server, lambda key: key in self.trusted)
        self.listener = self.listen(curve, self.take)
        self.relay = HostileRelay(lambda: self.listener.port)
        await self.relay.start()
        return self

    async def __aexit__(self, *_):
        for link in reversed(self.links):
            await link.aclose()
        await self.relay.stop()

    @property
    def trusted(self):
        """Allowed public keys."""
        return {pair.public for pair in self.pairs.values()}

    def take(self, peer, _lane, frames, _origin):
        """The receiver of the server's link."""
        self.got.append((peer, bytes(frames[0])))

    def listen(self, curve, take):
        """A listener."""
        link = ZmqListener(f"{HERE}:0", None, curve if self.encrypted else None)
        link.set_receiver(take)
        self.links.append(link)
        return link

    def dial(self, name, pair=None, port=None):
        """A client; with ``pair``, one that does not own its name."""
        if name not in self.pairs and pair is None:
            self.pairs[name] = KeyPair.new()
        curve = DialerCurve(pair or self.pairs[name], self.server.public)
        address = f"{HERE}:{port or self.relay.port}"
        link = ZmqDialer(
            address, name, None, curve if self.encrypted else None, self.failures.append
        )
        self.links.append(link)
        return link

    async def send(self, link, name, words):
        """Send, and wait until the server has it."""
        link.send("", Lane.CONTROL, [words])
        await until(lambda: (name, words) in self.got)

    def lane_of(self, name, infix=b"/c/"):
        """A plain client's control connection; or the first encrypted one beyond its handshake."""
        for connection in self.relay.connections:
            if self.encrypted and len(connection.frames[UP]) > HANDSHAKE:
                return connection
            if not self.encrypted and name.encode() + infix in bytes(connection.raw[UP]):
                return connection
        raise AssertionError("no such connection")


async def quiet(expected, seconds=QUIET_S):
    """Wait a moment, or until something forbidden was delivered."""
    with contextlib.suppress(TimeoutError):
        await until(expected, seconds)


async def play_again(port, connection, handshake):
    """Send all bytes of a recorded connection, waiting for answers where the client had waited."""
    reader, writer = await asyncio.open_connection(HERE, port)
    recorded = bytes(connection.raw[UP])
    sent = 64
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        writer.write(recorded[:64])
        async with asyncio.timeout(QUIET_S):
            await reader.readexactly(64)
        for number, frame in enumerate(connection.frames[UP]):
            writer.write(frame.data)
            sent += len(frame.data)
            if number < handshake:
                async with asyncio.timeout(QUIET_S):
                    await reader.readexactly(2)
        await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):  # uvloop raises it for a closed one
        writer.write(recorded[sent:])
        await writer.drain()
    return writer


@both
def test_a_replayed_connection(encrypted):
    """Handshake, HELLO and messages, byte by byte: a plain server gets everything twice."""

    async def main():
        async with World(encrypted=encrypted) as world:
            link = world.dial("victim")
            await world.send(link, "victim", b"delta")
            connection = world.lane_of("victim")
            before = list(world.got)
            # While the victim is there, and when it has gone.
            for goes in (False, True):
                if goes:
                    world.links.remove(link)
                    await link.aclose()
                    world.got[:] = before
                writer = await play_again(world.listener.port, connection, HANDSHAKE // 2)
                if encrypted:
                    await quiet(lambda: world.got != before)
                    assert world.got == before
                else:
                    await until(lambda: world.got == [*before, ("victim", b"delta")])
                writer.close()

    run(main())


@both
def test_a_replay_does_not_affect_sessions(encrypted):
    """No HELLO, no message, no session of the victim begins or ends.

    On plain nodes, where the bytes arrive, sessions ensure that: a HELLO must be newer than the
    last one.
    """

    async def main():
        events = []
        async with World(encrypted=encrypted) as world:
            link = world.dial("victim")

            def on_event(event):
                events.append(event)
                if isinstance(event, HelloReceived):
                    endpoint.welcome(event.peer, {})

            settings = TransportSettings()
            loop = asyncio.get_running_loop()
            endpoint = ListenerEndpoint(world.listener, loop, settings, on_event, "ps")
            up = []
            client = DialerEndpoint(link, loop, settings, up.append, "victim", incarnation=7)
            client.connect(dict)
            await until(lambda: any(isinstance(one, PeerUp) for one in up))
            client.send("", {"words": 1})
            await until(lambda: any(isinstance(one, MessageReceived) for one in events))
            connection = world.lane_of("victim")
            client.disconnect()
            await until(lambda: endpoint.peers == [])
            before = list(events)
            writer = await play_again(world.listener.port, connection, HANDSHAKE // 2)
            await quiet(lambda: events != before)
            assert events == before
            assert endpoint.peers == []
            writer.close()
            await client.aclose()
            await endpoint.aclose()

    run(main())


@pytest.mark.parametrize(("encrypted", "after"), [(True, 0), (True, HANDSHAKE), (False, HANDSHAKE)])
def test_two_crossed_connections(encrypted, after):
    """A's bytes on B's connection and the reverse, from the start or after honest handshakes."""

    async def main():
        async with World(encrypted=encrypted) as world:
            pairs = {}

            def cross(connection, way, frame):
                """Send what the clients send on the other client's connection of the same lane."""
                if way == DOWN or (after and not crossing.is_set()):
                    return None
                if not crossing.is_set():
                    held.append((connection, frame.data))
                    return []
                if connection not in pairs:
                    return None
                pairs[connection].send(UP, frame.data)
                return []

            held = []
            crossing = asyncio.Event()
            world.relay.trick = cross
            a, b = world.dial("a"), world.dial("b")
            if after:
                await world.send(a, "a", b"honest a")
                await world.send(b, "b", b"honest b")
            else:
                await until(lambda: len(world.relay.connections) == 4)
            lanes = list(world.relay.connections)
            if after:
                shaken = HANDSHAKE if encrypted else HANDSHAKE // 2
                first, second = (one for one in lanes if len(one.frames[UP]) > shaken)
                pairs.update({first: second, second: first})
            else:
                pairs.update(zip(lanes, [*lanes[2:], *lanes[:2]], strict=True))
            crossing.set()
            for connection, data in held:
                pairs[connection].send(UP, data)
            a.send("", Lane.CONTROL, [b"from a"])
            b.send("", Lane.CONTROL, [b"from b"])
            wrong = {("b", b"from a"), ("a", b"from b")}
            if encrypted:
                await until(lambda: after or world.listener.garbage)
                await quiet(lambda: wrong & set(world.got))
                assert not wrong & set(world.got)
            else:
                await until(lambda: wrong <= set(world.got))

    run(main())


@both
def test_a_piece_of_an_old_connection_in_a_new_one(encrypted):
    """A frame of the same client with the same key, spliced into its next connection."""

    async def main():
        async with World(encrypted=encrypted) as world:
            old = world.dial("victim")
            await world.send(old, "victim", b"yesterday")
            piece = world.lane_of("victim").frames[UP][-1].data
            world.links.remove(old)
            await old.aclose()
            world.relay.connections.clear()
            new = world.dial("victim")
            await world.send(new, "victim", b"today")
            world.lane_of("victim").send(UP, piece)
            words = lambda: [said for _, said in world.got]  # noqa: E731
            if encrypted:
                await quiet(lambda: words().count(b"yesterday") > 1)
                assert words() == [b"yesterday", b"today"]
            else:
                await until(lambda: words() == [b"yesterday", b"today", b"yesterday"])

    run(main())


@both
def test_posing_as_the_server(encrypted):
    """With its own key that accepts all: the client sends it nothing and tells its operator."""

    async def main():
        async with World(encrypted=encrypted) as world:
            received = []
            impostor = world.listen(
                ListenerCurve(KeyPair.new(), lambda _key: True),
                lambda peer, _lane, frames, _origin: received.append(bytes(frames[0])),
            )
            link = world.dial("victim", port=impostor.port)
            link.send("", Lane.CONTROL, [b"weights"])
            if encrypted:
                await until(lambda: world.failures)
                await quiet(lambda: received)
                assert received == []
                assert {failed.why for failed in world.failures} <= {CLOSED, "other"}
                server = Address(HERE, impostor.port, world.server.public)
                lines = [
                    at_client(failed, server, world.pairs["victim"].public, "victim")
                    for failed in world.failures
                ]
                assert any("its key is not the one in this address" in line for line in lines)
            else:
                await until(lambda: received == [b"weights"])

    run(main())


@both
@pytest.mark.parametrize("claims", ["its own key", "the victim's public key"])
def test_posing_as_a_client(encrypted, claims):
    """Under an allowed client's name, with a key of its own, or with the client's public key."""

    async def main():
        async with World(encrypted=encrypted) as world:
            honest = world.dial("victim")
            await world.send(honest, "victim", b"honest")
            own = KeyPair.new()
            if claims != "its own key":
                own = KeyPair(world.pairs["victim"].public, own.secret)
            world.failures.clear()
            liar = world.dial("victim", pair=own, port=world.listener.port)
            liar.send("", Lane.CONTROL, [b"forged"])
            if encrypted:
                await until(lambda: world.failures)
                await quiet(lambda: ("victim", b"forged") in world.got)
                assert world.got == [("victim", b"honest")]
            else:
                await until(lambda: ("victim", b"forged") in world.got)
            await world.send(honest, "victim", b"still here")

    run(main())
