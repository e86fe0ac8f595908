"""One suite for every link under the same endpoints: memory, ZeroMQ, encrypted, and by relays."""

import os

import pytest

from fsl_transport import (
    HeartbeatReceived,
    HelloReceived,
    MessageReceived,
    PeerDown,
    PeerUp,
    Refused,
    StreamDeclined,
    StreamFailed,
    StreamOffered,
    StreamReceived,
    StreamSent,
    Superseded,
    Unreachable,
)

pytestmark = pytest.mark.parametrize("world", ["mem", "zmq", "curve", "relay"], indirect=True)


def pair(world, **settings):
    ps = world.listener()
    client = world.dialer()
    world.until(lambda: client.count(PeerUp) and ps.count(PeerUp))
    return ps, client


def test_hello_and_welcome_carry_their_bodies(world):
    """A session starts with both bodies and both incarnations known on the other side."""
    ps = world.listener(incarnation=77)
    client = world.dialer(incarnation=10, hello=lambda: {"manifest": "abc"})
    world.until(lambda: client.count(PeerUp))
    assert ps.story == [
        HelloReceived("c", 10, {"manifest": "abc"}, "client", world.public("c")),
        PeerUp("c", 10, {"manifest": "abc"}),
    ]
    assert client.story == [PeerUp("", 77, {"run": "r"})]


def test_refuse_ends_the_calling(world):
    """A refused dialer reports it once and stops until the next connect()."""
    ps = world.listener()
    ps.on[HelloReceived] = lambda e: ps.endpoint.refuse(e.peer, "manifest", "layer w differs")
    client = world.dialer()
    world.until(lambda: client.count(Refused))
    assert client.story == [Refused("manifest", "layer w differs")]
    asked = ps.count(HelloReceived)
    world.run(5)
    assert ps.count(HelloReceived) == asked
    ps.on[HelloReceived] = lambda e: ps.endpoint.welcome(e.peer, {})
    client.endpoint.connect(dict)
    world.until(lambda: client.count(PeerUp))


def test_messages_arrive_in_order_both_ways(world):
    """In order, exactly once."""
    ps, client = pair(world)
    for number in range(500):
        client.endpoint.send("", {"n": number})
        ps.endpoint.send("c", {"m": number, "text": "x" * (number % 50)})
    world.until(lambda: ps.count(MessageReceived) >= 500 and client.count(MessageReceived) >= 500)
    world.run(3)
    assert [e.body["n"] for e in ps.all(MessageReceived)] == list(range(500))
    assert [e.body["m"] for e in client.all(MessageReceived)] == list(range(500))


def test_messages_survive_a_broken_connection(world):
    """A reconnect loses what was in flight; the session repairs it."""
    ps, client = pair(world)
    for number in range(300):
        client.endpoint.send("", {"n": number})
        ps.endpoint.send("c", {"n": number})
        if number in {50, 200}:
            world.reset(client)
        if number % 50 == 0:
            world.run(0.2)
    world.until(lambda: ps.count(MessageReceived) >= 300 and client.count(MessageReceived) >= 300)
    assert [e.body["n"] for e in ps.all(MessageReceived)] == list(range(300))
    assert [e.body["n"] for e in client.all(MessageReceived)] == list(range(300))
    assert not client.count(PeerDown)


def test_a_large_control_message(world):
    """A manifest of some megabytes is one message."""
    ps, client = pair(world)
    body = {"blob": os.urandom(3 << 20), "names": ["layer"] * 5000}
    client.endpoint.send("", body)
    world.until(lambda: ps.count(MessageReceived))
    assert ps.last(MessageReceived).body == body


def test_streams_both_ways_at_once(world, new_source, new_sink):
    """Bulk data arrives intact in both directions and is confirmed to the sender."""
    ps, client = pair(world)
    up = [os.urandom(200_000) for _ in range(40)]
    down = [os.urandom(100_000 + index) for index in range(60)]
    at_ps, at_client = new_sink(), new_sink()
    world.accept_all(ps, at_ps)
    world.accept_all(client, at_client)
    client.endpoint.offer("", "delta", {"tokens": 5}, new_source(up))
    ps.endpoint.offer("c", "update", {"version": 1}, new_source(down))
    world.until(lambda: client.count(StreamSent) and ps.count(StreamSent))
    assert at_ps.content == b"".join(up)
    assert at_client.content == b"".join(down)
    assert ps.all(StreamOffered) == [StreamOffered("c", "delta", {"tokens": 5}, 40)]
    assert ps.all(StreamReceived) == [StreamReceived("c", "delta")]
    assert client.all(StreamReceived) == [StreamReceived("", "update")]
    assert ps.endpoint.transfers() == []
    assert client.endpoint.transfers() == []


def test_credit_bounds_unwritten_bytes(world, new_source, new_sink):
    """A slow writer must hold back the sender; there are no high-water marks."""
    ps, client = pair(world)
    data = [bytes([index]) * 100_000 for index in range(60)]
    sink, source = new_sink(hold=True), new_source(data)
    world.accept_all(ps, sink)
    client.endpoint.offer("", "delta", {}, source)
    world.until(lambda: len(sink.got) == 10)
    world.run(20)
    assert len(sink.got) == 10  # 1 MiB of credit, chunks of 100,000 bytes
    assert len(source.reads) == 11  # one chunk is read ahead
    assert [t.done for t in ps.endpoint.transfers()] == [0]
    while not ps.count(StreamReceived):
        world.until(lambda: sink.waiting)
        sink.release(1)
    assert sink.content == b"".join(data)
    assert sink.most_unwritten <= 1 << 20
    assert source.reads == list(range(60))  # nothing was sent twice


def test_decline_and_cancel(world, new_source, new_sink):
    """Either side may end a stream, and the other one gets the reason."""
    ps, client = pair(world)
    ps.on[StreamOffered] = lambda e: ps.endpoint.decline(e.peer, e.stream_id, "known")
    client.endpoint.offer("", "a", {}, new_source([b"x"]))
    world.until(lambda: client.count(StreamDeclined))
    assert client.last(StreamDeclined) == StreamDeclined("", "a", "known")

    sink = new_sink(hold=True)
    world.accept_all(ps, sink)
    data = [b"y" * 100_000] * 50
    client.endpoint.offer("", "b", {}, new_source(data))
    world.until(lambda: sink.waiting)
    ps.endpoint.cancel("c", "b", "disk full")
    world.until(lambda: client.count(StreamFailed))
    assert client.last(StreamFailed) == StreamFailed("", "b", "disk full")

    sink = new_sink(hold=True)
    world.accept_all(ps, sink)
    client.endpoint.offer("", "c", {}, new_source(data))
    world.until(lambda: sink.waiting)
    client.endpoint.cancel("", "c", "newer one")
    world.until(lambda: ps.count(StreamFailed))
    assert ps.last(StreamFailed) == StreamFailed("c", "c", "newer one")
    sink.release()  # late confirmations of a dead stream are ignored
    world.run(1)
    assert not ps.count(StreamReceived)


def test_a_stream_resumes_at_the_chunk(world, new_source, new_sink):
    """After a lost session the application offers it again and pays only for missing chunks."""
    ps, client = pair(world)
    data = [bytes([index]) * 1000 for index in range(20)]
    sink, source = new_sink(), new_source(data)
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, sink, 15)
    client.endpoint.offer("", "delta", {}, source)
    world.until(lambda: client.count(StreamSent))
    assert source.reads == [15, 16, 17, 18, 19]
    assert sorted(sink.got) == source.reads


def test_a_stream_survives_broken_connections(world, new_source, new_sink):
    """Chunks lost with a connection are requested again, and none is written twice."""
    ps, client = pair(world)
    data = [os.urandom(100_000) for _ in range(60)]
    sink = new_sink(hold=True)
    world.accept_all(ps, sink)
    client.endpoint.offer("", "delta", {}, new_source(data))
    for wanted in (5, 25, 45):
        while len(sink.got) < wanted:
            world.until(lambda: sink.waiting)
            sink.release(1)
        world.reset(client)
    while not ps.count(StreamReceived):
        world.until(lambda: sink.waiting or ps.count(StreamReceived))
        sink.release()
    assert sink.content == b"".join(data)
    assert not ps.count(PeerDown)


def test_listener_restart_is_found_at_once(world):
    """A restarted listener holds no session: UNKNOWN brings the dialer back within a heartbeat."""
    ps, client = pair(world)
    world.kill(ps)
    again = world.listener(incarnation=2)
    client.endpoint.send("", {"lost": True})
    world.until(lambda: client.count(PeerUp) == 2)
    downs = client.all(PeerDown)
    assert [down.reason for down in downs] == ["reset"]
    assert client.last(PeerUp).incarnation == 2
    client.endpoint.send("", {"n": 1})
    world.until(lambda: again.count(MessageReceived))
    assert [e.body for e in again.all(MessageReceived)] == [{"n": 1}]


def test_a_relaunched_client_replaces_its_old_session(world):
    """Preemption: the new process must not wait until the old session expires."""
    ps, client = pair(world)
    world.kill(client)
    again = world.dialer(incarnation=20)
    world.until(lambda: again.count(PeerUp))
    assert [type(e) for e in ps.story] == [HelloReceived, PeerUp, PeerDown, HelloReceived, PeerUp]
    assert ps.all(PeerDown)[0].reason == "superseded"
    assert ps.all(PeerDown)[0].incarnation == 10
    assert ps.last(PeerUp).incarnation == 20


def test_clock_skew_does_not_lock_a_relaunched_client_out(world):
    """A lower incarnation that was never up raises itself above the known one."""
    ps, client = pair(world)
    world.kill(client)
    again = world.dialer(incarnation=3)
    world.until(lambda: again.count(PeerUp))
    assert again.endpoint.incarnation == 11
    assert ps.last(PeerUp).incarnation == 11


def test_a_remembered_incarnation_counts_as_seen(world):
    """A server restarted from its ledger must not accept an older incarnation of a name."""
    ps = world.listener()
    ps.endpoint.remember("c", 50)
    client = world.dialer(incarnation=10)
    world.until(lambda: client.count(PeerUp))
    assert client.endpoint.incarnation == 51
    assert [event.incarnation for event in ps.all(HelloReceived)] == [51]


def test_a_remembered_incarnation_reconnects_and_an_older_one_does_not(world):
    """After a restart the process in the ledger reconnects as itself; one before it stays out."""
    ps = world.listener()
    same, ghost = world.dialer("same", incarnation=50), world.dialer("ghost", incarnation=10)
    world.until(lambda: same.count(PeerUp) and ghost.count(PeerUp))
    world.kill(ps)
    again = world.listener(incarnation=2)
    again.endpoint.remember("same", 50)
    again.endpoint.remember("ghost", 11)
    same.endpoint.send("", {})
    ghost.endpoint.send("", {})
    world.until(lambda: same.count(PeerUp) == 2 and ghost.count(Superseded))
    assert same.endpoint.incarnation == 50
    assert [(e.peer, e.incarnation) for e in again.all(HelloReceived)] == [("same", 50)]


def test_equal_incarnation_is_a_reconnect(world):
    """The same process after a partition gets a new session."""
    ps, client = pair(world)
    world.cut(client)
    world.until(lambda: client.count(PeerDown) and ps.count(PeerDown))
    assert client.last(PeerDown).reason == "expired"
    assert ps.last(PeerDown).reason == "expired"
    world.heal(client)
    world.until(lambda: client.count(PeerUp) == 2)
    assert client.endpoint.incarnation == 10


def test_unreachable_is_reported_until_the_listener_answers(world):
    """A wrong address or a dead server must be visible, and recover by itself."""
    ps = world.listener()
    world.kill(ps)
    client = world.dialer()
    world.until(lambda: client.count(Unreachable) >= 2)
    first, second = client.all(Unreachable)[:2]
    assert second.seconds > first.seconds > 0
    assert first.address == client.endpoint.address
    world.listener(incarnation=2)
    world.until(lambda: client.count(PeerUp))


def test_bye(world):
    """It arrives at once, without waiting for expiry; the dialer stays away."""
    ps, client = pair(world)
    client.endpoint.disconnect("", "draining")
    world.until(lambda: ps.count(PeerDown))
    assert ps.last(PeerDown) == PeerDown("c", 10, "bye", "draining")
    world.run(5)
    assert ps.count(HelloReceived) == 1
    client.endpoint.connect(dict)
    world.until(lambda: client.count(PeerUp) == 2)


def test_bye_of_the_listener_is_a_loss(world):
    """A restarting server sends BYE; its clients must come back by themselves."""
    ps, client = pair(world)
    ps.endpoint.disconnect("c", "restart")
    world.until(lambda: client.count(PeerDown))
    assert client.last(PeerDown) == PeerDown("", 1, "bye", "restart")
    world.until(lambda: client.count(PeerUp) == 2)


def test_bye_is_sent_even_when_closed_at_once(world):
    """Every process ends with ``disconnect`` and ``close``: the BYE must be sent."""
    ps, client = pair(world)
    client.endpoint.disconnect("", "done")
    client.endpoint.close()
    world.until(lambda: ps.count(PeerDown), units=8)
    assert ps.last(PeerDown).reason == "bye"


def test_heartbeats_carry_payloads_both_ways(world):
    """They show a node that is alive but stuck."""
    ps = world.listener(beat_payload=lambda peer: {"members": 1, "to": peer})
    client = world.dialer(beat_payload=lambda peer: {"step": 4, "to": peer})
    world.until(lambda: client.count(PeerUp) and ps.count(PeerUp))
    world.until(lambda: ps.count(HeartbeatReceived) >= 2 and client.count(HeartbeatReceived) >= 2)
    assert ps.last(HeartbeatReceived) == HeartbeatReceived("c", {"step": 4, "to": ""})
    assert client.last(HeartbeatReceived) == HeartbeatReceived("", {"members": 1, "to": "c"})
    world.run(25)
    assert not ps.count(PeerDown)


@pytest.mark.parametrize("who", ["source", "sink"])
def test_a_failing_source_or_sink_ends_only_its_stream(world, new_source, new_sink, who):
    """A disk error on one side fails one stream on both, and the session goes on."""
    ps, client = pair(world)
    sink = new_sink(fail_at=3 if who == "sink" else None)
    world.accept_all(ps, sink)
    source = new_source([b"z" * 1000] * 9, fail_at=3 if who == "source" else None)
    client.endpoint.offer("", "delta", {}, source)
    world.until(lambda: client.count(StreamFailed) and ps.count(StreamFailed))
    assert client.last(StreamFailed).stream_id == "delta"
    client.endpoint.send("", {"n": 1})
    world.until(lambda: ps.count(MessageReceived))
    assert not ps.count(PeerDown)
    assert ps.endpoint.transfers() == []


def test_many_clients_do_not_disturb_each_other(world, new_source, new_sink):
    """Ten clients send at once: each stream arrives in its own sink."""
    world.unit_s *= 10  # ten at once on a busy machine are slow: a lost peer would send again
    ps = world.listener()
    sinks = {}

    def offered(event):
        sinks[event.peer] = sink = new_sink()
        ps.endpoint.accept(event.peer, event.stream_id, sink)

    ps.on[StreamOffered] = offered
    clients = [world.dialer(f"site-{index}.x_{index}", connect=False) for index in range(10)]
    for index, client in enumerate(clients):
        data = [bytes([index, chunk]) * 5000 for chunk in range(30)]
        client.on[PeerUp] = lambda e, c=client, d=data: c.endpoint.offer(
            "", "delta", {}, new_source(d)
        )
        client.endpoint.connect(dict)
    world.until(lambda: ps.count(StreamReceived) == 10)
    for index, client in enumerate(clients):
        expected = b"".join(bytes([index, chunk]) * 5000 for chunk in range(30))
        assert sinks[client.name].content == expected
    assert ps.endpoint.peers == [e.peer for e in ps.all(PeerUp)]
