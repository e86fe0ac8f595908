"""Encrypted links: access by key, failed handshakes at both ends, revoked keys."""

import asyncio
import contextlib

import pytest
import zmq
import zmq.asyncio
from waiting import until

from fsl_transport import (
    HelloReceived,
    LocalError,
    MessageReceived,
    PeerDown,
    PeerUp,
    Refused,
)
from fsl_transport.loop import run
from fsl_transport.zmq import curve as cv
from fsl_transport.zmq.curve import DialerCurve, HandshakeFailed, KeyPair, ListenerCurve
from fsl_transport.zmq.link import ZmqDialer, ZmqListener

KEY = bytes(range(32))


def test_a_pair_is_made_read_back_and_keeps_its_secret():
    """A log line or traceback that shows a pair must not reveal the secret key."""
    pair = KeyPair.new()
    assert KeyPair.of_secret(pair.secret) == pair
    assert pair.public in repr(pair)
    assert pair.secret not in repr(pair)
    assert KeyPair.new() != pair


@pytest.mark.parametrize(
    "text",
    ["", "a" * 39, "a" * 41, "a" * 39 + '"', "#" * 40, "0" * 40, " " + "a" * 39, "ä" * 40, None, 7],
)
def test_what_is_no_key(text):
    """Wrong length or alphabet, groups beyond 32 bits, and the point whose secrets are public."""
    assert not cv.is_key(text)
    with pytest.raises(LocalError):
        DialerCurve(KeyPair.new(), text)
    with pytest.raises(LocalError):
        KeyPair.of_secret(text)


@contextlib.asynccontextmanager
async def linked(allowed, *, pair=None, server_key=None, encrypted=True):
    """A listener and a dialer; the messages and failures that they report."""
    server, told_server, told_client, got = KeyPair.new(), [], [], []
    listener_curve = ListenerCurve(server, lambda key: key in allowed) if encrypted else None
    listener = ZmqListener("127.0.0.1:0", None, listener_curve, told_server.append)
    listener.set_receiver(lambda *message: got.append(message))
    curve = None if pair is None else DialerCurve(pair, server_key or server.public)
    dialer = ZmqDialer(f"127.0.0.1:{listener.port}", "c", None, curve, told_client.append)
    dialer.send("", 0, [b"hello"])
    try:
        yield got, told_server, told_client, listener, dialer
    finally:
        await dialer.aclose()
        await listener.aclose()


def test_an_unknown_key_is_reported_at_both_ends_and_accepted_once_allowed():
    """Enrolling a site: it connects as soon as its key is allowed, without a restart."""

    async def main():
        pair, allowed = KeyPair.new(), set()
        async with linked(allowed, pair=pair) as (got, told_server, told_client, _, _):
            await until(lambda: told_server and told_client)
            assert told_server[0] == HandshakeFailed("unknown-key", pair.public, "127.0.0.1")
            assert told_client[0] == HandshakeFailed("unknown-key")
            assert not got
            allowed.add(pair.public)
            await until(lambda: got)

    run(main())


def test_a_failing_callback_does_not_stop_the_handler():
    """A bug in a report about one peer must not keep out the sites."""

    async def main():
        problems, got = [], []
        asyncio.get_running_loop().set_exception_handler(
            lambda _loop, context: problems.append(context["exception"])
        )

        def broken(_failed):
            raise ZeroDivisionError

        server, good, bad = KeyPair.new(), KeyPair.new(), KeyPair.new()
        curve = ListenerCurve(server, {good.public}.__contains__)
        listener = ZmqListener("127.0.0.1:0", None, curve, broken)
        listener.set_receiver(lambda *message: got.append(message))
        address = f"127.0.0.1:{listener.port}"
        unknown = ZmqDialer(address, "s", None, DialerCurve(bad, server.public))
        await until(lambda: problems)
        dialer = ZmqDialer(address, "c", None, DialerCurve(good, server.public))
        dialer.send("", 0, [b"hello"])
        await until(lambda: got)
        assert isinstance(problems[0], ZeroDivisionError)
        for link in (unknown, dialer, listener):
            await link.aclose()

    run(main())


def test_another_server_key_is_reported_at_both_ends():
    """An invite of another server, or a man in the middle; libzmq is silent (pyzmq #1706)."""

    async def main():
        pair = KeyPair.new()
        other = KeyPair.new().public
        async with linked({pair.public}, pair=pair, server_key=other) as (
            got,
            at_server,
            at_client,
            *_,
        ):
            await until(lambda: at_server and at_client)
            assert at_server[0] == HandshakeFailed("server-key")
            assert at_client[0] == HandshakeFailed("closed")
            assert not got

    run(main())


@pytest.mark.parametrize("encrypted", [True, False])
def test_only_one_side_encrypts(encrypted):
    """An old invite without a key, or a server with --insecure: both sides must report it."""

    async def main():
        pair = None if encrypted else KeyPair.new()
        async with linked(set(), pair=pair, encrypted=encrypted) as (got, at_server, at_client, *_):
            await until(lambda: HandshakeFailed("mechanism") in at_server)
            await until(lambda: {failed.why for failed in at_client} & {"mechanism", "closed"})
            assert not got

    run(main())


def test_messages_of_a_revoked_key_are_dropped_at_once():
    """ZAP is asked at the handshake only, so each message must be checked."""

    async def main():
        pair = KeyPair.new()
        allowed = {pair.public}
        async with linked(allowed, pair=pair) as (got, _, _, listener, dialer):
            await until(lambda: got)
            got.clear()
            allowed.clear()
            for lane in (0, 1):
                dialer.send("", lane, [b"more"])
            await until(lambda: listener.revoked == 2)
            assert not got

    run(main())


def test_no_connection_is_accepted_without_a_zap_handler():
    """Without a handler, libzmq accepts all by default."""

    async def main():
        pair, server = KeyPair.new(), KeyPair.new()
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        ListenerCurve(server, lambda _key: True).prepare(socket)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        dialer = ZmqDialer(f"127.0.0.1:{port}", "c", None, DialerCurve(pair, server.public))
        dialer.send("", 0, [b"hello"])
        assert not await socket.poll(500)
        await dialer.aclose()
        context.destroy(0)

    run(main())


def test_a_revoked_session_ends_at_both_ends_and_the_others_go_on(curve_world):
    """One site's key is stolen; other sites must not be affected."""
    world = curve_world
    ps = world.listener()
    bad, good = world.dialer("bad"), world.dialer("good")
    world.until(lambda: bad.count(PeerUp) and good.count(PeerUp))
    world.allowed.discard(world.public("bad"))
    assert ps.endpoint.evict(lambda key: key in world.allowed) == ["bad"]
    world.until(lambda: bad.count(Refused))
    assert bad.last(Refused).code == "revoked"
    assert [(down.peer, down.reason) for down in ps.all(PeerDown)] == [("bad", "revoked")]
    good.endpoint.send("", {"n": 1})
    world.until(lambda: ps.count(MessageReceived))
    assert ps.last(MessageReceived).peer == "good"
    assert not good.count(PeerDown)
    bad.endpoint.connect(dict)
    world.run(20)
    assert ps.count(HelloReceived) == 2
    assert ps.endpoint.evict(lambda key: key in world.allowed) == []


def test_a_name_refused_for_its_key_does_not_affect_its_holder(curve_world):
    """Otherwise any allowed site could replace another one by its name and a later incarnation."""
    world = curve_world
    ps = world.listener()
    holder = world.dialer("c", incarnation=10)
    world.until(lambda: holder.count(PeerUp))
    held = {"c": world.public("c")}
    ps.endpoint._admit = lambda name, key: None if held[name] == key else ("name", "not yours")
    world.pairs.pop("c")
    thief = world.dialer("c", incarnation=20)
    world.until(lambda: thief.count(Refused))
    assert thief.last(Refused) == Refused("name", "not yours")
    holder.endpoint.send("", {"n": 1})
    world.until(lambda: ps.count(MessageReceived))
    assert not ps.count(PeerDown)
    assert ps.endpoint.key("c") == held["c"]


def test_a_refused_dialer_comes_back_many_times():
    """After libzmq gave up a connection, dialing again must neither leak nor break the socket."""

    async def main():
        pair, allowed = KeyPair.new(), set()
        async with linked(allowed, pair=pair) as (got, told_server, _, _, dialer):
            for count in range(1, 30):
                await until(lambda seen=2 * count: len(told_server) >= seen)
                for pipe in dialer._pipes:
                    dialer._dial_again(pipe)
            allowed.add(pair.public)
            await until(lambda: got)

    run(main())
