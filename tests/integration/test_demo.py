"""The demo with real processes, sockets, training and SIGKILL."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsl_async.observe.ledger_audit import audit_run, read_ledger

KEYS = [
    "rounds", "clients", "tokens", "loss_first", "loss_last", "eval_loss", "bytes_raw",
    "bytes_sent", "ratio", "relaunches", "deltas_merged", "deltas_lost", "deltas_doubled",
    "participation", "seconds", "run_dir",
]  # fmt: skip

UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))
FSL_NODE = [sys.executable, "-m", "fsl_async.cli"]


def children_of(run_dir):
    """Process ids of the nodes that keep their files in `run_dir`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "--role" in command and str(run_dir) in command:
            found.append(int(path.parent.name))
    return found


def gone_within(run_dir, seconds):
    """Whether all nodes of `run_dir` are gone within `seconds`."""
    deadline = time.monotonic() + seconds
    while children_of(run_dir):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture
def text(tmp_path):
    """A small text: quick to index, the same on every Python."""
    path = tmp_path / "text.txt"
    path.write_text(
        "".join(f"line {i} of a text that repeats itself, as texts do\n" for i in range(20_000))
    )
    return path


@pytest.mark.slow
def test_a_complete_demo(tmp_path, text):
    """A killed client must catch up without loss, and `status` must agree with the result."""
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [*FSL_NODE, "demo", "--clients", "2", "--seconds", "22", "--every", "2", "--seed", "1",
         "--data", str(text), "--run-dir", str(run_dir), "--json"],
        capture_output=True, text=True, timeout=150 * UNIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    records = [json.loads(line) for line in done.stdout.splitlines()]
    result = records.pop()
    assert list(result) == KEYS
    assert result["rounds"] >= 1
    assert result["clients"] == 2
    assert (result["deltas_lost"], result["deltas_doubled"]) == (0, 0)
    assert result["relaunches"] == 1
    assert result["deltas_merged"] >= result["rounds"]
    assert result["tokens"] > 0
    assert result["eval_loss"] < result["loss_first"]
    assert result["ratio"] == pytest.approx(result["bytes_raw"] / result["bytes_sent"], abs=0.01)
    assert 0 < result["participation"] <= 1
    kinds = [record["event"] for record in records]
    for kind in ("killed", "gone", "relaunched", "caught up", "version", "end"):
        assert kind in kinds
    assert gone_within(run_dir, 2.0)

    audit = audit_run(run_dir)
    assert (audit.merged, audit.tokens) == (result["deltas_merged"], result["tokens"])
    shown = subprocess.run(
        [*FSL_NODE, "status", str(run_dir), "--json"],
        capture_output=True,
        text=True,
        timeout=60 * UNIT_S,
        check=True,
    )
    status = json.loads(shown.stdout)
    for key in ("rounds", "tokens", "bytes_raw", "bytes_sent", "relaunches", "deltas_merged"):
        assert status[key] == result[key]
    assert status["phase"] == "ended"
    assert status["server"].endswith(": the demo is over")
    assert status["audit"]["lost"] == []


@pytest.mark.slow
def test_a_clients_error_is_the_demos_own(tmp_path):
    """A client detects too little text; the user must get its one line and exit code 2."""
    short = tmp_path / "short.txt"
    short.write_text("too short")
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [*FSL_NODE, "demo", "--data", str(short), "--run-dir", str(run_dir)],
        capture_output=True, text=True, timeout=100 * UNIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: data ")
    assert gone_within(run_dir, 5.0)


@pytest.mark.sweep
@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf")
def test_the_demo_of_adapters(tmp_path):
    """A killed client must train again, and the run's adapters must fit held-out records."""
    from tiny_base import write_llama

    # With one client no rounds pass while it is away, which the comparison would train as well.
    base, data = write_llama(tmp_path / "base"), tmp_path / "red.jsonl"
    rows = [{"text": f"number {n} of the red ones is {n * n}"} for n in range(96)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [*FSL_NODE, "demo", "lora", "--base", str(base), "--data", str(data), "--rank", "2",
         "--rounds", "4", "--run-dir", str(run_dir), "--json"],
        capture_output=True, text=True, timeout=200 * UNIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["clients"], result["rank"], result["rule"]) == (1, 2, "fedit")
    assert (result["deltas_lost"], result["deltas_doubled"]) == (0, 0)
    assert (result["relaunches"], result["base_unchanged"]) == (1, True)
    assert result["rounds"] >= 4
    assert result["loss_federated"] < result["loss_base"]
    assert list(result["loss_alone_by_site"]) == ["client-1"]
    assert max(result["loss_alone"], result["loss_pooled"]) < result["loss_base"]
    # 2 blocks of width 32: q, o 32x32; k, v 32x16; gate, up, down 32x64.
    values = 2 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    assert result["bytes_up_fp32"] == 4 * values
    assert 0 < result["bytes_up"] < result["bytes_up_fp32"]
    kinds = [json.loads(line).get("event") for line in done.stdout.splitlines()]
    for kind in ("killed", "gone", "relaunched", "caught up", "version", "end"):
        assert kind in kinds
    assert gone_within(run_dir, 2.0)

    facts, _ = read_ledger(run_dir / "ledger.jsonl")
    steps = [fact["steps"] for fact in facts if fact["fact"] == "accepted"]
    assert sum(steps) == result["steps"]
    shown = subprocess.run(
        [*FSL_NODE, "status", str(run_dir), "--json"],
        capture_output=True, text=True, timeout=60 * UNIT_S, check=True,
    )  # fmt: skip
    status = json.loads(shown.stdout)
    assert (status["phase"], status["rounds"]) == ("ended", result["rounds"])
    assert status["deltas_merged"] == result["deltas_merged"]
