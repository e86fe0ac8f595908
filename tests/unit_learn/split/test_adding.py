"""The example of docs/adding-a-method.md is a working method."""

import re
from pathlib import Path

import torch
from split_lockstep import start
from torch import nn

from fsl_async.config.settings_training import SplitConfig
from fsl_async.learn.models.cuts import split
from fsl_async.learn.models.forward import Batch
from fsl_async.learn.split.optimizers import OptimizerSpec
from fsl_async.learn.split.server_training import ServerSettings
from fsl_async.plan.link import LinkSpec
from fsl_async.plan.methods import ALL_METHODS, PLANNED, Workload, planned_methods
from fsl_async.plan.report import make_plan
from fsl_async.plan.shapes import find_shapes
from fsl_async.roles.split import methods
from fsl_async.roles.split.methods import method_of
from fsl_async.tools.sim.simulation import SimulationSettings
from fsl_async.tools.sim.split_simulation import SplitSimulation

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "adding-a-method.md"


def test_the_pages_example_is_a_method(monkeypatch):
    """A method written by the page trains, is planned, and is simulated."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(compile(block, str(PAGE), "exec"), names)
    monkeypatch.setitem(methods.METHODS, "fsl-an", names["FslAn"])
    rules = SplitConfig(method="fsl-an", upload_every=2)
    method = method_of(rules)
    assert [step for step in range(7) if method.uploads_at(step)] == [0, 2, 4, 6]

    torch.manual_seed(0)
    model = split(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), 1)
    spec = OptimizerSpec("sgd", 0.1)
    run = start(method, model, "ab", spec, auxiliary=nn.Linear(5, 3), server=ServerSettings(spec))
    rng = torch.Generator().manual_seed(1)

    def batch():
        inputs = torch.randn(6, 4, generator=rng)
        return Batch(inputs, inputs[:, :3].argmax(1))

    losses = [run.round({name: [batch() for _ in range(4)] for name in "ab"}) for _ in range(30)]
    assert losses[-1]["a"] < losses[0]["a"] - 0.2
    replicas = [run.server.part(name).export() for name in "ab"]
    assert (replicas[0] == replicas[1]).all()
    assert run.server.part("a").updates == 30 * 2

    simulation = SplitSimulation(SimulationSettings(2, 0.1, 1, "mild", every_s=60.0), rules)
    simulation.run()
    assert simulation.violations == []
    assert simulation.facts()["uploads"]["trained"] > 10

    monkeypatch.setitem(ALL_METHODS, "fsl-an", planned_methods()["fsl-an"])
    planned, known = (
        make_plan(
            method=name,
            shapes=find_shapes("gpt-0.5m"),
            work=Workload(2, 4, 20, 2),
            link=LinkSpec(1e6, 0.1),
        )
        for name in ("fsl-an", "cse-fsl")
    )
    assert "fsl-an" not in PLANNED
    assert planned.flows == known.flows, "what crosses is what CSE-FSL sends"


def test_every_method_is_one_short_file():
    """As the page promises."""
    folder = ROOT / "fsl_async" / "roles" / "split" / "methods"
    files = [path for path in folder.glob("*.py") if path.name not in {"__init__.py", "base.py"}]
    assert len(files) == len(methods.METHODS)
    for path in files:
        assert len(path.read_text(encoding="utf-8").splitlines()) < 100, path
