"""A group of a roster: cuts and global weights come between two versions, and merges wait."""

import pytest
from configs import ROSTER
from deltas import key
from machines import of

from fsl_async.roles.groups import effects as groups
from fsl_async.roles.groups.events import AdoptFailed, Decision, GroupEnds
from fsl_async.roles.machine import ClientLeft, EndSession, Finish, Note, TimerFired
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.ps import Phase

G1 = Decision(1, 4, "g1", "run")
BROUGHT = groups.Adopt(G1, counted=True)

ENDS = {"name": "a", "roster": ROSTER, "hold_s": 7.0}


@pytest.fixture
def group(make_server):
    """A group with two clients and an open round that both answer at once."""
    server = make_server(every_s=10.0).begin("a", "b")
    server.fire()
    assert server.machine.phase is Phase.COLLECTING
    return server


def test_merges_wait_from_the_cut_on_and_uploads_do_not(group, look):
    """Deltas are acknowledged meanwhile; the round is merged once merges are resumed."""
    assert group.feed(groups.TakeCut(0)) == [groups.TakeCut(0)]
    for client in ("a", "b"):
        effects = group.store(key(client), number=0)
        assert look.sent(effects, client) == [msg.Accepted(key(client))]
        assert not of(effects, do.Commit)
    assert of(group.feed(groups.ResumeMerges()), do.Commit)


def test_a_cut_waits_for_a_version_that_is_being_made(group):
    """And so does a version of global weights."""
    group.store(key("a"), number=0)
    group.store(key("b"), number=0)
    assert group.machine.phase is Phase.MERGING
    assert group.feed(groups.TakeCut(0)) == []
    assert groups.TakeCut(0) in group.committed(1)
    assert group.feed(BROUGHT) == [BROUGHT]


def test_deltas_that_arrived_meanwhile_go_into_the_version_after(group, look):
    """The open round ends with the version of global weights; nothing is merged twice."""
    group.feed(groups.TakeCut(0))
    group.store(key("a"), number=0)
    assert group.feed(BROUGHT) == [BROUGHT]
    assert not of(group.store(key("b"), number=0), do.Commit)
    effects = group.committed(1)
    assert look.sent(effects, "a") == [msg.Announce(1, "d1")]
    assert group.feed(groups.ResumeMerges()) == []
    for client in ("a", "b"):
        group.hold(client, 1)
    group.fire()
    group.store(key("a", 2, 1), number=1)
    (commit,) = of(group.store(key("b", 2, 1), number=1), do.Commit)
    merged = [one.key for one in commit.merged]
    assert merged == [key("a"), key("b"), key("a", 2, 1), key("b", 2, 1)]
    assert commit.version == 2


def test_a_version_that_cannot_be_written_changes_nothing(group):
    """The round goes on; the member brings the weights again."""
    group.feed(BROUGHT)
    assert group.machine.phase is Phase.MERGING
    group.feed(AdoptFailed(1, "no space"))
    assert group.machine.phase is Phase.COLLECTING
    group.store(key("a"), number=0)
    assert of(group.store(key("b"), number=0), do.Commit)
    assert group.feed(BROUGHT) == []
    assert of(group.committed(1), groups.Adopt)


@pytest.fixture
def ending(make_server):
    """A group whose clients hold the version of its last round."""
    server = make_server(**ENDS, rounds=1).begin("a")
    server.fire()
    server.store(key("a"), number=0)
    server.committed(1)
    assert of(server.hold("a", 1), GroupEnds)
    return server


def test_a_group_ends_without_a_last_global_round_that_does_not_come(ending, look):
    """After the time of a step of the end; and it says so."""
    ending.now += 7.0
    effects = ending.feed(TimerFired())
    assert any("without a last global round" in one.text for one in of(effects, Note))
    assert of(effects, Finish)


def test_a_group_without_clients_ends_after_a_last_global_round(ending):
    """What they sent before they left counts all the same."""
    ending.feed(ClientLeft("a", 1, "lost"))
    assert not ending.machine.ended
    assert of(ending.feed(groups.EndGroup()), Finish)


def test_a_group_that_joins_publishes_nothing(make_server, look):
    """Its clients wait for the run's weights, and show their models again then."""
    server = make_server(name="b", roster=ROSTER)
    effects = server.join("a")
    assert not look.sent(effects, "a")
    adopt = groups.Adopt(G1, counted=False)
    assert server.feed(adopt) == [adopt]
    assert [one.peer for one in of(server.committed(0), EndSession)] == ["a"]
    assert server.machine.phase is Phase.READY


def test_a_new_process_of_a_group_that_joined_goes_on(make_server):
    """After version 0 such a group is like any other."""
    server = make_server(name="b", roster=ROSTER)
    server.recover(0, "d0", digests={0: "d0"})
    assert server.join("a")
    assert isinstance(server.receive(msg.Fetch(-1, ""), "a")[0], do.SendVersion)


def test_global_weights_are_fetched_as_one_update_from_those_before(make_server):
    """By clients that kept those, whatever version they hold; others get the newest in full."""
    server = make_server(**ENDS, keep_versions=9).begin("a")

    def asked(version, kept="", digest=None):
        found = server.receive(msg.Fetch(version, digest or f"d{version}", kept), "a")
        return [(one.kind, one.version) for one in found]

    assert asked(-1, digest="none") == [("global_full", 0)], "they are the first global weights"
    for version in (1, 2):
        server.feed(ev.VersionCommitted(version, f"d{version}", 1, 0.1))
    assert asked(-1, digest="none") == [("full", 2)]
    server.feed(ev.VersionCommitted(3, "d3", 1, 0.1, made_of="global", global_base="d0"))
    assert asked(2, "d0") == asked(0, "d0") == [("global", 3)]
    assert asked(-1, "d0", digest="none") == [("global", 3)]
    assert asked(2, "d1") == asked(2) == [("global_full", 3)]
    server.feed(ev.VersionCommitted(4, "d4", 1, 0.1))
    assert asked(2, "d0") == [("global", 3)], "and from there update by update"
    assert asked(3, "d3") == [("update", 4)]
    assert asked(1) == [("full", 4)], "no update leads over it"
    server.feed(ev.VersionCommitted(5, "d5", 1, 0.1, made_of="late"))
    assert asked(4, "d3") == asked(4) == [("full", 5)]


def test_versions_of_global_weights_are_no_rounds(make_server, look):
    """They end no run early, and make no delta stale; also after a restart."""
    server = make_server(**ENDS, max_staleness=1, rounds=2, every_s=10.0).begin("a")
    server.feed(ev.VersionCommitted(1, "d1", 1, 0.1))
    for version in (2, 3, 4):
        server.feed(ev.VersionCommitted(version, f"d{version}", 1, 0.1, made_of="global"))
    assert not server.machine.end.asked
    assert server.machine.deltas.staleness(key("a", base=1)) == 0
    assert server.machine.deltas.staleness(key("a", base=0)) == 1
    assert server.machine.progress.position(0.0).progress == pytest.approx(0.5, abs=0.1)
    server.fire()
    assert server.machine.round.last
    again = make_server(**ENDS, max_staleness=1, rounds=2)
    again.feed(
        ev.Recovered(
            4, "d4", {0: "d0", 4: "d4"}, global_version=4, global_base="d0",
            global_versions=3, newest_global=(2, 3, 4),
        )
    )  # fmt: skip
    assert not again.machine.end.asked
    assert again.machine.deltas.staleness(key("a", base=0)) == 1
    again.feed(ev.VersionCommitted(5, "d5", 1, 0.1))
    assert again.machine.end.asked
