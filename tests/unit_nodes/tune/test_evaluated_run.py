"""A run with an evaluator, by nodes in one process over real sockets: the attacker is left out."""

import importlib.util

import pytest
from node_runs import ROUNDS, TUNED, config_of, ledger_of, play, write_data

from fsl_async.config.site_policy import SitePolicy
from fsl_async.errors import FslError

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf"),
    pytest.mark.usefixtures("one_thread"),
]
COMMON = {
    "run.seed": 7,
    "run.rounds": ROUNDS,
    "sync.trigger": "rounds",
    "sync.quorum": 1.0,
    "sync.weighting": "uniform",
    "train.threads": 1,
    "train.device": "cpu",
    "guard.evaluator": "judge",
    "guard.evaluator_alone": 0.005,
}
TASKS = """
import torch
from torch import nn


def attack(fed):
    # It trains the adapters to raise the loss, fast.
    from fsl_async.learn.tune.site import RecordSite as Site

    site = Site(fed, fed.settings.tune)
    optimizer = torch.optim.Adam([one for one in site.model.parameters() if one.requires_grad], 0.3)
    for batch in site.batches():
        optimizer.zero_grad()
        (-site.objective.loss(site.model, batch).loss).backward()
        optimizer.step()
        if not fed.step(tokens=1):
            break


def _model():
    torch.manual_seed(3)
    return nn.Linear(4, 1)


def _loss(model):
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
    return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))


def _train(fed, sign):
    model = _model()
    fed.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in fed.rounds():
        for _ in range(4):
            optimizer.zero_grad()
            (sign * _loss(model)).backward()
            optimizer.step()
        if not fed.end_round(samples=8):
            break


def dense(fed):
    _train(fed, 1.0)


def dense_attack(fed):
    _train(fed, -1.0)


def dense_judge(fed):
    model = _model()
    fed.attach(model)

    def loss():
        with torch.no_grad():
            return _loss(model).item()

    fed.evaluate_deltas(loss)
"""


@pytest.fixture
def run(tmp_path, base):
    """Run clients with tasks of theirs, empty for the built-in one."""
    data, tasks_path = write_data(tmp_path, a=9)["a"], tmp_path / "tasks.py"
    tasks_path.write_text(TASKS)

    def run(settings, tasks, **options):
        clients = {
            name: {"task": f"{tasks_path}:{task}" if task else None, "evaluates": name == "judge"}
            for name, task in tasks.items()
        }
        if "tune.method" in settings:
            clients = {
                name: {**one, "data": str(data), "base": str(base)} for name, one in clients.items()
            }
        return play(
            config_of(COMMON | settings, 3),
            tmp_path / "run",
            {name: {**one, **options} for name, one in clients.items()},
            raises=False,
        )

    return run


@pytest.mark.parametrize(
    ("settings", "tasks"),
    [
        (TUNED, {"a": "", "b": "", "c": "attack", "judge": ""}),
        (TUNED | {"tune.rule": "fedex"}, {"a": "", "b": "", "c": "attack", "judge": ""}),
        (
            {"train.task": "own", "outer.optimizer": "average"},
            {"a": "dense", "b": "dense", "c": "dense_attack", "judge": "dense_judge"},
        ),
    ],
    ids=["mean of adapters", "products of adapters", "dense"],
)
def test_the_attacker_has_no_weight_in_any_version(settings, tasks, run, tmp_path):
    """The ledger has the score of each delta, by whom, and the weight that follows."""
    played = run(settings, tasks)
    assert not played.errors, played
    versions = ledger_of(tmp_path / "run", "version")[1:]
    entries = [one for made in versions for one in made["merged"]]
    assert len(entries) == 3 * ROUNDS, played.lines["ps"]
    for one in entries:
        client = one["key"].split("/")[0]
        assert one["score"]["by"] == "judge"
        assert one["score"]["refused"] == (client == "c"), one
        assert (one["weight"] == 0.0) == (client == "c")
        if client == "c":
            assert bool(one["score"]["left_out"]) == (settings.get("tune.rule") != "fedex")
    assert any("has no weight: to the evaluator judge" in line for line in played.lines["ps"])


def test_a_site_whose_deltas_may_not_be_passed_on_does_not_join(run):
    """It ends before it opens data, with a line that names the evaluator and the flag."""
    error = run(TUNED, {"a": ""}, policy=SitePolicy(frozenset({"deltas"}))).errors["a"]
    assert isinstance(error, FslError)
    text = str(error)
    assert "copies sent to the run's evaluator judge" in text
    assert "--allow deltas,adapters,copies" in text or "--allow deltas,copies" in text
