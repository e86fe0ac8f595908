"""Groups of parameter servers in a world of mixed outcomes, crashes and lost sessions."""

# ruff: noqa: D102 - methods are named after what they do

import pytest
from ring_world import World, digest_of

from fsl_async.roles.machine import Send, TimerFired
from fsl_async.roles.messages import MessageError
from fsl_async.roles.ring import effects as do
from fsl_async.roles.ring import events as ev
from fsl_async.roles.ring import messages as msg
from fsl_async.roles.ring.coordinator import CoordinatorPhase
from fsl_async.roles.ring.machine import RingMachine
from fsl_async.roles.ring.rules import RingRules


def check_end(world):
    """All tokens are in the global weights, or in the group that merged them since."""
    world.end_cleanly()
    newest = max(world.digests)
    for server in world.servers.values():
        disk = server.disk
        assert disk.round >= newest - 1, world.notes[-20:]
        assert digest_of(disk.globals) == world.digests[disk.round]
        assert disk.theta == disk.globals + disk.tokens - disk.reference
    for decision in world.decisions:
        assert len(decision.contributors) >= 2
    counted = sum(
        stop - begin for one in world.decisions for begin, stop in one.contributors.values()
    )
    assert digest_of(counted) == world.digests[newest]


def storm(seed):
    world = World(seed, members=2 + seed % 4)
    world.start()
    world.run(400.0)
    rounds = len(world.decisions)
    check_end(world)
    assert len(world.decisions) >= rounds + 3, world.notes[-20:]
    return world


def test_tokens_are_in_one_decided_round_whatever_fails():
    """The property of the whole design, with every kind of fault in some seed."""
    worlds = [storm(seed) for seed in range(7)]
    assert sum(world.mixed for world in worlds) > 5
    assert sum(len(world.decisions) for world in worlds) > 50
    notes = "\n".join(note for world in worlds for note in world.notes)
    for part in ("merges again", "is dropped", "did not arrive", "could not be adopted"):
        assert part in notes


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_more_storms(seed):
    """The same, many times."""
    storm(seed)


def test_without_faults_all_groups_hold_the_same_weights_after_each_round():
    """Merges are held from the cut to the decision, so no group adopts late."""
    world = World(1, members=3, faults=False)
    for server in world.servers.values():
        adopt = server.adopt

        def checked(effect, server=server, adopt=adopt):
            adopt(effect)
            disk = server.disk
            if disk.version > 0 and disk.round == effect.round and effect.counted:
                assert disk.theta == disk.globals

        server.adopt = checked
    world.start()
    world.run(200.0)
    check_end(world)
    assert not [note for note in world.notes if "dropped" in note or "merges again" in note]


class Alone:
    """One machine, its effects by hand."""

    def __init__(self, name="a", roster=("a", "b", "c"), **more):
        self.machine = RingMachine(RingRules(name, roster, **more))
        self.now = 0.0

    def feed(self, event):
        return self.machine.handle(event, self.now)

    def get(self, peer, message):
        return self.feed(ev.RingMessage(peer, message))


G0 = digest_of(0)


def coordinator_polling():
    """A coordinator with two members that polls; returns it after its own promise."""
    one = Alone(every=1)
    one.feed(ev.RingRecovered())
    one.feed(ev.Adopted(0, 0, G0, 0))
    for name in ("b", "c"):
        one.get(name, msg.AskGlobal(0, G0))
    effects = one.feed(ev.GroupVersion(1))
    assert do.TakeCut(0) in effects
    assert [effect.peer for effect in effects if isinstance(effect, Send)] == ["b", "c"]
    one.feed(ev.CutTaken(ev.Cut(0, 1, digest_of("a"), 0, 10)))
    return one


def test_a_silent_member_is_left_out_after_the_grace_time():
    """A stopped process has a session for a while, and must not stop the others."""
    one = coordinator_polling()
    assert one.get("b", msg.Promise(0, 3, digest_of("b"), 0, 30, 0)) == []
    one.now = one.machine.next_deadline()
    effects = one.machine.coordinator.timer("grace", one.now)
    assert effects == [do.KeepAttempt(0, 1)]
    effects = one.feed(ev.AttemptKept(1))
    (start,) = [effect for effect in effects if isinstance(effect, do.StartRing)]
    assert [share.name for share in start.view.members] == ["a", "b"]
    assert [share.weight for share in start.view.members] == [0.25, 0.75]


def reducing():
    one = coordinator_polling()
    one.get("b", msg.Promise(0, 3, digest_of("b"), 0, 30, 0))
    one.get("c", msg.Promise(0, 2, digest_of("c"), 0, 0, 0))
    one.feed(ev.AttemptKept(1))
    return one


def test_other_digests_of_one_attempt_decide_nothing():
    """The attempt is dropped at all members, and the reason has all digests."""
    one = reducing()
    one.feed(ev.RingDone(1, digest_of("x")))
    effects = one.get("b", msg.Reported(0, 1, digest_of("y")))
    dropped = [effect.peer for effect in effects if isinstance(effect, Send)]
    assert dropped == ["b", "c"]
    assert digest_of("y") in effects[0].text
    assert one.get("c", msg.Reported(0, 1, digest_of("x"))) == []


def test_a_member_that_cannot_reduce_is_tried_less_and_less_often():
    """Every attempt costs all members a reduction; a hostile one could ask for them for ever."""
    one = reducing()
    attempts = 1
    while one.now < 600.0:
        one.get("c", msg.Failed(0, one.machine.coordinator.attempt, "no route"))
        one.get("c", msg.AskGlobal(0, G0))  # asking again does not hurry it
        assert one.machine.coordinator.phase is CoordinatorPhase.IDLE
        one.now = one.machine.next_deadline()
        one.feed(TimerFired())
        one.get("b", msg.Promise(0, 3, digest_of("b"), 0, 30, 0))
        one.get("c", msg.Promise(0, 2, digest_of("c"), 0, 0, 0))
        one.feed(ev.AttemptKept(one.machine.coordinator.attempt))
        attempts += 1
    assert 8 <= attempts <= 20


def test_a_report_of_an_older_attempt_does_not_count():
    """An attempt that was dropped is never decided, even if all report it later."""
    one = reducing()
    one.get("b", msg.Failed(0, 1, "reset"))
    assert one.feed(ev.RingDone(1, digest_of("x"))) == []
    for name in ("b", "c"):
        assert one.get(name, msg.Reported(0, 1, digest_of("x"))) == []
    one.now = 100.0
    one.feed(TimerFired())
    for name in ("b", "c"):
        one.get(name, msg.Promise(0, 3, digest_of(name), 0, 30, 0))
    one.feed(ev.AttemptKept(2))
    one.feed(ev.RingDone(2, digest_of("x")))
    for name in ("b", "c"):
        assert one.get(name, msg.Reported(0, 1, digest_of("x"))) == []
        assert one.get(name, msg.Failed(0, 1, "late")) == []
    one.get("b", msg.Reported(0, 2, digest_of("x")))
    (decision,) = one.get("c", msg.Reported(0, 2, digest_of("x")))
    assert decision.attempt == 2


def test_a_decision_is_in_the_ledger_before_anybody_gets_it():
    """KeepDecision comes alone; the answers follow its line."""
    one = reducing()
    one.feed(ev.RingDone(1, digest_of("x")))
    one.get("b", msg.Reported(0, 1, digest_of("x")))
    effects = one.get("c", msg.Reported(0, 1, digest_of("x")))
    contributors = {"a": (0, 10), "b": (0, 30), "c": (0, 0)}
    assert effects == [do.KeepDecision(1, 1, digest_of("x"), contributors)]
    effects = one.feed(ev.DecisionKept(1, 1))
    sent = [effect for effect in effects if isinstance(effect, Send)]
    assert sent == [Send(name, msg.Decided(1, 1, digest_of("x"), True)) for name in ("b", "c")]
    assert do.ReceiveGlobal(1, 1, digest_of("x")) in effects
    assert one.get("b", msg.AskGlobal(0, G0))[0].message.counted
    assert not one.get("d", msg.AskGlobal(0, G0))[0].message.counted


def test_work_that_is_rounds_old_weighs_less():
    """1 / sqrt(1 + s) for s rounds that were decided without it."""
    one = Alone(every=1)
    decided = ev.Decision(4, 9, G0)
    one.feed(ev.RingRecovered(4, G0, 4, ev.Cut(4, 7, digest_of("a"), 5, 15), decided, 9))
    one.get("b", msg.AskGlobal(4, G0))
    one.feed(ev.GroupVersion(1))
    one.get("b", msg.Promise(4, 2, digest_of("b"), 0, 30, 3))
    effects = one.feed(ev.AttemptKept(10))
    (start,) = [effect for effect in effects if isinstance(effect, do.StartRing)]
    assert [share.weight for share in start.view.members] == [0.25, 0.375]


def test_a_member_of_another_lineage_takes_no_part():
    """A coordinator that was restored from an old backup must not decide a round again."""
    one = coordinator_polling()
    effects = one.get("b", msg.AskGlobal(3, digest_of(3)))
    assert "restore" in effects[0].text
    assert "b" not in one.machine.coordinator.present


def member_with_cut():
    one = Alone("b")
    one.feed(ev.RingRecovered(0, G0, 0))
    assert one.feed(ev.PeerHere("")) == [Send("", msg.AskGlobal(0, G0))]
    assert one.get("", msg.Poll(0)) == [do.TakeCut(0)]
    cut = ev.Cut(0, 3, digest_of("b"), 0, 30)
    promise = Send("", msg.Promise(0, 3, digest_of("b"), 0, 30, 0))
    assert one.feed(ev.CutTaken(cut)) == [promise]
    return one, promise


def test_every_attempt_of_a_round_has_the_same_cut():
    """Also after the group merged on, and after a restart."""
    one, promise = member_with_cut()
    one.now = 1000.0
    assert do.ResumeMerges() in one.machine.member.timer("hold", one.now)
    assert one.get("", msg.Poll(0)) == [promise]
    again = Alone("b")
    again.feed(ev.RingRecovered(0, G0, 0, one.machine.member.cut))
    again.feed(ev.PeerHere(""))
    assert again.get("", msg.Poll(0)) == [promise]


def test_a_view_with_another_cut_is_refused():
    """The coordinator sees Failed, and no process starts."""
    one, _ = member_with_cut()
    shares = [("a", digest_of("a"), 0.5), ("b", digest_of("other"), 0.5)]
    (effect,) = one.get("", msg.View(0, 1, shares, 1 << 20))
    assert isinstance(effect.message, msg.Failed)


@pytest.mark.parametrize(
    "shares",
    [
        [("a", G0, 0.5)],
        [("a", G0, 0.5), ("a", G0, 0.5)],
        [("a", G0, 0.5), ("b", G0, float("nan"))],
        [("a", G0, 0.5), ("b", G0, 2.0)],
        [("a", G0, 0.5), ("b", "no digest", 0.5)],
        [("a", G0, 0.5), ("b", G0)],
        [("a", G0, 0.5), 7],
    ],
)
def test_hostile_views_are_refused(shares):
    """A coordinator's bytes are checked like any others."""
    wire = {"m": "view/1", "round": 0, "attempt": 1, "shares": shares, "piece_values": 1}
    with pytest.raises(MessageError):
        msg.from_wire(wire)
