"""Complete runs with real processes: what users are promised when processes die."""

import os
import signal
import time

import pytest

from fsl_async.observe.ledger_audit import audit_run

pytestmark = pytest.mark.slow

UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))


def merged_keys(site):
    """Return every key of every version."""
    return [one["key"] for version in site.ledger("version") for one in version["merged"]]


def test_kill_nine_of_the_server_in_mid_round(site):
    """Killed with one delta acknowledged and another awaited, and started again: nothing is lost or
    doubled.
    """
    server = site.server(every_s=4, sync__quorum=1.0, session__expire_after_s=30)
    clients = [site.client("a"), site.client("b")]
    site.wait_version(1)
    clients[1].signal(signal.SIGSTOP)  # stopped: the round has to wait for it
    waiting = set()
    deadline = time.monotonic() + 60 * UNIT_S
    while not waiting and time.monotonic() < deadline:
        time.sleep(0.02)
        accepted = {one["key"] for one in site.ledger("accepted")}
        waiting = accepted - set(merged_keys(site))
    assert waiting, "the round must have an acknowledged delta that is not merged yet"
    server.kill()
    clients[1].signal(signal.SIGCONT)
    before = max(one["version"] for one in site.ledger("version"))
    again = site.server(every_s=2)
    assert "still to be merged" in again.text
    site.wait_version(before + 2)
    again.signal(signal.SIGINT)
    assert again.end() == 130
    assert [client.end() for client in clients] == [0, 0]
    keys = merged_keys(site)
    assert len(keys) == len(set(keys))
    assert waiting <= set(keys)
    assert {one["key"] for one in site.ledger("accepted")} == set(keys)
    audit = audit_run(site.run_dir)
    assert (audit.lost, audit.doubled) == ((), ()) or (not audit.lost and not audit.doubled)


def test_a_replaced_client_reports_only_that_and_ends(site):
    """When a launcher starts a client twice, the first ends with that message, not "restarted"."""
    site.server(every_s=2)
    first = site.client("a")
    site.wait_version(1)
    second = site.client("a")
    second.wait_for("received version")
    begun = time.monotonic()
    first.wait_for("another process took over")
    assert time.monotonic() - begun < 5.0  # the rest is Python's exit with torch imported
    assert first.end() == 2
    assert first.lines[-1].startswith("error: another process took over as a")
    assert "restarted" not in first.text
    assert "is back" not in first.text
    assert second.popen.poll() is None


SLOW = """
import time
import torch

def train(fed):
    fed.attach(torch.nn.Linear(1, 3))
    while True:
        print("a step begins", flush=True)
        time.sleep(120)
        if not fed.step(tokens=8):
            break
"""


def test_twice_ends_a_client_in_a_long_step(site):
    """A step may last minutes; the second Ctrl-C does not wait for its end."""
    site.server()
    path = site.folder / "slow.py"
    path.write_text(SLOW)
    task = f"{path}:train"
    client = site.start("--role", "client", "--name", "a", "--task", task, site.address)
    client.wait_for("a step begins")
    client.signal(signal.SIGINT)
    client.wait_for("once more stops at once")
    client.signal(signal.SIGINT)
    begun = time.monotonic()
    assert client.end() == 130
    assert time.monotonic() - begun < 10.0  # about one on a machine with nothing else to do
    assert client.lines[-1] == "stopped: Ctrl-C"
    assert "Traceback" not in client.text
