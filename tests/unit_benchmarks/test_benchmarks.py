"""Benchmark scripts run to their end with tiny sizes; docs/BENCHMARKS.md names those not run here.

Times are not judged.
"""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = {
    "sync.py --smoke": 1,
    "sync_peers.py --smoke": 3,
    "one_delta.py --rounds 1": 2,
    "quality.py --smoke": 4,
    "quality.py --summary": 1,
    "asynchronous.py --quick --way buffer --steps 120": 1,
    "asynchronous.py --quick --way anarchic --steps 120": 1,
    "loop_lag.py --smoke": 1,
    "cut_bits.py --steps 1 --batch 1": 45,
    "ledger_start.py --smoke": 2,
    "stripe_memory.py --stripes 1,5 --clients 2 --mib 1 --quiet 0": 4,
    "split_server_memory.py --smoke --methods fsl-sage --clients 1": 1,
    "storm.py --clients 2 --calm 6 --storm 6 --every 1.5 --faults-per-hour 3600 --seeds 2": 2,
    "relay.py --mib 1 --rounds 1": 4,
    "streaming.py --values 0.6 --format uniform --rounds 1": 1,
    "transport.py --chunks 64 --rounds 1 --seconds 0.2 --warm 0.05 --others pyzmq --json": 3,
}


def rows_of(command: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.sweep
@pytest.mark.parametrize("command", ROWS)
def test_a_script_prints_its_rows(command):
    """Scripts start nodes by their production functions: a change that breaks one fails here."""
    rows = rows_of(command)
    assert len(rows) == ROWS[command]
    numbers = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert all(math.isfinite(number) for number in numbers)


@pytest.mark.slow
def test_a_sync_of_a_real_server_takes_the_coded_bits():
    """The light clients follow the protocol: a change that breaks them fails here."""
    (row,) = rows_of("sync.py --smoke")
    assert row["sync_s"] > 0
    assert 6 < row["bits_up"] < 7


@pytest.mark.sweep
def test_one_client_that_averages_trains_as_one_process():
    """Nothing of the machinery costs quality: schedule, snapshot, outer step, rebase."""
    (row,) = rows_of("quality.py --check")
    assert abs(row["difference"]) < 1e-3


@pytest.mark.sweep
def test_lockstep_is_one_process_to_the_bit():
    """The difference to one process is judged: it is not a time, and must not grow."""
    (row,) = rows_of("lockstep.py --methods fsl-sage --models gpt --optimizers adamw")
    assert row["difference"] <= 1e-6
    assert row["fp32_average"] > 0, "the comparison shows a rounding"


@pytest.mark.sweep
def test_codec_measures_beside_others():
    """Codes are torch's casts, and sizes are close to the entropy."""
    rows = rows_of("codec.py --smoke --json")
    tensors = [row for row in rows if row["row"] == "tensor"]
    assert {row["bit_exact"] for row in tensors if row["format"] != "uniform"} == {True}
    assert all(0 < row["entropy_bits"] < row["bits_per_value"] * 1.05 for row in tensors)


@pytest.mark.slow
def test_attackers_of_a_real_server(monkeypatch):
    """The attacker and the honest clients follow the protocol to the end of a run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    one_peer, under_attack = map(importlib.import_module, ("one_peer", "under_attack"))
    monkeypatch.setattr(one_peer, "ROUNDS", 2)
    kept = one_peer.measure("first round x 1e6", "trimmed")
    assert kept["versions"] == 2
    assert kept["moved"] < 10
    replayed = under_attack.measure("replayed", 20_000, 1, warm_s=0.1)
    assert (replayed["problem"], replayed["lost_sessions"]) == ("", 0)
