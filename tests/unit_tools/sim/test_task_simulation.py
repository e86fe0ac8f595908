"""Simulated runs of training functions: production code around them, in virtual time."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import fsl_async
from fsl_async import cli
from fsl_async.errors import FslError, TaskError, TaskRaisedError, UsageError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.tune.zeroth import measure_round
from fsl_async.tools.sim import residents, task_simulation, task_training

EXAMPLE = f"{Path(__file__).parents[3] / 'examples' / 'own_task.py'}:train"
POINTS = list(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).split(4))
QUIET = {"log": lambda _: None}


def train(fed):
    """Fit a line to this client's part of the points, with noise from the default generator."""
    torch.manual_seed(fed.seed)
    model = nn.Linear(4, 1)
    fed.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in fed.shard(POINTS):
        noise = 0.01 * torch.randn(len(x), 1)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True) + noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not fed.step(tokens=len(x), metrics={"loss": loss.item()}):
            break


def simulated(tmp_path, task=train, *, name="run", settings=None, **arguments):
    """Simulate four clients that train for five rounds of 20 steps, where nothing else is given."""
    usual = {"run.rounds": 5, "sync.every_s": 20, "session.heartbeat_every_s": 2}
    usual |= {"session.expire_after_s": 8, **(settings or {})}
    given = {"clients": 4, "step_seconds": 1.0, "run_dir": tmp_path / name, **QUIET, **arguments}
    return fsl_async.simulate(task, settings=usual, **given)


def test_clients_train_and_the_loss_falls(tmp_path):
    """Each client trains its own part; steps take the virtual time of its rate."""
    result = simulated(tmp_path, rates=[1, 0.5])
    assert [point.version for point in result.points] == list(range(6))
    assert result.points[-1].loss < 0.5 * result.points[1].loss
    assert [client.steps for client in result.clients] == [100, 50, 100, 50]
    assert result.points[-1].tokens == sum(client.tokens for client in result.clients) == 4 * 300
    assert result.points[-1].hours == pytest.approx(100 / 3600, rel=0.05)
    assert "loss by version" in repr(result)


def test_the_same_seed_gives_the_same_versions_in_a_storm(tmp_path):
    """Clients and the parameter server are killed, messages lost and doubled; digests of all
    versions are equal, whatever the number of torch's threads, and other seeds give others.
    """
    settings = {"sync.every_s": 3600, "run.rounds": 5, "session.heartbeat_every_s": 60}
    settings |= {"session.expire_after_s": 180}
    storm = {"settings": settings, "faults": "storm", "step_seconds": 600.0, "clients": 5}
    first = simulated(tmp_path, name="first", seed=3, **storm)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        second = simulated(tmp_path, name="second", seed=3, **storm)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    other = simulated(tmp_path, name="other", seed=4, **storm)
    assert first.digests == second.digests
    assert len(first.digests) >= 4
    assert first.digests != other.digests
    assert first.faults == second.faults
    assert first.faults["client killed"] > 0
    assert first.faults["server killed"] > 0
    assert sum(client.launches for client in first.clients) > 5


@pytest.mark.parametrize("faults", [pytest.param("none", marks=pytest.mark.sweep), "storm"])
def test_more_processes_give_the_same_versions(tmp_path, faults):
    """Digests, the clients' parts, faults and bytes; links and speeds differ among clients."""
    settings = {"sync.every_s": 3600, "run.rounds": 4, "session.heartbeat_every_s": 60}
    settings |= {"session.expire_after_s": 180}
    usual = {"settings": settings, "faults": faults, "step_seconds": 300.0, "clients": 5}
    usual |= {"rates": [1, 0.4], "links": ["1mbit,20ms", "8kbit:80kbit,90ms,1%"], "seed": 5}
    one, two, three = (
        simulated(tmp_path, name=f"{number}", workers=number, **usual) for number in (1, 2, 3)
    )
    assert repr(one.points) == repr(two.points) == repr(three.points)  # not a number, mostly
    assert one.clients == two.clients == three.clients
    assert one.faults == two.faults == three.faults
    assert len(one.points) >= 4
    assert (faults == "none") == (one.faults == {})


def children():
    """Return the processes that this one has started and not yet waited for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                found.add(stat.parent.name)
    return found


def test_what_ends_a_worker_ends_the_simulation(tmp_path):
    """An error of the training function is one line; a process that is gone is, too."""
    before = children()

    def fails(fed):
        fed.attach(nn.Linear(2, 1))
        raise ValueError("no such column")

    with pytest.raises(TaskRaisedError, match=r"c000\d: your task .*no such column"):
        simulated(tmp_path, fails, name="fails", workers=2)

    def dies(fed):
        fed.attach(nn.Linear(2, 1))
        if fed.part[0] == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(FslError, match=r"worker process .* was killed"):
        simulated(tmp_path, dies, name="dies", workers=2)
    assert children() - before == set()


def test_workers_end_with_the_process_that_forked_them(tmp_path):
    """Also where that is killed."""

    def waits(fed):
        fed.attach(nn.Linear(2, 1))
        (tmp_path / f"pid-{fed.part[0]}").write_text(str(os.getpid()))
        while fed.step(tokens=1):
            pass

    parent = os.fork()
    if parent == 0:
        simulated(tmp_path, waits, workers=2, settings={"run.rounds": 10**6})
        os._exit(1)
    workers = [_soon(lambda at=at: (tmp_path / f"pid-{at}").read_text()) for at in (0, 1)]
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    for pid in workers:
        _soon(lambda pid=pid: not Path(f"/proc/{pid}/task").exists() or None)


def _soon(look):
    """Return what `look` finds, within a minute."""
    for _ in range(600):
        with contextlib.suppress(OSError):
            if found := look():
                return found
        time.sleep(0.1)
    raise AssertionError("it did not happen")


@pytest.mark.parametrize("optimizer", [pytest.param("SGD", marks=pytest.mark.sweep), "AdamW"])
def test_models_that_are_out_come_back_to_the_bit(tmp_path, monkeypatch, optimizer):
    """With one model in memory the versions are those of all in memory, in a storm too; weights,
    gradients that are kept, and moments are moved.
    """
    seen, move_out = [], residents.Model.move_out

    def watched(model):
        move_out(model)
        seen.append(sum(size for _, size in model.moved))

    monkeypatch.setattr(residents.Model, "move_out", watched)

    def adds_up(fed):
        torch.manual_seed(fed.seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        fed.attach(model)
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)
        for number, x in enumerate(fed.shard(POINTS)):
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            if number % 2:
                made.step()
                made.zero_grad()
            if not fed.step(tokens=len(x)):
                break

    storm = {"settings": {"session.heartbeat_every_s": 60, "session.expire_after_s": 180}}
    storm["settings"] |= {"sync.every_s": 3600, "run.rounds": 3}
    storm |= {"faults": "storm", "step_seconds": 600.0, "seed": 3}
    every = simulated(tmp_path, adds_up, name="every", **storm)
    assert not seen
    one = simulated(tmp_path, adds_up, name="one", resident=1, workers=2, **storm)
    assert not seen, "workers are other processes"
    assert one.digests == every.digests
    one = simulated(tmp_path, adds_up, name="alone", resident=1, **storm)
    assert one.digests == every.digests
    weights = 4 * (4 * 6 + 6 + 2 * 6 + 6 + 1)
    assert max(seen) == weights * (4 if optimizer == "AdamW" else 2) + (
        6 * 4 if optimizer == "AdamW" else 0  # a count of steps for each tensor
    )


def test_steps_are_computed_late_and_none_sees_an_order_of_later(tmp_path, monkeypatch):
    """Threads pause for several steps and catch up; the versions are those of single steps."""
    late = simulated(tmp_path, name="late", rates=[1, 0.7], settings={"sync.every_s": 11.3})
    usual = task_training.StepTime.__init__
    single = lambda self, of, seconds, rate, _: usual(self, of, seconds, rate, 0.0)  # noqa: E731
    monkeypatch.setattr(task_training.StepTime, "__init__", single)
    by_step = simulated(tmp_path, name="by", rates=[1, 0.7], settings={"sync.every_s": 11.3})
    assert late.digests == by_step.digests
    assert [one.tokens for one in late.clients] == [one.tokens for one in by_step.clients]


def test_transfers_take_the_time_of_the_link(tmp_path):
    """A client that sends 1 kB/s uploads its 20 bytes later than the others, and waits longer."""
    slow = simulated(tmp_path, name="slow", links="800bit:8kbit,2s")
    fast = simulated(tmp_path, name="fast", links="8mbit,2ms")
    assert slow.points[-1].hours > fast.points[-1].hours


@pytest.mark.parametrize(
    "settings",
    [
        {"sync.trigger": "buffer", "sync.local_steps": 10, "sync.pace": "speed"},
        {"tune.method": "lora", "tune.rule": "ffa", "tune.steps": 5, "tune.targets": "0,1"},
        {"outer.aggregation": "median", "sync.every_s": 10},
        {"codec.up": "fp32", "store.resident": False},
    ],
    ids=["async", "adapters", "robust", "lossless"],
)
def test_other_kinds_of_run_are_simulated_with_the_settings_of_production(tmp_path, settings):
    """The configuration is that of a parameter server."""
    task = adapt if "tune.method" in settings else train
    result = simulated(tmp_path, task, settings=settings, rates=[1, 1, 0.4])
    assert result.points[-1].version == 5
    assert result.points[-1].loss < result.points[1].loss


def adapt(fed):
    """Train adapters by rounds, each client on its own part."""
    torch.manual_seed(0)
    model = fed.lora(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
    assert fed.part[1] == 4
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.02)
    for x in fed.shard(POINTS):
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not fed.step(tokens=len(x), metrics={"loss": loss.item()}):
            break


OWN_MERGE = """
from fsl_async.store.rules.adapters import HetLoRA

class Mine(HetLoRA):
    def merge(self, current, sites, scale, draw):
        return super().merge(current, sites, scale, draw)
"""


@pytest.mark.parametrize(
    ("task", "key", "rule", "more"),
    [
        (train, "outer.aggregation", "by_metric.py:ByLoss", {}),
        (train, "outer.optimizer", "fedyogi.py:FedYogi", {"outer.learning_rate": 0.05}),
        (adapt, "tune.rule", "mine.py:Mine", {"tune.method": "lora", "tune.targets": "0,1"}),
    ],
    ids=["aggregation", "optimizer", "merge"],
)
def test_the_operators_own_rules_make_the_versions(tmp_path, task, key, rule, more):
    """As at a parameter server; the run has the text of its rule, and its digest."""
    (tmp_path / "mine.py").write_text(OWN_MERGE)
    folder = tmp_path if "mine" in rule else Path(EXAMPLE).parent / "rules"
    result = simulated(tmp_path, task, settings={key: f"{folder / rule}", **more})
    assert result.points[-1].loss < result.points[1].loss
    (kept,) = (tmp_path / "run" / "rules").iterdir()
    made_by = f"{rule.partition(':')[2]}@{kept.stem.rpartition('-')[2]}"
    ledger = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in ledger]
    made_by = f"mean, {made_by}" if key == "outer.optimizer" else made_by
    assert {one["rule"] for one in lines if one.get("version", 0) > 0} == {made_by}
    journal = (tmp_path / "run" / "journal.jsonl").read_text()
    assert f'"rules":{{"{"tune.merge" if task is adapt else key}":' in journal


def measure(fed):
    """Train by losses alone."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    fed.attach(model)
    weights, points = ModelWeights(model), torch.cat(POINTS)
    chance = torch.Generator().manual_seed(fed.part[0])

    def loss(rows):
        chosen = points[rows]
        return nn.functional.mse_loss(model(chosen), chosen.sum(1, keepdim=True)).item()

    for number in fed.rounds():
        batches = [torch.randint(64, (8,), generator=chance) for _ in range(2)]
        scalars = measure_round(fed, weights, loss, batches, number=number)
        metrics = {"loss": loss(torch.arange(64))}
        if not fed.end_round(samples=16, metrics=metrics, scalars=scalars):
            break


def comes_and_goes(fed):
    """Send whenever it likes."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    fed.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number, x in enumerate(fed.shard(POINTS)):
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % (3 + fed.part[0]) == 0:
            fed.send()
        if not fed.step(tokens=len(x), metrics={"loss": loss.item()}):
            break


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        (measure, {"tune.method": "zeroth", "tune.zo_steps": 2, "tune.zo_rate": 0.02}),
        (comes_and_goes, {"sync.trigger": "buffer", "sync.pace": "own", "sync.buffer": 2}),
    ],
)
def test_losses_alone_and_sites_that_come_and_go_are_simulated(tmp_path, task, settings):
    """A storm's versions are those of a second run, also in more processes."""
    storm = {"session.heartbeat_every_s": 60, "session.expire_after_s": 180, "run.rounds": 12}
    storm |= {"train.task": "own"} if task is comes_and_goes else {}
    usual = {"settings": storm | settings, "faults": "storm", "step_seconds": 200.0, "seed": 2}
    first = simulated(tmp_path, task, name="first", **usual)
    second = simulated(tmp_path, task, name="second", workers=2, **usual)
    assert first.digests == second.digests
    assert first.points[-1].version >= 12
    assert first.faults["client killed"] > 0
    assert first.points[-1].loss < 0.9 * first.points[1].loss


def test_the_run_directory_is_one_like_any_other(tmp_path, capsys):
    """`status`, its page, trackers, `evaluate` and `export` read it, and a second simulation is
    refused in it.
    """
    pytest.importorskip("tensorboard")
    result = simulated(tmp_path)
    run_dir = str(result.run_dir)
    board = tmp_path / "board"
    assert cli.main(["status", run_dir, "--tensorboard", str(board)]) == 0
    assert list(board.rglob("events.out.*"))
    scored = tmp_path / "score.py"
    scored.write_text("def score(weights):\n    return {'loss': float(len(weights))}\n")
    assert cli.main(["evaluate", run_dir, "--task", f"{scored}:score", "--json"]) == 0
    assert '"loss": 2.0' in capsys.readouterr().out
    assert cli.main(["status", run_dir, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["version"] == 5
    assert len(status["clients"]) == 4
    assert cli.main(["export", run_dir, str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(FslError, match="give another --run-dir"):
        simulated(tmp_path)


def test_errors_of_the_training_function_end_the_simulation_in_one_line(tmp_path):
    """With the client's name; a refusal and a shared module too."""

    def fails(fed):
        fed.attach(nn.Linear(2, 1))
        raise ValueError("no such column")

    with pytest.raises(TaskRaisedError, match=r"c000\d: your task .*no such column"):
        simulated(tmp_path, fails, name="fails")
    shared = nn.Linear(2, 1)
    with pytest.raises(TaskError, match="build the model inside"):
        simulated(tmp_path, lambda fed: fed.attach(shared), name="shared")
    with pytest.raises(FslError, match=r"c000\d: .*is not the run's"):
        simulated(tmp_path, lambda fed: fed.attach(nn.Linear(1 + fed.part[0], 1)), name="refused")


def test_a_run_whose_clients_have_all_ended_ends(tmp_path):
    """A training function with an end of its own."""

    def short(fed):
        fed.attach(nn.Linear(2, 1))
        for _ in range(30):
            fed.step(tokens=1)

    result = simulated(tmp_path, short)
    assert result.reason == "all clients have ended"
    assert result.points[-1].tokens == 4 * 30


def test_the_simulated_time_ends_a_run(tmp_path):
    """Where nothing else does; what is trained until then is merged."""
    result = simulated(tmp_path, settings={"run.rounds": 0}, hours=0.02)
    assert result.reason == "the simulated time is over"
    assert result.points[-1].tokens == 4 * sum(client.steps for client in result.clients)


def test_a_model_that_does_not_fit_is_refused_before_training(tmp_path, monkeypatch):
    """The line has what is needed and what is there."""
    monkeypatch.setattr(task_simulation, "available_bytes", lambda: 100)
    with pytest.raises(UsageError, match="simulate fewer clients"):
        simulated(tmp_path)


def test_the_command_simulates_an_example_unchanged(tmp_path, capsys):
    """`fsl-node sim --task` on examples/own_task.py; what it prints is one JSON object."""
    given = ["--clients", "3", "--set", "run.rounds=2", "--set", "sync.every_s=10", "--rates", "1"]
    run_dir = ["--step-seconds", "1", "--link", "8mbit,5ms", "--run-dir", str(tmp_path / "run")]
    png = ["--png", str(tmp_path / "loss.png")]
    assert cli.main(["sim", "--task", EXAMPLE, *given, *run_dir, *png, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["versions"], len(found["clients"])) == (2, 3)
    assert found["points"][0]["loss"] is None
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--task", EXAMPLE], "no end"),
        (["--task", EXAMPLE, "--pace", "own"], "--pace is of the simulation that counts"),
        (["--rates", "1"], "--rates needs --task"),
        (["--task", "nowhere.py:train", "--hours", "1"], "no such file"),
    ],
)
def test_wrong_combinations_of_options_are_refused_in_one_line(given, words, capsys):
    """Exit code 2."""
    assert cli.main(["sim", *given]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert "\n" not in error
