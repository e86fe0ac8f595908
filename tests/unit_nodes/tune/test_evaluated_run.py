"""A run with an evaluator, by nodes in one process over real sockets: the attacker is left out."""

import importlib.util
import json
import threading

import pytest

from fsl_async.config.load import load
from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.errors import FslError
from fsl_async.process.stopper import Stopper

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf"),
    pytest.mark.usefixtures("one_thread"),
]
ROUNDS = 3
COMMON = {
    "run.seed": 7,
    "run.rounds": ROUNDS,
    "sync.trigger": "rounds",
    "sync.clients": 3,
    "sync.min_clients": 3,
    "sync.quorum": 1.0,
    "sync.weighting": "uniform",
    "train.threads": 1,
    "train.device": "cpu",
    "listen.address": "tcp://127.0.0.1:0",
    "guard.evaluator": "judge",
    "guard.evaluator_alone": 0.005,
}
TUNED = {
    "tune.method": "lora",
    "tune.rank": 4,
    "tune.targets": "q_proj,v_proj",
    "tune.context": 24,
    "tune.steps": 4,
    "train.batch": 2,
    "train.learning_rate": 1e-2,
    "train.schedule": "constant",
    "data.holdout": 0.0,
}
TASKS = """
import torch
from torch import nn


def attack(fed):
    # It trains the adapters to raise the loss, fast.
    from fsl_async.learn.tune.task import Site

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
def site(tmp_path):
    """What a site has: a base, records, and tasks of its own."""
    from tiny_base import write_llama

    data = tmp_path / "data.jsonl"
    lines = [json.dumps({"text": f"the film was a joy to watch and {n}"}) for n in range(9)]
    data.write_text("\n".join(lines) + "\n")
    tasks = tmp_path / "tasks.py"
    tasks.write_text(TASKS)
    return {"base": str(write_llama(tmp_path / "base")), "data": str(data), "tasks": str(tasks)}


def play(settings, run_dir, site, tasks, **policies):
    """Run nodes to the end. tasks: name -> its task, empty for the built-in one.

    Returns the lines of each client, and their errors.
    """
    from fsl_async.nodes.client import joining
    from fsl_async.nodes.client.parts import ClientOptions
    from fsl_async.nodes.ps import node as node_ps

    config = load(None, [f"{key}={value}" for key, value in (COMMON | settings).items()])
    run_dir.mkdir()
    listening, address, errors = threading.Event(), [], {}
    lines = {name: [] for name in (*tasks, "ps")}
    stop = Stopper()

    def announce(at):
        address.append(at)
        listening.set()

    def serve():
        log = lines["ps"].append
        node_ps.serve(config, run_dir, from_version=None, announce=announce, log=log, stop=stop)

    def client(name, task):
        is_tuned = "tune.method" in settings
        options = ClientOptions(
            address[0],
            name,
            task=f"{site['tasks']}:{task}" if task else None,
            data=site["data"] if is_tuned else None,
            base=site["base"] if is_tuned else "",
            policy=policies.get(name, SitePolicy(frozenset(KINDS))),
            evaluates=name == "judge",
        )
        joining.join_run(options, stop=Stopper(), log=lines[name].append)

    def guarded(name, work, *given):
        def wrapped():
            try:
                work(*given)
            except BaseException as error:  # noqa: BLE001 - looked at by the test
                errors[name] = error
                listening.set()

        return threading.Thread(target=wrapped, daemon=True)

    server = guarded("ps", serve)
    server.start()
    assert listening.wait(30), errors
    clients = [guarded(name, client, name, task) for name, task in tasks.items()]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(120)
    stop.request()
    server.join(60)
    assert not any(thread.is_alive() for thread in (server, *clients)), (lines, errors)
    return lines, errors


def versions(run_dir):
    """The versions of the ledger."""
    found = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    return [one for one in found if one["fact"] == "version" and one["version"]]


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
def test_the_attacker_has_no_weight_in_any_version(settings, tasks, site, tmp_path):
    """The ledger has the score of each delta, by whom, and the weight that follows."""
    lines, errors = play(settings, tmp_path / "run", site, tasks)
    assert not errors, (errors, lines)
    entries = [one for made in versions(tmp_path / "run") for one in made["merged"]]
    assert len(entries) == 3 * ROUNDS, lines["ps"]
    for one in entries:
        client = one["key"].split("/")[0]
        assert one["score"]["by"] == "judge"
        assert one["score"]["refused"] == (client == "c"), one
        assert (one["weight"] == 0.0) == (client == "c")
        is_mean = settings.get("tune.rule") != "fedex"
        assert bool(one["score"]["left_out"]) == is_mean
    assert any("has no weight: to the evaluator judge" in line for line in lines["ps"])


def test_a_site_whose_deltas_may_not_be_passed_on_does_not_join(site, tmp_path):
    """It ends before it opens data, with a line that names the evaluator and the flag."""
    policy = SitePolicy(frozenset({"deltas"}))
    _, errors = play(TUNED, tmp_path / "run", site, {"a": ""}, a=policy)
    assert isinstance(errors["a"], FslError)
    text = str(errors["a"])
    assert "copies sent to the run's evaluator judge" in text
    assert "--allow deltas,adapters,copies" in text or "--allow deltas,copies" in text
