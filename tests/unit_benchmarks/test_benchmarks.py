"""Scripts of benchmarks/ run to their end with tiny sizes. Times are not judged."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STORM = "--clients 2 --calm 6 --storm 6 --every 1.5 --faults-per-hour 3600 --seeds 2"

SCRIPTS = {
    "sync.py --smoke": lambda row: row["sync_s"] > 0 and 6 < row["bits_up"] < 7,
    "sync_peers.py --smoke": lambda *rows: sum("skipped" not in row for row in rows) >= 2,
    "rule_cost.py --clients 5 --parameters 20000": lambda *rows: len(rows) >= 4,
    "quality.py --smoke": lambda *rows: all(math.isfinite(row["eval_loss"]) for row in rows),
    # Nothing of the machinery costs quality: one client that averages trains as one process.
    "quality.py --check": lambda row: abs(row["difference"]) < 1e-3,
    "asynchronous.py --quick --way waits --steps 120": lambda row: row["versions"] > 1,
    "asynchronous.py --quick --way buffer --steps 120": lambda row: row["versions"] > 1,
    "asynchronous.py --quick --way anarchic --steps 120": lambda row: row["versions"] > 1,
    "asynchronous.py --quick --way latest --steps 120": lambda row: row["versions"] > 1,
    "cut_bits.py --steps 1 --batch 1": lambda *rows: len(rows) == 3 * 3 * 5,
    # A split run in lockstep is one process to the bit.
    "lockstep.py --methods fsl-sage --models gpt --optimizers adamw": (
        lambda row: row["difference"] <= 1e-6 and row["fp32_average"] > 0
    ),
    "split_server_memory.py --smoke --methods fsl-sage --clients 1": (
        lambda row: row["grown"] > row["kept"] > 0
    ),
    f"storm.py {STORM}": lambda row, _: row["faults"] >= 1 and row["complaints"] == [],
    "split_storm.py --warm --clients 2 --kills 3 --seed 13": (
        lambda row: sum(row["kills"].values()) >= 3 and row["uploads"]["trained"] > 0
    ),
    "relay.py --mib 1 --rounds 1": lambda *rows: len(rows) == 4,
    "codec.py --full --smoke --json": (
        # Codes are torch's casts, which has none to uniform.
        lambda *rows: {row.get("bit_exact") for row in rows} == {None, True}
    ),
}
IN_CI = "sync.py --smoke"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [one if one == IN_CI else pytest.param(one, marks=pytest.mark.sweep) for one in SCRIPTS],
)
def test_a_script_runs_with_tiny_sizes(words):
    """Scripts start nodes by their production functions, whose arguments change."""
    done = subprocess.run(
        [sys.executable, *words.split()],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert SCRIPTS[words](*rows), rows
