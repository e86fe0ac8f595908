"""A hundred dialers over a network that loses, repeats and reorders; settings; imports."""

import subprocess
import sys

import pytest

from fsl_transport import (
    Conditions,
    LocalError,
    MessageReceived,
    PeerUp,
    StreamOffered,
    StreamReceived,
    StreamSent,
    TransportSettings,
)

BAD = Conditions(delay_s=0.05, jitter_s=0.2, drop=0.2, duplicate=0.2, reorder=0.2)


def scenario(mem_world, patient, new_source, new_sink, seed):
    """100 clients shake hands, send messages and streams over a bad network."""
    world = mem_world(BAD, seed)
    ps = world.listener(settings=patient)
    sink_of = {}
    ps.on[MessageReceived] = lambda e: ps.endpoint.send(e.peer, {"echo": e.body["n"]})

    def offered(event):
        sink_of[event.peer] = new_sink()
        ps.endpoint.accept(event.peer, event.stream_id, sink_of[event.peer])

    ps.on[StreamOffered] = offered
    clients = []
    for index in range(100):
        client = world.dialer(f"c{index}", settings=patient, connect=False)
        source = new_source([bytes([index, chunk]) * 500 for chunk in range(5)])

        def up(event, client=client, source=source):
            if client.count(PeerUp) == 1:
                client.endpoint.offer("", "delta", {}, source)
                for number in range(5):
                    client.endpoint.send("", {"n": number})

        client.on[PeerUp] = up
        world.scheduler.call_at(index * 0.01, client.endpoint.connect, dict)
        clients.append(client)
    world.run(120)
    return world, ps, clients, sink_of


@pytest.fixture
def patient(new_settings):
    """With a fifth of all heartbeats lost each way, ten units without one are common."""
    return new_settings(expire_after_s=60.0)


def test_a_hundred_handshakes_over_a_bad_network(mem_world, patient, new_source, new_sink):
    """All get a session, every message and chunk arrives once, whatever was lost."""
    world, ps, clients, sink_of = scenario(mem_world, patient, new_source, new_sink, 11)
    for index, client in enumerate(clients):
        assert client.count(PeerUp) == 1
        assert [e.body["echo"] for e in client.all(MessageReceived)] == list(range(5))
        assert client.count(StreamSent) == 1
        expected = b"".join(bytes([index, chunk]) * 500 for chunk in range(5))
        assert sink_of[client.name].content == expected
    assert ps.count(StreamReceived) == 100
    counts = world.network.counts
    assert min(counts["dropped"], counts["duplicated"], counts["reordered"]) > 100


def test_the_package_loads_without_sockets():
    """Simulations and ``--help`` must not pay for zmq and asyncio."""
    code = "import sys, fsl_transport; print({'zmq', 'asyncio', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"set()"


@pytest.mark.parametrize(
    "wrong",
    [
        {"heartbeat_every_s": 0},
        {"heartbeat_every_s": float("nan")},
        {"expire_after_s": 5.0},
        {"ack_after_s": 3.0},
        {"window_bytes": 1 << 20},
        {"eager_bytes": 3 << 20},
        {"window_bytes": 8 << 20, "window_limit_bytes": 4 << 20},
        {"max_sessions": -1},
    ],
    ids=repr,
)
def test_settings_that_contradict_each_other(wrong):
    """They are checked when they are made, not when a long run stalls."""
    with pytest.raises(LocalError):
        TransportSettings(**wrong)
