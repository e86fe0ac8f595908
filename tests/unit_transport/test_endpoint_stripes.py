"""Several bulk connections through endpoints: found by trial, both ways; broken, stalled ones."""

import random

import pytest

from fsl_transport import Conditions, PeerDown, PeerUp, StreamReceived, StreamSent
from fsl_transport.bulk.parallelism import LONG_START

MIB = 1 << 20


def settings_of(new_settings, **changes):
    values = {"window_bytes": 4 * MIB, "window_limit_bytes": 16 * MIB, "chunk_limit_bytes": MIB}
    return new_settings(**(values | changes))


@pytest.fixture
def meet(mem_world, new_settings):
    """A world of lossless slow connections, and a listener and a dialer with a session."""

    def make(stripes=64, conditions=None, seed=7, **changes):
        conditions = conditions or Conditions(delay_s=0.045, bytes_per_s=1e6)
        world = mem_world(conditions, seed, stripes)
        settings = settings_of(new_settings, **changes)
        ps, client = world.listener(settings=settings), world.dialer(settings=settings)
        world.until(lambda: client.count(PeerUp))
        return world, ps, client

    return make


def count_of(node):
    peers = node.endpoint._all_peers()
    return peers[0].parallelism.count


@pytest.mark.parametrize("down", [False, True])
def test_both_ends_find_the_number_of_stripes(meet, new_source, new_sink, down):
    """Each connection carries 1 MB/s: a hundred MB must not take a hundred seconds, either way."""
    world, ps, client = meet()
    sender, receiver = (ps, client) if down else (client, ps)
    sink = new_sink()
    world.accept_all(receiver, sink)
    begun = world.scheduler.time()
    data = [bytes([index]) * (MIB // 2) for index in range(200)]
    sender.endpoint.offer("c", "s", {}, new_source(data))
    world.until(lambda: sender.count(StreamSent))
    assert sink.content == b"".join(data)
    assert world.scheduler.time() - begun < 25
    assert count_of(sender) >= 16


@pytest.mark.parametrize("down", [False, True])
def test_small_streams_on_a_long_path_use_several_stripes(meet, new_source, new_sink, down):
    """They never wait for a window; with one stripe each took three round trips more."""
    world, ps, client = meet()
    sender, receiver = (ps, client) if down else (client, ps)
    for number in (1, 2, 3):
        world.accept_all(receiver, new_sink())
        source = new_source([bytes(64_000)])
        sender.endpoint.offer("c", f"s{number}", {}, source, 70_000)
        world.until(lambda number=number: sender.count(StreamSent) == number)
    assert count_of(sender) == LONG_START
    stripes = sender.endpoint._all_peers()[0].streams.outgoing._bulk._stripes.values()
    assert sum(stripe.is_open for stripe in stripes) == LONG_START
    assert sum(stripe.delivered > 0 for stripe in stripes) >= 5
    before = sum(stripe.last_number for stripe in stripes)
    world.accept_all(receiver, new_sink())
    sender.endpoint.offer("c", "batch", {}, new_source([bytes(140_000)] * 4), 600_000)
    world.until(lambda: sender.count(StreamSent) == 4)
    assert sum(stripe.last_number for stripe in stripes) - before <= 4 * 9, (
        "pieces are cut by the size of the stream"
    )


def test_the_number_found_is_remembered(meet, new_source, new_sink):
    """The next session on the path must not start with one stripe again."""
    world, ps, client = meet()
    world.accept_all(ps, new_sink())
    client.endpoint.offer("", "s", {}, new_source([bytes(MIB // 2)] * 200))
    world.until(lambda: client.count(StreamSent))
    found = count_of(client)
    client.endpoint.disconnect("", "again")
    client.endpoint.connect(dict)
    world.until(lambda: client.count(PeerUp) == 2)
    world.accept_all(ps, new_sink())
    begun = world.scheduler.time()
    client.endpoint.offer("", "t", {}, new_source([bytes(MIB // 2)] * 40))
    world.until(lambda: client.count(StreamSent) == 2)
    assert found >= 16
    assert world.scheduler.time() - begun < 6  # 20 MiB, 1 MB/s for each


def test_a_setting_bounds_the_stripes(meet, new_source, new_sink):
    """A test-bed may want a single connection."""
    world, ps, client = meet(stripes_limit=1)
    world.accept_all(ps, new_sink())
    client.endpoint.offer("", "s", {}, new_source([bytes(MIB // 2)] * 20))
    world.until(lambda: client.count(StreamSent))
    assert count_of(client) == 1
    assert len(client.endpoint._peer.streams.outgoing._bulk._stripes) == 1


def test_a_dialer_adopts_settings_of_the_run(meet, new_source, new_sink, new_settings):
    """The number of stripes is a setting of the run, which a client gets with its welcome."""
    world, ps, client = meet()
    client.endpoint.adopt(settings_of(new_settings, stripes_first=3, stripes_limit=3))
    world.accept_all(ps, new_sink())
    client.endpoint.offer("", "s", {}, new_source([bytes(MIB // 2)] * 20))
    world.until(lambda: client.count(StreamSent))
    assert count_of(client) == 3
    client.endpoint.adopt(settings_of(new_settings, stripes_limit=1, window_limit_bytes=5 * MIB))
    assert count_of(client) == 1
    bulk = client.endpoint._peer.streams.outgoing._bulk
    assert (bulk._window_limit, bulk.congestion_window._window_limit) == (5 * MIB, 5 * MIB)


def test_ends_with_different_settings_do_not_wait_for_each_other(
    mem_world, new_settings, new_source, new_sink
):
    """A receiver reports written chunks in steps of its own window; a sender with a small window
    must not stop before that.
    """
    world = mem_world(Conditions(delay_s=0.01, bytes_per_s=1e8))
    ps = world.listener(
        settings=settings_of(new_settings, window_bytes=32 * MIB, window_limit_bytes=64 * MIB)
    )
    client = world.dialer(
        settings=settings_of(new_settings, window_bytes=MIB, window_limit_bytes=MIB)
    )
    world.until(lambda: client.count(PeerUp))
    sink = new_sink()
    world.accept_all(ps, sink)
    data = [bytes([index]) * MIB for index in range(40)]
    client.endpoint.offer("", "s", {}, new_source(data))
    world.until(lambda: client.count(StreamSent))
    assert sink.content == b"".join(data)


def test_a_dead_stripe_does_not_stall_the_transfer(meet, new_source, new_sink):
    """A middlebox may cut a connection silently: the others carry on."""
    world, ps, client = meet(stripes_first=4, stripes_limit=4)
    world.accept_all(ps, new_sink())
    client.endpoint.offer("", "s", {}, new_source([bytes(MIB // 2)] * 20))
    world.until(lambda: client.count(StreamSent))
    world.network.cut_stripe("c", "ps", 2)
    # An incoming stream that waits must not hide the probe timeouts of the outgoing ones.
    held = new_sink(hold=True)
    world.accept_all(client, held)
    ps.endpoint.offer("c", "back", {}, new_source([bytes(1000)] * 2))
    world.until(lambda: held.waiting)
    sink = new_sink()
    world.accept_all(ps, sink)
    begun = world.scheduler.time()
    client.endpoint.offer("", "t", {}, new_source([bytes([n]) * (MIB // 2) for n in range(20)]))
    world.until(lambda: client.count(StreamSent) == 2)
    assert sink.content == b"".join(bytes([n]) * (MIB // 2) for n in range(20))
    assert world.scheduler.time() - begun < 6  # 10 MiB over three of 1 MB/s
    assert not ps.count(PeerDown)


@pytest.mark.parametrize("seed", range(5))
def test_many_streams_over_bad_connections(meet, new_source, new_sink, seed):
    """Loss, duplication, reordering and a reset: every byte arrives once, in order."""
    bad = Conditions(delay_s=0.02, jitter_s=0.03, drop=0.05, duplicate=0.1, reorder=0.1)
    world, ps, client = meet(stripes=5, conditions=bad, seed=seed, stripes_first=5)
    rng = random.Random(seed)
    sinks = {}
    for number in range(6):
        data = [rng.randbytes(rng.randrange(100_000)) for _ in range(12)]
        for sender, way in ((client, "up"), (ps, "down")):
            sinks[f"{way}{number}"] = new_sink(), b"".join(data)
            sender.endpoint.offer("c", f"{way}{number}", {}, new_source(data), 1 << 16)
    for node in (ps, client):
        world.accept_all(node, None)
        node.on = {
            kind: (
                (lambda e, n=node: n.endpoint.accept(e.peer, e.stream_id, sinks[e.stream_id][0]))
                if kind.__name__ == "StreamOffered"
                else reaction
            )
            for kind, reaction in node.on.items()
        }
    world.run(0.5)
    world.reset(client)
    world.until(lambda: ps.count(StreamReceived) == 6 and client.count(StreamReceived) == 6)
    for sink, data in sinks.values():
        assert sink.content == data
    assert not ps.count(PeerDown)


def test_real_connections(zmq_world, new_source, new_sink):
    """Eight sockets to one port, both ways, and after all of them broke."""
    made = zmq_world
    made.stripes = 8
    ps, client = made.listener(), made.dialer()
    made.until(lambda: client.count(PeerUp))
    at_ps, at_client = new_sink(), new_sink()
    made.accept_all(ps, at_ps)
    made.accept_all(client, at_client)
    data = [bytes([index]) * 200_000 for index in range(40)]
    client.endpoint.offer("", "up", {}, new_source(data))
    ps.endpoint.offer("c", "down", {}, new_source(data))
    made.until(lambda: client.count(StreamSent) and ps.count(StreamSent))
    made.until(lambda: client.endpoint._peer.streams.outgoing._bulk.open_count >= 8)
    made.until(lambda: ps.endpoint._peers["c"].streams.outgoing._bulk.open_count >= 8)
    made.reset(client)
    again = new_sink()
    made.accept_all(ps, again)
    client.endpoint.offer("", "again", {}, new_source(data))
    made.until(lambda: client.count(StreamSent) == 2)
    assert at_ps.content == at_client.content == again.content == b"".join(data)
    assert ps.endpoint.garbage == 0
