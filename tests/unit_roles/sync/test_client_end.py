"""How a client ends: the run's end, a refusal, Ctrl-C, its function's return or error."""

import pytest

from fsl_async.errors import ExitCode
from fsl_async.roles.machine import (
    SERVER,
    DeclineStream,
    DrainAsked,
    Finish,
    HelloRefused,
    Received,
    SendGoodbye,
    SessionLost,
    TimerFired,
    TrainingEnded,
)
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.client import VIOLATIONS
from fsl_async.roles.sync.shutdown import LOSSES


def outstanding(client):
    """A client with an outstanding delta."""
    client.ready()
    client.call(0)
    client.snapshot(1, 0)
    return client


def test_the_run_ends(client):
    """Training stops at its next step, then the process ends with exit code 0."""
    client.ready()
    assert client.receive(msg.Stop("limit")) == [SendGoodbye("limit"), do.EndTraining("limit")]
    assert client.call(3) == [], "no more work"
    assert isinstance(client.offered(1)[0], DeclineStream)
    assert client.receive(msg.Publish()) == []
    assert client.feed(TrainingEnded(None)) == [Finish("limit", 0)]
    assert client.machine.next_deadline() is None


@pytest.mark.parametrize(("code", "exit_code"), [("model", ExitCode.BAD_INPUT), ("finished", 0)])
def test_refused(client, code, exit_code):
    """A run that has ended is no failure of the client; the user must fix anything else."""
    client.ready()
    client.feed(HelloRefused(code, "why"))
    assert client.feed(TrainingEnded(None)) == [Finish("why", exit_code)]


def test_training_raises(client):
    """An error in the user's function counts even after the end was asked for."""
    client.ready()
    client.receive(msg.Stop("limit"))
    assert client.feed(TrainingEnded("ZeroDivisionError")) == [
        Finish("ZeroDivisionError", ExitCode.BUG)
    ]


def test_training_returns_with_nothing_trained_since(client):
    """A user's loop may end before the run."""
    client.ready()
    assert client.feed(TrainingEnded(None)) == [do.TakeSnapshot(1)]
    effects = client.snapshot(1, 0, tokens=0)
    assert effects[0] == do.DropDelta(1)
    assert effects[-1] == Finish("the training function returned", 0)


def test_training_returns_with_an_outstanding_delta(client):
    """The outstanding delta is sent first, then the progress since: one at a time."""
    outstanding(client)
    assert client.feed(TrainingEnded(None)) == []
    assert client.acknowledge(client.key(1)) == [do.DropDelta(1), do.TakeSnapshot(2)]
    client.snapshot(2, 0)
    effects = client.acknowledge(client.key(2))
    assert effects == [do.DropDelta(2), Finish("the training function returned", 0)]


def test_the_last_delta_does_not_arrive(client):
    """The client waits drain_s if no bytes advance."""
    outstanding(client)
    client.feed(TrainingEnded(None))
    assert [type(effect) for effect in client.fire()] == [Finish]
    assert client.now == 10.0


def test_the_last_delta_is_slow(client):
    """The client waits longer than drain_s while bytes advance."""
    outstanding(client)
    client.feed(TrainingEnded(None))
    client.moving = ("",)
    for _ in range(5):
        assert client.fire() == []
    assert client.now == 10.0 + 4 * 60.0
    client.moving = ()
    assert [type(effect) for effect in client.fire()] == [Finish]


def test_the_wait_for_the_last_delta_has_a_cap(client):
    """A Slurm job must end at some time."""
    outstanding(client)
    client.feed(TrainingEnded(None))
    client.moving = ("",)
    while not client.machine.finished:
        client.fire()
    assert client.now == pytest.approx(3600.0)


def test_the_last_call_holds_the_training_thread(client):
    """No work is wasted, and the user's loop ends with the run's last weights, exactly."""
    client.ready()
    assert client.call(0, last=True) == [do.TakeSnapshot(1, hold=True)]
    assert [type(effect) for effect in client.snapshot(1, 0)] == [do.OfferDelta]
    client.acknowledge(client.key(1))
    client.announce(1)
    client.offered(1)
    client.fetched(1)
    assert client.replaced(1) == [do.Rebase(1, discard=True)]
    client.rebased(1)
    client.receive(msg.Stop("limit"))
    assert client.feed(TrainingEnded(None)) == [Finish("limit", 0)]


@pytest.mark.parametrize("how", ["lost", "refused", "nothing", "ending"])
def test_a_held_training_thread_resumes(client, how):
    """If no last version will arrive, the thread must not wait forever."""
    client.ready()
    client.call(0, last=True)
    if how == "nothing":
        assert do.ResumeTraining() in client.snapshot(1, 0, tokens=0)
        return
    if how == "ending":
        client.feed(DrainAsked("Ctrl-C"))
        assert do.ResumeTraining() in client.snapshot(1, 0)
        return
    client.snapshot(1, 0)
    effects = client.lose() if how == "lost" else client.refuse(client.key(1))
    assert do.ResumeTraining() in effects


def test_ctrl_c_waits_for_the_last_delta(client):
    """The first Ctrl-C drains: a requested snapshot is taken, sent and acknowledged."""
    client.ready()
    client.call(0)
    client.feed(DrainAsked("Ctrl-C"))
    assert [type(effect) for effect in client.snapshot(1, 0)] == [do.OfferDelta]
    assert client.feed(TrainingEnded(None)) == []
    assert client.acknowledge(client.key(1)) == [do.DropDelta(1), do.TakeSnapshot(2)]
    assert client.snapshot(2, 0, tokens=0)[-1] == Finish("Ctrl-C", ExitCode.INTERRUPTED)


def test_finished_is_finished(client):
    """A session lost after the end must not cause a second Finish."""
    outstanding(client)
    client.feed(DrainAsked("Ctrl-C"))
    client.fire()
    late = [
        TrainingEnded(None),
        SessionLost("bye"),
        Received(SERVER, msg.Accepted(client.key(1))),
        Received(SERVER, msg.Stop("late")),
        ev.Welcomed("r", 0, 1),
        TimerFired(),
    ]
    for event in late:
        assert client.feed(event, after_s=100.0) == []
    assert client.machine.next_deadline() is None


BAD = SessionLost("bye", "DeltaMeta.delta.tokens is float, not int")


def test_a_message_that_the_server_cannot_read_is_not_sent_for_ever(client):
    """It is offered in each new session, which ends as the one before; the cause is the end's."""
    outstanding(client)
    for _ in range(VIOLATIONS - 1):
        assert not any(isinstance(one, do.EndTraining) for one in client.feed(BAD))
        client.welcome()
    (end,) = client.feed(BAD)
    assert isinstance(end, do.EndTraining)
    assert "tokens is float, not int" in end.reason
    (finish,) = client.feed(TrainingEnded(None))
    assert finish.exit_code == ExitCode.BUG
    assert "tokens is float, not int" in finish.reason


def test_what_goes_through_between_two_violations_ends_the_count(client):
    """A rare fault over days is none that ends every session."""
    for number in range(2 * VIOLATIONS):
        client.ready() if not number else client.welcome()
        client.call(number)
        client.snapshot(number + 1, 0)
        client.acknowledge(client.key(number + 1))
        assert not any(isinstance(one, do.EndTraining) for one in client.feed(BAD))


def test_sessions_that_end_again_and_again_do_not_keep_a_client_that_has_ended(client):
    """Each of them gave it ten seconds more, so Ctrl-C did not end it."""
    outstanding(client)
    client.feed(DrainAsked("Ctrl-C"))
    client.feed(TrainingEnded(None))
    for _ in range(100):
        client.feed(SessionLost("bye"), after_s=1.0)
        client.welcome()
        if client.machine.next_deadline() <= client.now + 1.0:
            break
    assert client.now <= LOSSES + 10.0
    assert client.fire() == [Finish("Ctrl-C", ExitCode.INTERRUPTED)]


def test_a_session_lost_between_the_last_call_and_its_snapshot(client):
    """The hold is already requested, so the thread resumes after the snapshot."""
    client.ready()
    client.call(0, last=True)
    assert do.ResumeTraining() not in client.lose(), "the hold that follows would undo it"
    client.welcome()
    assert do.ResumeTraining() in client.snapshot(1, 0)
