"""Preempted clients as processes: in time, the last delta arrives, goodbye is sent, exit code is
64.
"""

import json
import signal
import threading
import time

import pytest
from ec2_metadata import Metadata

from fsl_async.observe.ledger_audit import audit_run
from fsl_async.process.watches import EC2_VARIABLE

pytestmark = pytest.mark.slow

COUNTS = """
import time
import torch

def train(fed):
    model = torch.nn.Linear(1, 3)
    fed.attach(model)
    steps, goes_on = 0, True
    while goes_on:
        with torch.no_grad():
            model.weight += 0.01
        time.sleep(0.02)
        steps += 1
        goes_on = fed.step(tokens=8)
        if steps == 20:
            print("twenty steps", flush=True)
    print("was asked to end:", fed.is_leaving(), flush=True)
    print("tokens trained", 8 * steps, flush=True)
"""

STUCK = """
import time
import torch

def train(fed):
    fed.attach(torch.nn.Linear(1, 3))
    print("a step begins", flush=True)
    time.sleep(300)
    fed.step(tokens=8)
"""


def tokens_accepted(site, client):
    """Return the tokens of a client's deltas in the ledger."""
    accepted = site.ledger("accepted")
    return sum(one["tokens"] for one in accepted if one["key"].startswith(f"{client}/"))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR2, marks=pytest.mark.sweep)]
)
def test_what_a_preempted_client_trained_is_not_lost(site, number):
    """No sync is due for ten minutes: the last delta has everything that it trained."""
    server = site.server(every_s=600)
    path = site.folder / "counts.py"
    path.write_text(COUNTS)
    words = ("--role", "client", "--name", "b", "--task", f"{path}:train", "--grace", "30")
    client = site.start(*words, "--json", site.address)
    client.wait_for("twenty steps")
    begun = time.monotonic()
    client.signal(number)
    assert client.end() == 64
    assert time.monotonic() - begun < 20.0
    server.wait_for("b left: it ended its session")
    error = json.loads(client.lines[-1])
    assert (error["kind"], error["exit_code"]) == ("PreemptedError", 64)
    client.wait_for("was asked to end: True")
    trained = int(client.wait_for("tokens trained").split()[-1])
    assert tokens_accepted(site, "b") == trained >= 160
    server.signal(signal.SIGINT)
    assert server.end() == 130
    audit = audit_run(site.run_dir)
    assert not audit.lost
    assert not audit.doubled


@pytest.mark.cold
def test_a_spot_instance_that_goes_and_a_requeued_job(site, monkeypatch):
    """From the metadata service to the exit code; the journal has the Slurm job and its restart
    count.
    """
    metadata = Metadata()
    serving = threading.Thread(target=metadata.serve_forever, args=(0.01,), daemon=True)
    serving.start()
    try:
        server = site.server(every_s=600)
        monkeypatch.setenv(EC2_VARIABLE, metadata.base)
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        words = ("--role", "client", "--name", "a", "--task", f"{site.folder / 'task.py'}:train")
        folder = site.folder / "a"
        client = site.start(*words, "--ec2-spot", "--run-dir", folder, site.address)
        site.wait_version(0)
        metadata.announced = b'{"action":"terminate","time":"2099-01-01T00:00:00Z"}'
        assert client.end() == 64
        assert "stopped: EC2 spot (terminate)" in client.text
        server.wait_for("a left: it ended its session")
        assert tokens_accepted(site, "a") > 0
        (journal,) = folder.rglob("journal.jsonl")
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        started = next(line for line in lines if line["type"] == "node_started")
        assert (started["slurm_job"], started["requeues"]) == ("17", 2)
    finally:
        metadata.shutdown()
        metadata.server_close()
        serving.join()


def test_a_step_that_does_not_end_does_not_delay_the_exit(site):
    """The goodbye is sent before the deadline, and the exit code asks for a relaunch."""
    server = site.server()
    path = site.folder / "stuck.py"
    path.write_text(STUCK)
    words = ("--role", "client", "--name", "a", "--task", f"{path}:train", "--grace", "5")
    client = site.start(*words, site.address)
    client.wait_for("a step begins")
    begun = time.monotonic()
    client.signal(signal.SIGTERM)
    assert client.end() == 64
    assert time.monotonic() - begun < 5.0
    server.wait_for("a left: it ended its session")


def test_a_server_that_is_moved_does_not_end_the_run(site):
    """After SIGTERM to the parameter server, clients train on and return when it is started
    again.
    """
    server = site.server()
    client = site.client("a")
    site.wait_version(1)
    server.signal(signal.SIGTERM)
    assert server.end() == 64
    assert "leaving; the run goes on" in server.text
    client.wait_for("training goes on")
    again = site.server()
    before = site.ledger("version")[-1]["version"]
    site.wait_version(before + 1)
    again.signal(signal.SIGINT)
    assert again.end() == 130
    assert client.end() == 0
    audit = audit_run(site.run_dir)
    assert not audit.lost
    assert not audit.doubled
