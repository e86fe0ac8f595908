"""examples/own_script.py as a process: its last delta, and processes that it forks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "own_script.py"

UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))


def script(*arguments):
    """Start the script."""
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )


def test_ctrl_c_sends_the_last_delta_and_ends_the_script(site):
    """Work since the last sync must arrive, and the script must continue after its loop."""
    server = site.server(every_s=3000)
    with script(site.address) as process:
        assert "leaves this machine: deltas" in process.stdout.readline()
        assert "joined run" in process.stdout.readline()
        site.wait_version(0)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60 * UNIT_S)
    assert process.returncode == 130
    assert "steps, last loss" in out
    assert "Traceback" not in err
    assert err.endswith("stopped: Ctrl-C\n")
    assert len(site.ledger("accepted")) == 1
    server.signal(signal.SIGINT)
    assert server.end() == 130


FORKS = """
import os, sys, time
import torch
from torch.utils.data import DataLoader
import fsl_async

with fsl_async.clean_exit():
    with fsl_async.join(sys.argv[1], name="f", log=lambda _: None) as fed:
        model = torch.nn.Linear(1, 3)
        fed.attach(model)
        data = DataLoader(range(8), batch_size=4, num_workers=1, multiprocessing_context="fork")
        print([batch.tolist() for batch in data], flush=True)
        for call in (fed.step, fed.close):
            if child := os.fork():
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
                continue
            call()
            break
        if child:
            fed.step(tokens=4)
    print("left", flush=True)
"""


def test_a_process_forked_inside_of_the_block_leaves_it_at_once(site):
    """It has neither the threads nor the sockets of the client, so it must not wait for them."""
    site.server(every_s=3000)
    command = [sys.executable, "-W", "ignore", "-c", FORKS, site.address]
    with subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            out, err = process.communicate(timeout=20 * UNIT_S)
        finally:
            process.kill()
    told = "error: fed belongs to the process that joined, and this one was forked from it"
    assert out.splitlines() == ["[[0, 1, 2, 3], [4, 5, 6, 7]]", "2", "left", "0", "left"]
    assert [line.startswith(told) for line in err.splitlines()] == [True]
    assert process.returncode == 0
    (accepted,) = site.ledger("accepted")
    assert accepted["tokens"] == 4
