"""An established session: order, exactly once, heartbeats, expiry; without a network."""

import pytest

from fsl_transport import PeerError
from fsl_transport.session import frames
from fsl_transport.session.reliable import ACK_EVERY, BEAT_DUE, Session

SESSION = b"12345678"


def make(new_settings, *, beats=True, now=0.0, **changes):
    return Session(SESSION, new_settings(**changes), [], now, beats=beats)


def sent(session):
    """Parse and empty the outbox."""
    messages = [frames.parse([head], 1 << 23, 0) for head in session.outbox]
    session.outbox.clear()
    return messages


def data(seq, ack=0, n=0):
    return frames.Data(SESSION, seq, ack, frames.MESSAGE, [{"n": n}])


def send(session, n, now):
    session.send(frames.MESSAGE, ({"n": n},), now)


def test_an_acknowledgement_of_the_future_is_a_peer_error(new_settings):
    """Accepting it would drop messages that were never received."""
    session = make(new_settings)
    with pytest.raises(PeerError):
        session.handle(frames.Ack(SESSION, 1, False), 0.0)
    send(session, 0, 0.0)
    with pytest.raises(PeerError):
        session.handle(frames.Beat(SESSION, 2, False, {}), 0.0)


def test_the_retransmission_timeout_doubles(new_settings):
    """A peer that is busy for long must not be flooded with retransmissions."""
    session = make(new_settings, beats=False, expire_after_s=100.0)
    send(session, 0, 0.0)
    times = []
    while len(times) < 5:
        now = session.next_deadline()
        sent(session)
        session.handle_timer(now)
        if session.outbox:
            times.append(round(now))
    assert times == [2, 6, 14, 30, 62]
    assert session.retransmitted == 5
    session.handle(frames.Ack(SESSION, 1, False), 70.0)
    send(session, 1, 70.0)
    assert session.next_deadline() == pytest.approx(72.0, abs=0.01)


def test_large_messages_get_time_to_travel(new_settings):
    """4 MB over 64 kB/s take a minute; retransmitting them after two seconds would never end."""
    session = make(new_settings, beats=False, expire_after_s=500.0)
    session.send(frames.MESSAGE, ({"blob": b"x" * 3_000_000},), 0.0)
    assert session.next_deadline() > 45.0


def test_an_acknowledgement_waits_for_other_traffic(new_settings):
    """A lone ACK per message would double the traffic."""
    session = make(new_settings)
    assert session.handle(data(1), 1.0) == [data(1)]
    assert session.outbox == []
    assert session.next_deadline() == 1.5
    assert session.handle_timer(1.5) == []
    assert sent(session) == [frames.Ack(SESSION, 1, False)]
    session.handle(data(2), 3.0)
    send(session, 0, 3.1)
    assert sent(session)[0].ack == 2
    assert session.next_deadline() == 4.0  # the next heartbeat; no ACK is due


def test_a_one_way_flow_is_acknowledged_in_groups(new_settings):
    """Otherwise the sender's window would wait for the receiver's timer."""
    session = make(new_settings)
    for seq in range(1, 2 * ACK_EVERY + 1):
        session.handle(data(seq), 1.0)
    assert sent(session) == [
        frames.Ack(SESSION, ACK_EVERY, False),
        frames.Ack(SESSION, 2 * ACK_EVERY, False),
    ]


def test_duplicates_and_gaps(new_settings):
    """Each message goes up once; a gap is reported once and repaired without waiting."""
    session = make(new_settings)
    session.handle(data(1), 1.0)
    assert session.handle(data(1), 1.0) == []
    assert sent(session) == [frames.Ack(SESSION, 1, False)]
    assert session.handle(data(3), 1.0) == []
    assert session.handle(data(4), 1.0) == []
    assert sent(session) == [frames.Ack(SESSION, 1, True)]
    assert session.handle(data(2), 1.0) == [data(2)]


def test_backlog_beyond_the_window(new_settings):
    """Unacknowledged messages are bounded; the rest waits, in order."""
    session = make(new_settings, control_window=2)
    for n in range(5):
        send(session, n, 0.0)
    assert [message.seq for message in sent(session)] == [1, 2]
    session.handle(frames.Ack(SESSION, 1, False), 0.1)
    assert [message.fields[0]["n"] for message in sent(session)] == [2]
    session.handle(frames.Ack(SESSION, 3, False), 0.2)
    assert [message.fields[0]["n"] for message in sent(session)] == [3, 4]


def test_a_backlog_that_moves_is_no_dead_peer(new_settings):
    """The limit is on what waits now, not on the sum."""
    session = make(new_settings, control_window=1, backlog_limit_bytes=1000)
    send(session, 0, 0.0)
    for n in range(1, 100):
        send(session, n, 0.0)
        session.handle(frames.Ack(SESSION, n, False), 0.0)
    assert not session.is_expired


def test_a_peer_with_a_growing_backlog_is_dead(new_settings):
    """Memory must not grow with a peer that no longer reads."""
    session = make(new_settings, control_window=1, backlog_limit_bytes=1000)
    for n in range(60):
        send(session, n, 0.0)
    assert session.is_expired
    assert session.next_deadline() < 0
    assert session.handle_timer(0.0) == []


def test_heartbeats_only_when_quiet(new_settings):
    """Other control traffic shows as much as a heartbeat."""
    session = make(new_settings, retransmit_after_s=50.0, ack_after_s=1.0)
    assert session.next_deadline() == 2.0
    send(session, 0, 1.5)
    assert session.handle_timer(2.0) == []
    assert session.next_deadline() == 3.5
    assert session.handle_timer(3.5) == [BEAT_DUE]
    session.beat({"step": 1}, 3.5, asks=True)
    assert sent(session)[-1] == frames.Beat(SESSION, 0, True, {"step": 1})
    assert session.next_deadline() == 5.5
    quiet = make(new_settings, beats=False)
    assert quiet.next_deadline() == 10.0


def test_a_payload_is_at_most_two_heartbeats_old(new_settings):
    """Only heartbeats carry it; a client that syncs more often must still send them."""
    session = make(new_settings, ack_after_s=1.0, expire_after_s=500.0)
    beats = []
    for tenth in range(1, 101):
        now = tenth / 10
        if tenth % 10 == 5:  # every second, while a beat is due after two quiet ones
            send(session, tenth, now)
            session.handle(frames.Ack(SESSION, session._sent, False), now)
        if now >= session.next_deadline() and BEAT_DUE in session.handle_timer(now):
            session.beat({"step": tenth}, now, asks=True)
            beats.append(now)
    assert beats == [4.0, 8.0]


def test_expiry(new_settings):
    """Silence ends a session; any received message keeps it, also on the bulk lane."""
    session = make(new_settings, beats=False)
    session.on_received(5.0)
    assert session.last_received_ago_s(8.0) == 3.0
    session.handle_timer(14.9)
    assert not session.is_expired
    session.handle_timer(15.0)
    assert session.is_expired


def test_bye_reason_is_cut(new_settings):
    """Any text may be a reason."""
    head = make(new_settings).bye_head("x" * 9999)
    assert len(frames.parse([head], 1 << 16, 0).reason) == frames.TEXT_LIMIT
