"""The paces at which clients send by themselves, and DyLU."""

import pytest

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
    server = run(local_steps=100, dylu=True)
    for name in "ab":
        server.join(name)
    sent = beats(server, 12, a=4, b=1)
    assert sent == [("b", 25)]
    assert beats(server, 12, a=4, b=1) == []
    assert paces(server.hello("b", 2)) == [("b", 25)], "a relaunched client is as slow"


def test_the_fastest_client_changes(run):
    """All paces follow it when it comes, and when it is gone."""
    server = run(local_steps=100, dylu=True)
    for name in "abc":
        server.join(name)
    beats(server, 12, a=4, b=2)
    assert dict(beats(server, 9, a=4, b=2, c=8)) == {"a": 50, "b": 25}
    server.left("c")
    assert dict(beats(server, 9, a=4, b=2)) == {"a": 100, "b": 50}


def test_a_step_longer_than_heartbeats(run):
    """The speed is that between two advances, not zero in between."""
    server = run(local_steps=100, dylu=True)
    for name in "ab":
        server.join(name)
    sent = beats(server, 100, a=0.2, b=0.1)
    assert sent[-1][0] == "b"
    assert 40 <= sent[-1][1] <= 60


def test_a_false_speed(run):
    """Others are told a 64th of their steps at least, and one in any case."""
    server = run(local_steps=640, dylu=True)
    for name in "ab":
        server.join(name)
    assert beats(server, 12, a=10**15, b=1) == [("b", 10)]
    assert min(steps for _, steps in beats(run_small(run), 12, a=10**15, b=1)) == 1


def run_small(run):
    server = run(local_steps=3, dylu=True)
    for name in "ab":
        server.join(name)
    return server
