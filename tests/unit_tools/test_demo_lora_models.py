"""`demo lora`: the base that it makes, and the training that it compares with."""

import json
import math

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("peft", reason="needs the extra hf")

import torch
from tiny_base import write_llama

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.learn.tune.base import load_base
from fsl_async.learn.tune.objectives import objective_of
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.tokens import tokenize
from fsl_async.tools.demo import lora_work
from fsl_async.tools.demo.lora import held_out, lora, write_lines
from fsl_async.tools.demo.scenario import Choices, overrides


@pytest.fixture
def small(monkeypatch):
    """A corpus and a model that take no time."""
    monkeypatch.setattr(lora_work, "CORPUS_BYTES", 40_000)
    monkeypatch.setattr(lora_work, "LAYERS", 1)
    monkeypatch.setattr(lora_work, "WIDTH", 32)


def test_the_base_is_a_folder_that_the_nodes_load(small, tmp_path):
    """Nodes load it like any other base; its tokenizer must keep every text."""
    said = []
    lora_work.make_base(tmp_path / "base", seed=1, steps=5, say=said.append)
    base = load_base(tmp_path / "base", "lm")
    text = "  def größe(x):\n\treturn x  # ☃"
    ids = base.tokenizer(text)["input_ids"]
    assert ids[0] == lora_work.BEGIN
    assert base.tokenizer.decode(ids, skip_special_tokens=True) == text
    assert base.context == lora_work.CONTEXT
    assert len(said) == 1 + lora_work.LINES


def test_the_base_learns_and_follows_from_its_seed(small, tmp_path):
    """Its loss on the text must fall below that of a uniform guess."""
    for name, seed, steps in (("a", 1, 3), ("b", 1, 3), ("c", 2, 3), ("d", 1, 60)):
        lora_work.make_base(tmp_path / name, seed=seed, steps=steps, say=lambda _: None)
    models = {name: load_base(tmp_path / name, "lm") for name in "abcd"}
    first = {name: next(base.model.parameters()) for name, base in models.items()}
    assert torch.equal(first["a"], first["b"])
    assert not torch.equal(first["a"], first["c"])
    ids = models["d"].tokenizer("import os\nimport sys\n" * 8, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = models["d"].model(input_ids=ids, labels=ids).loss.item()
    assert loss < 0.9 * math.log(lora_work.VOCABULARY)


def test_alone_trains_the_given_steps_on_the_given_records(tmp_path):
    """The comparison is honest only with the same steps, rank and optimizer as in the run."""
    base = write_llama(tmp_path / "base")
    rows = [json.dumps({"text": f"the sum of {n} and {n} is {2 * n}"}) for n in range(64)]
    for part, lines in zip(("train", "test"), held_out(rows), strict=True):
        write_lines(tmp_path / "site" / part, lines)
    made = lora(Choices(base=str(base), rule="rolora", rank=2, seed=5, run_dir=tmp_path))
    job = {"overrides": overrides(made.settings), "base": str(base)}
    tables = lora_work.tables_of(job)
    fed = lora_work.alone(tables, "a", str(tmp_path / "site" / "train"), 12)
    assert len(fed.history) == 12
    assert {each.shape[0] for name, each in fed.model.named_parameters() if "lora_A" in name} == {2}
    tune, untuned = TuneConfig(**tables["tune"]), load_base(base, "lm")
    records = Records(str(tmp_path / "site" / "test"), "lm")
    test = tokenize(records, untuned.tokenizer, "lm", context=untuned.context)
    objective = objective_of(tune)
    before, after = (
        objective.evaluate(model, test)["eval_loss"] for model in (untuned.model, fed.model)
    )
    assert after < before
    # rolora would train one factor only in a process without versions.
    trained = [name for name, weight in fed.model.named_parameters() if weight.requires_grad]
    assert {name.split(".")[-3] for name in trained} == {"lora_A", "lora_B"}
