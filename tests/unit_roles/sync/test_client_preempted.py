"""A client that others will end at a given time: what it sends, and that it leaves in time."""

import pytest

from fsl_async.errors import ExitCode
from fsl_async.roles.machine import Finish, TrainingEnded
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev


def preempt(client, deadline, source="SIGTERM"):
    return client.feed(ev.Preempting(deadline, source))


def measured(client, seconds):
    """A client whose delta 1 took `seconds`, without a new version."""
    client.ready()
    client.call(0)
    client.snapshot(1, 0)
    client.now += seconds
    client.acknowledge(client.key(1))
    return client


def test_what_was_trained_last_is_sent_and_the_exit_code_asks_for_a_relaunch(client):
    """With notice, no trained work is lost."""
    measured(client, 3.0)
    until = client.now + 30.0
    assert preempt(client, until) == [do.EndTraining("SIGTERM")]
    assert client.feed(TrainingEnded(None)) == [do.TakeSnapshot(2)]
    (offer,) = client.snapshot(2, 0)
    effects = client.acknowledge(offer.delta.key)
    assert effects == [do.DropDelta(2), Finish("SIGTERM", ExitCode.RELAUNCH, until)]


def test_a_delta_that_would_not_arrive_is_not_begun(client):
    """28 s are left before the goodbye, and a delta takes 40."""
    measured(client, 40.0)
    until = client.now + 30.0
    warning, end = preempt(client, until)
    assert "28.0 s are left and a delta takes 40.0 s" in warning.text
    assert end == do.EndTraining("SIGTERM")
    client.fire()
    finish = Finish("SIGTERM", ExitCode.RELAUNCH, until)
    assert client.feed(TrainingEnded(None)) == [finish]


def test_a_training_step_may_take_as_long_as_a_delta_can_still_arrive(client):
    """Without a deadline the thread has 10 s; with one in 60 s and deltas of 20 s it has 38 s."""
    measured(client, 20.0)
    begun = client.now
    preempt(client, begun + 60.0)
    assert client.machine.next_deadline() == begun + 38.0
    client.now += 37.0
    assert client.feed(TrainingEnded(None)) == [do.TakeSnapshot(2)]


def test_a_step_that_ends_too_late_is_lost_and_the_client_says_goodbye(client):
    """The thread ends when a delta would not arrive any more."""
    measured(client, 20.0)
    begun = client.now
    preempt(client, begun + 60.0)
    effects = client.fire()
    assert client.now == begun + 38.0
    assert [type(effect) for effect in effects] == [Finish]
    assert effects[0].exit_code == ExitCode.RELAUNCH


def test_the_goodbye_comes_before_the_deadline_whatever_is_under_way(client):
    """A killed process sends no goodbye, and the parameter server waits until it expires."""
    client.ready()
    preempt(client, client.now + 30.0)
    client.feed(TrainingEnded(None))
    client.snapshot(1, 0)
    client.moving = ("",)  # its bytes advance all the time
    effects = []
    while not client.machine.finished:
        effects = client.fire()
    assert client.now == 28.0
    (finish,) = effects
    assert finish.exit_code == ExitCode.RELAUNCH
    assert "could be sent in time" in finish.reason


def test_without_a_deadline_it_drains_as_for_ctrl_c(client):
    """Without a deadline the client waits while bytes advance."""
    client.ready()
    preempt(client, None)
    client.feed(TrainingEnded(None))
    client.snapshot(1, 0)
    client.moving = ("",)
    for _ in range(5):
        assert client.fire() == []
    assert client.now > 200.0


@pytest.mark.parametrize(("second", "leaves_at"), [(20.0, 18.0), (90.0, 58.0)])
def test_of_two_notices_the_earlier_deadline_counts(client, second, leaves_at):
    """A spot market's two minutes, then the scheduler's TERM; or in the other order."""
    client.ready()
    preempt(client, 60.0, "EC2")
    assert preempt(client, second) == []
    client.feed(TrainingEnded(None))
    client.snapshot(1, 0)
    client.moving = ("",)
    effects = []
    while not client.machine.finished:
        effects = client.fire()
    assert client.now == leaves_at
    assert effects[-1].deadline == min(60.0, second), "the launcher needs it"
