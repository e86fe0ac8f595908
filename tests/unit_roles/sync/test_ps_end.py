"""The parameter server's limits, its end in every phase, and its recovery after a crash."""

import pytest
from deltas import key, stored_of

from fsl_async.roles.machine import Done, DrainAsked, Finish
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.ps import Phase


def drain(server):
    return server.feed(DrainAsked("asked"))


def finish(effects, look):
    (one,) = look.only(effects, Finish)
    return one


def test_drain_before_version_0(server, look):
    """There is nothing to save; a late answer of the disk must not restart the run."""
    server.join("a")
    effects = drain(server)
    assert look.sent(effects, "a") == [msg.Stop("asked")]
    assert finish(effects, look).exit_code == 0
    assert server.committed(0) == []
    assert (server.machine.phase, server.machine.next_deadline()) == (Phase.DONE, None)
    (refusal,) = server.hello("b")
    assert refusal.code == "finished"


def test_drain_in_an_overdue_round_still_waits_drain_s(server, look):
    """An answer may arrive within seconds."""
    server.begin("a", "b")
    server.fire()
    server.fire()
    assert look.only(drain(server), Finish) == []
    assert server.machine.next_deadline() == server.now + 10.0


def test_drain_while_merging(server, look):
    """Progress since the snapshots of the current merge is called for after its version."""
    server.begin("a")
    server.fire()
    server.store(key("a"))
    effects = drain(server)
    assert look.only(effects, do.Commit) == []
    assert look.sent(server.committed(1)) == [msg.Announce(1, "d1")]
    assert look.sent(server.fire()) == [msg.Call(1, last=True)]
    server.fire()
    server.fire()
    assert server.machine.ended, "the wait for a client that never holds the last version ends"


@pytest.mark.parametrize("failed_before", [True, False])
def test_drain_with_a_full_disk_ends(server, look, failed_before):
    """The commit must not be tried forever, or the drain would never end."""
    server.begin("a")
    server.fire()
    server.store(key("a"))
    if failed_before:
        server.feed(Done(do.Commit(1, (), 1.0), "no space left"))
        assert len(look.only(drain(server), do.Commit)) == 1, "one more try, at once"
    else:
        drain(server)
    effects = server.feed(Done(do.Commit(1, (), 1.0), "no space left"))
    assert finish(effects, look).exit_code == 1
    assert "no space left" in finish(effects, look).reason
    assert server.machine.next_deadline() is None


def test_limit_by_rounds(make_server, look):
    """The last round is called as the last, so no other one follows."""
    server = make_server(rounds=2)
    server.begin("a")
    assert look.sent(server.fire()) == [msg.Call(0)]
    server.store(key("a"))
    server.committed(1)
    server.hold("a", 1)
    assert look.sent(server.fire()) == [msg.Call(1, last=True)]
    server.store(key("a", 2, 1))
    effects = server.committed(2)
    assert look.sent(effects) == [msg.Announce(2, "d2")]
    effects = server.hold("a", 2)
    assert "limit of" in finish(effects, look).reason
    assert look.sent(effects) == [msg.Stop(finish(effects, look).reason)]


def test_a_last_round_without_deltas_is_not_the_last(make_server, look):
    """The round is called again: the run must not end a version short of its limit."""
    server = make_server(rounds=1, every_s=100.0)
    server.begin("a")
    server.fire()
    assert look.only(server.receive(msg.Skip(0, "nothing"), "a"), Finish) == []
    assert look.sent(server.fire()) == [msg.Call(0, last=True)]
    assert look.only(server.offer(key("a")), do.ReceiveDelta)


def test_after_the_last_round_no_delta_is_accepted(make_server, look):
    """A useless delta is refused; during the last merge the answer is "later"."""
    server = make_server(rounds=1)
    server.begin("a", "b")
    server.fire()
    server.store(key("a"))
    server.store(key("b"))
    (answer,) = look.sent(server.offer(key("a", 2)))
    assert answer.code == "later"
    server.committed(1)
    (answer,) = look.sent(server.offer(key("a", 2)))
    assert answer.code == "ended"
    assert look.sent(server.offer(key("a"))) == [msg.Accepted(key("a"))], (
        "a known key gets its answer"
    )


@pytest.mark.parametrize("collecting", [True, False])
def test_the_end_has_a_cap(make_server, look, collecting, monkeypatch):
    """An endless transfer must not delay the end forever."""
    monkeypatch.setattr("fsl_async.roles.sync.shutdown.DRAIN_CAP_S", 200.0)
    server = make_server()
    server.begin("a")
    server.moving = ("a",)
    drain(server)
    if not collecting:
        server.store(key("a"))
        server.committed(1)
    while not server.machine.ended:
        server.fire()
    assert server.now <= 200.0 + 10.0


def test_the_last_round_waits_as_long_as_answers_take(make_server):
    """A training step may take longer than drain_s: earlier rounds give the usual time."""
    server = make_server(every_s=100.0)
    server.begin("a")
    for version in range(3):
        server.fire()
        server.store(key("a", version + 1, version), after_s=30.0)
        server.committed(version + 1)
        server.hold("a", version + 1)
    drain(server)
    assert server.machine.next_deadline() == pytest.approx(server.now + 30.0)


def test_limit_by_time(make_server, look):
    """It ends like a drain, with a last round."""
    server = make_server(seconds=30.0)
    server.begin("a")
    effects = server.fire()
    assert server.now == 30.0
    assert look.sent(effects) == [msg.Call(0, last=True)]
    assert "limit of 30 s" in look.notes(effects)


def test_limit_by_time_goes_on_after_a_restart(make_server, look):
    """A restart does not reset the time of the run."""
    server = make_server(seconds=3000.0)
    server.recover(2, "d2", digests={2: "d2"}, served_s=2950.0)
    server.join("a")
    assert look.sent(server.fire()) == [msg.Call(2, last=True)]
    assert server.now == 50.0


def test_limit_by_time_during_the_drain_of_another(make_server):
    """A second reason to end changes nothing."""
    server = make_server(rounds=1, seconds=5.0, every_s=1.0)
    server.begin("a")
    server.fire()
    server.store(key("a"))
    server.committed(1)
    server.fire()
    assert server.now == 5.0
    server.fire()
    assert server.machine.ended


def test_a_member_that_leaves_ends_the_wait(server, look):
    """The last client without the last version has left."""
    server.begin("a", "b")
    server.fire()
    server.store(key("a"))
    server.store(key("b"))
    drain(server)
    server.committed(1)
    server.hold("a", 1)
    assert look.sent(server.left("b"), "a") == [msg.Call(1, last=True)]
    assert look.only(server.receive(msg.Skip(1, "nothing"), "a"), Finish)


def test_recovery_with_pending_deltas(make_server, look):
    """Deltas acknowledged before the crash are merged; offers get their answer."""
    server = make_server()
    effects = server.recover(
        2,
        "d2",
        digests={1: "d1", 2: "d2"},
        pending=(stored_of(key("a", 3, 1)),),
        settled={key("b", 5, 1): "merged", key("c", 2, 1): "quarantined"},
        tokens_total=100,
    )
    assert "version 2 with 1 delta " in look.notes(effects)
    server.join("a")
    server.join("b")
    server.join("c")
    assert look.sent(server.offer(key("a", 3, 1))) == [msg.Accepted(key("a", 3, 1))]
    assert look.sent(server.offer(key("b", 5, 1))) == [msg.Accepted(key("b", 5, 1))]
    assert look.sent(server.offer(key("c", 2, 1)))[0].code == "quarantined"
    server.fire()
    for name in "abc":
        effects = server.receive(msg.Skip(2, "nothing"), name)
    (commit,) = look.only(effects, do.Commit)
    assert [one.key for one in commit.merged] == [key("a", 3, 1)]
    server.committed(3)
    assert server.machine.tokens_total == 110


def test_killed_between_its_last_version_and_its_end(make_server, look):
    """The restarted parameter server calls no round beyond the limit."""
    server = make_server(rounds=2)
    server.recover(2, "d2", digests={2: "d2"})
    server.join("a")
    assert look.only(server.hold("a", 2), Finish) == [], "others may reconnect"
    server.hello("b")
    server.attach("b")
    server.fire()
    assert server.machine.phase is Phase.READY
    assert look.only(server.hold("b", 2), Finish)
