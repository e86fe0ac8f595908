"""A script around a Hugging Face Trainer, alone and in a run of two."""

import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "hf_trainer.py"
UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))


def script(seed, server):
    """Start the script in the run of `server`."""
    return subprocess.Popen(
        [sys.executable, SCRIPT, seed],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FSL_SERVER": server},
    )


def held_out(text):
    """The loss that the script prints at its end."""
    found = re.search(r"held-out loss (\S+)", text)
    assert found, text
    return float(found[1])


def test_two_lines_put_a_trainer_into_a_run(site, tmp_path, capsys):
    """The script without the lines trains alone; with them until the run ends, with others."""
    lines = SCRIPT.read_text().splitlines()
    added = [line for line in lines if line.endswith("# +")]
    assert len(added) == 2
    server = site.server(every_s=1, tune__method="lora", run__rounds=6, sync__min_clients=2)
    with script("1", site.address) as one, script("2", site.address) as two:
        alone = tmp_path / "alone.py"
        kept = [line for line in lines if line not in added]
        alone.write_text("\n".join(kept).replace("max_steps=300", "max_steps=5"))
        runpy.run_path(str(alone))["main"](seed=1)
        text = capsys.readouterr().out
        held_out(text)
        assert "joined run" not in text
        texts = [process.communicate(timeout=100 * UNIT_S)[0] for process in (one, two)]
    assert (one.returncode, two.returncode) == (0, 0), texts
    assert server.end() == 0
    assert [fact["version"] for fact in site.ledger("version")] == list(range(7))
    accepted = site.ledger("accepted")
    assert len({fact["key"].split("/")[0] for fact in accepted}) == 2
    # Rank 8 in 2 blocks: q, k, v, o of 48 x 48; gate, up, down of 48 x 96.
    exchanged = 2 * 8 * (4 * (48 + 48) + 3 * (48 + 96))
    steps = Counter()
    for fact in accepted:
        # A step is two batches of 8 rows of 24 tokens, the first of which nothing predicts.
        assert fact["tokens"] == fact["steps"] * 2 * 8 * 23
        client = fact["key"].split("/")[0]
        steps[client] += fact["steps"]
        facts = {name: fact["facts"][name] for name in ("rank", "order", "data_drawn")}
        assert facts == {"rank": 8.0, "order": 1.0, "data_drawn": float(steps[client])}
        assert 0 < fact["bytes"] < 4 * exchanged
    losses = [held_out(text) for text in texts]
    assert all(loss < 3.2 for loss in losses), texts  # ln 32 = 3.47 at the start
