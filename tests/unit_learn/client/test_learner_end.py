"""A learner at its beginning and its end: refused, stopped, held by the last call, asked after the training function is back."""

import queue

import pytest
import torch
from torch import nn

from fsl_async.errors import RefusedError, TaskError
from fsl_async.learn.client.learner import Learner, RunFinishedError
from fsl_async.roles.sync.events import Attached, Rebased, Snapshotted


class Model(nn.Module):
    """One vector of weights, all equal at first."""

    def __init__(self, start=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((5,), start))


def attached(model):
    """A learner whose own weights are version 0; no thread is needed, the event answers itself."""
    learner = Learner()
    learner.events = queue.Queue()

    def on_event(event):
        learner.events.put(event)
        if isinstance(event, Attached):
            learner.request_rebase(0, learner.adopt_initial())

    learner.on_event = on_event
    learner.attach(model)
    learner.events = queue.Queue()
    return learner


def step(learner):
    learner.meter.count(1, None)
    return learner.attend() if learner.attention else True


def test_attach_refuses_what_cannot_begin_a_run():
    """These are a user's mistakes; each gets its line before any weight travels."""
    learner = Learner()
    with pytest.raises(TaskError, match="NaN"):
        learner.attach(Model(start=float("nan")))
    with pytest.raises(TaskError, match=r"before fed\.attach"):
        learner.attend()
    learner = attached(Model())
    with pytest.raises(TaskError, match="twice"):
        learner.attach(Model())


@pytest.mark.parametrize("early", [True, False])
def test_attach_ends_when_the_model_is_refused_or_the_run_stops(in_thread, early):
    """A training thread that waits for ever would keep the process from ending."""
    for ask, kind, text in (
        (lambda learner: learner.refuse("manifest", "w differs"), RefusedError, "w differs"),
        (lambda learner: learner.stop(), RunFinishedError, "run ended before"),
    ):
        learner, events = Learner(), queue.Queue()
        learner.on_event = events.put
        if early:
            ask(learner)
        wait = in_thread(lambda learner=learner: learner.attach(Model()))
        assert isinstance(events.get(timeout=20), Attached)
        if not early:
            ask(learner)
        with pytest.raises(kind, match=text):
            wait()


def test_requests_before_the_end_are_still_answered():
    """The last delta of a drained client is asked for just before it is stopped."""
    learner = attached(Model())
    learner.request_snapshot(1)
    learner.stop()
    assert not step(learner)
    assert isinstance(learner.events.get(timeout=20), Snapshotted)


@pytest.mark.parametrize("then", ["resume", "stop"])
def test_a_held_step_answers_and_waits(in_thread, then):
    """After the last call a step ends only with the run, on the run's last version; or training goes on."""
    learner = attached(Model())
    learner.request_snapshot(1, hold=True)
    wait = in_thread(lambda: step(learner))
    assert isinstance(learner.events.get(timeout=20), Snapshotted)
    learner.request_rebase(0, learner._base_digest)
    assert learner.events.get(timeout=20) == Rebased(0), "requests are answered meanwhile"
    with pytest.raises(queue.Empty):
        learner.events.get(timeout=0.05)
    learner.resume() if then == "resume" else learner.stop()
    assert wait() is (then == "resume")
    assert step(learner) is (then == "resume"), "one hold is one wait"


def test_what_is_asked_when_the_training_function_is_back(in_thread):
    """What was trained last is copied by the thread that trained it, after its last step, also once it was stopped."""
    learner = attached(Model())
    assert step(learner)
    learner.stop()
    learner.attend_for(0.01)
    wait = in_thread(lambda: learner.attend_for(20))
    learner.request_snapshot(1)
    wait()
    assert learner.events.get(timeout=20).steps == 1
