"""Relays between clients and parameter server, as processes: a run goes on when they are killed."""

import contextlib
import signal
import time
from pathlib import Path

import pytest

from fsl_async.observe.ledger_audit import audit_run

pytestmark = pytest.mark.slow


def relay(site, server, listen="127.0.0.1:0", *more):
    """Start a relay in front of `server`; returns the process and where clients reach it."""
    process = site.start("--role", "relay", "--listen", listen, *more, server)
    line = process.wait_for("--role client")
    return process, "fsl://" + line.split("fsl://")[1].rstrip("'")


def client_at(site, address, name, function="train"):
    """Start a client that has only the relay's address."""
    task = f"{site.folder / 'task.py'}:{function}"
    return site.start("--role", "client", "--name", name, "--task", task, address)


def merged(site):
    """Return every key of every version."""
    return [one["key"] for version in site.ledger("version") for one in version["merged"]]


HEARTBEATS_BYTES = 64 << 10
"""More than the small messages that can wait at a relay: more bytes than this include a chunk."""


def unread_bytes(pid):
    """Return the bytes that the kernel holds unread for a process, over all its TCP connections."""
    mine = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(str(one.readlink()).removeprefix("socket:[").rstrip("]"))
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    rows = (line.split() for line in lines)
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[9] in mine)


def stop_in_a_transfer(site, victim):
    """Stop a relay (SIGSTOP) while a chunk waits in it, so that a kill hits a transfer."""

    def holds_a_chunk():
        victim.signal(signal.SIGSTOP)
        time.sleep(0.03)  # senders go on, and the kernel buffers
        if unread_bytes(victim.popen.pid) > HEARTBEATS_BYTES:
            return True
        victim.signal(signal.SIGCONT)
        return False

    site.wait_until(holds_a_chunk, "a chunk is on its way through the relay")


def test_two_relays_in_a_row_that_are_killed_and_restarted(site):
    """Clients train on and reconnect; no delta of some 20 chunks is lost or merged twice."""
    server = site.server(every_s=1.0)
    near, far_place = relay(site, site.address)
    far, entry = relay(site, far_place)
    clients = [client_at(site, entry, name, "bulk") for name in "ab"]
    site.wait_version(1)
    for victim in (near, far):
        stop_in_a_transfer(site, victim)
        assert unread_bytes(victim.popen.pid) > HEARTBEATS_BYTES
        victim.kill()
        before = max(one["version"] for one in site.ledger("version"))
        time.sleep(0.5)
        if victim is near:
            relay(site, site.address, far_place)
        else:
            last, _ = relay(site, far_place, entry)
        site.wait_version(before + 2)
    incarnations = {tuple(key.split("/")[:2]) for key in merged(site)}
    assert len(incarnations) == 2, "both clients took part, each as one process"
    server.signal(signal.SIGINT)
    assert server.end() == 130
    assert [client.end() for client in clients] == [0, 0]
    keys = merged(site)
    assert len(keys) == len(set(keys))
    assert {one["key"] for one in site.ledger("accepted")} == set(keys)
    audit = audit_run(site.run_dir)
    assert not audit.lost
    assert not audit.doubled
    last.signal(signal.SIGTERM)
    assert last.end() == 64
    last.wait_for("reason")
