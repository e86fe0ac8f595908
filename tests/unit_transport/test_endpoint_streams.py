"""Streams through endpoints over memory: limits, sharing, slow sources, slow paths, slow sinks."""

import msgpack
import pytest

from fsl_transport import (
    Conditions,
    PeerDown,
    PeerUp,
    StreamDeclined,
    StreamFailed,
    StreamOffered,
    StreamReceived,
    StreamSent,
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


def test_empty_and_finished_streams(world, pair, new_source, new_sink):
    """No chunks at all, or none left to send: both are complete at once."""
    ps, client = pair
    source = new_source([b"x"] * 3)
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, new_sink(), e.chunks)
    client.endpoint.offer("", "empty", {}, new_source([]))
    client.endpoint.offer("", "finished", {}, source)
    world.until(lambda: client.count(StreamSent) == 2)
    assert [e.stream_id for e in ps.all(StreamReceived)] == ["empty", "finished"]
    assert source.reads == []


def test_offering_again_replaces(world, pair, new_source, new_sink):
    """A stream is restarted under the same id: the old one fails, the new one arrives."""
    ps, client = pair
    sinks = [new_sink(hold=True), new_sink()]
    left = list(sinks)
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, left.pop(0))
    client.endpoint.offer("", "s", {}, new_source([b"old"] * 3))
    world.until(lambda: len(sinks[0].got) == 3)
    client.endpoint.offer("", "s", {}, new_source([b"new"] * 3))
    world.until(lambda: client.count(StreamSent))
    sinks[0].release()
    world.run(1)
    assert [e.reason for e in ps.all(StreamFailed)] == ["offered again"]
    assert ps.count(StreamReceived) == 1
    assert sinks[1].content == b"newnewnew"


def test_an_id_that_is_offered_twice_on_the_wire(world, pair, new_source):
    """The receiver keeps one stream per id even if a sender does not stop the old one."""
    ps, client = pair
    client.endpoint.offer("", "s", {}, new_source([b"x"]))
    client.endpoint._peer.send_op(frames.OFFER, (2, "s", 1, 0, {}))
    world.until(lambda: ps.count(StreamOffered) == 2)
    assert ps.count(StreamFailed) == 1
    assert len(ps.endpoint.transfers()) == 1


def test_too_many_streams_are_declined(world, new_settings, new_source):
    """One peer's offers must not fill the receiver's tables."""
    ps = world.listener(settings=new_settings(max_streams=2))
    client = world.dialer()
    world.until(lambda: client.count(PeerUp))
    for name in "abc":
        client.endpoint.offer("", name, {}, new_source([b"x"]))
    world.until(lambda: client.count(StreamDeclined))
    assert client.last(StreamDeclined).stream_id == "c"
    assert [e.stream_id for e in ps.all(StreamOffered)] == ["a", "b"]


def test_a_chunk_over_the_limit_fails_its_stream_at_the_sender(world, pair, new_source, new_sink):
    """The receiver would end the whole session for it."""
    ps, client = pair
    world.accept_all(ps, new_sink())
    client.endpoint.offer("", "s", {}, new_source([b"x" * (1 << 19)]))
    world.until(lambda: client.count(StreamFailed) and ps.count(StreamFailed))
    assert "over the limit" in client.last(StreamFailed).reason
    assert not ps.count(PeerDown)


def test_many_streams_share_the_budget(world, new_settings, new_source, new_sink):
    """A thousand clients at once must not each get four megabytes of memory."""
    small = new_settings(receive_budget_bytes=1 << 20, chunk_limit_bytes=1 << 16)
    ps = world.listener(settings=small)
    sinks = []

    def offered(event):
        sinks.append(new_sink(hold=True))
        ps.endpoint.accept(event.peer, event.stream_id, sinks[-1])

    ps.on[StreamOffered] = offered
    for index in range(8):
        client = world.dialer(f"c{index}", settings=small)
        world.until(lambda client=client: client.count(PeerUp))
        client.endpoint.offer("", "s", {}, new_source([b"x" * 50_000] * 100))
        world.run(2)
    held = [sink.unwritten for sink in sinks]
    assert held[0] > 900_000  # the first had the budget for itself
    assert held[-1] <= 1 << 17
    for _ in range(60):
        for sink in sinks:
            sink.release()
        world.run(0.2)
    assert sum(sink.unwritten for sink in sinks) <= 3 << 19
    assert ps.endpoint.receive_budget.streams == 8 - ps.count(StreamReceived)


def test_a_slow_source_survives_the_stall_timeout(world, pair, new_source, new_sink):
    """An encoder that needs longer than ``stall_s`` per chunk must still make progress."""
    ps, client = pair
    sink = new_sink()
    world.accept_all(ps, sink)
    source = new_source([bytes([index]) for index in range(4)], later=True)
    client.endpoint.offer("", "s", {}, source)
    for _ in range(4):
        world.until(lambda: source.waiting)
        world.run(20)
        deliver, data = source.waiting.pop(0)
        deliver(data)
    world.until(lambda: client.count(StreamSent))
    assert sink.content == bytes(range(4))
    assert source.reads == [0, 1, 2, 3]


def test_a_slow_path_is_not_filled_with_retransmissions(world, new_source, new_sink):
    """A chunk that takes longer than ``stall_s`` to arrive is late, not lost."""
    ps = world.listener()
    world.network.set_conditions("c", "ps", Conditions(delay_s=0.02, bytes_per_s=2000))
    client = world.dialer()
    world.until(lambda: client.count(PeerUp))
    sink, source = new_sink(), new_source([b"x" * 20_000] * 30)  # 10 s a chunk, stall_s is 3 s
    world.accept_all(ps, sink)
    client.endpoint.offer("", "s", {}, source)
    world.until(lambda: client.count(StreamSent), units=3000)
    assert len(sink.got) == 30
    assert len(source.reads) < 120


def test_a_loss_in_the_middle_and_at_the_end(world, pair, new_source, new_sink, intercept):
    """A gap is repaired at once, a lost tail by the stall timeout."""
    ps, client = pair
    sink, source = new_sink(), new_source([bytes([index]) for index in range(6)])
    world.accept_all(ps, sink)
    lost = {2, 5}

    def lossy(plain, stripe, parts):
        if len(parts) == 2 and parts[1][0] in lost:
            lost.discard(parts[1][0])
        else:
            plain(stripe, parts)

    intercept(client, "send_bulk", lossy)
    client.endpoint.offer("", "s", {}, source)
    world.until(lambda: client.count(StreamSent))
    assert sink.content == bytes(range(6))
    assert lost == set()


@pytest.fixture
def quiet_pair(world, new_settings):
    """Two ends whose sessions have no timers that could help a stream by chance."""
    quiet = new_settings(heartbeat_every_s=100.0, expire_after_s=400.0, retransmit_after_s=50.0)
    ps = world.listener(settings=quiet)
    client = world.dialer(settings=quiet)
    world.until(lambda: client.count(PeerUp))
    return ps, client


def lost_piece(head):
    """Return a piece that arrives and is dropped, because its stream is over."""
    fields = msgpack.unpackb(head)
    fields[2] = 0
    return (msgpack.packb(fields), b"x")


@pytest.mark.parametrize("hold", [False, True])
def test_the_stall_timeout_is_armed(world, quiet_pair, new_source, new_sink, *, intercept, hold):
    """A lost tail is requested after ``stall_s``, counted from the end of the last write."""
    ps, client = quiet_pair
    sink, source = new_sink(hold=hold), new_source([b"a", b"b"])
    world.accept_all(ps, sink)
    # Lost without the stripes detecting it, as if the receiver had dropped it for lack of credit.
    restore = intercept(
        client,
        "send_bulk",
        lambda plain, stripe, parts: plain(
            stripe, parts if parts[-1] == b"a" else lost_piece(parts[0])
        ),
    )
    client.endpoint.offer("", "s", {}, source)
    world.until(lambda: sink.got)
    restore()
    if hold:
        world.run(20)
        assert source.reads == [0, 1]
        sink.release()
    world.run(2.5)
    assert source.reads == [0, 1]
    world.run(1)
    assert source.reads == [0, 1, 1]
    sink.release()
    world.run(0.2)
    assert client.count(StreamSent)


def test_eager_chunks_save_a_round_trip(world, pair, new_source, new_sink):
    """A small upload over a long path should take one delay, not three."""
    ps, client = pair
    sinks = {"eager": new_sink(), "late": new_sink()}
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, sinks[e.stream_id])
    took = {}
    for name, eager in (("eager", 1 << 16), ("late", 0)):
        begun = world.scheduler.time()
        client.endpoint.offer("", name, {}, new_source([b"abc", b"de"]), eager)
        world.until(lambda name=name: any(e.stream_id == name for e in ps.all(StreamReceived)))
        took[name] = world.scheduler.time() - begun
        world.run(1)
    assert sinks["eager"].content == sinks["late"].content == b"abcde"
    assert took["eager"] == pytest.approx(0.02, abs=0.001)
    assert took["late"] == pytest.approx(0.06, abs=0.001)
    assert client.count(StreamSent) == 2


def test_eager_bytes_are_bounded_over_all_streams(world, new_settings, new_source, new_sink):
    """What is not accepted yet waits in the receiver's memory."""
    settings = new_settings(eager_bytes=1000)
    ps, client = world.listener(settings=settings), world.dialer(settings=settings)
    world.until(lambda: client.count(PeerUp))
    sources = {name: new_source([bytes(300)] * 4) for name in "abc"}
    for name, source in sources.items():
        client.endpoint.offer("", name, {}, source, 700)
    world.run(1)
    kept = ps.endpoint._peers["c"].streams.incoming._eager._kept
    assert {number: len(chunks) for number, chunks in kept.items()} == {1: 2, 2: 1}
    ps.endpoint.decline("c", "b", "no")
    assert 2 not in kept
    for name in "ac":
        ps.endpoint.accept("c", name, new_sink())
    world.until(lambda: client.count(StreamSent) == 2)
    assert not kept
    assert sources["a"].reads == [0, 1, 2, 3]  # nothing was read again


def test_eager_chunks_may_overtake_their_offer(world, pair, new_source, new_sink, intercept):
    """They travel on another connection."""
    ps, client = pair
    sink = new_sink()
    world.accept_all(ps, sink)
    held = []
    restore = intercept(client, "send_op", lambda plain, *operation: held.append(operation))
    client.endpoint.offer("", "s", {}, new_source([b"abc"] * 3), 1 << 16)
    world.run(1)
    assert not sink.got
    restore()
    begun = world.scheduler.time()
    for operation in held:
        client.endpoint._peer.send_op(*operation)
    world.until(lambda: client.count(StreamSent))
    assert sink.content == b"abc" * 3
    assert world.scheduler.time() - begun < 0.1  # no timeout was needed


@pytest.mark.parametrize("first", [1, 3])
def test_a_receiver_may_have_some_of_it_already(world, pair, new_source, new_sink, first):
    """A delta resumes where it stopped, eager or not."""
    ps, client = pair
    sink = new_sink()
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, sink, first)
    client.endpoint.offer("", "s", {}, new_source([bytes([65 + n]) * 9 for n in range(5)]), 20)
    world.until(lambda: client.count(StreamSent))
    assert sink.content == b"".join(bytes([65 + n]) * 9 for n in range(first, 5))


def test_invalid_eager_bytes_are_the_peers_error(world, pair, new_sink):
    """They are checked at ACCEPT, but must not raise in the application's call."""
    ps, client = pair
    client.endpoint._peer.send_op(frames.OFFER, (1, "s", 2, 0, {}))
    world.until(lambda: ps.count(StreamOffered))
    eager = frames.Chunk(b"", 1, 0, 7, 0, 5, 0, 1, False, b"12345")
    ps.endpoint._peers[client.name].streams.handle_bulk(eager, world.scheduler.time())
    ps.endpoint.accept(client.name, "s", new_sink())
    assert [event.reason for event in ps.all(PeerDown)] == ["protocol"]
    ps.endpoint.accept(client.name, "s", new_sink())


def test_eager_bytes_that_did_not_fit_are_requested_again(
    world, new_settings, new_source, new_sink
):
    """The receiver neither keeps more than its own limit nor waits for the stall timeout."""
    ps = world.listener(settings=new_settings(eager_bytes=400))
    client = world.dialer()
    world.until(lambda: client.count(PeerUp))
    sink = new_sink()
    client.endpoint.offer("", "s", {}, new_source([bytes(300)] * 6), 1 << 16)
    world.run(1)
    begun = world.scheduler.time()
    ps.endpoint.accept("c", "s", sink)
    world.until(lambda: client.count(StreamSent))
    assert len(sink.content) == 1800
    assert world.scheduler.time() - begun < 1.0


@pytest.mark.parametrize("seed", range(6))
def test_eager_chunks_over_a_bad_path(mem_world, new_source, new_sink, seed):
    """Lost, duplicated and reordered: every byte arrives once, in order."""
    world = mem_world(Conditions(delay_s=0.02, jitter_s=0.03, drop=0.1, duplicate=0.1), seed=seed)
    ps, client = world.listener(), world.dialer()
    world.until(lambda: client.count(PeerUp), 200)
    sinks = {f"s{n}": new_sink() for n in range(8)}
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, sinks[e.stream_id])
    for name in sinks:
        client.endpoint.offer("", name, {}, new_source([name.encode()] * 5), 10)
    world.until(lambda: client.count(StreamSent) == 8, 400)
    assert all(sink.content == name.encode() * 5 for name, sink in sinks.items())
    assert not ps.count(PeerDown)
