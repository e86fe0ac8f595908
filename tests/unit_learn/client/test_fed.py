"""The interface of a training function, with a run and without one."""

import threading
from contextlib import suppress

import pytest
import torch
from client_sides import Sides
from torch import nn

from fsl_async.config.site_policy import SiteChoices
from fsl_async.errors import DataError, TaskError
from fsl_async.learn.client.context import ClientContext, choose_device
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.client.ports import RunFinishedError
from fsl_async.roles.sync.events import PaceReached, Rebased, Snapshotted


def connected(**place):
    """Make a Fed whose run admits its first model at once."""
    sides = Sides(publishes=True)
    return Fed(sides.training, ClientContext("alice", **place)), sides


def local(**place):
    return LocalFed(ClientContext("alice", **place)), None


@pytest.mark.parametrize("make", [connected, local])
def test_the_same_task_runs_with_and_without_a_network(make):
    """A baseline uses the same training script."""
    lines = []
    fed, sides = make(config={"train": {"batch": 3}}, seed=7, log=lines.append)
    assert (fed.client_name, fed.seed, fed.config["train"]["batch"]) == ("alice", 7, 3)
    assert fed.version == -1
    model = nn.Linear(2, 2)
    with pytest.raises(TaskError, match=r"before fed\.attach"):
        fed.step(tokens=0)
    fed.attach(model)
    fed.attach(model)  # the same tensors
    with pytest.raises(TaskError, match=r"another model .* tensor 'weight' is 3x2 here"):
        fed.attach(nn.Linear(2, 3))
    assert fed.running
    assert fed.version == 0
    before = fed.status()["step"]
    assert fed.step(tokens=10, metrics={"loss": torch.tensor(2.0)})
    assert fed.step(tokens=10, metrics={"loss": 1.0})
    reported = fed.status()
    assert reported["step"] - before == 2
    assert reported["tokens"] == 20
    assert reported["loss"] == pytest.approx(1.95)
    assert reported["version"] == 0
    with pytest.raises(TaskError, match=r"metrics\['loss'\] is 'low'"):
        fed.step(metrics={"loss": "low"})
    (sides.exchange if sides else fed).stop()
    assert not any(fed.step(tokens=1) for _ in range(100))
    assert not fed.running
    with pytest.raises(RunFinishedError, match="its loop does not") as caught:
        fed.step(tokens=1)
    assert caught.value.exit_code == 0
    assert len([line for line in lines if "if not fed.running: break" in line]) == 1


def test_a_loop_over_a_shard_that_ignores_step_ends_with_the_run():
    """The shortest loop that a user writes ends with its run."""
    fed = LocalFed(ClientContext("alice"), steps=5)
    fed.attach(nn.Linear(1, 1))
    seen = 0
    for _ in fed.shard([1, 2, 3]):
        fed.step()
        seen += 1
    assert seen == 5
    assert [step for step, _ in fed.history] == [1, 2, 3, 4, 5]


def test_items_are_dealt_out_disjointly_and_once_an_epoch():
    """A user's own examples are divided as bytes are."""
    parts = []
    for index in range(3):
        fed, _ = local(shard_index=index, shard_count=3)
        drawn = fed.shard(list(range(20)))
        size = len(range(index, 20, 3))
        first = [next(drawn) for _ in range(size)]
        second = [next(drawn) for _ in range(size)]
        assert sorted(first) == sorted(second)
        assert first != second
        parts += first
        again = local(shard_index=index, shard_count=3)[0].shard(list(range(20)))
        assert [next(again) for _ in range(size)] == first
    assert sorted(parts) == list(range(20))
    with pytest.raises(TaskError, match="leave none for part 2 of 3"):
        local(shard_index=2, shard_count=3)[0].shard([1, 2])
    config = {"data": {"sharding": "local"}}  # each site has data of its own
    drawn = local(config=config, shard_index=1, shard_count=2)[0].shard([1, 2, 3])
    assert sorted(next(drawn) for _ in range(3)) == [1, 2, 3]


def test_text_comes_as_batches_of_this_clients_part(tmp_path):
    """Positions, dtype and the configured batch, as the built-in task relies on them."""
    path = tmp_path / "x.txt"
    path.write_bytes(bytes(range(250)))
    config = {"train": {"batch": 6}, "data": {"holdout": 0.1}}
    fed, _ = local(config=config, shard_index=1, shard_count=2)
    batch = next(fed.shard(path, context=4))
    assert batch.shape == (6, 5)
    assert batch.dtype == torch.int64
    assert batch.min() >= 112
    assert batch.max() < 225
    assert next(fed.shard(path, context=4, batch=2)).shape == (2, 5)
    with pytest.raises(TaskError, match="context="):
        fed.shard(path)
    with pytest.raises(DataError, match="No such file"):
        fed.shard(tmp_path / "y.txt", context=4)


def test_a_device_that_is_not_there_is_an_error_of_one_line():
    """The usual cause is a configuration written on another machine."""
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in {"cpu", "cuda"}
    for text in ("cuda:77", "toaster"):
        with pytest.raises(TaskError, match=f"train.device '{text}' cannot be used") as caught:
            choose_device(text)
        assert "\n" not in str(caught.value)


def test_a_nan_metric_does_not_stay_in_the_running_mean():
    """One bad batch must not hide the loss for the rest of the run."""
    fed, _ = local()
    fed.attach(nn.Linear(1, 1))
    for loss in (2.0, float("nan"), 4.0, 4.0):
        fed.step(metrics={"loss": loss})
    assert fed.status()["loss"] == 4.0


def test_a_step_is_what_lies_between_two_calls_of_step():
    """A copy or a wait inside fed.step is no hang of training."""
    fed, sides = connected()
    fed.attach(nn.Linear(1, 1))
    meter, inside = sides.training.meter, []
    sides.training.attend = lambda: inside.append(meter.step_begun) or len(inside) < 3
    for expected in (0, 1):
        sides.orders.attention = True
        assert fed.step(tokens=1)
        assert meter.step_begun is not None
        assert len(meter.step_times) == expected
    sides.orders.attention = True
    assert not fed.step(tokens=1)
    assert inside == [None] * 3
    assert meter.step_begun is None, "the loop is over"


def test_a_version_is_evaluated_without_what_was_trained_since():
    """In half precision too: a client's own weights come back to the bit."""
    fed, _ = connected()
    model = nn.Linear(3, 3).to(torch.bfloat16)
    fed.attach(model)
    initial = [weight.detach().clone() for weight in model.parameters()]
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.37)
    trained = [weight.detach().clone() for weight in model.parameters()]
    with fed.at_version() as version:
        assert version == 0
        assert all(map(torch.equal, model.parameters(), initial))
    assert all(map(torch.equal, model.parameters(), trained))
    with fed.at_version(), pytest.raises(TaskError, match=r"inside of `with fed\.at_version"):
        fed.step(tokens=1)
    with suppress(ZeroDivisionError), fed.at_version():
        _ = 1 / 0
    assert all(map(torch.equal, model.parameters(), trained))


def test_facts_are_those_of_the_moment_a_delta_is_made():
    """A privacy budget grows with each step, and no policy for metrics withholds it."""
    fed, sides = connected()
    fed.attach(nn.Linear(1, 1))
    spent = 0.0
    fed.add_facts(lambda: {"epsilon": spent})
    for sequence in (1, 2):
        asking = threading.Thread(target=sides.exchange.request_snapshot, args=(sequence,))
        asking.start()
        asking.join()
        spent += 0.5
        assert fed.step(tokens=4)
        assert sides.events[-1].facts == {"epsilon": spent}


BY_ROUNDS = {"tune": {"method": "lora", "steps": 3}, "sync": {"trigger": "rounds"}}


def calling_a_round(**place):
    """A Fed that is called to train a round as soon as it has weights; the run ends after it."""
    events = []

    def take(event):
        events.append(event)
        if isinstance(event, Rebased):
            sides.exchange.begin_round(1, 0)
        elif isinstance(event, Snapshotted):
            sides.exchange.stop()

    sides = Sides(publishes=True, take=take)
    return Fed(sides.training, ClientContext("alice", **place)), events


def test_a_loop_of_steps_on_an_attached_model_trains_whole_rounds(in_thread):
    """A model with adapters of its own is attached as it is, and trains `tune.steps` steps too."""
    fed, events = calling_a_round(config=BY_ROUNDS)

    def train():
        fed.attach(nn.Linear(1, 1))
        while fed.step(tokens=4):
            pass

    in_thread(train)()
    (found,) = [one for one in events if isinstance(one, Snapshotted)]
    assert (found.steps, found.tokens) == (3, 12)


def test_a_loop_that_asks_for_rounds_where_steps_make_them_is_told(in_thread):
    """It would wait for a second round, and the run for its first."""
    fed, _ = calling_a_round(config=BY_ROUNDS)

    def train():
        fed.attach(nn.Linear(1, 1))
        with pytest.raises(TaskError, match="call it after each step"):
            next(fed.rounds())

    in_thread(train)()


LORA = {"method": "lora"}
PRIVATE = {**LORA, "dp_epsilon": 4.0}


@pytest.mark.parametrize(
    ("call", "tune", "order", "says"),
    [
        ("step", {"method": "zeroth"}, None, "leave out --task"),  # counts as one of losses
        ("step", LORA, "zeroth", "leave out --task"),
        ("step", PRIVATE, None, "this task adds no"),
        (
            "lora",
            {**PRIVATE, "rule": "ffa"},
            "zeroth",
            "gets no noise",
        ),  # scalars leave as they are measured
        ("lora", {**LORA, "rule": "hetlora"}, "zeroth", "weighs sites by the norm"),
        ("attach", {**LORA, "rule": "bank"}, None, r"give the base model to fed\.lora"),
    ],
)
def test_a_task_that_does_not_fit_the_run_is_refused(call, tune, order, says):
    """The parameter server would decline its deltas again and again, or count them otherwise."""
    config = {"tune": tune, "sync": {"trigger": "clock" if tune == PRIVATE else "rounds"}}
    fed, sides = connected(config=config, site=SiteChoices(order=order))
    if call == "step":
        fed.attach(nn.Linear(1, 1))
        fed.add_facts(lambda: {"balance": 0.5})
    with pytest.raises(TaskError, match=says):
        fed.step(tokens=4) if call == "step" else getattr(fed, call)(nn.Sequential(nn.Linear(1, 1)))
    assert call == "step" or not sides.events
    if says == "this task adds no":
        fed.add_facts(lambda: {"epsilon": 1.5})
        assert fed.step(tokens=4)


def test_the_steps_of_a_pace_are_reported_once():
    """After each snapshot, and no more when the pace is taken back."""
    fed, sides = connected()
    fed.attach(nn.Linear(1, 1))
    sides.exchange.count_steps(3)

    def reported(steps):
        before = len(sides.events)
        for _ in range(steps):
            fed.step(tokens=1)
        return sides.events[before:].count(PaceReached())

    assert [reported(2), reported(1), reported(5)] == [0, 1, 0]
    sides.exchange.request_snapshot(1)
    assert [reported(3), reported(1)] == [0, 1], "the snapshot is taken in the first step"
    sides.exchange.request_snapshot(2)
    sides.exchange.count_steps(0)
    assert reported(9) == 0


def test_a_task_sends_at_its_own_pace():
    """It asks, and does not wait; where the parameter server calls, that is an error."""
    fed, sides = connected(config={"sync": {"trigger": "buffer"}})
    with pytest.raises(TaskError, match=r"before fed\.attach"):
        fed.send()
    fed.attach(nn.Linear(1, 1))
    fed.send()
    assert sides.events[-1] == PaceReached()
    fed, _ = connected()
    with pytest.raises(TaskError, match=r"start it with sync\.trigger = buffer"):
        fed.send()
    alone, _ = local()
    with pytest.raises(TaskError, match=r"before fed\.attach"):
        alone.send()
    alone.attach(nn.Linear(1, 1))
    alone.send()
