"""`fsl-node evaluate` and `fsl-node decay` work on a run's directory."""

import json
import math
import threading
import time

import numpy as np
import pytest
from asking import ask

from fsl_async.commands import decay, evaluate
from fsl_async.config.fixed import keep_settings
from fsl_async.config.load import load
from fsl_async.errors import RunDirError, TaskError, UsageError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.pretrain import evaluate as loss_of
from fsl_async.learn.client.pretrain import open_corpus
from fsl_async.learn.models.gpt import GPT, GPTConfig
from fsl_async.nodes.ps.decay_requests import FILE, read_request
from fsl_async.observe.evaluations import EVALUATIONS, Evaluation, kept, line_of, newest
from fsl_async.observe.journal import JOURNAL
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta
from fsl_async.roles.sync.progress import RunLimits
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, encode

SIZES = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16"]
CONFIG = GPTConfig(1, 16, 2, 16)
LOSSLESS = CodecSpec(format="fp32")


@pytest.fixture
def text(tmp_path):
    """Text to evaluate on."""
    path = tmp_path / "text.txt"
    path.write_text("a line of text\n" * 400)
    return path


@pytest.fixture
def run_dir(tmp_path):
    """A run of the built-in model at version 1."""
    store = Store(tmp_path / "run")
    store.recover()
    weights = ModelWeights(GPT(CONFIG, seed=3))
    own = np.empty(weights.manifest.values, np.float32)
    weights.copy_out(own)
    store.begin_initial(weights.manifest)
    store.write_initial(0, encode(own, LOSSLESS))
    digest = store.finish_initial().digest
    delta = Delta(DeltaKey("a", 1, 0, 1), digest, 100, 5)
    store.spool_begin(delta)
    store.spool_write(delta.key, 0, encode(0.1 * own, LOSSLESS))
    store.spool_finish(delta.key)
    store.commit(1, [MergedDelta(delta, 0, 1.0)], 1.0)
    store.finish_snapshot()
    store.close()
    keep_settings(tmp_path / "run", load(None, [*SIZES, "data.holdout=0.1"]), -1)
    return tmp_path / "run"


def test_a_version_and_the_mean_are_evaluated_and_kept(run_dir, text):
    """The loss is that of the weights in the file, computed here in another way."""
    of_weights, of_mean = ask(evaluate.command, run_dir, "--data", text, "--mean")
    assert (of_weights["version"], of_weights["tokens"], of_weights["of"]) == (1, 100, "weights")
    assert of_mean["loss"] == of_weights["loss"], "the mean begins as the first version"
    tables = {"data": {"path": str(text), "holdout": 0.1}}
    model = GPT(CONFIG)
    from safetensors.torch import load_file

    folder = run_dir / "checkpoints" / "v00000001"
    model.load_state_dict(load_file(folder / "weights.safetensors"), strict=False)
    expected = loss_of(model, open_corpus(tables, 16), limit_bytes=1 << 17)
    assert of_weights["loss"] == pytest.approx(expected, rel=1e-6)
    assert of_weights["perplexity"] == pytest.approx(math.exp(expected))
    assert of_weights["bits_per_byte"] == pytest.approx(expected / math.log(2))
    (older,) = ask(evaluate.command, run_dir, "--data", text, "--version", 0)
    assert older["loss"] != of_weights["loss"]
    assert [one.version for one in kept(run_dir)] == [1, 1, 0]


def test_ones_own_function_gets_the_weights_by_name(run_dir, tmp_path):
    """Runs of other models are evaluated too."""
    (tmp_path / "own.py").write_text(
        "def score(weights):\n"
        "    return {'loss': float(weights['embedding'].square().mean()), 'shapes': len(weights)}\n"
        "def wrong(weights):\n    return 3\n"
        "def diverged(weights):\n    return {'loss': float('nan'), 'tokens': 7.0, 'version': 9.0}\n"
        "def broken(weights):\n    raise KeyError('no such tensor')\n"
    )
    task = f"{tmp_path / 'own.py'}:score"
    (row,) = ask(evaluate.command, run_dir, "--task", task)
    from safetensors.torch import load_file

    weights = load_file(run_dir / "checkpoints" / "v00000001" / "weights.safetensors")
    assert row["loss"] == pytest.approx(float(weights["embedding"].square().mean()))
    assert row["data"] == task
    assert row["shapes"] == len(GPT(CONFIG).state_dict())
    (diverged,) = ask(evaluate.command, run_dir, "--task", f"{tmp_path / 'own.py'}:diverged")
    assert (diverged["loss"], diverged["tokens"], diverged["version"]) == (None, 100, 1)
    assert [one.version for one in kept(run_dir)] == [1], "a loss that is no number is left out"
    with pytest.raises(TaskError, match="must return numbers by name"):
        ask(evaluate.command, run_dir, "--task", f"{tmp_path / 'own.py'}:wrong")
    with pytest.raises(TaskError, match="no such tensor"):
        ask(evaluate.command, run_dir, "--task", f"{tmp_path / 'own.py'}:broken")


def test_wrong_directories_and_options_are_one_line(run_dir, tmp_path):
    """Each says what to do."""
    with pytest.raises(RunDirError, match="has no ledger"):
        ask(evaluate.command, tmp_path)
    with pytest.raises(RunDirError, match=r"does not keep version 7; it has \[0, 1\]"):
        ask(evaluate.command, run_dir, "--version", 7)
    with pytest.raises(UsageError, match="not both"):
        ask(evaluate.command, run_dir, "--follow", "--version", 1)
    empty = Store(tmp_path / "empty")
    empty.recover()
    empty.close()
    with pytest.raises(RunDirError, match="has no version yet"):
        ask(evaluate.command, tmp_path / "empty", "--follow")
    (run_dir / "settings.json").unlink()
    with pytest.raises(RunDirError, match=r"no settings\.json"):
        ask(evaluate.command, run_dir)


def test_lines_of_another_form_are_skipped(tmp_path):
    """A half-written line must not break `status`."""
    row = {"version": 4, "loss": 1.5, "of": "weights", "bits_per_byte": 2.16}
    wrong = [{"version": "x", "loss": 1, "of": ""}, row | {"loss": math.nan}]
    wrong += [row | {"version": math.inf}]
    lines = [json.dumps(row), "{", "3", *map(json.dumps, wrong)]
    (tmp_path / EVALUATIONS).write_text("\n".join(lines))
    assert kept(tmp_path) == [Evaluation(4, 1.5, "weights", 2.16)]


def test_the_line_compares_losses_on_one_text_only():
    """A client's own held-out text is another one than that of the command."""
    by_clients = [Evaluation(4, 1.2), Evaluation(5, 1.3), Evaluation(9, 0.5)]
    by_command = [Evaluation(4, 1.5, data="/x"), Evaluation(5, 1.6, data="/x")]
    by_command += [Evaluation(5, 1.1, "mean", data="/x"), Evaluation(4, 1.4, data="/x")]
    found = newest(5, by_clients, by_command)
    assert 9 not in {one.version for one in found}, "a rollback made that version void"
    assert len(found) == 5, "the last evaluation of version 4 on /x counts"
    on_x = [one for one in found if one.data]
    assert line_of(on_x) == (
        "held-out loss on /x 1.6000 nats a token (perplexity 4.953) at version 5;"
        " lowest 1.4000 at 4"
    )
    assert "lowest 1.2000 at 4" in line_of([one for one in found if not one.data])


def answering(run_dir, text):
    """Take the request as a parameter server does, and write its answer."""
    give_up_at = time.monotonic() + 30.0
    while not (run_dir / FILE).exists():
        assert time.monotonic() < give_up_at, "nothing was asked"
        time.sleep(0.01)
    found = read_request(run_dir / FILE)
    (run_dir / FILE).unlink()
    line = {"t": 1.0, "kind": "effect", "type": "note", "text": text}
    with (run_dir / JOURNAL).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return found


@pytest.mark.parametrize(
    "text", ["learning rates fall from version 1 on", "no decay: the run is ending"]
)
def test_a_decay_is_asked_for_and_answered(run_dir, text):
    """The answer is that of the parameter server."""
    (run_dir / JOURNAL).write_text("")
    taken = []
    server = threading.Thread(target=lambda: taken.append(answering(run_dir, text)))
    server.start()
    if text.startswith("no decay"):
        with pytest.raises(UsageError, match=text):
            ask(decay.command, run_dir, "--rounds", 7)
    else:
        assert ask(decay.command, run_dir, "--rounds", 7)[0]["begun"] is True
    server.join()
    assert taken == [RunLimits(rounds=7)]


def test_without_a_parameter_server_the_request_waits(run_dir, monkeypatch):
    """It is taken at the next start."""
    monkeypatch.setattr(decay, "WAIT_S", 0.3)
    (run_dir / JOURNAL).write_text("")
    (found,) = ask(decay.command, run_dir, "--seconds", 60)
    assert "when it is started again" in found["answer"]
    assert read_request(run_dir / FILE) == RunLimits(seconds=60.0)
    with pytest.raises(UsageError, match="only one"):
        ask(decay.command, run_dir, "--seconds", 60, "--rounds", 2)


def test_a_run_that_has_ended_is_not_asked(run_dir):
    """The request would cut short a run that is started again with a later end."""
    ended = {"t": 1.0, "type": "finish", "reason": "the run's limit of 9 rounds is reached"}
    (run_dir / JOURNAL).write_text(json.dumps(ended) + "\n")
    with pytest.raises(RunDirError, match="has ended: the run's limit of 9 rounds"):
        ask(decay.command, run_dir, "--rounds", 4)
    assert not (run_dir / FILE).exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"rounds": -1, "tokens": 0, "seconds": 0}',
        '{"rounds": 1, "tokens": 0}',
        '{"rounds": 1.5, "tokens": 0, "seconds": 0}',
        '{"rounds": 1, "tokens": 0, "seconds": Infinity}',
    ],
)
def test_a_request_of_another_form_is_none(tmp_path, text):
    """A file that another program wrote ends no run."""
    (tmp_path / FILE).write_text(text)
    assert read_request(tmp_path / FILE) is None
