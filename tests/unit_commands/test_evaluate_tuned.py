"""`fsl-node evaluate` measures a tuned base by the run's objective."""

import json
import math

import pytest
import torch
from asking import ask
from torch.nn import functional
from tuned_runs import adapted, make_run, write_base

from fsl_async.commands import evaluate
from fsl_async.errors import DataError, UsageError
from fsl_async.observe.evaluations import Evaluation, kept, line_of
from fsl_async.tools.kept_run import KeptRun


@pytest.fixture
def evaluated(tmp_path):
    """Call the command for the run of the test; returns the objects that it prints."""
    return lambda *arguments: ask(evaluate.command, tmp_path / "run", *arguments)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base of random weights."""
    return write_base(tmp_path_factory.mktemp("bases") / "llama", "llama")


def test_a_language_model_by_nats_a_token(tmp_path, base, evaluated):
    """The loss is that of all records, computed here in another way."""
    data = tmp_path / "held.jsonl"
    texts = ["abc", "defg", "hé"]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tune = make_run(tmp_path / "run", base, "tune.rank=2")
    (row,) = evaluated("--base", base, "--data", data)
    model, weights, _ = adapted(base, tune)
    weights.copy_in(KeptRun(tmp_path / "run").chosen(None).vector)
    total, count = 0.0, 0
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([list(text.encode())])
            logits = model.eval()(input_ids=ids).logits[0, :-1]
            total += float(functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
    assert row["loss"] == pytest.approx(total / count, rel=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert (row["version"], row["of"], row["data"]) == (2, "weights", str(data))
    named = tmp_path / "named.jsonl"
    named.write_text(data.read_text().replace('"text"', '"body"'))
    (same,) = ask(
        evaluate.command,
        tmp_path / "run",
        "--base",
        base,
        "--data",
        named,
        "--columns",
        "text=body",
    )
    assert same["loss"] == row["loss"]
    (older,) = ask(
        evaluate.command, tmp_path / "run", "--base", base, "--data", data, "--version", 0
    )
    assert older["loss"] != row["loss"]
    assert [one.version for one in kept(tmp_path / "run")] == [2, 2, 0]


def test_a_classifier_by_its_accuracy(tmp_path, base, evaluated):
    """With the line of `status`, which names no nats a token."""
    data = tmp_path / "held.jsonl"
    rows = [("good", "yes"), ("bad", "no"), ("fine", "yes"), ("worse", "no"), ("ok", "yes")]
    data.write_text("".join(json.dumps({"text": t, "label": n}) + "\n" for t, n in rows))
    settings = ["tune.objective=classify", "tune.labels=no,yes", "tune.rank=2"]
    tune = make_run(tmp_path / "run", base, *settings)
    (row,) = evaluated("--base", base, "--data", data)
    model, weights, _ = adapted(base, tune)
    weights.copy_in(KeptRun(tmp_path / "run").chosen(None).vector)
    right, total = 0, 0.0
    with torch.no_grad():
        for text, label in rows:
            logits = model.eval()(input_ids=torch.tensor([list(text.encode())])).logits
            number = torch.tensor([int(label == "yes")])
            right += int(logits.argmax() == number)
            total += float(functional.cross_entropy(logits, number))
    assert row["accuracy"] == pytest.approx(right / 5)
    assert row["loss"] == pytest.approx(total / 5, rel=1e-4)
    assert row["perplexity"] is None
    (found,) = kept(tmp_path / "run")
    assert found.accuracy == row["accuracy"]
    shown = f"held-out loss on x 0.5000 (accuracy {found.accuracy:.1%}".replace("%", " %")
    line = line_of([Evaluation(2, 0.5, data="x", accuracy=found.accuracy)])
    assert line == f"{shown}) at version 2"


def test_what_is_missing_is_one_line(tmp_path, base, evaluated):
    """Base and records are the user's to give."""
    make_run(tmp_path / "run", base, "tune.rank=2")
    for given in ([], ["--base", base], ["--data", base]):
        with pytest.raises(UsageError, match="give --base MODEL, and --data RECORDS"):
            evaluated(*given)
    with pytest.raises(DataError, match="neither a file nor a folder"):
        evaluated("--base", base, "--data", tmp_path / "none")
