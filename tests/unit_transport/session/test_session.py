"""The handshake machines, row by row of their tables, without a network."""

import math

from fsl_transport.session import frames
from fsl_transport.session.session import (
    Ask,
    DialerMachine,
    DialerState,
    Down,
    ListenerMachine,
    ListenerState,
    RefusedBy,
    SendHello,
    Up,
)

SESSION = b"12345678"
OTHER = b"87654321"


def dialer(new_settings, *, incarnation=10):
    return DialerMachine("c", "client", incarnation, new_settings(), lambda: 0.5)


def hello(incarnation=10, attempt=1):
    return frames.Hello(frames.PROTOCOL_VERSION, incarnation, attempt, "c", "client", {})


def welcome(incarnation=10, attempt=1, session=SESSION):
    return frames.Welcome(frames.PROTOCOL_VERSION, incarnation, attempt, session, 77, {"run": 1})


def refuse(code="full", incarnation=10, attempt=1, known=0):
    return frames.Refuse(frames.PROTOCOL_VERSION, incarnation, attempt, code, "because", known)


def data(seq=1, session=SESSION):
    return frames.Data(session, seq, 0, frames.MESSAGE, [{}])


def sent(machine):
    messages = [frames.parse([head], 1 << 20, 0) for head in machine.outbox]
    machine.outbox.clear()
    return messages


def up_dialer(new_settings):
    machine = dialer(new_settings)
    machine.connect(0.0)
    machine.handle(welcome(), 0.0)
    return machine


def up_listener(new_settings, *, incarnation=10, attempt=1):
    machine = ListenerMachine(77, new_settings())
    machine.handle(hello(incarnation, attempt), 0.0)
    machine.welcome(SESSION, {"run": 1}, 0.0)
    machine.outbox.clear()
    return machine


def test_dialer_calls_with_growing_waits(new_settings):
    """Thousands of clients must not overload a server that is down."""
    machine = dialer(new_settings)
    assert machine.next_deadline() == math.inf
    assert machine.connect(0.0) == [SendHello()]
    assert machine.connect(0.0) == []
    times = []
    while len(times) < 4:
        now = machine.next_deadline()
        if SendHello() in machine.handle_timer(now):
            times.append(now)
    assert times == [1.0, 3.0, 5.0, 7.0]  # waits grow up to heartbeat_every_s


def test_welcome_for_this_attempt_only(new_settings):
    """A late WELCOME belongs to a session that the listener has given up."""
    machine = dialer(new_settings)
    assert machine.handle(welcome(), 0.0) == []
    machine.connect(0.0)
    assert machine.handle(welcome(attempt=2), 0.0) == []
    assert machine.handle(welcome(incarnation=9), 0.0) == []
    assert machine.handle(welcome(), 0.0) == [Up(77, {"run": 1})]
    assert machine.state is DialerState.UP
    assert machine.handle(welcome(), 0.0) == []


def test_a_superseded_refusal_of_a_lower_incarnation_is_a_plain_one(new_settings):
    """Raising to less than its own incarnation would not end."""
    machine = dialer(new_settings)
    machine.connect(0.0)
    assert machine.handle(refuse("superseded", known=3), 0.0) == [
        RefusedBy("superseded", "because")
    ]


def test_bye_calls_again_later(new_settings):
    """A listener that ends all sessions must not be called by all dialers at once."""
    machine = up_dialer(new_settings)
    assert machine.handle(frames.Bye(OTHER, "x"), 1.0) == []
    assert machine.handle(frames.Bye(SESSION, "x"), 1.0) == [Down(77, "bye", "x")]
    assert machine.handle_timer(machine.next_deadline()) == [SendHello()]


def test_dialer_violated(new_settings):
    """Bad bytes end the session on both sides."""
    machine = dialer(new_settings)
    assert machine.violated("bad", 0.0) == []
    machine = up_dialer(new_settings)
    assert machine.violated("bad", 1.0) == [Down(77, "protocol", "bad")]
    assert sent(machine) == [frames.Bye(SESSION, "protocol")]
    assert machine.state is DialerState.CALLING


def test_a_lost_welcome_is_sent_again(new_settings):
    """Until something is received in the session, the WELCOME may be lost."""
    machine = up_listener(new_settings)
    assert machine.handle(hello(), 9.0) == []
    assert sent(machine) == [welcome()]
    assert machine.next_deadline() == 19.0  # the HELLO counts as received
    machine.handle(data(), 9.5)
    machine.handle(hello(), 9.6)
    assert sent(machine) == []


def test_a_lost_refusal_is_asked_again(new_settings):
    """The listener keeps nothing of a refused session."""
    machine = ListenerMachine(77, new_settings())
    machine.handle(hello(), 0.0)
    machine.refuse("full", "because")
    assert sent(machine) == [refuse()]
    assert machine.handle(hello(), 1.0) == [Ask(hello())]
    # Also soon after a session, when old copies of its HELLO are ignored.
    machine = up_listener(new_settings)
    machine.disconnect("x", 1.0)
    machine.handle(hello(10, 2), 1.0)
    machine.refuse("full", "because")
    assert machine.handle(hello(10, 2), 2.0) == [Ask(hello(10, 2))]


def test_lower_incarnation_is_refused_with_the_known_one(new_settings):
    """Also after the session is over: the replaced process must not come back."""
    machine = up_listener(new_settings)
    assert machine.handle(hello(9, 4), 1.0) == []
    message = sent(machine)[0]
    assert (message.code, message.known, message.incarnation, message.attempt) == (
        "superseded",
        10,
        9,
        4,
    )
    machine.handle(frames.Bye(SESSION, "x"), 1.0)
    machine.handle(hello(9, 4), 100.0)
    assert sent(machine)[0].code == "superseded"


def test_newer_attempt_is_a_new_session(new_settings):
    """The same process reconnects; copies of its older attempts are ignored."""
    machine = up_listener(new_settings, attempt=2)
    assert machine.handle(hello(10, 1), 1.0) == []
    assert sent(machine) == []
    assert machine.handle(hello(10, 3), 1.0) == [Down(10, "reset"), Ask(hello(10, 3))]
    assert machine.handle(hello(10, 4), 1.0) == [Ask(hello(10, 4))]


def test_old_copies_open_no_session(new_settings):
    """A duplicate HELLO after a BYE is ignored for a limited time."""
    machine = up_listener(new_settings)
    machine.handle(frames.Bye(SESSION, "x"), 1.0)
    assert machine.handle(hello(), 2.0) == []
    assert machine.handle(hello(10, 2), 2.0) == [Ask(hello(10, 2))]
    machine.disconnect("x", 3.0)
    assert machine.handle(hello(10, 1), 12.0) == [Ask(hello(10, 1))]


def test_unknown_sessions_are_answered(new_settings):
    """With UNKNOWN and the id that was used, in every state."""
    machine = ListenerMachine(77, new_settings())
    for state in ("absent", "asked", "up"):
        assert machine.state.value == state
        for message in (data(session=OTHER), frames.Ack(OTHER, 0, False)):
            assert machine.handle(message, 0.0) == []
            assert sent(machine) == [frames.Unknown(OTHER)]
        if state == "absent":
            machine.handle(hello(), 0.0)
        elif state == "asked":
            machine.welcome(SESSION, {}, 0.0)
            machine.outbox.clear()


def test_listener_ignores_messages_of_listeners(new_settings):
    """WELCOME, REFUSE and UNKNOWN from a dialer, and another session's BYE."""
    machine = up_listener(new_settings)
    strange = [welcome(), refuse(), frames.Unknown(SESSION), frames.Bye(OTHER, "x")]
    for message in strange:
        assert machine.handle(message, 0.0) == []
    assert machine.state is ListenerState.UP
    assert sent(machine) == []


def test_protocol_mismatch_names_both_versions(new_settings):
    """A person must learn which side to update."""
    machine = ListenerMachine(77, new_settings())
    assert machine.handle(frames.Foreign(9, 5, 2), 0.0) == []
    message = sent(machine)[0]
    assert message.code == "protocol"
    assert (message.incarnation, message.attempt) == (5, 2)
    assert f"protocol {frames.PROTOCOL_VERSION}" in message.text
    assert "the dialer 9" in message.text


def test_listener_expiry(new_settings):
    """Silence, an application that does not answer, and a WELCOME that may be lost."""
    machine = up_listener(new_settings)
    assert machine.next_deadline() == 10.0
    assert machine.handle_timer(9.0) == []
    assert machine.handle_timer(10.0) == [Down(10, "expired")]
    assert machine.next_deadline() == math.inf
    # Nothing was received in the session: the dialer may still repeat this HELLO.
    assert machine.handle(hello(), 10.5) == [Ask(hello())]
    assert machine.next_deadline() == 20.5
    assert machine.handle_timer(20.0) == []
    assert machine.handle_timer(20.5) == []
    assert machine.state is ListenerState.ABSENT
    assert machine.handle_timer(21.0) == []
    assert machine.handle(hello(), 21.0) == [Ask(hello())]


def test_listener_violated_and_disconnect(new_settings):
    """Both end the session with a BYE; without a session nothing is sent."""
    machine = ListenerMachine(77, new_settings())
    assert machine.violated("bad", 0.0) == []
    machine.disconnect("x", 0.0)
    assert sent(machine) == []
    machine = up_listener(new_settings)
    assert machine.violated("bad", 1.0) == [Down(10, "protocol", "bad")]
    assert sent(machine) == [frames.Bye(SESSION, "protocol")]
    machine = up_listener(new_settings)
    machine.disconnect("drain", 1.0)
    assert sent(machine) == [frames.Bye(SESSION, "drain")]
