"""Runs whose clients send by themselves, with real processes: speeds differ, and one is killed."""

import signal

import pytest

from fsl_async.observe.ledger_audit import audit_run

pytestmark = pytest.mark.slow


def ended(site, server, clients):
    """End the run; returns its versions, after a check of its books."""
    server.signal(signal.SIGINT)
    assert server.end() == 130
    assert [client.end() for client in clients] == [0] * len(clients)
    versions = site.ledger("version")
    keys = [one["key"] for version in versions for one in version["merged"]]
    assert len(keys) == len(set(keys))
    assert {one["key"] for one in site.ledger("accepted")} == set(keys)
    audit = audit_run(site.run_dir)
    assert not audit.lost
    assert not audit.doubled
    return versions


def merged_steps(versions, client):
    """Steps of each delta of a client that a version has, but for the last version."""
    return [
        one["steps"]
        for version in versions[1:-1]
        for one in version["merged"]
        if one["key"].startswith(client)
    ]


def test_unequal_speeds_and_a_client_that_is_killed(site):
    """No version waits for the slow client or for the dead one."""
    server = site.server(
        every_s=20, sync__trigger="buffer", sync__local_steps=20, sync__dylu="true",
        sync__least_s=0.1,
    )  # fmt: skip
    clients = [site.client("a"), site.client("b"), site.client("c", "slow")]
    site.wait_version(4)
    clients[1].kill()
    site.wait_version(max(one["version"] for one in site.ledger("version")) + 2)
    clients[1] = site.client("b")
    at = max(one["version"] for one in site.ledger("version"))
    site.wait_until(
        lambda: any(
            one["key"].startswith("b/")
            for version in site.ledger("version")
            if version["version"] > at
            for one in version["merged"]
        ),
        "a delta of the client that came back",
    )
    # Its first two may be of all steps: the parameter server does not know its speed yet.
    site.wait_until(lambda: len(merged_steps(site.ledger("version"), "c")) > 2, "slow one")
    versions = ended(site, server, clients)
    assert "0 of 0 called" not in server.text
    slow, fast = (merged_steps(versions, name) for name in "ca")
    assert min(slow) < min(20, max(fast)), "the slow client is given fewer steps"


def test_clients_that_choose_their_steps(site):
    """Each task sends when it likes, and mean steps count equally."""
    server = site.server(
        every_s=20, sync__trigger="buffer", sync__pace="own", sync__weighting="anarchic",
        sync__least_s=0.1, train__task="own",
    )  # fmt: skip
    clients = [site.client(name, "sending") for name in "ab"]
    site.wait_version(4)
    versions = ended(site, server, clients)
    merged = [one for version in versions[1:] for one in version["merged"]]
    assert len({one["steps"] for one in merged}) > 1
    fresh = [one for one in merged if not one["staleness"]]
    assert fresh
    assert all(one["weight"] == pytest.approx(1 / one["steps"]) for one in fresh)
