"""Virtual time, the network in memory and its faults, settings, imports."""

import hashlib
import subprocess
import sys

import pytest

from fsl_transport import (
    Conditions,
    Lane,
    LocalError,
    MemNetwork,
    MessageReceived,
    PeerUp,
    StreamOffered,
    StreamReceived,
    StreamSent,
    TransportSettings,
    VirtualScheduler,
)


def net(conditions=None, seed=1):
    """A network, its listener ``ps`` and dialer ``c``, and the log of what they received."""
    scheduler = VirtualScheduler()
    network = MemNetwork(scheduler, seed, conditions or Conditions())
    got = []
    ps, c = network.listener("ps"), network.dialer("c")
    for link in (ps, c):
        link.set_receiver(
            lambda peer, lane, parts, origin, at=link.name: got.append(
                (round(scheduler.time(), 6), at, peer, lane, parts[0])
            )
        )
    return scheduler, network, ps, c, got


def test_calls_run_in_order_of_time_then_of_insertion():
    """The trace must not depend on anything but the calls."""
    scheduler, log = VirtualScheduler(), []
    scheduler.call_at(2.0, log.append, "c")
    scheduler.call_at(1.0, log.append, "a")
    scheduler.call_at(1.0, log.append, "b")
    canceled = scheduler.call_at(1.5, log.append, "never")
    canceled.cancel()
    scheduler.call_soon(log.append, "now")
    assert scheduler.next_time() == 0.0
    scheduler.run_until(1.0)
    assert log == ["now", "a", "b"]
    assert scheduler.time() == 1.0
    assert scheduler.run_next()
    assert scheduler.time() == 2.0
    assert not scheduler.run_next()
    assert scheduler.next_time() is None
    scheduler.run_until(9.0)
    assert scheduler.time() == 9.0


def test_the_clock_does_not_go_back():
    """A call scheduled in the past runs now."""
    scheduler, log = VirtualScheduler(5.0), []
    scheduler.call_at(1.0, lambda: log.append(scheduler.time()))
    scheduler.run_until(6.0)
    late = scheduler.call_at(1.0, lambda: log.append(scheduler.time()))
    scheduler.run_next()
    late.cancel()
    assert log == [5.0, 6.0]


def test_names_and_peers():
    """A listener receives names; a dialer receives its only peer as the empty name."""
    scheduler, _, ps, c, got = net()
    c.send("ignored", Lane.CONTROL, (b"up",))
    ps.send("c", Lane.BULK, (b"down",))
    ps.send("nobody", Lane.CONTROL, (b"lost",))
    assert got == []  # never inside send
    scheduler.run_until(1.0)
    assert got == [(0, "ps", "c", Lane.CONTROL, b"up"), (0, "c", "", Lane.BULK, b"down")]
    assert (ps.address, c.address) == ("mem://ps", "mem://ps")


def test_wrong_use():
    """Mistakes of a simulation's author are reported."""
    network = MemNetwork(VirtualScheduler())
    with pytest.raises(LocalError, match="which listener"):
        network.dialer("c")
    with pytest.raises(LocalError, match="no name"):
        network.listener("a/b")
    with pytest.raises(LocalError, match="probability"):
        Conditions(drop=1.5)
    with pytest.raises(LocalError, match="negative"):
        Conditions(delay_s=-1)


def test_rate_queues_per_lane():
    """A saturated bulk lane must not hold the control lane back."""
    scheduler, _, _, c, got = net(Conditions(delay_s=0.5, bytes_per_s=100))
    for _ in range(2):
        c.send("", Lane.BULK, (b"x" * 100,))
    c.send("", Lane.CONTROL, (b"y" * 10,))
    scheduler.run_until(10.0)
    assert [(when, lane) for when, _, _, lane, _ in got] == [
        (0.6, Lane.CONTROL),
        (1.5, Lane.BULK),
        (2.5, Lane.BULK),
    ]


def test_jitter_keeps_the_order():
    """As TCP does; only ``reorder`` breaks it."""
    scheduler, _, _, c, got = net(Conditions(delay_s=0.1, jitter_s=1.0))
    for number in range(50):
        c.send("", Lane.CONTROL, (bytes([number]),))
    scheduler.run_until(10.0)
    assert [parts for *_, parts in got] == [bytes([number]) for number in range(50)]
    assert len({when for when, *_ in got}) > 3


def test_better_conditions_do_not_overtake():
    """Improving a path must not reorder messages in flight."""
    scheduler, network, _, c, got = net(Conditions(delay_s=0.1, jitter_s=5.0))
    for number in range(5):
        c.send("", Lane.CONTROL, (bytes([number]),))
    network.set_conditions("c", "ps", Conditions())
    c.send("", Lane.CONTROL, (bytes([5]),))
    scheduler.run_until(10.0)
    assert [parts for *_, parts in got] == [bytes([number]) for number in range(6)]


def test_every_fault_fires_and_is_counted():
    """An injected fault that never fired would prove nothing."""
    scheduler, network, _, c, got = net(
        Conditions(delay_s=0.1, drop=0.2, duplicate=0.2, reorder=0.2)
    )
    for number in range(200):
        c.send("", Lane.CONTROL, (bytes([number]),))
    scheduler.run_until(10.0)
    counts = network.counts
    assert counts["sent"] == 200
    assert min(counts["dropped"], counts["duplicated"], counts["reordered"]) > 20
    assert len(got) == 200 - counts["dropped"] + counts["duplicated"]
    order = [parts for *_, parts in got]
    assert order != sorted(order)


def test_one_direction_only():
    """Asymmetric paths are common."""
    scheduler, network, ps, c, got = net()
    network.set_direction("c", "ps", Conditions(delay_s=3.0))
    c.send("", Lane.CONTROL, (b"up",))
    ps.send("c", Lane.CONTROL, (b"down",))
    scheduler.run_until(10.0)
    assert [when for when, *_ in got] == [0.0, 3.0]


def test_cut_heal_and_reset():
    """A partition loses everything; a reset loses only what is in flight."""
    scheduler, network, _, c, got = net(Conditions(delay_s=1.0))
    c.send("", Lane.CONTROL, (b"1",))
    network.cut("ps", "c")
    c.send("", Lane.CONTROL, (b"2",))
    scheduler.run_until(2.0)
    network.heal("ps", "c")
    c.send("", Lane.CONTROL, (b"3",))
    network.reset("ps", "c")
    c.send("", Lane.CONTROL, (b"4",))
    scheduler.run_until(9.0)
    assert [parts for *_, parts in got] == [b"4"]
    assert (network.counts["cut"], network.counts["reset"]) == (2, 1)


def test_traffic_of_a_killed_process_arrives_late():
    """Messages in flight still arrive, after its successor took the name."""
    scheduler, network, ps, old, got = net(Conditions(delay_s=1.0))
    old.send("", Lane.CONTROL, (b"last words",))
    network.kill("c")
    old.send("", Lane.CONTROL, (b"never",))
    new = network.dialer("c")
    new.set_receiver(lambda peer, lane, parts, origin: got.append("new received"))
    ps.send("c", Lane.CONTROL, (b"hi",))
    scheduler.run_until(0.5)
    new.send("", Lane.CONTROL, (b"first words",))
    old.close()  # the name is no longer its own
    scheduler.run_until(9.0)
    assert [entry if entry == "new received" else entry[-1] for entry in got] == [
        b"last words",
        "new received",
        b"first words",
    ]
    network.kill("c")
    network.kill("c")
    ps.send("c", Lane.CONTROL, (b"hi",))
    scheduler.run_until(20.0)
    assert network.counts["absent"] == 1


BAD = Conditions(delay_s=0.05, jitter_s=0.2, drop=0.2, duplicate=0.2, reorder=0.2)


def scenario(mem_world, patient, new_source, new_sink, seed):
    """100 clients shake hands, send messages and streams over a bad network; returns the trace."""
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
    trace = hashlib.sha256()
    for node in [ps, *clients]:
        for when, event in zip(node.times, node.events, strict=True):
            trace.update(f"{when!r} {node.name} {event!r}\n".encode())
    return world, ps, clients, sink_of, trace.hexdigest()


@pytest.fixture
def patient(new_settings):
    """With a fifth of all heartbeats lost each way, ten units without one are common."""
    return new_settings(expire_after_s=60.0)


def test_a_hundred_handshakes_over_a_bad_network(mem_world, patient, new_source, new_sink):
    """All get a session, every message and chunk arrives once, whatever was lost."""
    world, ps, clients, sink_of, _ = scenario(mem_world, patient, new_source, new_sink, 11)
    for index, client in enumerate(clients):
        assert client.count(PeerUp) == 1
        assert [e.body["echo"] for e in client.all(MessageReceived)] == list(range(5))
        assert client.count(StreamSent) == 1
        expected = b"".join(bytes([index, chunk]) * 500 for chunk in range(5))
        assert sink_of[client.name].content == expected
    assert ps.count(StreamReceived) == 100
    counts = world.network.counts
    assert min(counts["dropped"], counts["duplicated"], counts["reordered"]) > 100


def test_same_seed_same_trace(mem_world, patient, new_source, new_sink):
    """A failing simulation must be repeatable to the last event."""
    traces = [scenario(mem_world, patient, new_source, new_sink, seed)[-1] for seed in (3, 3, 4)]
    assert traces[0] == traces[1]
    assert traces[0] != traces[2]


def test_a_trace_does_not_depend_on_the_hash_seed():
    """Sets and dicts ordered by hash would differ from process to process."""
    code = (
        "import random\n"
        "from fsl_transport import *\n"
        "s = VirtualScheduler()\n"
        "n = MemNetwork(s, 5, Conditions(delay_s=.1, jitter_s=.2, drop=.2, reorder=.2))\n"
        "log = []\n"
        "def on(e):\n"
        "    log.append((round(s.time(), 9), e))\n"
        "    if isinstance(e, HelloReceived): ps.welcome(e.peer, {})\n"
        "ps = ListenerEndpoint(n.listener('ps'), s, TransportSettings(), on, 'ps',"
        " rng=random.Random(1))\n"
        "for i in range(20):\n"
        "    d = DialerEndpoint(n.dialer(f'c{i}'), s, TransportSettings(), on, f'c{i}',"
        " incarnation=1, rng=random.Random(i))\n"
        "    d.connect(dict)\n"
        "s.run_until(60)\n"
        "print(len(log), log)\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


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
