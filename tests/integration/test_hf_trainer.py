"""A script around a Hugging Face Trainer, alone and in a run of two."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="the extra hf is not installed"
    ),
]

SCRIPT = Path(__file__).parents[2] / "examples" / "hf_trainer.py"
UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))


def script(path, *arguments, server=""):
    """Start the script, in the run of `server`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment.pop("FSL_SERVER", None)
    if server:
        environment["FSL_SERVER"] = server
    return subprocess.Popen(
        [sys.executable, path, *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )


def held_out(text):
    """The loss that the script prints at its end."""
    found = re.search(r"held-out loss (\S+)", text)
    assert found, text
    return float(found[1])


def test_two_lines_put_a_trainer_into_a_run(site, tmp_path):
    """The script without the lines trains alone; with them until the run ends, with others."""
    lines = SCRIPT.read_text().splitlines()
    added = [line for line in lines if line.endswith("# +")]
    assert len(added) == 2
    alone = tmp_path / "alone.py"
    alone.write_text("\n".join(line for line in lines if line not in added) + "\n")
    assert "fsl_async.hf" not in alone.read_text().replace("fsl_async.hf.patch", "")
    server = site.server(every_s=1.0, tune__method="lora", run__rounds=8, sync__clients=2)
    begun = time.monotonic()
    with script(SCRIPT, "1", server=site.address) as one:
        with script(SCRIPT, "2", server=site.address) as two:
            texts = [process.communicate(timeout=100 * UNIT_S)[0] for process in (one, two)]
    assert (one.returncode, two.returncode) == (0, 0), texts
    assert server.end() == 0
    print(f"a run of 8 rounds: {time.monotonic() - begun:.1f} s")
    versions = [fact["version"] for fact in site.ledger("version")]
    assert versions == list(range(9))
    accepted = site.ledger("accepted")
    assert len({fact["key"].split("/")[0] for fact in accepted}) == 2
    for fact in accepted:
        # A step is two batches of 8 rows of 24 tokens; the first of a row is not predicted.
        assert fact["tokens"] == fact["steps"] * 2 * 8 * 23
        assert fact["facts"] == {"rank": 8.0, "order": 1.0}
    # Rank 8 in 2 blocks: q, k, v, o of 48 x 48; gate, up, down of 48 x 96.
    exchanged = 2 * 8 * (4 * (48 + 48) + 3 * (48 + 96))
    assert all(fact["bytes"] < 4 * exchanged for fact in accepted)
    losses = [held_out(text) for text in texts]
    assert all(loss < 3.2 for loss in losses), texts  # ln 32 = 3.47 at the start
    with script(alone, "1") as process:
        text, _ = process.communicate(timeout=100 * UNIT_S)
    assert process.returncode == 0, text
    held_out(text)
    assert "run" not in text
