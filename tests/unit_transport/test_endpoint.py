"""Endpoints over memory: timers, limits, misuse, events, protocol violations."""

import pytest

from fsl_transport import (
    Conditions,
    HelloReceived,
    Lane,
    LocalError,
    MessageReceived,
    PeerDown,
    PeerUp,
    Refused,
    StreamOffered,
)
from fsl_transport.session import frames


@pytest.fixture
def world(mem_world):
    return mem_world(Conditions(delay_s=0.02))


@pytest.fixture
def pair(world):
    ps = world.listener()
    client = world.dialer()
    world.until(lambda: client.count(PeerUp))
    return ps, client


def raw(world, name):
    """Return a link without an endpoint, for bytes no endpoint would send, and what it receives."""
    link, received = world.network.dialer(name, "ps"), []
    link.set_receiver(
        lambda peer, lane, parts, origin: received.append(frames.parse(parts, 1 << 20, 1 << 20))
    )
    return link, received


def test_events_are_never_nested(world):
    """An application that answers inside its handler must not be entered again meanwhile."""
    ps = world.listener()
    depth, deepest = [0], [0]
    queue = ps.endpoint._context.events
    take = queue._on_event

    def careful(event):
        depth[0] += 1
        deepest[0] = max(deepest[0], depth[0])
        take(event)
        depth[0] -= 1

    queue._on_event = careful
    client = world.dialer()
    world.until(lambda: client.count(PeerUp))
    assert [type(e) for e in ps.events] == [HelloReceived, PeerUp]
    assert deepest == [1]


def test_a_failing_handler_does_not_stop_the_endpoint(world):
    """Its exception goes to the loop; the next event is delivered all the same."""
    ps = world.listener()
    client = world.dialer()
    world.until(lambda: client.count(PeerUp))
    ps.on[MessageReceived] = lambda e: 1 // e.body["n"]
    client.endpoint.send("", {"n": 0})
    with pytest.raises(ZeroDivisionError):
        world.run(1)
    client.endpoint.send("", {"n": 1})
    world.run(1)
    assert ps.count(MessageReceived) == 2


def test_nothing_is_sent_without_a_session(world, new_source, new_sink):
    """An application need not check first: messages to an absent peer are dropped."""
    ps = world.listener()
    for node, peer in ((ps, "nobody"), (world.dialer(connect=False), "")):
        endpoint = node.endpoint
        endpoint.send(peer, {"n": 1})
        endpoint.offer(peer, "s", {}, new_source([b"x"]))
        endpoint.accept(peer, "s", new_sink())
        endpoint.decline(peer, "s", "x")
        endpoint.cancel(peer, "s", "x")
        endpoint.disconnect(peer, "x")
        assert endpoint.last_received_ago_s(peer) is None
    ps.endpoint.welcome("nobody", {})
    ps.endpoint.refuse("nobody", "x", "y")
    world.run(5)
    assert world.network.counts["sent"] == 0
    assert ps.events == []


def test_misuse_is_named(world, pair, new_source, new_sink):
    """Invalid arguments are a LocalError at the call."""
    ps, client = pair
    with pytest.raises(LocalError, match="str"):
        client.endpoint.send("", {1: 2})
    with pytest.raises(LocalError, match="msgpack"):
        client.endpoint.send("", {"x": object()})
    with pytest.raises(LocalError, match="stream"):
        client.endpoint.send("", {"x": b"x" * (5 << 20)})
    with pytest.raises(LocalError, match="stream id"):
        client.endpoint.offer("", "", {}, new_source([]))
    with pytest.raises(LocalError, match="own"):
        ps.endpoint.refuse("c", "superseded", "x")
    with pytest.raises(LocalError, match="name"):
        world.dialer("no/good")
    client.endpoint.offer("", "s", {}, new_source([b"x"] * 3))
    world.until(lambda: ps.count(StreamOffered))
    with pytest.raises(LocalError, match="chunk 4 of 3"):
        ps.endpoint.accept("c", "s", new_sink(), 4)
    ps.endpoint.accept("c", "s", new_sink(hold=True))
    with pytest.raises(LocalError, match="already"):
        ps.endpoint.accept("c", "s", new_sink())
    ps.endpoint.accept("c", "unknown", new_sink())
    assert not ps.count(PeerDown)


def test_garbage_from_unauthenticated_peers_is_counted_and_ignored(world, pair):
    """Whatever one sends, no session is affected."""
    ps, _client = pair
    link, received = raw(world, "unknown")
    for parts in ([b"junk"], [], [b"", b"", b""], [frames.pack((frames.UNKNOWN, b"1"), 99)]):
        link.send("", Lane.CONTROL, parts)
        link.send("", Lane.BULK, parts)
    world.run(1)
    assert ps.endpoint.garbage == 8
    assert received == []
    assert not ps.count(PeerDown)
    assert not ps.count(HelloReceived) - 1


def test_unauthenticated_peers_get_answers(world, pair):
    """UNKNOWN for a session from before a restart, a refusal for another protocol, else nothing."""
    link, received = raw(world, "unknown")
    pack = lambda *fields: frames.pack(fields, 1000)  # noqa: E731
    link.send("", Lane.CONTROL, [pack(frames.ACK, b"12345678", 0, False)])
    link.send("", Lane.CONTROL, [pack(frames.HELLO, 99, 5, 1, "future", "shape")])
    link.send("", Lane.CONTROL, [pack(frames.BYE, b"12345678", "x")])
    link.send("", Lane.BULK, [pack(frames.CHUNK, b"12345678", 1, 0, 0, 0, 1, 0, 1, True), b"x"])
    world.run(1)
    assert [type(message) for message in received] == [frames.Unknown, frames.Refuse]
    assert received[1].code == "protocol"


def test_protocol_mismatch_is_explained_to_the_dialer(world, monkeypatch):
    """Both versions in one text, on the side where a person waits."""
    world.listener()
    client = world.dialer(connect=False)
    monkeypatch.setattr(frames, "PROTOCOL_VERSION", 99)
    client.endpoint.connect(dict)
    monkeypatch.undo()
    world.until(lambda: client.count(Refused))
    assert client.last(Refused).code == "protocol"
    assert f"protocol {frames.PROTOCOL_VERSION}, the dialer 99" in client.last(Refused).text


def test_bad_bytes_cost_the_peer_its_session(world, pair):
    """It may come back, and other sessions are not affected."""
    ps, client = pair
    other = world.dialer("other")
    world.until(lambda: other.count(PeerUp))
    client.link.send("", Lane.CONTROL, [b"junk"])
    world.until(lambda: client.count(PeerUp) == 2)
    assert ps.last(PeerDown).reason == "protocol"
    assert ps.last(PeerDown).peer == "c"
    assert client.last(PeerDown).reason == "bye"
    assert not other.count(PeerDown)
    ps.link.send("c", Lane.BULK, [b"junk"])
    world.until(lambda: client.count(PeerUp) == 3)
    assert client.all(PeerDown)[-1].reason == "protocol"
    assert client.endpoint.garbage == 1


@pytest.mark.parametrize(
    "fields",
    [(frames.ACCEPT, 1, 5, 0, 0, 9), (frames.CREDIT, 1, 9, 0), (frames.DONE, 1)],
    ids=["accept", "credit", "done"],
)
def test_invalid_stream_operations_cost_the_session(world, pair, new_source, fields):
    """Operations that fit no stream state are the peer's error."""
    ps, client = pair
    client.endpoint.offer("", "s", {}, new_source([b"x"]))
    world.until(lambda: ps.count(StreamOffered))
    ps.endpoint._peers["c"].send_op(fields[0], fields[1:])
    world.until(lambda: client.count(PeerDown))
    assert client.last(PeerDown).reason == "protocol"


def test_offering_a_number_twice_costs_the_session(world, pair, new_source):
    """Numbers are the sender's own count; two streams with one number cannot be told apart."""
    ps, client = pair
    client.endpoint.offer("", "s", {}, new_source([b"x"]))
    client.endpoint._peer.send_op(frames.OFFER, (1, "t", 1, 0, {}))
    world.until(lambda: ps.count(PeerDown))
    assert ps.last(PeerDown).reason == "protocol"


def test_messages_on_the_wrong_lane(world, pair):
    """The lanes have different limits; a chunk cannot hide in the control lane."""
    ps, client = pair
    beat = frames.pack((frames.BYE, b"12345678", "x"), 1000)
    client.link.send("", Lane.BULK, [beat])
    world.until(lambda: ps.count(PeerDown) == 1)
    world.until(lambda: client.count(PeerUp) == 2)
    chunk = frames.pack((frames.CHUNK, b"12345678", 1, 0, 0, 0, 1, 0, 1, True), 1000)
    client.link.send("", Lane.CONTROL, [chunk, b"x"])
    world.until(lambda: ps.count(PeerDown) == 2)


def test_a_hello_under_another_name(world, pair):
    """The connection's name counts."""
    ps, _client = pair
    link, _heard = raw(world, "mallory")
    link.send(
        "",
        Lane.CONTROL,
        [frames.pack((frames.HELLO, frames.PROTOCOL_VERSION, 99, 1, "c", "x", {}), 1000)],
    )
    world.run(1)
    assert ps.endpoint.bad_messages == 1
    assert ps.count(HelloReceived) == 1
    assert not ps.count(PeerDown)


def test_only_small_messages_of_unauthenticated_peers_are_parsed(world):
    """Megabytes of msgpack from an unknown peer are not unpacked."""
    ps = world.listener()
    link, _ = raw(world, "unknown")
    body = {"x": b"x" * (300 * 1024)}
    link.send(
        "",
        Lane.CONTROL,
        [frames.pack((frames.HELLO, frames.PROTOCOL_VERSION, 9, 1, "unknown", "x", body), 1 << 20)],
    )
    world.run(1)
    assert ps.count(HelloReceived) == 0
    assert ps.endpoint.bad_messages == 1


def test_a_full_listener_refuses(world, new_settings):
    """The limit on sessions holds, and a place that becomes free can be taken."""
    ps = world.listener(settings=new_settings(max_sessions=2))
    first, _second, third = (world.dialer(name) for name in ("a", "b", "c"))
    world.until(lambda: third.count(Refused))
    assert third.last(Refused).code == "full"
    assert ps.endpoint.peers == ["a", "b"]
    first.endpoint.disconnect("", "x")
    world.run(1)
    third.endpoint.connect(dict)
    world.until(lambda: third.count(PeerUp))
    assert ps.endpoint.peers == ["b", "c"]


def test_remembered_names_are_bounded(world, new_settings):
    """Names come from outside: the oldest absent one is forgotten first."""
    ps = world.listener(settings=new_settings(max_sessions=2))
    stays = world.dialer("stays")
    for index in range(20):
        client = world.dialer(f"n{index}")
        world.until(lambda client=client: client.count(PeerUp))
        client.endpoint.disconnect("", "x")
        world.run(1)
    assert len(ps.endpoint._peers) == 8
    assert "stays" in ps.endpoint._peers
    assert not stays.count(PeerDown)


def test_a_remembered_incarnation_never_lowers_one_in_use(world, pair):
    """The ledger may hold less than an established session does, and its numbers are checked."""
    ps, client = pair
    ps.endpoint.remember("c", 99)
    ps.endpoint.remember("other", 20)
    ps.endpoint.remember("other", 5)
    assert ps.endpoint.peers == ["c"]
    client.endpoint.send("", {"n": 1})
    world.until(lambda: ps.count(MessageReceived))
    other = world.dialer("other", incarnation=10)
    world.until(lambda: other.count(PeerUp))
    assert other.endpoint.incarnation == 21
    for name, number in (("no/good", 1), ("a", -1), ("a", 1 << 62), ("a", True)):
        with pytest.raises(LocalError):
            ps.endpoint.remember(name, number)


def test_an_incarnation_out_of_range_is_refused(world, new_settings):
    """In the ledger it would prevent a restart, and no higher one could ever use the name."""
    ps = world.listener(settings=new_settings())
    limit = frames.INCARNATION_LIMIT
    hostile = world.dialer("hostile", incarnation=limit + 5)
    world.run(5)
    assert not ps.count(HelloReceived)
    assert not hostile.count(PeerUp)
    last = world.dialer("last", incarnation=limit - 1)
    world.until(lambda: last.count(PeerUp))
    ps.endpoint.remember("last", limit - 1)
    late = world.dialer("last", incarnation=limit - 2)
    world.until(lambda: late.count(Refused))
    assert "the highest possible" in late.last(Refused).text


def test_an_unanswered_hello_expires(world, new_settings):
    """An application that never answers must not use up all sessions."""
    ps = world.listener(settings=new_settings(max_sessions=1))
    ps.on.clear()
    client = world.dialer("a")
    world.until(lambda: ps.count(HelloReceived))
    client.endpoint.disconnect("", "x")
    world.run(15)
    assert ps.endpoint._present == {}


def test_bulk_alone_keeps_a_session_alive(world, pair, new_source, new_sink, intercept):
    """Chunks count as received: a path saturated by bulk is alive."""
    ps, client = pair
    sink = new_sink()
    world.accept_all(ps, sink)
    source = new_source([b"x" * 100] * 40, later=True)
    client.endpoint.offer("", "s", {}, source)
    world.until(lambda: source.waiting)
    # From now on all control messages of the client are lost.
    intercept(client, "flush", lambda plain: client.endpoint._machine.outbox.clear())
    for _ in range(20):
        world.run(1)
        while source.waiting:
            deliver, data = source.waiting.pop(0)
            deliver(data)
            break
    assert not ps.count(PeerDown)


def test_a_dialer_may_disconnect_while_it_handles_a_loss(world, pair):
    """The HELLO that was about to be sent must not be."""
    ps, client = pair
    client.on[PeerDown] = lambda e: client.endpoint.disconnect("", "x")
    world.kill(ps)
    again = world.listener(incarnation=2)
    world.until(lambda: client.count(PeerDown))
    assert client.last(PeerDown).reason == "reset"
    world.run(30)
    assert again.count(HelloReceived) == 0


def test_a_process_that_slept_reads_before_it_expires_peers(world, new_settings):
    """After a suspension the heartbeats wait in the sockets."""
    ps = world.listener()
    client = world.dialer(settings=new_settings(expire_after_s=100.0))
    world.until(lambda: client.count(PeerUp))
    deadlines = ps.endpoint._context.deadlines
    deadlines._timer.cancel()
    world.cut(client)
    world.run(15)
    world.heal(client)
    deadlines._on_timer()
    client.endpoint.send("", {"n": 1})
    world.run(5)
    assert ps.count(MessageReceived) == 1
    assert not ps.count(PeerDown)
    deadlines._timer.cancel()
    world.kill(client)
    world.run(15)
    deadlines._on_timer()
    world.run(1)
    assert ps.last(PeerDown).reason == "expired"


def test_close_is_silent_and_final(world, pair, new_source):
    """After close: no event, no timer, no message; a second close has no effect."""
    ps, client = pair
    client.endpoint.offer("", "s", {}, new_source([b"x"]))
    client.endpoint.close()
    client.endpoint.close()
    events = len(client.events)
    client.endpoint.send("", {"n": 1})
    client.endpoint._peer.emit(PeerUp("", 1, {}))
    sent = world.network.counts["sent"]
    world.until(lambda: ps.count(PeerDown))
    assert ps.last(PeerDown).reason == "expired"
    assert len(client.events) == events
    assert world.network.counts["sent"] == sent + 1  # the listener's acknowledgement of the offer
    assert world.scheduler.next_time() is None


def test_hello_bodies_are_fresh(world):
    """A client that trained on while the server was down reports what it has now."""
    version = [0]
    client_hello = lambda: {"version": version[0]}  # noqa: E731
    ps = world.listener()
    client = world.dialer(hello=client_hello)
    world.until(lambda: client.count(PeerUp))
    version[0] = 5
    ps.endpoint.disconnect("c", "x")
    world.until(lambda: client.count(PeerUp) == 2)
    assert [e.hello for e in ps.all(HelloReceived)] == [{"version": 0}, {"version": 5}]
