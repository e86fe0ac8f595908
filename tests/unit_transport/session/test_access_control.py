"""Rate limits: token buckets, HELLOs, messages, connections, totals over all peers."""

import errno
import os
import resource
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsl_transport import HelloReceived, Lane, LocalError, MessageReceived, PeerDown, PeerUp
from fsl_transport.rate_limit import Rate, RateLimit, TokenBucket
from fsl_transport.session import frames
from fsl_transport.session.access_control import HelloLimits, MessageLimits
from fsl_transport.session.frames import Ack, Beat, Data
from fsl_transport.settings import TransportSettings
from fsl_transport.zmq.admission import ConnectionAdmission, descriptors

SESSION = b"s" * 8
WORD = Data(SESSION, 1, 0, frames.MESSAGE, [{}])
CREDIT = Data(SESSION, 1, 0, frames.CREDIT, [1, 2, 3])


@pytest.mark.parametrize("rate", [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.5)])
def test_a_rate_allows_something(rate):
    """A limit of nothing is a mistake, not a limit."""
    with pytest.raises(LocalError):
        Rate(*rate)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 5)), max_size=60))
def test_a_bucket_never_allows_more_than_its_rate(steps):
    """At most burst + rate * time, and one message larger than the burst."""
    bucket, now, taken = TokenBucket(Rate(1.5, 4.0), 0.0), 0.0, 0.0
    for wait_s, tokens in steps:
        now += wait_s
        if bucket.take(now, tokens):
            taken += tokens
    assert taken <= 4.0 + 1.5 * now + 5.0 + 1e-6


def test_buckets_are_bounded():
    """Unauthenticated peers choose the keys. Full buckets are dropped first."""
    buckets = RateLimit(Rate(1.0, 2.0), 10)
    assert [buckets.take("a", 0.0) for _ in range(3)] == [True, True, False]
    for number in range(9):
        buckets.take(f"k{number}", 0.0)
    assert not buckets.take("a", 0.0)  # used again: not the oldest
    for number in range(50):
        buckets.take(f"x{number}", 0.0)
    assert len(buckets) == 10
    buckets.forget_full(100.0)
    assert len(buckets) == 0


def hello_limits(**changes):
    values = {
        "hellos_of_an_origin": Rate(1.0, 3.0),
        "hellos_of_new_names": Rate(1.0, 5.0),
        "max_half_open": 4,
        **changes,
    }
    return HelloLimits(TransportSettings(**values), 0.0)


def test_half_open_names_are_limited():
    """A peer that asks and never answers holds one of few places, for seconds."""
    limits = hello_limits(hellos_of_new_names=Rate(1000.0, 1000.0))
    for number in range(4):
        assert limits.allows(f"n{number}", "", 0.0, is_known=False)
        limits.open(f"n{number}")
    assert not limits.allows("n4", "", 0.0, is_known=False)
    assert limits.allows("n0", "", 0.0, is_known=False)  # a repetition does not count
    limits.close("n1")
    assert limits.allows("n4", "", 0.0, is_known=False)
    assert limits.half_open == 3


def message_limits(**changes):
    values = {
        "control_messages": Rate(1.0, 6.0),
        "control_bytes": Rate(10.0, 1000.0),
        "application_messages": Rate(1.0, 2.0),
        **changes,
    }
    return MessageLimits(TransportSettings(**values), 0.0)


def test_messages_for_the_application_have_a_lower_rate():
    """Messages, heartbeats and offers cost work and journal lines; credit does not."""
    limits = message_limits()
    beat = Beat(SESSION, 0, True, {})
    assert [limits.allows(one, 10, 0.0) for one in (WORD, beat, WORD)] == [True, True, False]
    assert limits.allows(CREDIT, 10, 0.0)
    assert limits.allows(Ack(SESSION, 0, False), 10, 0.0)
    assert limits.allows(CREDIT, 10, 0.0)
    assert not limits.allows(CREDIT, 10, 0.0)


def test_bytes_of_control_are_limited():
    """Few large messages cost as much as many small ones."""
    limits = message_limits()
    assert limits.allows(CREDIT, 900, 0.0)
    assert not limits.allows(CREDIT, 900, 0.0)
    assert limits.allows(CREDIT, 900, 80.0)


def test_a_fast_sender_is_slowed_and_loses_nothing(world, new_settings):
    """Messages beyond the rate arrive later, in order, in the same session."""
    unit_s = world.unit_s
    ps = world.listener(
        settings=new_settings(unit_s, application_messages=Rate(40.0 / unit_s, 20.0))
    )
    client = world.dialer()
    world.until(lambda: client.count(PeerUp))
    for number in range(60):
        client.endpoint.send("", {"n": number})
    world.until(lambda: ps.count(MessageReceived) == 60)
    assert [event.body["n"] for event in ps.story if isinstance(event, MessageReceived)] == list(
        range(60)
    )
    assert ps.endpoint.throttled > 0
    assert not ps.count(PeerDown)


@pytest.fixture
def memory(mem_world):
    """A world in memory."""
    return mem_world()


def hello(name, number=1):
    fields = (
        frames.HELLO,
        frames.PROTOCOL_VERSION,
        number,
        1,
        name,
        "client",
        {"pad": "x" * 30_000},
    )
    return frames.pack(fields, 1 << 16)


def test_a_flood_of_names_leaves_room_for_known_ones(memory, new_settings):
    """Few of thousands are handled, no bodies are kept, and a known name reconnects."""
    ps = memory.listener(
        settings=new_settings(hellos_of_new_names=Rate(1.0, 50.0), max_half_open=20)
    )
    client = memory.dialer("member")
    memory.until(lambda: client.count(PeerUp))
    client.endpoint.send("", {"n": 1})
    memory.until(lambda: ps.count(MessageReceived))
    for number in range(3000):
        ps.link.take(f"fresh-{number}", Lane.CONTROL, [hello(f"fresh-{number}")])
    assert ps.count(HelloReceived) <= 22
    assert ps.endpoint.dropped_hellos >= 2900
    assert sum(len(repr(peer.machine.hello)) for peer in ps.endpoint._peers.values()) < 1000
    client.endpoint.disconnect("", "again")
    client.endpoint.connect(dict)
    memory.until(lambda: client.count(PeerUp) == 2)


def test_eager_chunks_are_bounded_over_all_sessions(memory, new_settings):
    """No session may hold much, nor all together, nor with empty chunks."""
    total = 100_000
    ps = memory.listener(settings=new_settings(eager_bytes=30_000, eager_total_bytes=total))
    attackers = [memory.dialer(f"attacker-{number}") for number in range(10)]
    memory.until(lambda: all(attacker.count(PeerUp) for attacker in attackers))
    for number, attacker in enumerate(attackers):
        session = attacker.endpoint._machine.session.identity
        for index in range(300):
            size = 0 if index % 2 else 2000
            fields = (session, 1 + index % 3, 0, index, 0, size, 0, index + 1, False)
            head = frames.pack((frames.CHUNK, *fields), 200)
            ps.link.take(f"attacker-{number}", Lane.BULK, [head, bytes(size)])
        assert ps.endpoint.receive_budget.eager_bytes <= min(total, 60_000 * (number + 1))
    assert ps.endpoint.receive_budget.eager_bytes > total / 2
    for attacker in attackers:
        attacker.endpoint.disconnect("", "bye")
    memory.until(lambda: ps.count(PeerDown) == 10)
    assert ps.endpoint.receive_budget.eager_bytes == 0


@pytest.mark.parametrize(("soft", "got"), [(256, 10_240), (20_000, 20_000)])
def test_descriptors_of_a_system_that_reports_no_limit_but_has_one(monkeypatch, soft, got):
    """On macOS, which refuses the limit that it reports, a client stayed at 256 files."""
    hard = 2**63 - 1
    now = [soft, hard]

    def setrlimit(_, wanted):
        if wanted[0] > 20_000:
            raise ValueError("not allowed to raise maximum limit")
        now[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert descriptors() == got
    assert now[1] == hard


def test_admission_closes_the_newest_connection():
    """Established ones stay; a descriptor that was reused for a file is left alone."""
    admission = ConnectionAdmission(TransportSettings(max_connections=2), 0.0)
    pairs = [socket.socketpair() for _ in range(3)]
    for ours, _ in pairs:
        admission.accepted(ours.fileno(), 0.0)
    assert (len(admission), admission.rejected) == (3, 1)
    pairs[2][1].settimeout(5)
    assert pairs[2][1].recv(1) == b""
    for _, theirs in pairs[:2]:
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
    admission.closed(pairs[2][0].fileno())
    reader, writer = os.pipe()
    admission.accepted(writer, 0.0)
    os.write(writer, b"x")
    assert os.read(reader, 1) == b"x"
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
    os.close(reader)
    os.close(writer)


def test_connections_that_took_the_last_descriptors_are_closed(monkeypatch):
    """Without a free descriptor to close them by, they stayed, and nothing else could be opened."""

    def dup(_):
        raise OSError(errno.EMFILE, "Too many open files")

    admission = ConnectionAdmission(TransportSettings(max_connections=1), 0.0)
    pairs = [socket.socketpair() for _ in range(2)]
    monkeypatch.setattr("fsl_transport.zmq.admission.os.dup", dup)
    for ours, _ in pairs:
        admission.accepted(ours.fileno(), 0.0)
    monkeypatch.undo()
    pairs[0][1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pairs[0][1].recv(1)
    pairs[1][1].settimeout(5)
    assert pairs[1][1].recv(1) == b""
    for ours, theirs in pairs:
        os.fstat(ours.fileno())  # still open: it is libzmq's
        ours.close()
        theirs.close()


def test_a_connection_that_is_gone_is_closed_once(monkeypatch):
    """A second close hit the descriptor of another thread, and libzmq aborted the process."""
    closed = []
    monkeypatch.setattr("fsl_transport.zmq.admission.os.close", closed.append)
    admission = ConnectionAdmission(TransportSettings(max_connections=1), 0.0)
    with socket.socket() as gone:  # its address and its shutdown fail: it is not connected
        for _ in range(3):
            admission.accepted(gone.fileno(), 0.0)
    assert closed == []
    reader, writer = os.pipe()
    admission.accepted(writer, 0.0)
    copies = [number for number in closed if number not in {reader, writer}]
    assert len(copies) >= 1, "of what is no socket the copy is ours to close"
    monkeypatch.undo()
    for number in (reader, writer, *copies):
        os.close(number)


def test_a_listener_counts_its_connections(zmq_world):
    """On real sockets the limit holds, and an established session goes on."""
    ps = zmq_world.listener()
    admission = ps.link._pipes[0].admission
    admission.limit = 6
    client = zmq_world.dialer()
    zmq_world.until(lambda: client.count(PeerUp))
    others = [socket.create_connection(("127.0.0.1", ps.link.port)) for _ in range(10)]
    zmq_world.until(lambda: admission.rejected >= 6)
    zmq_world.until(lambda: ps.link.connections <= 6)
    client.endpoint.send("", {"n": 1})
    zmq_world.until(lambda: ps.count(MessageReceived))
    for other in others:
        other.close()
    zmq_world.until(lambda: ps.link.connections == 2)
    assert not ps.count(PeerDown)
