"""The parameter server's limits, its end in every phase, and its return after a crash."""

import pytest

from fsl_async import effects as do
from fsl_async import events as ev
from fsl_async import messages as msg
from fsl_async.events import DeltaKey, PendingDelta
from fsl_async.roles.ps import Phase


def key(client, sequence=1, base=0, incarnation=1):
    return DeltaKey(client, incarnation, base, sequence)


def drain(server):
    return server.feed(ev.DrainAsked("asked"))


def finish(effects, look):
    (one,) = look.only(effects, do.Finish)
    return one


def test_drain_before_anything_is_there(server, look):
    """There is nothing to save; a disk that answers late must not wake the run up again."""
    server.join("a")
    effects = drain(server)
    assert look.said(effects, "a") == [msg.Stop("asked")]
    assert finish(effects, look).exit_code == 0
    assert server.committed(0) == []
    assert (server.machine.phase, server.machine.next_deadline()) == (Phase.DONE, None)
    (refusal,) = server.hello("b")
    assert refusal.code == "finished"


def test_drain_when_ready_calls_one_last_round(server, look):
    """What was trained since the last round still counts."""
    server.begin("a", "b")
    effects = drain(server)
    assert look.said(effects) == [msg.Call(0)] * 2
    assert drain(server) == []
    server.store(key("a"))
    (commit,) = look.only(server.fire(), do.Commit)
    assert server.now == 10.0, "the last round lasts drain_s, whatever the clock says"
    assert len(commit.merged) == 1
    effects = server.committed(1)
    assert look.only(effects, do.Finish) == []
    assert look.only(server.hold("a", 1), do.Finish) == []
    assert finish(server.hold("b", 1), look).reason == "asked"


def test_drain_with_nobody_here(server, look):
    """The run ends at once; what is pending is in the spool."""
    server.begin("a")
    server.left("a")
    assert look.only(drain(server), do.Finish)


def test_drain_in_a_round_shortens_it(server, look):
    """Clients get drain_s for what they have, also in a round that is overdue."""
    server.begin("a", "b")
    server.fire()
    drain(server)
    assert server.machine.next_deadline() == 610.0
    effects = server.fire()
    assert "closes without a new version" in look.notes(effects)
    assert look.only(effects, do.Finish), "nothing came, so all hold the last version already"


def test_drain_in_an_overdue_round_still_waits_a_moment(server, look):
    """An answer may be seconds away."""
    server.begin("a", "b")
    server.fire()
    server.fire()
    assert look.only(drain(server), do.Finish) == []
    assert server.machine.next_deadline() == server.now + 10.0


def test_drain_while_merging(server, look):
    """The commit under way is the last."""
    server.begin("a")
    server.fire()
    server.store(key("a"))
    effects = drain(server)
    assert look.only(effects, do.Commit) == []
    assert look.said(server.committed(1)) == [msg.Announce(1, "d1")]
    server.fire()
    assert server.machine.ended, (
        "a client that never holds the last version is not waited for for ever"
    )


@pytest.mark.parametrize("failed_before", [True, False])
def test_drain_with_a_full_disk_ends(server, look, failed_before):
    """Before, the commit was tried again for ever and the drain never ended."""
    server.begin("a")
    server.fire()
    server.store(key("a"))
    if failed_before:
        server.feed(ev.CommitFailed(1, "no space left"))
        assert len(look.only(drain(server), do.Commit)) == 1, "one more try, at once"
    else:
        drain(server)
    effects = server.feed(ev.CommitFailed(1, "no space left"))
    assert finish(effects, look).exit_code == 1
    assert "no space left" in finish(effects, look).reason
    assert server.machine.next_deadline() is None


@pytest.mark.parametrize("limit", ["limit_rounds", "limit_tokens"])
def test_limits_by_rounds_and_tokens(make_server, look, limit):
    """The version that reaches the limit is handed out, then the run ends without another round."""
    server = make_server(**{limit: 1 if limit == "limit_rounds" else 8})
    server.begin("a")
    server.fire()
    server.store(key("a"))
    effects = server.committed(1)
    assert look.said(effects) == [msg.Announce(1, "d1")]
    effects = server.hold("a", 1)
    assert "limit of" in finish(effects, look).reason
    assert look.said(effects) == [msg.Stop(finish(effects, look).reason)]


def test_limit_by_time(make_server, look):
    """It ends like a drain: with a last round."""
    server = make_server(limit_s=30.0)
    server.begin("a")
    effects = server.fire()
    assert server.now == 30.0
    assert look.said(effects) == [msg.Call(0)]
    assert "limit of 30 s" in look.notes(effects)


def test_limit_by_time_during_the_drain_of_another(make_server):
    """Two reasons to end are one end."""
    server = make_server(limit_s=5.0, limit_rounds=1, every_s=1.0)
    server.begin("a")
    server.fire()
    server.store(key("a"))
    server.committed(1)
    server.fire()
    assert server.now == 5.0
    server.fire()
    assert server.machine.ended


def test_a_member_that_leaves_ends_the_wait(server, look):
    """The last one who had not the last version is gone."""
    server.begin("a", "b")
    server.fire()
    server.store(key("a"))
    server.store(key("b"))
    drain(server)
    server.committed(1)
    server.hold("a", 1)
    assert look.only(server.left("b"), do.Finish)


def test_a_hello_that_ends_the_last_round(server, look):
    """The one the round waited for dials anew: the round closes, all others hold the version, the run is over."""
    server.begin("a")
    drain(server)
    effects = server.hello("a", 2)
    assert look.only(effects, do.Refuse)[0].code == "finished"
    assert look.only(effects, do.Finish)


def test_recovery_with_pending_deltas(make_server, look):
    """Acknowledged before the crash: accumulated again, merged with the next version, answered when offered."""
    server = make_server()
    effects = server.recover(
        2,
        "d2",
        digests={1: "d1", 2: "d2"},
        pending=(PendingDelta(key("a", 3, 1), 8, 2, 1),),
        settled={key("b", 5, 1): "merged", key("c", 2, 1): "quarantined"},
        tokens_total=100,
    )
    assert "version 2 with 1 deltas" in look.notes(effects)
    assert len(look.only(effects, do.Accumulate)) == 1
    server.join("a")
    server.join("b")
    server.join("c")
    assert look.said(server.offer(key("a", 3, 1))) == [msg.Accepted("a/1/1/3")]
    assert look.said(server.offer(key("b", 5, 1))) == [msg.Accepted("b/1/1/5")]
    assert look.said(server.offer(key("c", 2, 1)))[0].code == "quarantined"
    server.fire()
    for name in "abc":
        effects = server.feed(ev.CallSkipped(name, 2, "nothing"))
    (commit,) = look.only(effects, do.Commit)
    assert [one.key for one in commit.merged] == [key("a", 3, 1)]
    server.committed(3)
    assert server.machine.tokens_total == 108


def test_killed_between_its_last_version_and_its_end(make_server, look):
    """Before, the restarted server called one more round and went beyond its limit."""
    server = make_server(limit_rounds=2)
    server.recover(2, "d2", digests={2: "d2"})
    server.join("a")
    assert look.only(server.hold("a", 2), do.Finish) == [], "others may be on their way"
    server.hello("b")
    server.attach("b")
    server.fire()
    assert server.machine.phase is Phase.READY
    assert look.only(server.hold("b", 2), do.Finish)


def test_nothing_wakes_a_run_that_is_over(server):
    """Late events of every kind, and no deadline ever again."""
    server.begin("a")
    server.fire()
    server.left("a")
    drain(server)
    assert server.machine.ended
    late = [
        ev.TimerFired(),
        ev.ClientLeft("a", 1, "late"),
        ev.ModelAttached("a", "f", 1, None),
        ev.VersionCommitted(1, "d1", 1, 0.1),
        ev.CommitFailed(1, "late"),
        ev.StreamLost("a", "delta:a/1/0/1", "late"),
        ev.DrainAsked("again"),
    ]
    for event in late:
        assert server.feed(event, after_s=1000.0) == []
    assert server.machine.next_deadline() is None
