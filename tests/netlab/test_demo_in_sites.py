"""`fsl-node demo --net` starts its nodes in the sites, at the sites' addresses."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from fsl_async.observe.journal import JournalReader
from fsl_async.observe.ledger_audit import JOURNAL
from fsl_async.tools.demo.places import Sites
from fsl_async.tools.demo.pretrain import pretrain
from fsl_async.tools.demo.scenario import Choices

LIMIT_S = 60 * float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))


def test_the_command_lines_of_sites(tmp_path):
    """The site's prefix must precede a node's command, and addresses must be reachable."""
    lab = SimpleNamespace(address=lambda _: "10.77.0.1", command=lambda site, _: ("ip", site))
    places = Sites(lab)
    demo = pretrain(Choices(run_dir=tmp_path, places=places))
    server = demo.servers[0].child(places).argv
    client = demo.clients[0].child(places, "tcp://10.77.0.1:5").argv
    assert server[:2] == ("ip", "server")
    assert "tcp://10.77.0.1:0" in server
    assert client[:2] == ("ip", "client-1")
    assert "--insecure" in server
    assert "--insecure" in client


def version_of(run_dir):
    """Return the newest version in the parameter server's journal; -1 before the first."""
    path = run_dir / JOURNAL
    lines = JournalReader(path).read() if path.exists() else ()
    return max([-1, *(line["version"] for line in lines if line["type"] == "version_committed")])


@pytest.mark.slow
def test_a_demo_over_a_slow_line(backend, sweeper, left, tmp_path):
    """Clients reach a server at an address that this machine does not have, and a version is made
    of what they train; two Ctrl-C leave no site.
    """
    run_dir = tmp_path / "run"
    words = ["--net", "dsl", "--clients", "2", "--every", "2", "--run-dir", run_dir]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "fsl_async.cli", "demo", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        name = f"p{demo.pid}-1"
        sweeper(name)
        try:
            deadline = time.monotonic() + LIMIT_S
            while version_of(run_dir) < 1:
                assert demo.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert left(name)
            for _ in range(2):
                demo.send_signal(signal.SIGINT)
                time.sleep(0.2)
            said, _ = demo.communicate(timeout=LIMIT_S)
        finally:
            demo.kill()
    assert demo.returncode == 130, said
    assert "the parameter server listens at tcp://10.77.0.1:" in said
    assert left(name) == []
