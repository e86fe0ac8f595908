"""`demo lora`: the base that it makes, and the training that it compares with."""

import json
import math

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("peft", reason="needs the extra hf")

import torch
from tiny_base import write_llama

from fsl_async.learn.tune.base import load_base
from fsl_async.process.stopper import Stopper
from fsl_async.tools.compare import alone
from fsl_async.tools.demo import lora, lora_base
from fsl_async.tools.demo.scenario import Choices, Stage


@pytest.fixture
def small(monkeypatch):
    """A corpus and a model that take no time."""
    monkeypatch.setattr(lora_base, "CORPUS_BYTES", 40_000)
    monkeypatch.setattr(lora_base, "LAYERS", 1)
    monkeypatch.setattr(lora_base, "WIDTH", 32)


def test_the_base_is_a_folder_that_the_nodes_load(small, tmp_path):
    """Nodes load it like any other base; its tokenizer must keep every text."""
    said = []
    lora_base.make_base(tmp_path / "base", seed=1, steps=5, stage=Stage(said.append, Stopper()))
    base = load_base(tmp_path / "base", "lm")
    text = "  def größe(x):\n\treturn x  # ☃"
    ids = base.tokenizer(text)["input_ids"]
    assert ids[0] == lora_base.BEGIN
    assert base.tokenizer.decode(ids, skip_special_tokens=True) == text
    assert base.context == lora_base.CONTEXT
    assert len(said) == 1 + lora_base.LINES


def test_the_base_learns_and_follows_from_its_seed(small, tmp_path):
    """Its loss on the text must fall below that of a uniform guess."""
    for name, seed, steps in (("a", 1, 3), ("b", 1, 3), ("c", 2, 3), ("d", 1, 60)):
        lora_base.make_base(tmp_path / name, seed=seed, steps=steps, stage=Stage(print, Stopper()))
    models = {name: load_base(tmp_path / name, "lm") for name in "abcd"}
    first = {name: next(base.model.parameters()) for name, base in models.items()}
    assert torch.equal(first["a"], first["b"])
    assert not torch.equal(first["a"], first["c"])
    ids = models["d"].tokenizer("import os\nimport sys\n" * 8, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = models["d"].model(input_ids=ids, labels=ids).loss.item()
    assert loss < 0.9 * math.log(lora_base.VOCABULARY)


def test_the_comparison_trains_as_many_steps_and_of_the_same_rank(tmp_path, monkeypatch):
    """It is honest only with the steps of each site, the same test, and adapters of that rank."""
    base, names = write_llama(tmp_path / "base"), ["client-1", "client-2"]
    files = []
    for name in names:
        files.append(tmp_path / f"{name}.jsonl")
        rows = [{"text": f"{name}: the sum of {n} and {n} is {2 * n}"} for n in range(32)]
        files[-1].write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = tuple(map(str, files))
    chosen = Choices(base=str(base), data=data, rule="rolora", rank=2, seed=5, run_dir=tmp_path)
    steps = dict(zip(names, (12, 8), strict=True))
    monkeypatch.setattr(
        lora, "work_of", lambda _: {name: {"steps": count} for name, count in steps.items()}
    )
    scored, trained = [], {}
    train = alone.TunedModel.train

    def counted(self, data, stage):
        train(self, data, stage)
        assert {w.shape[0] for n, w in self._model.named_parameters() if "lora_A" in n} == {2}
        # rolora would train one factor only in a process without versions.
        names = [n for n, weight in self._model.named_parameters() if weight.requires_grad]
        assert {name.split(".")[-3] for name in names} == {"lora_A", "lora_B"}
        trained[self._fed.client_name] = len(self._fed.history), len(data)

    monkeypatch.setattr(alone.TunedModel, "train", counted)
    monkeypatch.setattr(
        alone.TunedModel, "__call__", lambda self, run_dir: scored.append(run_dir) or self.score()
    )
    settings = lora.lora(chosen).settings
    losses = lora.measured(chosen, settings, names, Stage(print, Stopper()))
    assert scored == [tmp_path]
    assert trained == {"client-1": (12, 29), "client-2": (8, 29), "pooled": (20, 58)}
    assert all(losses[name] < losses["base"] for name in trained)
