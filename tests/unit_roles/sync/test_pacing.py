"""The paces at which clients send by themselves, DyLU, and a client that follows its pace."""

import pytest

from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg


@pytest.fixture
def run(make_server):
    """Make a parameter server with these paces."""

    def make(**rules):
        return make_server(trigger="buffer", shards=9, **rules)

    return make


def paces(effects):
    return [
        (effect.peer, effect.message.steps)
        for effect in effects
        if isinstance(getattr(effect, "message", None), msg.Pace)
    ]


def beat(server, name, step, after_s=0.0):
    return paces(server.feed(ev.HeartbeatReceived(name, {"step": step}), after_s))


def beats(server, seconds, **speeds):
    """Let each client report for so many seconds, once a second; returns the paces sent."""
    sent = []
    for _ in range(seconds):
        server.now += 1.0
        for name, speed in speeds.items():
            sent += beat(server, name, int(speed * server.now))
    return sent


def test_a_pace_follows_the_welcome(run, look):
    """Of every session, in milliseconds."""
    server = run(every_s=1.5)
    assert look.sent(server.hello("a"), "a") == [msg.Pace(0, 1500)]
    assert look.sent(server.hello("a"), "a") == [msg.Pace(0, 1500)]


def test_steps_by_speed(run):
    """H_w = floor(v_w / v_max * H), told once it differs by a tenth."""
    server = run(local_steps=100, pace="speed")
    for name in "ab":
        server.join(name)
    sent = beats(server, 12, a=4, b=1)
    assert sent == [("b", 25)]
    assert beats(server, 12, a=4, b=1) == []
    assert paces(server.hello("b", 2)) == [("b", 25)], "a relaunched client is as slow"


def test_the_fastest_client_changes(run):
    """All paces follow it when it comes, and when it is gone."""
    server = run(local_steps=100, pace="speed")
    for name in "abc":
        server.join(name)
    beats(server, 12, a=4, b=2)
    assert dict(beats(server, 9, a=4, b=2, c=8)) == {"a": 50, "b": 25}
    server.left("c")
    assert dict(beats(server, 9, a=4, b=2)) == {"a": 100, "b": 50}


def test_a_step_longer_than_heartbeats(run):
    """The speed is that between two advances, not zero in between."""
    server = run(local_steps=100, pace="speed")
    for name in "ab":
        server.join(name)
    sent = beats(server, 100, a=0.2, b=0.1)
    assert sent[-1][0] == "b"
    assert 40 <= sent[-1][1] <= 60


def test_a_false_speed(run):
    """Others are told a 64th of their steps at least, and one in any case."""
    server = run(local_steps=640, pace="speed")
    for name in "ab":
        server.join(name)
    assert beats(server, 12, a=10**15, b=1) == [("b", 10)]
    assert min(steps for _, steps in beats(run_small(run), 12, a=10**15, b=1)) == 1


def run_small(run):
    server = run(local_steps=3, pace="speed")
    for name in "ab":
        server.join(name)
    return server


@pytest.fixture
def leader(client):
    """Make a client that trains on version 0, at a pace of 20 steps."""
    client.feed(ev.Attached("f", 10))
    client.welcome()
    assert client.receive(msg.Pace(20, 0)) == [do.CountSteps(20)]
    client.announce(0)
    client.follow(0, "full")
    return client


def test_one_delta_is_outstanding(leader, look):
    """A pace that is reached meanwhile is answered once, after the acknowledgement."""
    leader.feed(ev.PaceReached())
    leader.snapshot(1, 0)
    assert leader.feed(ev.PaceReached()) == []
    assert leader.feed(ev.PaceReached()) == []
    assert leader.acknowledge(leader.key(1)) == [do.DropDelta(1), do.TakeSnapshot(2)]
    leader.snapshot(2, 0)
    assert leader.acknowledge(leader.key(2)) == [do.DropDelta(2)]


def test_by_seconds(leader, look):
    """They count from the last snapshot."""
    leader.receive(msg.Pace(0, 30_000), after_s=5.0)
    assert leader.machine.next_deadline() == 35.0
    assert leader.fire() == [do.TakeSnapshot(1)]
    leader.feed(ev.Snapshotted(1, 0, 8, 2), 2.0)
    assert leader.machine.next_deadline() == 67.0
    assert leader.fire() == [], "the first one is outstanding"
    assert leader.acknowledge(leader.key(1)) == [do.DropDelta(1), do.TakeSnapshot(2)]


def test_seconds_begin_with_the_first_version(client):
    """Before, there is nothing to send."""
    client.feed(ev.Attached("f", 10))
    client.welcome()
    client.receive(msg.Pace(0, 30_000))
    client.announce(0)
    assert client.machine.next_deadline() is None
    client.now = 100.0
    client.follow(0, "full")
    assert client.machine.next_deadline() == 130.0


def test_nothing_was_trained(leader):
    """Nothing is sent, and no call is skipped."""
    leader.feed(ev.PaceReached())
    assert leader.snapshot(1, 0, tokens=0, steps=0) == [do.DropDelta(1)]


def test_while_the_parameter_server_is_away(leader, look):
    """Training goes on, a delta is kept, and offered in the next session."""
    leader.lose()
    assert leader.feed(ev.PaceReached()) == [do.TakeSnapshot(1)]
    assert look.only(leader.snapshot(1, 0), do.OfferDelta) == []
    leader.feed(ev.PaceReached())
    assert look.only(leader.welcome(), do.OfferDelta)
    assert leader.receive(msg.Pace(20, 0)) == [do.CountSteps(20)]
    assert do.TakeSnapshot(2) in leader.acknowledge(leader.key(1))


def test_a_parameter_server_that_calls_again(leader, look):
    """A client without a pace in this session waits for calls."""
    leader.feed(ev.PaceReached())
    leader.snapshot(1, 0)
    leader.feed(ev.PaceReached())
    leader.lose()
    assert do.CountSteps(0) in leader.welcome()
    assert leader.acknowledge(leader.key(1)) == [do.DropDelta(1)]
    assert leader.call(0) == [do.TakeSnapshot(2)]


def test_the_last_call(leader, look):
    """It holds the client, and what was sent before is no answer to it."""
    leader.feed(ev.PaceReached())
    leader.snapshot(1, 0)
    assert leader.call(0, last=True) == []
    assert leader.acknowledge(leader.key(1)) == [do.DropDelta(1), do.TakeSnapshot(2, True)]
    (offer,) = look.only(leader.snapshot(2, 0), do.OfferDelta)
    assert offer.delta.round == 0
    leader.feed(ev.PaceReached())
    assert look.sent(leader.announce(1)) == [msg.Fetch(0, "d0")]
