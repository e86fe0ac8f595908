"""The built-in task of tuning, private, at simulated clients."""

import importlib.util
import json

import pytest
from tiny_base import write_llama

import fsl_async
from fsl_async.observe.ledger_audit import read_ledger

NEEDED = ("peft", "opacus")


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in NEEDED), reason="needs hf and dp"
)
def test_private_tuning_spends_the_budget_of_each_client(tmp_path):
    """Each delta must tell the epsilon spent, as on real nodes, and end at the run's."""
    data = tmp_path / "notes.jsonl"
    data.write_text("".join(json.dumps({"text": f"a film like {i}"}) + "\n" for i in range(40)))
    settings = {
        "tune.method": "lora",
        "tune.rule": "ffa",
        "tune.rank": 4,
        "tune.targets": "q_proj,v_proj",
        "tune.context": 16,
        "tune.steps": 2,
        "tune.dp_epsilon": 8.0,
        "tune.base": str(write_llama(tmp_path / "base")),
        "run.rounds": 2,
        "sync.min_clients": 2,
        "sync.quorum": 1.0,
        "train.batch": 4,
        "data.path": str(data),
    }
    result = fsl_async.simulate(
        "fsl_async.learn.tune.task:train",
        clients=2,
        settings=settings,
        step_seconds=1.0,
        run_dir=tmp_path / "run",
    )
    assert [point.version for point in result.points][-1] == 2
    facts, problems = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert not problems
    spent = {}
    for fact in facts:
        if fact["fact"] == "accepted":
            client = fact["key"].split("/")[0]
            spent.setdefault(client, []).append(fact["facts"]["epsilon"])
    assert sorted(spent) == ["c0000", "c0001"]
    for epsilons in spent.values():
        assert 0 < epsilons[0] < epsilons[1] == pytest.approx(8.0, rel=0.01)
