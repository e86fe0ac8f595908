"""The built-in task, end to end on a short text."""

import math
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from client_sides import Sides

from fsl_async.config.site_policy import DELTAS, METRICS, SitePolicy
from fsl_async.errors import DataError, TaskError
from fsl_async.learn.client import pretrain
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.client.ports import RunFinishedError
from fsl_async.learn.models.gpt import GPT, PRESETS

TEXT = b"".join(b"line %d of a text that is easy to learn\n" % (i % 10) for i in range(600))


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text.txt").write_bytes(TEXT)
    return {
        "model": {"preset": "0.5m", "layers": 1, "width": 32, "heads": 2, "context": 32},
        "data": {"path": str(tmp_path / "text.txt"), "holdout": 0.02},
        "train": {"batch": 8, "learning_rate": 1e-2, "warmup_steps": 5, "threads": 1},
    }


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trained(config, steps=60, seed=0):
    lines = []
    fed = LocalFed(ClientContext("alice", config=config, seed=seed, log=lines.append), steps=steps)
    pretrain.train(fed)
    return fed, lines


def test_the_loss_falls_and_the_end_reports_the_held_out_loss(config):
    """As the demo shows."""
    fed, lines = trained(config)
    losses = [metrics["loss"] for _, metrics in fed.history]
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert losses[-1] < 2.0
    assert fed.status()["tokens"] == 60 * 8 * 32
    assert torch.get_num_threads() == 1
    (line,) = lines
    assert line.startswith("eval_loss ")
    assert line.endswith(", version 0"), "alone, that is what was trained"
    assert float(line.split()[1]) == pytest.approx(losses[-1], abs=0.5)


def test_a_run_repeats_by_its_seed(config):
    """Results are repeatable."""
    first, second, other = (trained(config, 4, seed)[0].history for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_the_optimizers_state_survives_a_rebase(config):
    """Moments stay local: replaced tensors would reset or orphan them."""
    sides = Sides(publishes=True)
    learner = sides.exchange
    fed = Fed(sides.training, ClientContext("alice", config=config, log=lambda _: None))
    seen = []
    real_step, build = fed.step, fed.optimizer

    def step(**fields):
        again = real_step(**fields)
        # gradients of one step must not leak into the next
        assert all(w.grad is None for group in seen[0].param_groups for w in group["params"])
        done = sides.training.meter.steps
        if done == 3:
            frame = learner.encode_initial(0)
            learner.begin_fetch("full", 1)
            learner.put_fetch(1, 0, frame)
            learner.request_rebase(1, learner.finish_fetch(1), discard=True)
        if done == 6:
            learner.stop()
        return again

    def building(model):
        optimizer = build(model)
        seen.append(optimizer)
        return optimizer

    fed.step, fed.optimizer = step, building
    pretrain.train(fed)
    (optimizer,) = seen
    muon, adamw = optimizer.parts
    assert fed.version == 1
    assert {int(state["step"]) for state in adamw.state.values()} == {6}
    assert all(state["momentum_buffer"].any() for state in muon.state.values())


def test_steps_with_gradients_that_are_not_finite_are_skipped(config, monkeypatch):
    """NaN in the moments would outlast every rebase."""
    real, calls = GPT.loss, []

    def loss(self, window):
        calls.append(1)
        return real(self, window) * (float("nan") if len(calls) in {3, 4} else 1.0)

    monkeypatch.setattr(GPT, "loss", loss)
    fed, lines = trained(config, 8)
    assert math.isnan(fed.history[2][1]["loss"])
    assert math.isfinite(fed.history[-1][1]["loss"])
    assert sum("not finite" in line for line in lines) == 1
    skipped = [metrics["skipped"] for _, metrics in fed.history]
    assert skipped == [0, 0, 1, 1, 0, 0, 0, 0], "the parameter server is told"
    assert all(torch.isfinite(weight).all() for weight in fed.model.parameters())


def test_evaluation_does_not_train_and_does_not_change_the_model(config):
    """It is called during runs too."""
    corpus = pretrain.open_corpus(config, 32)
    model = GPT(pretrain.gpt_config(config))
    model.train()
    first = pretrain.evaluate(model, corpus)
    assert first == pretrain.evaluate(model, corpus)
    assert first == pytest.approx(math.log(256), abs=0.2)
    assert model.training
    assert all(weight.grad is None for weight in model.parameters())
    config["data"]["holdout"] = 0
    with pytest.raises(DataError, match="nothing is held out"):
        pretrain.evaluate(model, pretrain.open_corpus(config, 32))


def test_configuration_picks_the_model_and_wrong_sizes_are_one_line(config):
    """0 means "from the preset", as the configuration file says."""
    assert pretrain.gpt_config({"model": {"preset": "10m", "layers": 0}}) == PRESETS["10m"]
    assert pretrain.gpt_config(config).width == 32
    with pytest.raises(TaskError, match=r"model.preset '7b' does not exist: use one of 0.5m, 1m"):
        pretrain.gpt_config({"model": {"preset": "7b"}})
    with pytest.raises(TaskError, match="does not split into 5 heads"):
        pretrain.gpt_config({"model": {"preset": "0.5m", "heads": 5}})


def test_without_a_path_the_standard_library_is_the_text():
    """The demo works on a machine without data."""
    corpus = pretrain.open_corpus({}, 128)
    assert corpus.bytes > 1_000_000
    assert any(name == "argparse.py" for name, _ in corpus.files)


def test_a_part_too_short_is_refused_before_the_model_is_attached(config):
    """A client that cannot train publishes no weights and takes no place."""
    fed = LocalFed(ClientContext("alice", config=config, shard_count=10_000), steps=1)
    with pytest.raises(DataError, match="cut in 10000 leaves"):
        pretrain.train(fed)
    assert fed.model is None


def evaluated(config, **place):
    """The steps of a short run at which a version was evaluated."""
    sides = Sides(publishes=True)
    place = {"policy": SitePolicy(frozenset({DELTAS, METRICS})), **place}
    fed = Fed(sides.training, ClientContext("a", config=config, log=lambda _: None, **place))
    found, step = [], fed.step

    def stepped(**fields):
        again = step(**fields)
        if "eval_loss" in fields["metrics"]:
            found.append((sides.training.meter.steps, fields["metrics"]))
        if sides.training.meter.steps == 5:
            sides.exchange.stop()
        return again

    fed.step = stepped
    pretrain.train(fed)
    return found


def test_one_client_evaluates_each_version_once(config):
    """And no more than its share of time; the metrics go with its next delta."""
    config["train"]["evaluate_share"] = 0.5
    config["train"]["task"] = ""
    ((step, metrics),) = evaluated(config)
    assert step == 1
    assert metrics["eval_version"] == 0.0
    assert metrics["eval_loss"] == pytest.approx(math.log(256), abs=0.2)
    assert metrics["eval_bits_per_byte"] == pytest.approx(metrics["eval_loss"] / math.log(2))
    assert evaluated(config, shard_index=1, shard_count=2) == []
    assert evaluated(config, policy=SitePolicy(frozenset({DELTAS}))) == [], "metrics stay there"
    config["train"]["evaluate_share"] = 0.0
    assert evaluated(config) == []


class OneVersion:
    """What HeldOut needs of a fed, with a version that the test sets."""

    def __init__(self):
        self.version = -1
        self.part = (0, 1)
        self.policy = SitePolicy(frozenset({DELTAS, METRICS}))
        self.leaves = False

    def is_leaving(self):
        """Whether it was asked to end."""
        return self.leaves

    @contextmanager
    def at_version(self):
        """The weights stay as they are."""
        yield self.version


def test_evaluations_keep_to_their_share_of_time(monkeypatch):
    """Each evaluation of a second is followed by three without one, at a quarter; then by the
    newest version, each once.
    """
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pretrain, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def measure():
        clock.now += 1.0
        return {"eval_loss": 2.0}

    fed = OneVersion()
    watch = pretrain.HeldOut(fed, measure, 0.25)
    found = []
    for fed.version, later_s in ((-1, 0.0), (0, 3.5), (0, 3.5), (1, 1.0), (2, 1.0), (3, 1.5)):
        begun = clock.now
        found.append(watch.due().get("eval_version"))
        clock.now = begun + later_s
    assert found == [None, 0.0, None, 1.0, None, None]
    clock.now += 2.0
    fed.leaves = True
    assert watch.due() == {}
    fed.leaves = False
    assert watch.due()["eval_version"] == 3.0


def test_a_client_that_was_asked_to_end_evaluates_nothing():
    """A preempted client evaluated in its grace time, which is for its last delta."""
    training = SimpleNamespace(meter=None, stopped=True, at_version=nullcontext)
    leaves = [True]
    fed = Fed(training, ClientContext("alice", is_leaving=lambda: leaves[0]))
    with fed.at_version():
        pass  # a task of one's own decides by fed.is_leaving()
    fed.evaluates_in_time = True
    with pytest.raises(RunFinishedError):
        fed.at_version()
    training.stopped = False
    with fed.at_version():
        pass  # the last delta is not taken yet
    training.stopped, leaves[0] = True, False
    with fed.at_version():
        pass  # the run has ended by itself
