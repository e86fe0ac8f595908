"""How a client ends: the run's end, a refusal, Ctrl-C, its function's return or error."""

import pytest

from fsl_async import effects as do
from fsl_async import events as ev
from fsl_async.roles.client import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED


def outstanding(client):
    """A client with a delta on its way."""
    client.ready()
    client.call(0)
    client.snapshot(1, 0)
    return client


def test_the_run_ends(client):
    """Training stops at its next step, then the process ends well."""
    client.ready()
    assert client.feed(ev.RunEnded("limit")) == [do.Leave("limit"), do.EndTraining("limit")]
    assert client.call(3) == [], "no more work"
    assert isinstance(client.offered(1)[0], do.DeclineStream)
    assert client.feed(ev.PublishAsked()) == []
    assert client.feed(ev.TrainingEnded(None)) == [do.Finish("limit", 0)]
    assert client.machine.next_deadline() is None


def test_a_training_thread_that_does_not_come_back(client):
    """A step of half an hour must not hold the process."""
    client.ready()
    client.feed(ev.DrainAsked("Ctrl-C"))
    assert client.feed(ev.DrainAsked("Ctrl-C")) == []
    assert client.fire() == [do.Finish("Ctrl-C", EXIT_INTERRUPTED)]
    assert client.now == 10.0


@pytest.mark.parametrize(("code", "exit_code"), [("model", EXIT_REFUSED), ("finished", 0)])
def test_refused(client, code, exit_code):
    """A run that has ended is no failure of the client; anything else is for the user to mend."""
    client.ready()
    client.feed(ev.ServerRefused(code, "why"))
    assert client.feed(ev.TrainingEnded(None)) == [do.Finish("why", exit_code)]


def test_refusal_is_the_reason_not_the_error_it_causes(client):
    """Before, fed.attach raising because of the refusal turned exit code 2 into 1."""
    client.welcome()
    client.feed(ev.ServerRefused("model", "head.weight differs"))
    effects = client.feed(ev.TrainingEnded("RefusedError: head.weight differs"))
    assert effects == [do.Finish("head.weight differs", EXIT_REFUSED)]


def test_training_raises(client):
    """Also after the end was asked for: an error in the last lines of the user's function is an error."""
    client.ready()
    client.feed(ev.RunEnded("limit"))
    assert client.feed(ev.TrainingEnded("ZeroDivisionError")) == [
        do.Finish("ZeroDivisionError", EXIT_FAILED)
    ]


def test_training_returns_with_nothing_outstanding(client):
    """A user's loop may end before the run."""
    client.ready()
    assert client.feed(ev.TrainingEnded(None)) == [do.Finish("the training function returned", 0)]


def test_training_returns_and_the_last_delta_still_arrives(client):
    """What was trained should count."""
    outstanding(client)
    assert client.feed(ev.TrainingEnded(None)) == []
    effects = client.acknowledge(client.key(1))
    assert effects == [do.DropDelta(1), do.Finish("the training function returned", 0)]


def test_the_last_delta_does_not_arrive(client):
    """The wait for it has an end: drain_s, or the session's."""
    outstanding(client)
    client.feed(ev.TrainingEnded(None))
    assert [type(effect) for effect in client.fire()] == [do.Finish]
    assert client.now == 10.0


def test_the_session_ends_while_the_last_delta_is_on_its_way(client):
    """Nobody is there to take it."""
    outstanding(client)
    client.feed(ev.TrainingEnded(None))
    assert [type(effect) for effect in client.lose()] == [do.Finish]
    assert client.lose() == [], "the shell closes the link after Finish; that is no second end"


def test_the_run_ends_while_the_last_delta_is_on_its_way(client):
    """Before, it waited drain_s for an answer that no ended run gives."""
    outstanding(client)
    client.feed(ev.TrainingEnded(None))
    assert [type(effect) for effect in client.feed(ev.RunEnded("limit"))] == [do.Leave, do.Finish]


def test_the_run_ended_and_the_delta_is_not_waited_for(client):
    """The same, the other way round."""
    outstanding(client)
    client.feed(ev.RunEnded("limit"))
    assert client.feed(ev.TrainingEnded(None)) == [do.Finish("limit", 0)]


def test_ctrl_c_waits_for_the_last_delta(client):
    """The first Ctrl-C drains: a snapshot that was asked for is taken, sent and acknowledged."""
    client.ready()
    client.call(0)
    client.feed(ev.DrainAsked("Ctrl-C"))
    assert [type(effect) for effect in client.snapshot(1, 0)] == [do.OfferDelta]
    assert client.feed(ev.TrainingEnded(None)) == []
    assert client.acknowledge(client.key(1))[-1] == do.Finish("Ctrl-C", EXIT_INTERRUPTED)


def test_offline_it_ends_when_training_does(client):
    """There is nothing to wait for."""
    outstanding(client)
    client.feed(ev.DrainAsked("Ctrl-C"))
    client.lose()
    assert client.feed(ev.TrainingEnded(None)) == [do.Finish("Ctrl-C", EXIT_INTERRUPTED)]


def test_a_delta_settled_while_training_ends(client):
    """With the thread still at work the end waits for the thread."""
    outstanding(client)
    client.feed(ev.DrainAsked("Ctrl-C"))
    assert client.acknowledge(client.key(1)) == [do.DropDelta(1)]
    assert client.feed(ev.TrainingEnded(None)) == [do.Finish("Ctrl-C", EXIT_INTERRUPTED)]


def test_finished_is_finished(client):
    """Before, a session lost after the end made a second Finish."""
    outstanding(client)
    client.feed(ev.DrainAsked("Ctrl-C"))
    client.fire()
    late = [
        ev.TrainingEnded(None),
        ev.ServerLost("bye"),
        ev.DeltaAcknowledged(client.key(1)),
        ev.RunEnded("late"),
        ev.Welcomed("r", 0, 1),
        ev.TimerFired(),
    ]
    for event in late:
        assert client.feed(event, after_s=100.0) == []
    assert client.machine.next_deadline() is None
