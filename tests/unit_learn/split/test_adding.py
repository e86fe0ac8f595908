"""docs/adding-a-method.md is true: its two files are a method."""

import re
from pathlib import Path

import torch
from torch import nn

from fsl_async.learn.models.cuts import split
from fsl_async.learn.models.forward import Batch
from fsl_async.learn.split import methods
from fsl_async.learn.split.lockstep import start
from fsl_async.learn.split.methods.base import MethodSettings
from fsl_async.learn.split.optimizers import OptimizerSpec
from fsl_async.learn.split.server import ServerSettings
from fsl_async.roles.split import methods as split_methods
from fsl_async.roles.split.methods import SplitRules, decisions_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "adding-a-method.md"


def test_the_pages_example_is_a_method(monkeypatch):
    """Who follows the page must end with something that trains, with replicas that are averaged after a round."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    made = []
    for block in blocks:
        names = {}
        exec(compile(block, str(PAGE), "exec"), names)
        made.append(names["FslAn"])
    decisions, mathematics = made
    monkeypatch.setitem(split_methods.METHODS, "fsl-an", decisions)
    monkeypatch.setitem(methods.METHODS, "fsl-an", mathematics)
    found = decisions_of(SplitRules(method="fsl-an", upload_every=3))
    assert [step for step in range(7) if found.uploads_at(step)] == [0, 3, 6]
    torch.manual_seed(0)
    halves = split(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), 1)
    method = methods.method("fsl-an", MethodSettings(upload_every=2))
    spec = OptimizerSpec("sgd", 0.1)
    run = start(method, halves, "ab", spec, auxiliary=nn.Linear(5, 3), server=ServerSettings(spec))
    chance = torch.Generator().manual_seed(1)

    def batch():
        inputs = torch.randn(6, 4, generator=chance)
        return Batch(inputs, inputs[:, :3].argmax(1))

    losses = [run.round({name: [batch() for _ in range(4)] for name in "ab"}) for _ in range(30)]
    assert losses[-1]["a"] < losses[0]["a"] - 0.2
    replicas = [run.server.half(name).export() for name in "ab"]
    assert (replicas[0] == replicas[1]).all()
    assert run.server.half("a").updates == 30 * 2


def test_every_method_is_two_short_files():
    """The promise of the page, and of whoever reviews a new one."""
    for folder in ("roles/split_methods", "learn/split/methods"):
        for path in (ROOT / "fsl_async" / folder).glob("*.py"):
            if path.name not in {"__init__.py", "base.py"}:
                assert len(path.read_text(encoding="utf-8").splitlines()) < 100, path
