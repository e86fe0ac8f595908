"""Real processes killed by SIGKILL at chosen effects and started again: the run ends, nothing
lost.
"""

import os
import time
from pathlib import Path

import pytest

from fsl_async.observe.ledger_audit import audit_run

KILLING = Path(__file__).resolve().parent.parent / "support" / "killing"
PATIENCE_S = 90.0 * float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))
POINTS = [
    "ps:before:commit:2",  # its deltas are in the sum, which is lost
    "ps:after:commit:2",  # submitted to the store's thread, which may be anywhere in it
    "client:after:offer_delta:2",
]


def dead(process):
    """Return whether it was killed."""
    return process.popen.poll() == -9


@pytest.mark.cold
@pytest.mark.slow
def test_killed_at_their_effects_processes_go_on(site, monkeypatch):
    """Points as in virtual time, with real disks, threads and sockets; the ledger shows that
    nothing was lost.
    """
    log = site.folder / "reached"
    log.mkdir()
    monkeypatch.setenv("FSL_CRASH_AT", ",".join(POINTS))
    monkeypatch.setenv("FSL_CRASH_LOG", str(log))
    monkeypatch.setenv("PYTHONPATH", str(KILLING), prepend=os.pathsep)
    server = site.server("--set", "run.rounds=4")
    clients = {name: site.client(name) for name in ("a", "b")}
    deadline = time.monotonic() + PATIENCE_S
    while server.popen.poll() != 0 and time.monotonic() < deadline:
        if dead(server):
            server = site.server("--set", "run.rounds=4")
        for name in [name for name, one in clients.items() if dead(one)]:
            clients[name] = site.client(name)
        time.sleep(0.05)
    assert server.end(1.0) == 0, server.text
    assert sorted(path.name for path in log.iterdir()) == sorted(POINTS)
    audit = audit_run(site.run_dir)
    assert audit.complaints() == []
    assert (audit.versions, audit.pending) == (4, 0)
    # From the ledger: a killed process loses its journal's last lines.
    assert audit.merged >= 5
