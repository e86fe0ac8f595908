"""A client that sends by itself, at the pace that it was given."""

import pytest

from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg


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
