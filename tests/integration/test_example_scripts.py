"""The scripts of docs/guides/your-own-script.md, each in a run."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))


@pytest.fixture(autouse=True)
def own_hook(monkeypatch):
    """`join` replaces the hook of a script; here the script is a part of the tests."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.mark.parametrize(
    ("name", "words", "least", "most"),
    [
        ("epochs", "accuracy", 0.5, 1.0),
        ("iterations", "held-out loss", 0.5, 4.5),  # ln 256 = 5.5 at the start
        ("images", "accuracy", 0.5, 1.0),
    ],
)
def test_a_script_trains_until_its_run_ends(  # noqa: PLR0917 - fixtures
    name, words, least, most, site, monkeypatch, capsys
):
    """People copy them; a loop that goes on, or a schedule of its own count, would show here."""
    # A version is 40 steps, not a time, so that a slow machine learns as much.
    by_steps = {"sync__trigger": "buffer", "sync__local_steps": 40, "sync__buffer": 1}
    server = site.server(every_s=30, run__rounds=3, **by_steps)
    monkeypatch.setattr(sys, "argv", [name, site.address])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert server.end() == 0
    found = re.search(rf"^version 3: .*{words} (\d\.\d+)$", out, re.MULTILINE)
    assert found, out
    assert least < float(found[1]) <= most, out
    assert [fact["version"] for fact in site.ledger("version")] == [0, 1, 2, 3]


def test_a_script_that_ends_first_sends_its_last_work_and_the_operator_is_told(site, tmp_path):
    """With its own `max_iters` and no `fed.close()` all of it was lost, and the server waited."""
    server = site.server(every_s=3000)
    text = (EXAMPLES / "iterations.py").read_text()
    path = tmp_path / "flat.py"
    path.write_text("".join(line for line in text.splitlines(True) if "fed.close()" not in line))
    done = subprocess.run(
        [sys.executable, path, site.address, "--max-iters", "5"],
        text=True,
        capture_output=True,
        timeout=60 * UNIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "this script ends without fed.close()" in done.stdout
    (accepted,) = site.ledger("accepted")
    assert (accepted["steps"], accepted["tokens"]) == (5, 5 * 8 * 32)
    server.wait_for("this run waits for clients without end")
