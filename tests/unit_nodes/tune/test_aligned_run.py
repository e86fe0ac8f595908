"""Runs that align, by nodes in one process over real sockets: rewards of answers, own heads."""

import importlib.util
import json

import numpy as np
import pytest
from node_runs import ROUNDS, TUNED, config_of, ledger_of, play

from fsl_async.config.site_policy import SitePolicy
from fsl_async.errors import TaskError, UsageError
from fsl_async.keys.folder import KeysFolder
from fsl_async.observe.ledger_audit import audit_run

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf"),
    pytest.mark.usefixtures("one_thread"),
]
REWARD = "def reward(prompt, answer):\n    return answer.count('e') / (1 + len(answer))\n"


def write(folder, name, rows):
    """Write a site's records; returns the file."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_sites_rate_answers_themselves_and_send_adapters_alone(tmp_path, base):
    (tmp_path / "mine.py").write_text(REWARD)
    clients = {}
    for name in "ab":
        data = write(tmp_path, name, [{"prompt": f"{name} {number}"} for number in range(6)])
        clients[name] = {"data": data, "base": str(base), "reward": str(tmp_path / "mine.py")}
        clients[name]["policy"] = SitePolicy(frozenset({"adapters", "metrics"}))
    settings = {**TUNED, "tune.objective": "grpo", "tune.group": 3, "tune.answer_tokens": 4}
    played = play(config_of(settings, 2), tmp_path / "run", clients)
    assert not audit_run(tmp_path / "run").problems
    accepted = ledger_of(tmp_path / "run", "accepted")
    assert len(accepted) == 2 * ROUNDS
    assert all({"reward", "kl", "flat"} <= one["metrics"].keys() for one in accepted)
    # tune.steps of train.batch prompts with tune.group answers each
    assert {one["tokens"] for one in accepted} == {4 * 2 * 3}
    assert "bug" not in str(played.lines)


def test_a_client_without_a_reward_function_ends_with_one_line(tmp_path, base):
    data = write(tmp_path, "a", [{"prompt": "x"}])
    settings = {**TUNED, "tune.objective": "grpo"}
    clients = {"a": {"data": data, "base": str(base)}}
    with pytest.raises(TaskError, match=r"give this client --reward FILE.py"):
        play(config_of(settings, 1), tmp_path / "run", clients)


def test_each_site_keeps_its_head_and_goes_on_with_it(tmp_path, base):
    """Two sites prefer the opposite; what they share is the body."""
    from fsl_async.learn.tune.base import Tuned
    from fsl_async.tools.kept_run import KeptRun

    texts = [("good film", "bad film"), ("good plot", "bad plot"), ("good end", "bad end")]
    clients = {}
    for name in "ab":
        order = slice(None, None, 1 if name == "a" else -1)
        rows = [dict(zip(("chosen", "rejected"), one[order], strict=True)) for one in texts]
        keys = KeysFolder(tmp_path / "keys" / name)
        data = write(tmp_path, name, rows)
        clients[name] = {"data": data, "base": str(base), "keys": keys}
    settings = {**TUNED, "tune.objective": "reward", "run.rounds": 12, "train.learning_rate": 1e-2}
    played = play(config_of(settings, 2), tmp_path / "run", clients)
    accepted = ledger_of(tmp_path / "run", "accepted")
    assert [one["metrics"]["accuracy"] for one in accepted[-2:]] == [1, 1]
    files = {name: next((tmp_path / "keys" / name).rglob("*.head.npz")) for name in "ab"}
    heads = [np.load(file)["score.weight"] for file in files.values()]
    assert np.vdot(*heads) < 0
    run = KeptRun(tmp_path / "run")
    assert not any("score" in one.name for one in run.manifest.tensors)
    given = base, run.tuning(), settings["run.seed"], run.manifest
    with pytest.raises(UsageError, match="--head FILE"):
        Tuned(*given)
    model = Tuned(*given, files["b"]).model
    assert np.array_equal(model.score.weight.detach().numpy(), heads[1])
    again = play(config_of(settings | {"run.rounds": 1}, 2), tmp_path / "again", clients)
    assert not any("goes on with the head" in line for line in again.lines["a"]), "of another run"
    assert "bug" not in str(played.lines)
