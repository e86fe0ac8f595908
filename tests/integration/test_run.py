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


def test_a_killed_client_comes_back_and_takes_part(site):
    """The new process gets the shard of its name; the round does not wait for the dead one."""
    server = site.server()
    site.client("a")
    victim = site.client("b")
    site.wait_version(2)
    victim.kill()
    server.wait_for("b left")
    at_death = max(one["version"] for one in site.ledger("version"))
    first = {key.split("/")[1] for key in merged_keys(site) if key.startswith("b/")}
    back = site.client("b")
    deadline = time.monotonic() + 60 * UNIT_S
    incarnations = first
    while incarnations == first and time.monotonic() < deadline:
        time.sleep(0.1)
        incarnations = {key.split("/")[1] for key in merged_keys(site) if key.startswith("b/")}
    assert len(incarnations) == 2, "the new process takes part"
    assert max(one["version"] for one in site.ledger("version")) > at_death
    # a provisional lease, then the final one
    leases = {(one["name"], one["index"]) for one in site.ledger("lease")}
    assert len(leases) == 2, "the same shard as before its death"
    server.signal(signal.SIGINT)
    assert server.end() == 130
    assert back.end() == 0
