"""A client of two ranks as real processes: torchrun, a parameter server, SIGKILL."""

import os
import signal
from pathlib import Path

import pytest

from fsl_async.observe.ledger_audit import audit_run
from fsl_async.tools.demo.fsdp import ranks_of

pytestmark = [pytest.mark.slow, pytest.mark.cold]


def gang(site, *more):
    """Start a client of two ranks."""
    task = f"{site.folder / 'task.py'}:train"
    options = ("--name", "gang", "--task", task, "--ranks", "2", *more)
    return site.start("--role", "client", *options, site.address)


def named_memory():
    """Shared memory that Python or torch has given a name; other programs have some as well."""
    return {path for path in Path("/dev/shm").iterdir() if path.name.startswith(("psm", "torch"))}


def test_a_killed_rank_comes_back_and_the_run_ends_in_good_order(site):
    """The client stays in the run, nothing is lost or doubled, and nothing stays behind."""
    before = named_memory()
    server = site.server(sync__clients=1)
    client = gang(site)
    client.wait_for("all 2 ranks are here")
    site.wait_version(1)
    ranks = ranks_of(client.popen.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    client.wait_for("is gone")
    site.wait_until(lambda: client.text.count("all 2 ranks are here") == 2, "they are back")
    merged = len(site.ledger("accepted"))
    site.wait_until(lambda: len(site.ledger("accepted")) > merged, "a delta of the new ranks")
    server.signal(signal.SIGINT)
    assert server.end() == 130
    assert "ends the run for all clients; SIGTERM would let it go on later" in server.text
    assert client.end() == 0
    assert client.text.count("weights finite True") == 2
    assert audit_run(site.run_dir).complaints() == []
    tokens = {one["tokens"] % 16 for one in site.ledger("accepted")}
    assert tokens == {0}  # two ranks of 8 tokens a step: no delta of one rank alone
    assert ranks_of(client.popen.pid) == []
    assert named_memory() <= before
