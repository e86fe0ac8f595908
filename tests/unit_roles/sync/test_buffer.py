"""The trigger buffer: clients send by themselves, and every few deltas make a version."""

import pytest
from deltas import key

from fsl_async.roles.machine import DrainAsked
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.ps import Phase


@pytest.fixture
def run(make_server):
    """Make a parameter server with versions of two deltas, and let clients join."""

    def make(*names, **rules):
        rules = {"buffer": 2, "every_s": 100.0, "local_steps": 20, **rules}
        server = make_server(trigger="buffer", **rules).begin(*names)
        server.fire()
        assert server.now == 2.0
        return server

    return make


def led(server, name, sequence=1, base=0):
    return server.store(key(name, sequence, base), number=msg.OWN_PACE)


def test_two_deltas_make_a_version(run, look):
    """No client is called, and two deltas of one client count as two."""
    server = run("a", "b", "c")
    assert look.sent(led(server, "a")) == [msg.Accepted(key("a"))]
    effects = led(server, "a", 2)
    (commit,) = look.only(effects, do.Commit)
    assert [one.key for one in commit.merged] == [key("a"), key("a", 2)]
    effects = server.committed(1)
    assert look.sent(effects) == [msg.Announce(1, "d1")] * 3
    assert server.machine.next_deadline() == 4.0, "not at once: a version writes files"


def test_one_delta_waits_for_the_time(run, look):
    """After every_s fewer deltas make a version, and without any there is none."""
    server = run("a", "b")
    assert not look.only(server.fire(), do.Commit)
    assert server.now == 102.0
    effects = led(server, "a")
    assert "1 of 2 deltas are buffered after 100.0 s" in look.notes(effects)
    assert look.only(effects, do.Commit)
    server.committed(1)
    server.fire()
    led(server, "b", base=1)
    assert server.machine.next_deadline() == 204.0
    assert look.only(server.fire(), do.Commit)


def test_an_old_delta_counts(run, look):
    """Whatever version it is based on, within max_staleness."""
    server = run("a", "b", max_staleness=2, buffer=1)
    for version in range(3):
        led(server, "a", version + 1, version)
        server.committed(version + 1)
        server.fire()
    assert look.sent(server.offer(key("b"), number=msg.OWN_PACE))[0].code == "stale"
    (commit,) = look.only(led(server, "b", 1, 1), do.Commit)
    assert commit.merged[0].staleness == 2


def test_it_opens_when_a_client_is_here(run, look, make_server):
    """Not by a timer: after a restart deltas may be pending for long."""
    server = make_server(trigger="buffer", buffer=1, every_s=100.0, local_steps=20)
    server.recover(1, "d1", digests={1: "d1"})
    assert "no round" in look.notes(server.fire())
    assert server.machine.next_deadline() is None
    server.join("a")
    server.fire()
    assert look.only(led(server, "a", base=1), do.Commit)


@pytest.mark.parametrize("pending", [0, 1])
def test_asked_to_end(run, look, pending):
    """The last round calls all clients, and contains what was pending."""
    server = run("a", "b")
    if pending:
        led(server, "a")
    effects = server.feed(DrainAsked("Ctrl-C"))
    assert look.sent(effects) == [msg.Call(0, True)] * 2
    assert not look.only(led(server, "b"), do.Commit), "what was on its way is no answer"
    server.store(key("a", 2))
    (commit,) = look.only(server.store(key("b", 2)), do.Commit)
    assert len(commit.merged) == 3 + pending
    server.committed(1)
    server.hold("a", 1)
    assert look.sent(server.hold("b", 1)) == [msg.Stop("Ctrl-C")] * 2


def test_the_last_round_by_count(run, look):
    """It is the one that reaches the limit, and waits for all up to its cap."""
    server = run("a", "b", rounds=2)
    led(server, "a")
    led(server, "b")
    server.committed(1)
    assert look.sent(server.fire()) == [msg.Call(1, True)] * 2
    assert not look.only(server.store(key("a", 2, 1)), do.Commit)
    effects = server.fire()
    assert server.now == 4.0 + 95.0
    assert look.only(effects, do.Commit), "one client hangs"
    server.committed(2)
    server.hold("a", 2)
    assert look.sent(server.hold("b", 2))[-1] == msg.Stop("the run's limit of 2 rounds is reached")


def test_the_last_round_without_deltas(run, look):
    """It ends without a version."""
    server = run("a")
    server.feed(DrainAsked("Ctrl-C"))
    effects = server.receive(msg.Skip(0, "nothing"), "a")
    assert look.sent(effects) == [msg.Stop("Ctrl-C")]


def test_a_client_far_behind_gets_a_full_version(run):
    """It moves onto one version in a step, and versions may follow each other faster."""
    server = run("a", "b", buffer=1, max_staleness=20)
    for version in range(7):
        led(server, "a", version + 1, version)
        server.committed(version + 1)
        server.fire()
    assert server.receive(msg.Fetch(1, "d1"), "b") == [do.SendVersion("b", "update", 2)]
    assert server.receive(msg.Fetch(0, "d0"), "b") == [do.SendVersion("b", "full", 7)]


def test_the_end_waits_for_a_client_that_catches_up(run, look):
    """Small versions arrive between two looks at transfers."""
    server = run("a", "b", heartbeat_every_s=2.5, max_staleness=20)
    for version in range(3):
        led(server, "a", 2 * version + 1, version)
        led(server, "a", 2 * version + 2, version)
        server.committed(version + 1)
        server.fire()
    server.feed(DrainAsked("Ctrl-C"))
    server.store(key("a", 9, 3))
    server.hold("b", 1)
    server.fire()
    assert server.machine.phase is Phase.COLLECTING, "b moves from version to version"
    server.fire()
    assert server.machine.phase is Phase.MERGING, "b moves no more"
