"""The start and the end of a client's training: refused, stopped, held, asked after its end."""

import queue

import numpy as np
import pytest
import torch
from client_sides import Sides, Weights
from torch import nn

from fsl_async.errors import RefusedError, TaskError
from fsl_async.learn.client.ports import RunFinishedError
from fsl_async.roles.sync.events import Attached, Rebased, Snapshotted
from fsl_codecs import decode


def attached(model):
    """Make a client whose own weights are version 0, in this thread: the event is answered at
    once.
    """
    events = queue.Queue()
    client = Sides(publishes=True, take=events.put)
    client.training.attach(model)
    while not events.empty():
        events.get()
    client.events = events
    return client


def test_attach_refuses_what_cannot_begin_a_run():
    """Each user's mistake is one line, before any weight is sent."""
    client = Sides()
    with pytest.raises(TaskError, match=r"NaN or infinite values at fed\.attach, first in w: "):
        client.training.attach(Weights(start=float("nan")))
    with pytest.raises(TaskError, match=r"before fed\.attach"):
        client.training.attend()
    client = attached(Weights())
    with pytest.raises(TaskError, match=r"another model than that of the first fed\.attach"):
        client.training.attach(nn.Linear(2, 3))


def test_a_second_module_of_the_same_tensors_goes_on():
    """A model that was compiled or wrapped after fed.attach is attached once more."""
    first, second = Weights(start=5.0), Weights(start=-1.0)
    client = attached(first)
    client.training.attach(second)
    assert torch.equal(second.w, first.w)


class Growing(nn.Module):
    """A frozen layer, integers, and room for more."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(2, 2)
        self.trunk.requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


def test_what_changes_after_attach_is_said_once():
    """It trained at each site alone: a head was averaged over two trunks, without a word."""
    model, said = Growing(), []
    client = Sides(publishes=True)
    client.training.log = said.append
    client.training.attach(model)
    client.step()

    def sync(sequence):
        client.exchange.request_snapshot(sequence)
        client.step()
        found = said.copy()
        said.clear()
        return found

    assert sync(1) == []
    model.trunk.requires_grad_(requires_grad=True)
    model.norm(torch.ones(4, 2))  # its counter is known to change
    (line,) = sync(2)
    assert line.startswith("trunk.weight (and 1 more) trains here and is not exchanged")
    assert sync(3) == []
    model.more = nn.Linear(1, 1)
    model.seen += 1
    lines = sync(4)
    assert [line.split(" has ")[0].split(" trains ")[0] for line in lines] == [
        "more.weight (and 1 more)",
        "seen",
    ]
    assert sync(5) == []
    model.norm = nn.BatchNorm1d(2)
    (line,) = sync(6)
    assert line.startswith("norm.weight (and 1 more) was replaced by another tensor")
    del model.head
    model.top = nn.Linear(2, 1)
    with pytest.raises(TaskError, match=r"head\.bias was in the model at fed\.attach"):
        sync(7)


def test_spectral_norms_of_a_version_are_sent():
    """At all clients the same, so that their mean has a norm of one."""
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    client = Sides(publishes=True)
    client.training.attach(model)
    client.step()
    client.exchange.request_snapshot(1)
    own = model.parametrizations.weight[0]._u.clone()
    for _ in range(3):
        model(torch.randn(2, 4))
        model.parametrizations.weight.original.data += 0.3
    client.step()
    sent = decode(client.exchange.encode_delta(1, 1))
    assert sent[:4].tolist() == own.tolist()
    assert model.parametrizations.weight[0]._u.tolist() != own.tolist()


def test_buffers_that_are_local_stay_at_their_client():
    """They were sent with each delta, and versions had their mean."""
    model = nn.BatchNorm1d(2)
    client = Sides(publishes=True)
    client.training.buffers = "local"
    client.training.attach(model)
    for number in (1, 2):
        model.running_var.fill_(5.0)
        client.step()
        client.exchange.request_snapshot(number)
        client.step()
        assert decode(client.exchange.encode_delta(number, 1)).tolist() == [0, 0, 1, 1]
    assert model.running_var.tolist() == [5, 5]


def test_a_second_attach_of_the_same_module_is_no_work():
    """What rounding to bf16 had added was sent as if it had been trained."""
    model = nn.Linear(4, 4).to(torch.bfloat16)
    client = Sides(publishes=True)
    client.training.attach(model)
    base = np.linspace(0.1, 0.9, 20, dtype=np.float32)
    client.training._weights.take(base)
    client.training.attach(model)
    found = np.empty_like(base)
    client.training._weights.copy_out(found)
    assert np.array_equal(found, base)


@pytest.mark.parametrize("early", [True, False])
def test_attach_ends_when_the_model_is_refused_or_the_run_stops(in_thread, early):
    """A waiting training thread would keep the process from ending."""
    for ask, kind, text in (
        (lambda client: client.exchange.refuse("manifest", "w differs"), RefusedError, "w differs"),
        (lambda client: client.exchange.stop(), RunFinishedError, "run ended before"),
    ):
        events = queue.Queue()
        client = Sides(take=events.put)
        if early:
            ask(client)
        wait = in_thread(lambda client=client: client.training.attach(Weights()))
        assert isinstance(events.get(timeout=20), Attached)
        if not early:
            ask(client)
        with pytest.raises(kind, match=text):
            wait()


@pytest.mark.parametrize("then", ["resume", "stop"])
def test_a_held_step_answers_and_waits(in_thread, then):
    """After the last call a step ends only with the run, on its last version."""
    client = attached(Weights())
    client.exchange.request_snapshot(1, hold=True)
    wait = in_thread(client.step)
    assert isinstance(client.events.get(timeout=20), Snapshotted)
    client.exchange.request_rebase(0, client.exchange._base_digest)
    assert client.events.get(timeout=20) == Rebased(0), "requests are answered meanwhile"
    with pytest.raises(queue.Empty):
        client.events.get(timeout=0.05)
    client.exchange.resume() if then == "resume" else client.exchange.stop()
    assert wait() is (then == "resume")
    assert client.step() is (then == "resume"), "one hold is one wait"


def test_requests_after_the_training_function_has_returned(in_thread):
    """The training thread copies the last work, also after a stop."""
    client = attached(Weights())
    assert client.step()
    client.exchange.stop()
    client.training.attend_for(0.01)
    wait = in_thread(lambda: client.training.attend_for(20))
    client.exchange.request_snapshot(1)
    wait()
    assert client.events.get(timeout=20).steps == 1


def test_a_loop_of_steps_trains_rounds_of_so_many_and_waits_between_them(in_thread):
    """No step is made from a version that is replaced meanwhile: the loop stands still in between.

    A second call's steps start from the version that the first round made.
    """
    events = queue.Queue()
    client = Sides(publishes=True, take=events.put)
    client.training.expect_rounds(3)
    client.training.facts["adapters"] = lambda: {"rank": 4.0}
    model = Weights()
    begun = []

    def train():
        client.training.attach(model)
        while True:
            begun.append(model.w[0].item())
            model.add(1.0)
            client.training.meter.count(2, None)
            if not client.training.step():
                return

    wait = in_thread(train)
    assert isinstance(events.get(timeout=20), Attached)
    assert isinstance(events.get(timeout=20), Rebased)
    assert not begun, "the first round was not called yet"
    client.exchange.begin_round(1, 0)
    found = events.get(timeout=20)
    assert isinstance(found, Snapshotted)
    assert (found.sequence, found.tokens, found.steps, found.facts) == (1, 6, 3, {"rank": 4.0})
    assert begun == [0.0, 1.0, 2.0]
    client.exchange.resume()
    client.exchange.begin_round(2, 1)
    assert events.get(timeout=20).steps == 3
    assert begun == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    client.exchange.stop()
    wait()
    assert len(begun) == 6
