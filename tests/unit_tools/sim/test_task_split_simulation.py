"""Simulated runs of split learning: production clients and servers, and a model of the user's."""

import json

import numpy as np
import pytest
from torch import nn

import fsl_async
from fsl_async import cli
from fsl_async.errors import FslError
from fsl_async.observe.ledger_audit import audit_split_dir
from fsl_async.roles.split.methods import METHODS

TASK = "fsl_async.learn.split.task:train"
MODEL = f"{__file__}:net"
STORM = {
    "session.heartbeat_every_s": 60,
    "session.expire_after_s": 180,
    "sync.round_cap_s": 4000,
    "run.rounds": 8,
}
"""Rounds of half an hour, in which everything is killed now and then."""


def net(shape, classes):
    """Build a model of three layers; it is cut behind the first one with weights."""
    layers = [nn.Linear(shape[0], 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, classes))


def broken(shape, classes):
    """Build a model whose split server's part fails."""

    class Fails(nn.Module):
        def forward(self, values):
            if self.training:
                raise RuntimeError("no such kernel")
            return values

    return nn.Sequential(nn.Linear(shape[0], 16), Fails(), nn.Linear(16, classes))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """96 samples of three classes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((96, 8)).astype(np.float32)
    file = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(file, x=x, y=(x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0))
    return file


def simulated(folder, data, method, *, model=MODEL, settings=None, **arguments):
    """Simulate three clients with batches of 8, four to a round."""
    usual = {
        "split.method": method,
        "model.family": model,
        "data.path": str(data),
        "train.batch": 8,
        "train.learning_rate": 0.02,
        "run.rounds": 4,
        "split.samples": 0,
    }
    given = {"clients": 3, "step_seconds": 1.0, "log": lambda _: None, **arguments}
    return fsl_async.simulate(TASK, settings=usual | (settings or {}), run_dir=folder, **given)


@pytest.mark.parametrize(
    "method", [pytest.param("splitfed-v2", marks=pytest.mark.sweep), "fsl-sage"]
)
def test_the_same_seed_gives_the_same_run_in_a_storm(tmp_path, data, method):
    """Clients and both servers are killed; both runs end with equal versions, and with equal files
    of the split server. Every upload that counts is in its ledger.
    """
    first, second = (
        simulated(
            tmp_path / name,
            data,
            method,
            settings=STORM,
            faults="storm",
            step_seconds=300.0,
            seed=1,
        )
        for name in ("first", "second")
    )
    assert first.points[-1].version == 8
    assert first.digests == second.digests
    assert first.bytes_by_category == second.bytes_by_category
    kept = [
        sorted(one.read_bytes() for one in run.run_dir.glob("server/checkpoints/*/*"))
        for run in (first, second)
    ]
    assert kept[0] == kept[1]
    assert len(kept[0]) >= 2
    for fault in ("client killed", "server killed", "split server killed"):
        assert first.faults[fault] > 0
    audit = audit_split_dir(first.run_dir / "server")
    assert not audit.problems
    assert audit.trained >= 20
    assert first.points[-1].loss < 0.95 * first.points[1].loss


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *((name, {}) for name in METHODS),
        *((name, {"split.mode": "lockstep"}) for name in METHODS if METHODS[name].has_server),
        ("splitfed-v1", {"split.labels_at_home": True}),
        ("splitfed-v2", {"model.family": "small-cnn", "data.sample_shape": "1x8x8"}),
    ],
)
def test_every_method_is_simulated_with_the_settings_of_production(
    tmp_path, data, method, settings
):
    """The run ends, learns, and counts the bytes of what the method sends."""
    if "model.family" in settings:
        data = tmp_path / "images.npz"
        rng = np.random.default_rng(0)
        np.savez(data, x=rng.standard_normal((48, 8, 8)).astype(np.float32), y=np.arange(48) % 3)
    result = simulated(tmp_path / "run", data, method, settings={"run.rounds": 3, **settings})
    assert result.reason == "the run's limit of 3 rounds is reached"
    assert [point.version for point in result.points] == [0, 1, 2, 3]
    assert result.points[-1].tokens == sum(client.tokens for client in result.clients)
    sent = {key for key, size in result.bytes_by_category.items() if size}
    kind = METHODS[method]
    assert ("activations up" in sent) == kind.has_server
    assert ("gradients down" in sent) == kind.gradients
    assert ("auxiliary down" in sent) == (kind.auxiliary != "none" and kind.has_server)
    assert ("labels up" in sent) == (kind.has_server and not settings.get("split.labels_at_home"))
    if kind.has_server:
        assert (result.run_dir / "server" / "ledger.jsonl").stat().st_size > 0


def test_steps_and_crossings_take_virtual_time(tmp_path, data):
    """A round of 12 batches takes 12 steps at the client's rate; each waits twice for the link,
    unless the next batch is computed meanwhile.
    """

    def round_s(name, delay, in_flight):
        settings = {"split.in_flight": in_flight}
        result = simulated(
            tmp_path / name,
            data,
            "splitfed-v1",
            clients=1,
            rates=[0.5],
            links=f"1gbit,{delay}",
            settings=settings,
        )
        return (result.points[3].hours - result.points[2].hours) * 3600

    steps_s = 12 / 0.5
    assert round_s("near", "0ms", 1) == pytest.approx(steps_s, abs=0.5)
    assert round_s("far", "500ms", 1) > steps_s + 12 * 2 * 0.5
    assert round_s("hidden", "500ms", 2) < steps_s + 6


def test_the_command_line_of_a_client_and_the_tools_of_a_run(tmp_path, data, capsys):
    """`sim --task` takes the built-in task by its name; `status` reads both folders."""
    run_dir = tmp_path / "run"
    settings = {"split.method": "fsl-sage", "model.family": MODEL, "data.path": str(data)}
    settings |= {"run.rounds": "2", "train.batch": "8", "split.samples": "0"}
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = ["sim", "--task", TASK, "--clients", "2", "--step-seconds", "1"]
    assert cli.main([*command, *given, "--run-dir", str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"] == 2
    assert found["bytes_by_category"]["activations up"] > 0
    assert cli.main(["status", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 2
    assert cli.main(["status", str(run_dir / "server")]) == 0
    assert "ended at 2020-01-01" in capsys.readouterr().out


def test_a_part_of_the_split_server_that_fails_ends_the_simulation_in_one_line(tmp_path, data):
    """With the reason, as the split server's process ends with it."""
    model = f"{__file__}:broken"
    with pytest.raises(FslError, match=r"split server failed: .*no such kernel") as caught:
        simulated(tmp_path / "run", data, "sl", model=model, settings={"split.cut": "0"})
    assert "\n" not in str(caught.value)
