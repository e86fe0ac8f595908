"""Decisions of a group's machine; `test_groups_simulation.py` has runs with faults."""

import hashlib

import pytest
from attrs import evolve
from configs import config_of, roster_of
from machines import Driver

from fsl_async.roles.groups import effects as do
from fsl_async.roles.groups import events as ev
from fsl_async.roles.groups import messages as msg
from fsl_async.roles.groups.coordinator import CoordinatorPhase
from fsl_async.roles.groups.machine import GroupsMachine
from fsl_async.roles.machine import Note, Send, TimerFired
from fsl_async.roles.messages import MessageError

RUN = "5" * 32


def digest_of(weights):
    """Return a digest of any value."""
    return hashlib.blake2b(str(weights).encode(), digest_size=16).hexdigest()


def alone(name="a", roster="abc", **more):
    """One machine, whose effects the test handles."""
    return Driver(GroupsMachine(config_of("groups", name=name, roster=roster_of(roster), **more)))


G0 = digest_of(0)
FIRST = ev.Decision(0, 0, G0, RUN)


def test_the_coordinator_does_not_wait_for_a_group_that_left():
    """Its own last round has the groups that are here."""
    one = alone()
    one.feed(ev.GroupsRecovered())
    one.feed(ev.Adopted(FIRST, 0, gained=False))
    one.receive(msg.AskGlobal(0, G0, RUN), "b")
    assert do.EndGroup() not in one.feed(ev.GroupEnds())
    assert do.EndGroup() not in one.feed(ev.PeerGone("b", "lost")), "its session may come back"
    one.now = one.machine.next_deadline()
    assert one.now == one.machine.member.groups.grace_s
    assert do.EndGroup() in one.feed(TimerFired())


def test_a_group_that_needs_no_round_ends_without_the_coordinator():
    """That may have ended before; a group whose work is not counted waits for it."""
    for gained in (False, True):
        member = alone("b")
        member.feed(ev.GroupsRecovered(0, G0, RUN, 0, gained=gained))
        assert member.feed(ev.GroupEnds()) == []
        member.feed(ev.PeerHere(""))
        member.feed(ev.PeerGone("", "closed"))
        member.now = member.machine.next_deadline()
        assert (do.EndGroup() in member.feed(TimerFired())) is not gained


def test_work_that_comes_after_a_group_said_that_it_has_none_needs_a_round_all_the_same():
    """A slow transfer may arrive after the last round."""
    member = alone("b")
    member.feed(ev.GroupsRecovered(0, G0, RUN, 0))
    member.feed(ev.PeerHere(""))
    assert member.feed(ev.GroupEnds()) == [Send("", msg.Ending(gained=False))]
    assert Send("", msg.Ending(gained=True)) in member.feed(ev.GroupVersion(4))
    assert member.receive(msg.AllEnded()) == []


def test_nothing_ends_while_a_decision_is_written():
    """A member that is lost then is in the round that is being decided."""
    one = reducing()
    for name in "bc":
        one.receive(msg.Ending(gained=name == "c"), name)
    one.feed(ev.GroupEnds())
    one.feed(ev.ReductionDone(1, digest_of("x")))
    for name in "bc":
        effects = one.receive(msg.Reported(0, 1, digest_of("x")), name)
    assert isinstance(effects[0], do.KeepDecision)
    for effects in (one.feed(ev.PeerGone("c", "reset")), one.feed(TimerFired())):
        assert not [each for each in effects if isinstance(each, do.EndGroup)]


def coordinator_polling(roster="abc"):
    """A coordinator with members that polls; returns it after its own promise."""
    one = alone(roster=roster, every=1)
    one.feed(ev.GroupsRecovered())
    one.feed(ev.Adopted(FIRST, 0, gained=False))
    for name in roster[1:]:
        one.receive(msg.AskGlobal(0, G0, RUN), name)
    effects = one.feed(ev.GroupVersion(1))
    assert do.TakeCut(0) in effects
    assert [effect.peer for effect in effects if isinstance(effect, Send)] == list(roster[1:])
    one.feed(ev.CutTaken(ev.Cut(0, 1, digest_of("a"), 0, 10)))
    return one


def test_a_silent_member_is_left_out_after_the_grace_time():
    """A stopped process has a session for a while, and must not stop the others."""
    one = coordinator_polling()
    assert one.receive(msg.Promise(0, 3, digest_of("b"), 0, 30, 0, 1 << 24), "b") == []
    one.now = one.machine.next_deadline()
    effects = one.machine.coordinator.timer("grace", one.now)
    assert effects == [do.KeepAttempt(0, 1)]
    effects = one.feed(ev.AttemptKept(1))
    (start,) = [effect for effect in effects if isinstance(effect, do.StartReduction)]
    assert [share.name for share in start.view.members] == ["a", "b"]
    assert [share.weight for share in start.view.members] == [0.25, 0.75]


def reducing(roster="abc"):
    one = coordinator_polling(roster)
    one.receive(msg.Promise(0, 3, digest_of("b"), 0, 30, 0, 1 << 24), "b")
    if "c" in roster:
        one.receive(msg.Promise(0, 2, digest_of("c"), 0, 0, 0, 1 << 24), "c")
    if "d" in roster:
        one.receive(promise(name="d"), "d")
    one.feed(ev.AttemptKept(1))
    return one


def test_other_digests_of_one_attempt_decide_nothing():
    """The attempt is dropped at all members, and the reason has all digests."""
    one = reducing()
    one.feed(ev.ReductionDone(1, digest_of("x")))
    effects = one.receive(msg.Reported(0, 1, digest_of("y")), "b")
    dropped = [effect.peer for effect in effects if isinstance(effect, Send)]
    assert dropped == ["b", "c"]
    assert digest_of("y") in effects[0].text
    assert one.receive(msg.Reported(0, 1, digest_of("x")), "c") == []


def promise(number=0, *, end=30, pieces=1 << 24, name="b"):
    return msg.Promise(number, 3, digest_of(name), 0, end, 0, pieces)


def next_attempt(one, names):
    """Let an attempt begin at its time; return the members of its view."""
    polled = []
    while not polled:  # the time of a hold may come first
        one.now = max(one.now, one.machine.next_deadline())
        polled = [each.peer for each in one.feed(TimerFired()) if isinstance(each, Send)]
    for name in names:
        if name in polled:
            one.receive(promise(name=name), name)
    effects = one.feed(ev.AttemptKept(one.machine.coordinator.attempt))
    views = [effect.view for effect in effects if isinstance(effect, do.StartReduction)]
    return [share.name for view in views for share in view.members]


def test_a_member_that_cannot_reduce_is_tried_less_and_less_often():
    """Every attempt costs all members a reduction; a hostile one could ask for them for ever."""
    one = reducing(roster="ab")
    attempts = 1
    while one.now < 600.0:
        one.receive(msg.Failed(0, one.machine.coordinator.attempt, "no route"), "b")
        one.receive(msg.AskGlobal(0, G0, RUN), "b")  # asking again does not hurry it
        assert one.machine.coordinator.phase is CoordinatorPhase.IDLE
        assert next_attempt(one, "b") == ["a", "b"]
        attempts += 1
    assert 8 <= attempts <= 20


def test_after_three_attempts_a_round_is_tried_without_the_member_that_ended_most():
    """The others go on, and it adopts what they decide; rounds later it is tried again."""
    one = reducing()
    members = ["a", "b", "c"]
    for _ in range(3):
        assert members == ["a", "b", "c"]
        one.receive(msg.Failed(0, one.machine.coordinator.attempt, "no route"), "c")
        members = next_attempt(one, "bc")
    assert members == ["a", "b"]
    attempt = one.machine.coordinator.attempt
    one.feed(ev.ReductionDone(attempt, digest_of(1)))
    one.receive(msg.Reported(0, attempt, digest_of(1)), "b")
    effects = one.feed(ev.DecisionKept(1, attempt))
    assert any("c is left out" in effect.text for effect in effects if isinstance(effect, Note))
    assert Send("c", msg.Decided(1, attempt, digest_of(1), False, RUN)) in effects
    one.feed(ev.GlobalHeld(1))
    one.feed(ev.Adopted(ev.Decision(1, attempt, digest_of(1), RUN), 1, gained=False))
    for name in ("b", "c"):
        one.receive(msg.AskGlobal(1, digest_of(1), RUN), name)
    one.now += 100.0
    effects = one.feed(ev.GroupVersion(2))
    assert [effect.peer for effect in effects if isinstance(effect, Send)] == ["b"]
    one.machine.coordinator.decided = evolve(FIRST, round=9)
    one.machine.coordinator.present = dict.fromkeys("abc", 9)
    assert one.machine.coordinator._ready() == ["a", "b", "c"]


def test_members_are_left_out_in_turn():
    """It is not known which end of a link is broken."""
    one, seen = reducing(), [["a", "b", "c"]]
    for _ in range(5):
        one.receive(msg.Failed(0, one.machine.coordinator.attempt, "no route"), seen[-1][1])
        seen.append(next_attempt(one, "bc"))
    assert seen == [["a", "b", "c"]] * 3 + [["a", "c"], ["a", "b"], ["a", "c"]]


def test_two_members_that_cannot_reduce_are_left_out_together():
    """After each was left out alone: it is not known which ones."""
    one, members = reducing(roster="abcd"), ["a", "b", "c", "d"]
    attempts = 1
    while {"b", "c"} & set(members):
        failed = "b" if "b" in members else "c"
        one.receive(msg.Failed(0, one.machine.coordinator.attempt, "no route"), failed)
        members = next_attempt(one, "bcd")
        attempts += 1
        assert attempts < 12
    assert members == ["a", "d"]


def test_a_silent_member_does_not_keep_others_from_their_turn():
    """It promises nothing, and the attempt without another one has too few members."""
    one = reducing()
    for _ in range(3):
        one.receive(msg.Failed(0, one.machine.coordinator.attempt, "reset"), "b")
        members = next_attempt(one, "bc" if one.machine.coordinator._turns < 3 else "b")
    assert members == [], "tried without b, and c is silent"
    one.now = one.machine.next_deadline()
    one.feed(TimerFired())
    assert next_attempt(one, "b") == ["a", "b"]


def test_a_promise_that_was_not_asked_for_does_not_count():
    """A member that is left out cannot bring itself back."""
    one = reducing()
    for _ in range(2):
        one.receive(msg.Failed(0, one.machine.coordinator.attempt, "no"), "c")
        next_attempt(one, "bc")
    one.receive(msg.Failed(0, one.machine.coordinator.attempt, "no"), "c")
    one.now = one.machine.next_deadline()
    one.feed(TimerFired())
    assert one.machine.coordinator.phase is CoordinatorPhase.POLLING
    assert one.receive(promise(name="c"), "c") == []
    assert "c" not in one.machine.coordinator.promises


def test_a_round_is_due_by_the_fastest_group():
    """The first group may have no clients."""
    one = alone(every=2)
    one.feed(ev.GroupsRecovered())
    one.feed(ev.Adopted(FIRST, 0, gained=False))
    for name in ("b", "c"):
        one.receive(msg.AskGlobal(0, G0, RUN), name)
    assert one.receive(msg.VersionMade(1), "b") == []
    assert one.receive(msg.VersionMade(1), "c") == []
    assert do.TakeCut(0) in one.receive(msg.VersionMade(2), "b")


def test_pieces_are_as_small_as_the_slowest_member_wants():
    """Else its part of a piece takes longer than the others wait."""
    one = coordinator_polling()
    one.receive(promise(pieces=20_000), "b")
    one.receive(promise(name="c"), "c")
    effects = one.feed(ev.AttemptKept(1))
    (start,) = [effect for effect in effects if isinstance(effect, do.StartReduction)]
    assert start.view.piece_values == 20_000


def test_a_report_of_an_older_attempt_does_not_count():
    """An attempt that was dropped is never decided, even if all report it later."""
    one = reducing()
    one.receive(msg.Failed(0, 1, "reset"), "b")
    assert one.feed(ev.ReductionDone(1, digest_of("x"))) == []
    for name in ("b", "c"):
        assert one.receive(msg.Reported(0, 1, digest_of("x")), name) == []
    one.now = 100.0
    one.feed(TimerFired())
    for name in ("b", "c"):
        one.receive(msg.Promise(0, 3, digest_of(name), 0, 30, 0, 1 << 24), name)
    one.feed(ev.AttemptKept(2))
    one.feed(ev.ReductionDone(2, digest_of("x")))
    for name in ("b", "c"):
        assert one.receive(msg.Reported(0, 1, digest_of("x")), name) == []
        assert one.receive(msg.Failed(0, 1, "late"), name) == []
    one.receive(msg.Reported(0, 2, digest_of("x")), "b")
    (decision,) = one.receive(msg.Reported(0, 2, digest_of("x")), "c")
    assert decision.attempt == 2


def test_a_decision_is_in_the_ledger_before_anybody_gets_it():
    """KeepDecision comes alone; the answers follow its line."""
    one = reducing()
    one.feed(ev.ReductionDone(1, digest_of("x")))
    one.receive(msg.Reported(0, 1, digest_of("x")), "b")
    effects = one.receive(msg.Reported(0, 1, digest_of("x")), "c")
    contributors = {"a": (0, 10), "b": (0, 30), "c": (0, 0)}
    assert effects == [do.KeepDecision(1, 1, digest_of("x"), contributors)]
    effects = one.feed(ev.DecisionKept(1, 1))
    sent = [effect for effect in effects if isinstance(effect, Send)]
    assert sent == [Send(name, msg.Decided(1, 1, digest_of("x"), True, RUN)) for name in ("b", "c")]
    assert do.ReceiveGlobal(1, 1, digest_of("x")) in effects
    assert one.receive(msg.AskGlobal(0, G0, RUN), "b")[0].message.counted
    assert not one.receive(msg.AskGlobal(0, G0, RUN), "d")[0].message.counted


def test_work_that_is_rounds_old_weighs_less():
    """1 / sqrt(1 + s) for s rounds that were decided without it."""
    one = alone(every=1)
    decided = ev.Decision(4, 9, G0, RUN)
    one.feed(
        ev.GroupsRecovered(4, G0, RUN, 4, False, ev.Cut(4, 7, digest_of("a"), 5, 15), decided, 9)
    )
    one.receive(msg.AskGlobal(4, G0, RUN), "b")
    one.feed(ev.GroupVersion(1))
    one.receive(msg.Promise(4, 2, digest_of("b"), 0, 30, 3, 1 << 24), "b")
    effects = one.feed(ev.AttemptKept(10))
    (start,) = [effect for effect in effects if isinstance(effect, do.StartReduction)]
    assert [share.weight for share in start.view.members] == [0.25, 0.375]


def test_a_member_of_another_lineage_takes_no_part():
    """A coordinator that was restored from an old backup must not decide a round again."""
    one = coordinator_polling()
    effects = one.receive(msg.AskGlobal(3, digest_of(3), RUN), "b")
    assert "restore" in effects[0].text
    assert "b" not in one.machine.coordinator.present


OTHER = "6" * 32


def test_a_group_of_another_run_takes_no_part():
    """Both say so: the coordinator may have been started anew under the same name."""
    one = coordinator_polling()
    note, answer = one.receive(msg.AskGlobal(0, G0, OTHER), "b")
    assert "b is of run 666" in note.text
    assert "b" not in one.machine.coordinator.present
    member = alone("b")
    member.feed(ev.GroupsRecovered(0, G0, OTHER, 0))
    member.feed(ev.PeerHere(""))
    for message in (answer.message, msg.Decided(7, 9, digest_of(7), True, RUN)):
        (note,) = member.receive(message)
        assert "the coordinator now of run 555" in note.text


def test_an_adoption_that_fails_fetches_what_is_damaged():
    """The files are looked at again before the next try."""
    member = alone("b")
    member.feed(ev.GroupsRecovered(0, G0, RUN, 0))
    member.feed(ev.PeerHere(""))
    decided = msg.Decided(1, 3, digest_of(1), False, RUN)
    receive = do.ReceiveGlobal(1, 3, digest_of(1))
    assert member.receive(decided) == [receive]
    assert member.feed(ev.GlobalHeld(1)) == [
        do.Adopt(ev.Decision(1, 3, digest_of(1), RUN), counted=False)
    ]
    member.feed(ev.AdoptFailed(1, "altered on disk"))
    member.now = member.machine.next_deadline()
    assert member.feed(TimerFired()) == [Send("", msg.AskGlobal(0, G0, RUN))]
    assert member.receive(decided) == [receive]


def member_with_cut():
    one = alone("b")
    one.feed(ev.GroupsRecovered(0, G0, RUN, 0))
    assert one.feed(ev.PeerHere("")) == [Send("", msg.AskGlobal(0, G0, RUN))]
    assert one.receive(msg.Poll(0)) == [do.TakeCut(0)]
    cut = ev.Cut(0, 3, digest_of("b"), 0, 30)
    promise = Send("", msg.Promise(0, 3, digest_of("b"), 0, 30, 0, 1 << 24))
    assert one.feed(ev.CutTaken(cut)) == [promise]
    return one, promise


def test_every_attempt_of_a_round_has_the_same_cut():
    """Also after the group merged on, and after a restart."""
    one, promise = member_with_cut()
    one.now = 1000.0
    assert do.ResumeMerges() in one.machine.member.timer("hold", one.now)
    assert one.receive(msg.Poll(0)) == [promise]
    again = alone("b")
    again.feed(ev.GroupsRecovered(0, G0, RUN, 0, False, one.machine.member.cut))
    again.feed(ev.PeerHere(""))
    assert again.receive(msg.Poll(0)) == [promise]


def test_a_view_with_another_cut_is_refused():
    """The coordinator sees Failed, and no process starts."""
    one, _ = member_with_cut()
    shares = [("a", digest_of("a"), 0.5), ("b", digest_of("other"), 0.5)]
    (effect,) = one.receive(msg.View(0, 1, shares, 1 << 20))
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
