"""What only real sockets have: addresses, taken ports, foreign bytes, take-overs, closing."""

# ruff: noqa: ASYNC110 - a test polls for its condition

import asyncio
import contextlib
import os
import random
import secrets
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq

from fsl_transport import (
    HelloReceived,
    Lane,
    LocalError,
    MessageReceived,
    PeerDown,
    PeerUp,
    StreamReceived,
    StreamSent,
    Superseded,
)
from fsl_transport.loop import run
from fsl_transport.session import frames
from fsl_transport.zmq import pipe as zmq_pipe
from fsl_transport.zmq.link import ZmqDialer, ZmqListener, split_address

UNIT_S = 0.1 * float(os.environ.get("FSL_TEST_TIME_UNIT", "1"))


def test_addresses():
    """Both spellings, names, IPv4 and IPv6."""
    assert split_address("ps.example.org:7100", listening=False) == ("ps.example.org", 7100)
    assert split_address("tcp://10.0.0.1:7100", listening=False) == ("10.0.0.1", 7100)
    assert split_address("[::1]:7100", listening=False) == ("::1", 7100)
    assert split_address("[fe80::1%eth0]:1", listening=False) == ("fe80::1%eth0", 1)
    assert split_address("*:0", listening=True) == ("*", 0)


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":7100", "host:99999", "host:0", "*:7100", "a b:1", "udp://h:1", 7100],
)
def test_wrong_addresses(address):
    """A typing error must be reported before anything waits for a connection."""
    with pytest.raises(LocalError):
        split_address(address, listening=False)


def test_bind_errors_name_the_address():
    """The most common error of a first start."""

    async def main():
        first = ZmqListener("127.0.0.1:0")
        with pytest.raises(LocalError, match=f"port in use: 127.0.0.1:{first.port}"):
            ZmqListener(f"127.0.0.1:{first.port}")
        with pytest.raises(LocalError, match="no such address"):
            ZmqListener("192.0.2.1:0")
        with pytest.raises(LocalError, match="cannot listen"):
            ZmqListener("no-such-device:0")
        await first.aclose()

    run(main())


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("bind", "dial"),
    [
        ("127.0.0.1:0", "localhost:{}"),
        ("*:0", "127.0.0.1:{}"),
        pytest.param(
            "[::1]:0", "[::1]:{}", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6")
        ),
        pytest.param("*:0", "[::1]:{}", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6")),
    ],
)
def test_both_lanes_over_every_kind_of_address(bind, dial):
    """Names, IPv4 and IPv6; small and large frames; both directions; uvloop where installed."""

    async def main():
        big = os.urandom(1 << 20)
        got, origins = asyncio.Queue(), set()
        listener = ZmqListener(bind)
        dialer = ZmqDialer(dial.format(listener.port), "c")
        for link in (listener, dialer):
            link.set_receiver(
                lambda peer, lane, parts, origin: (
                    origins.add(origin),
                    got.put_nowait((peer, lane, [bytes(part) for part in parts])),
                )
            )
        dialer.send("", Lane.BULK, [b"ho"])
        dialer.send("", Lane.CONTROL, [b"hi"])
        first = [await got.get(), await got.get()]
        assert sorted(first) == [("c", Lane.CONTROL, [b"hi"]), ("c", Lane.BULK, [b"ho"])]
        (tag,) = origins  # the same for both connections of a dialer
        listener.send("c", Lane.BULK, [b"head", big], tag)
        listener.send("c", Lane.BULK, [b"head", big], b"01234567")
        listener.send("c", Lane.BULK, [b"head", big])
        listener.send("nobody", Lane.BULK, [b"head", big], tag)
        peer, lane, parts = await got.get()
        assert (peer, lane, parts) == ("", Lane.BULK, [b"head", big])
        dialer.send("", Lane.BULK, [b"head", memoryview(bytearray(big))])
        assert await got.get() == ("c", Lane.BULK, [b"head", big])
        assert listener.garbage == dialer.garbage == 0
        assert listener.dropped == 2
        assert origins == {tag, b""}
        await dialer.aclose()
        await listener.aclose()

    run(main())


def test_only_the_newest_control_message_waits_for_a_connection():
    """A server that starts after an hour must not get an hour of HELLOs, nor of bulk."""

    async def main():
        probe = socket.create_server(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        dialer = ZmqDialer(f"127.0.0.1:{port}", "c")
        for number in range(50):
            dialer.send("", Lane.CONTROL, [b"hello %d" % number])
            dialer.send("", Lane.BULK, [b"chunk", bytes(1 << 20)])
            await asyncio.sleep(0.001)
        got = []
        listener = ZmqListener(f"127.0.0.1:{port}")
        listener.set_receiver(lambda peer, lane, parts, origin: got.append((lane, bytes(parts[0]))))
        async with asyncio.timeout(100 * UNIT_S):
            while (Lane.CONTROL, b"hello 49") not in got:
                await asyncio.sleep(0.005)
        await asyncio.sleep(2 * UNIT_S)
        assert got.count((Lane.BULK, b"chunk")) == 3  # what fits into 4 MiB with its heads
        assert len(got) == 4
        await dialer.aclose()
        await listener.aclose()

    run(main())


def test_foreign_connections_are_counted(zmq_world):
    """Port scanners, browsers and TLS clients are ignored and counted; no session is affected."""
    ps = zmq_world.listener()
    client = zmq_world.dialer()
    zmq_world.until(lambda: client.count(PeerUp))
    # With one seed in thirty, the bytes look like an incomplete greeting.
    some = random.Random(1).randbytes
    greetings = [
        b"GET / HTTP/1.1\r\nHost: ps\r\n\r\n",
        b"\x16\x03\x01" + some(300),
        b"\xff" + some(200),
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + b"\x03\x01NOPE" + bytes(60),
        some(2000),
    ]
    for data in greetings:
        with socket.create_connection(("127.0.0.1", ps.link.port)) as foreign:
            foreign.sendall(data)
            zmq_world.run(1)
    zmq_world.until(lambda: ps.endpoint.garbage >= len(greetings) - 1)
    client.endpoint.send("", {"n": 1})
    zmq_world.until(lambda: ps.count(MessageReceived))
    assert not ps.count(PeerDown)


def test_an_unfinished_handshake_is_closed(monkeypatch):
    """A greeting alone costs a connection and shows no key."""
    assert zmq_pipe.HANDSHAKE_MS == 10_000, "docs/LIMITS.md"
    monkeypatch.setattr(zmq_pipe, "HANDSHAKE_MS", 300)

    async def main():
        link = ZmqListener("127.0.0.1:0")
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(b"\xff" + bytes(8) + b"\x7f\3\1" + b"NULL".ljust(20, b"\0") + bytes(32))
        async with asyncio.timeout(10):
            while await reader.read(1024):
                pass
        writer.close()
        await link.aclose()

    run(main())


def test_real_zmtp_with_garbage_inside(zmq_world):
    """A peer with ZeroMQ but another protocol: bad routing ids, bad heads, no frames, no lane."""
    ps = zmq_world.listener()
    client = zmq_world.dialer()
    zmq_world.until(lambda: client.count(PeerUp))
    with zmq.Context() as context:
        for routing_id in (None, b"x/c", b"x/q/00000000", b"../etc/c/00000000", b"x/c/01234567"):
            with context.socket(zmq.DEALER) as foreign:
                foreign.linger = 200
                if routing_id:
                    foreign.routing_id = routing_id
                foreign.connect(ps.endpoint.address)
                foreign.send_multipart([secrets.token_bytes(50)])
                foreign.send_multipart([b"", b"", b"", b""])
                zmq_world.run(1)
    zmq_world.until(lambda: ps.endpoint.garbage >= 10)
    assert ps.endpoint.garbage == 10
    client.endpoint.send("", {"n": 1})
    zmq_world.until(lambda: ps.count(MessageReceived))
    assert not ps.count(PeerDown)


def test_an_attacker_under_an_honest_name(zmq_world):
    """Any peer may use any name, but gets neither the session nor the answers of its holder."""
    ps = zmq_world.listener()
    client = zmq_world.dialer()
    zmq_world.until(lambda: client.count(PeerUp))
    pack = lambda *fields: frames.pack(fields, 1000)  # noqa: E731
    session = client.endpoint._machine.session.identity
    received = []
    with zmq.Context() as context:
        control, bulk = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        with control, bulk:
            control.linger = bulk.linger = 0
            control.routing_id, bulk.routing_id = b"c/c/01234567", b"c/b/01234567"
            for foreign in (control, bulk):
                foreign.connect(ps.endpoint.address)
                foreign.send(b"junk")
                foreign.send(pack(frames.BYE, session, "gone"))
            head = pack(frames.CHUNK, session, 1, 0, 99, 0, 1, 0, 1, True)
            bulk.send_multipart([head, b"x", frames.trailer(head)])
            control.send(pack(frames.DATA, session, 1, 9, frames.MESSAGE, {}))
            control.send(pack(frames.HELLO, frames.PROTOCOL_VERSION, 9, 1, "c", "client", {}))
            control.send(pack(frames.HELLO, frames.PROTOCOL_VERSION, 10, 1, "c", "client", {}))
            control.send(pack(frames.HELLO, frames.PROTOCOL_VERSION, 99, 1, "d", "client", {}))
            control.send(pack(frames.HELLO, 99, 99, 1))
            while len(received) < 3:
                zmq_world.until(lambda: control.poll(0))
                received.append(frames.parse([control.recv()], 1000, 1000))
            for number in range(20):
                ps.endpoint.send("c", {"n": number})
                client.endpoint.send("", {"n": number})
            zmq_world.until(lambda: client.count(MessageReceived) == 20)
            zmq_world.until(lambda: ps.count(MessageReceived) == 20)
            zmq_world.until(lambda: ps.endpoint.garbage == 4)  # two junk, BYE as bulk, wrong name
            assert not control.poll(0)
            assert not bulk.poll(0)
    assert [type(message) for message in received] == [frames.Unknown, frames.Refuse, frames.Refuse]
    assert [message.code for message in received[1:]] == ["superseded", "protocol"]
    assert ps.count(HelloReceived) == 1
    assert not ps.count(PeerDown)
    assert not client.count(PeerDown)


def test_a_late_welcome_is_for_the_connection_that_asked(zmq_world):
    """Whatever arrived under the name in between."""
    ps = zmq_world.listener()
    ps.on.clear()
    client = zmq_world.dialer()
    zmq_world.until(lambda: ps.count(HelloReceived))
    pack = lambda *fields: frames.pack(fields, 1000)  # noqa: E731
    with zmq.Context() as context, context.socket(zmq.DEALER) as foreign:
        foreign.linger = 0
        foreign.routing_id = b"c/c/01234567"
        foreign.connect(ps.endpoint.address)
        foreign.send(pack(frames.HELLO, frames.PROTOCOL_VERSION, 10, 1, "c", "client", {}))
        foreign.send(pack(frames.HELLO, frames.PROTOCOL_VERSION, 3, 1, "c", "client", {}))
        zmq_world.until(lambda: foreign.poll(0))
        ps.endpoint.welcome("c", {})
        zmq_world.until(lambda: client.count(PeerUp))
        assert frames.parse([foreign.recv()], 1000, 1000).code == "superseded"
        assert not foreign.poll(0)
    assert ps.count(HelloReceived) == 1


def test_a_peer_that_reads_nothing_costs_little(zmq_world, new_source):
    """It grants all credit and confirms pieces and chunks, but memory stays bounded."""
    ps = zmq_world.listener()
    client = zmq_world.dialer()
    zmq_world.until(lambda: client.count(PeerUp))
    pack = lambda *fields: frames.pack(fields, 1000)  # noqa: E731
    source = new_source([bytes(100_000)] * 2000)
    with zmq.Context() as context, context.socket(zmq.DEALER) as control:
        bulk = context.socket(zmq.DEALER)
        with bulk:
            for foreign, lane in ((control, b"c"), (bulk, b"b")):
                foreign.linger, foreign.rcvhwm = 0, 1
                foreign.routing_id = b"evil/" + lane + b"/01234567"
                foreign.connect(ps.endpoint.address)
            control.send(pack(frames.HELLO, frames.PROTOCOL_VERSION, 9, 1, "evil", "client", {}))
            zmq_world.until(lambda: control.poll(0))
            session = frames.parse([control.recv()], 1000, 0).session
            ps.endpoint.offer("evil", "s", {}, source)
            control.send(pack(frames.DATA, session, 1, 1, frames.ACCEPT, 1, 0, 0, 0, 1 << 62))
            zmq_world.until(lambda: len(source.reads) >= 3)
            zmq_world.run(1)
            assert len(source.reads) <= 6  # what an unmeasured stripe may carry
            stripe = ps.endpoint._peers["evil"].streams.outgoing._bulk._stripes[0]
            acked = written = 0
            seq = 1
            for _ in range(4000):
                if stripe.last_number > acked:
                    control.send(pack(frames.PIECE_ACK, session, 0, acked + 1, stripe.last_number))
                    acked = stripe.last_number
                sent = len(source.reads) - 3
                if sent > written:
                    written = sent
                    seq += 1
                    fields = (frames.CREDIT, 1, 1 << 62, written)
                    control.send(pack(frames.DATA, session, seq, 1, *fields))
                zmq_world.run(0.02)
                if ps.link.dropped > 20:
                    break
            assert ps.link.dropped > 20  # and not kept
            held = ps.link._pipes[0]._send_budget.size(b"evil/b/01234567")
            limit = ps.endpoint.settings.send_budget_bytes
            assert limit // 2 < held <= limit  # limited by bytes: 320 messages would be more
            client.endpoint.send("", {"n": 1})
            zmq_world.until(lambda: ps.count(MessageReceived))
    assert not client.count(PeerDown)


def test_sent_bytes_leave_the_send_budget(zmq_world, new_source, new_sink):
    """A long transfer to an honest peer is many times the limit, and nothing of it is dropped."""
    ps = zmq_world.listener()
    client = zmq_world.dialer()
    zmq_world.until(lambda: client.count(PeerUp))
    source, sink = new_source([bytes([n % 256]) * 100_000 for n in range(300)]), new_sink()
    zmq_world.accept_all(client, sink)
    ps.endpoint.offer("c", "s", {}, source)
    zmq_world.until(lambda: ps.count(StreamSent), units=1000)
    assert ps.link.dropped == 0
    assert len(source.reads) == 300


def test_a_flood_of_small_frames_only_blocks_its_sender(zmq_world):
    """Without a receive limit an attacker's queue grows as fast as its path allows."""
    ps = zmq_world.listener()
    client = zmq_world.dialer()
    zmq_world.until(lambda: client.count(PeerUp))
    with zmq.Context() as context, context.socket(zmq.DEALER) as foreign:
        foreign.linger, foreign.sndhwm = 0, 1000
        foreign.routing_id = b"x/c/01234567"
        foreign.connect(ps.endpoint.address)
        with contextlib.suppress(zmq.Again):  # the listener does not read during this loop
            for sent in range(10_000_000):
                foreign.send(bytes(8000), zmq.DONTWAIT if sent > 500 else 0)
                if sent % 500 == 0:
                    time.sleep(0.01)
        assert sent < 5000  # its own queue, the kernel's buffers, and 64
        client.endpoint.send("", {"n": 1})
        zmq_world.until(lambda: ps.count(MessageReceived))
    assert not ps.count(PeerDown)


def test_a_frame_over_the_limit_breaks_only_its_connection(zmq_world, new_settings):
    """MAXMSGSIZE stops a huge frame before it is allocated."""
    ps = zmq_world.listener()
    client = zmq_world.dialer()
    zmq_world.until(lambda: client.count(PeerUp))
    with zmq.Context() as context, context.socket(zmq.DEALER) as foreign:
        foreign.linger = 0
        foreign.routing_id = b"x/c/01234567"
        foreign.connect(ps.endpoint.address)
        foreign.send(bytes(6 << 20))
        zmq_world.run(3)
    client.endpoint.send("", {"n": 1})
    zmq_world.until(lambda: ps.count(MessageReceived))
    assert ps.endpoint.bad_messages == 0


def test_the_older_of_two_processes_is_superseded(zmq_world):
    """Two processes of one name: the older one gets the reason and stops."""
    ps = zmq_world.listener()
    old = zmq_world.dialer()
    zmq_world.until(lambda: old.count(PeerUp))
    new = zmq_world.dialer(incarnation=20)
    zmq_world.until(lambda: new.count(PeerUp) and old.count(Superseded), units=30)
    assert old.last(PeerDown).reason == "reset"
    new.endpoint.send("", {"n": 1})
    zmq_world.until(lambda: ps.count(MessageReceived))
    assert ps.last(PeerUp).incarnation == 20
    assert not new.count(PeerDown)


def test_a_saturated_bulk_lane_does_not_delay_control(zmq_world, new_source, new_sink):
    """While a slow sink blocks megabytes, messages and heartbeats pass."""
    ps = zmq_world.listener()
    client = zmq_world.dialer()
    zmq_world.until(lambda: client.count(PeerUp))
    sink = new_sink(hold=True)
    zmq_world.accept_all(ps, sink)
    client.endpoint.offer("", "s", {}, new_source([bytes(200_000)] * 50))
    zmq_world.until(lambda: len(sink.got) == 5)
    client.endpoint.send("", {"n": 1})
    zmq_world.until(lambda: ps.count(MessageReceived), units=5)
    while not ps.count(StreamReceived):
        zmq_world.until(lambda: sink.waiting)
        sink.release()


def test_closing_leaves_nothing_behind():
    """Sockets, tasks, threads and file descriptors are all gone after ``aclose``."""

    async def one():
        listener = ZmqListener("127.0.0.1:0")
        dialer = ZmqDialer(f"127.0.0.1:{listener.port}", "c")
        dialer.send("", Lane.CONTROL, [b"x"])
        await asyncio.sleep(0.05)
        dialer.redial()
        await dialer.aclose()
        dialer.redial()
        dialer.send("", Lane.CONTROL, [b"x"])
        await listener.aclose()
        await listener.aclose()
        assert len(asyncio.all_tasks()) == 1

    run(one())  # makes what is made once per process
    table = Path("/proc/self/fd")
    before = len(list(table.iterdir())) if table.is_dir() else 0
    for _ in range(3):
        run(one())
    if before:
        assert len(list(table.iterdir())) <= before
    assert [t for t in threading.enumerate() if t.name.startswith("fsl")] == []


def test_a_link_closes_while_python_ends(monkeypatch):
    """From 3.12 on no thread starts then: a script without fed.close() ended with an error."""

    async def one():
        dialer = ZmqDialer("127.0.0.1:9", "c")
        await asyncio.sleep(0.01)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        await dialer.aclose()
        monkeypatch.undo()

    def refuse(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    run(one())


def test_run_returns_the_result_on_any_loop(monkeypatch):
    """Uvloop is optional."""

    async def main():
        return type(asyncio.get_running_loop()).__module__

    run(main())
    monkeypatch.setitem(__import__("sys").modules, "uvloop", None)
    assert run(main()).startswith("asyncio")
