"""Decisions of a group's machine; `test_groups_simulation.py` has runs with faults."""

import hashlib

import pytest
from attrs import evolve
from configs import config_of, roster_of
from machines import Driver, of

from fsl_async.roles.groups import effects as do
from fsl_async.roles.groups import events as ev
from fsl_async.roles.groups import messages as msg
from fsl_async.roles.groups.coordinator import CoordinatorPhase
from fsl_async.roles.groups.member import GroupMember
from fsl_async.roles.machine import Done, Note, Send, TimerFired
from fsl_async.roles.messages import MessageError

RUN, OTHER = "5" * 32, "6" * 32


def digest_of(weights):
    """Return a digest of any value."""
    return hashlib.blake2b(str(weights).encode(), digest_size=16).hexdigest()


G0 = digest_of(0)
FIRST = ev.Decision(0, 0, G0, RUN)
ASK = msg.AskGlobal(0, G0, RUN)


class Group(Driver):
    """One machine, whose effects the test handles."""

    def __init__(self, name="a", roster="abc", **more):
        super().__init__(
            GroupMember(config_of("groups", name=name, roster=roster_of(roster), **more))
        )

    @property
    def coordinator(self):
        """Its other half."""
        return self.machine.coordinator

    def fire(self):
        """Go to the next deadline; that of a hold may have passed."""
        self.now = max(self.now, self.machine.next_deadline())
        return self.feed(TimerFired())

    def fail(self, member, reason="no route"):
        """Report that the attempt under way failed at a member."""
        return self.receive(msg.Failed(0, self.coordinator.attempt, reason), member)

    def report(self, attempt, digest, members="bc"):
        """Let all members report a result; return the effects of the last report."""
        effects = self.feed(ev.ReductionDone(attempt, digest))
        for name in members:
            effects = self.receive(msg.Reported(0, attempt, digest), name)
        return effects

    def start(self, attempt):
        """Let the attempt's line be written; return the view of the reduction that starts."""
        starts = of(self.feed(Done(do.KeepAttempt(0, attempt))), do.StartReduction)
        return starts[0].view if starts else None


def leading(roster="abc", **more):
    """A coordinator whose members are here and hold G_0."""
    one = Group(roster=roster, **more)
    one.feed(ev.GroupsRecovered())
    one.feed(ev.Adopted(FIRST, 0, gained=False))
    for name in roster[1:]:
        one.receive(ASK, name)
    return one


def polling(roster="abc"):
    """A coordinator that polls, after its own promise."""
    one = leading(roster, every=1)
    effects = one.feed(ev.GroupVersion(1))
    assert do.TakeCut(0) in effects
    assert [effect.peer for effect in of(effects, Send)] == list(roster[1:])
    one.feed(ev.CutTaken(ev.Cut(0, 1, digest_of("a"), 0, 10)))
    return one


def promise(name="b", number=0, *, end=30, behind=0, pieces=1 << 24):
    return msg.Promise(number, 3, digest_of(name), 0, end, behind, pieces)


def reducing(roster="abc"):
    one = polling(roster)
    for name in roster[1:]:
        one.receive(promise(name, end=0 if name == "c" else 30), name)
    one.start(1)
    return one


def next_attempt(one, names):
    """Let an attempt begin at its time; return the members of its view."""
    polled = []
    while not polled:  # the time of a hold may come first
        polled = [each.peer for each in of(one.fire(), Send)]
    for name in names:
        if name in polled:
            one.receive(promise(name), name)
    view = one.start(one.coordinator.attempt)
    return [] if view is None else [share.name for share in view.members]


def member(name="b", *, here=True, **more):
    """A member that holds G_0, with a session or without."""
    one = Group(name)
    one.feed(ev.GroupsRecovered(**{"adopted": FIRST, "since": 0, **more}))
    if here:
        one.feed(ev.PeerHere(""))
    return one


# --- the end ---


def test_the_coordinator_does_not_wait_for_a_group_that_left():
    """Its own last round has the groups that are here."""
    one = leading("ab")
    assert do.EndGroup() not in one.feed(ev.GroupEnds())
    assert do.EndGroup() not in one.feed(ev.PeerGone("b", "lost")), "its session may come back"
    assert do.EndGroup() in one.fire()
    assert one.now == one.machine.groups.grace_s


@pytest.mark.parametrize("gained", [False, True])
def test_a_group_that_needs_no_round_ends_without_the_coordinator(gained):
    """That may have ended before; a group whose work is not counted waits for it."""
    one = member(here=False, gained=gained)
    assert one.feed(ev.GroupEnds()) == []
    one.feed(ev.PeerHere(""))
    one.feed(ev.PeerGone("", "closed"))
    assert (do.EndGroup() in one.fire()) is not gained


def test_work_that_comes_after_a_group_said_that_it_has_none_needs_a_round_all_the_same():
    """A slow transfer may arrive after the last round."""
    one = member()
    assert one.feed(ev.GroupEnds()) == [Send("", msg.Ending(gained=False))]
    assert Send("", msg.Ending(gained=True)) in one.feed(ev.GroupVersion(4))
    assert one.receive(msg.AllEnded()) == []


def test_nothing_ends_while_a_decision_is_written():
    """A member that is lost then is in the round that is being decided."""
    one = reducing()
    for name in "bc":
        one.receive(msg.Ending(gained=name == "c"), name)
    one.feed(ev.GroupEnds())
    assert of(one.report(1, digest_of("x")), do.KeepDecision)
    for effects in (one.feed(ev.PeerGone("c", "reset")), one.feed(TimerFired())):
        assert not of(effects, do.EndGroup)


# --- attempts ---


def test_a_silent_member_is_left_out_after_the_grace_time():
    """A stopped process has a session for a while, and must not stop the others."""
    one = polling()
    assert one.receive(promise(), "b") == []
    one.now = one.machine.next_deadline()
    assert one.coordinator.timer("grace", one.now) == [do.KeepAttempt(0, 1)]
    shares = one.start(1).members
    assert [(share.name, share.weight) for share in shares] == [("a", 0.25), ("b", 0.75)]


def test_other_digests_of_one_attempt_decide_nothing():
    """The attempt is dropped at all members, and the reason has all digests."""
    one = reducing()
    one.feed(ev.ReductionDone(1, digest_of("x")))
    effects = one.receive(msg.Reported(0, 1, digest_of("y")), "b")
    assert [effect.peer for effect in of(effects, Send)] == ["b", "c"]
    assert digest_of("y") in effects[0].text
    assert one.receive(msg.Reported(0, 1, digest_of("x")), "c") == []


def test_a_member_that_cannot_reduce_is_tried_less_and_less_often():
    """Every attempt costs all members a reduction; a hostile one could ask for them for ever."""
    one, attempts = reducing("ab"), 1
    while one.now < 600.0:
        one.fail("b")
        one.receive(ASK, "b")  # asking again does not hurry it
        assert one.coordinator.phase is CoordinatorPhase.IDLE
        assert next_attempt(one, "b") == ["a", "b"]
        attempts += 1
    assert 8 <= attempts <= 20


def test_after_three_attempts_a_round_is_tried_without_the_member_that_ended_most():
    """The others go on, and it adopts what they decide; rounds later it is tried again."""
    one, members = reducing(), ["a", "b", "c"]
    for _ in range(3):
        assert members == ["a", "b", "c"]
        one.fail("c")
        members = next_attempt(one, "bc")
    assert members == ["a", "b"]
    attempt, made = one.coordinator.attempt, digest_of(1)
    one.report(attempt, made, "b")
    effects = one.feed(Done(do.KeepDecision(1, attempt, made, {})))
    assert any("c is left out" in note.text for note in of(effects, Note))
    assert Send("c", msg.Decided(1, attempt, made, False, RUN)) in effects
    one.feed(ev.GlobalHeld(1))
    one.feed(ev.Adopted(ev.Decision(1, attempt, made, RUN), 1, gained=False))
    for name in "bc":
        one.receive(msg.AskGlobal(1, made, RUN), name)
    one.now += 100.0
    assert [effect.peer for effect in of(one.feed(ev.GroupVersion(2)), Send)] == ["b"]
    one.coordinator.decided = evolve(FIRST, round=9)
    one.coordinator.present = dict.fromkeys("abc", 9)
    assert one.coordinator._ready() == ["a", "b", "c"]


def test_members_are_left_out_one_after_the_other():
    """It is not known which end of a link is broken."""
    one, seen = reducing(), [["a", "b", "c"]]
    for _ in range(5):
        one.fail(seen[-1][1])
        seen.append(next_attempt(one, "bc"))
    assert seen == [["a", "b", "c"]] * 3 + [["a", "c"], ["a", "b"], ["a", "c"]]


def test_two_members_that_cannot_reduce_are_left_out_together():
    """After each was left out alone: it is not known which ones."""
    one, members, attempts = reducing("abcd"), ["a", "b", "c", "d"], 1
    while {"b", "c"} & set(members):
        one.fail("b" if "b" in members else "c")
        members = next_attempt(one, "bcd")
        attempts += 1
        assert attempts < 12
    assert members == ["a", "d"]


def test_a_silent_member_does_not_keep_others_from_being_left_out():
    """It promises nothing, and the attempt without another one has too few members."""
    one = reducing()
    for number in range(3):
        one.fail("b")
        members = next_attempt(one, "bc" if number < 2 else "b")
    assert members == [], "tried without b, and c is silent"
    one.fire()
    assert next_attempt(one, "b") == ["a", "b"]


def test_a_promise_that_was_not_asked_for_does_not_count():
    """A member that is left out cannot bring itself back."""
    one = reducing()
    for _ in range(2):
        one.fail("c")
        next_attempt(one, "bc")
    one.fail("c")
    one.fire()
    assert one.coordinator.phase is CoordinatorPhase.POLLING
    assert one.receive(promise("c"), "c") == []
    assert "c" not in one.coordinator.promises


def test_a_round_is_due_by_the_fastest_group():
    """The first group may have no clients."""
    one = leading(every=2)
    assert one.receive(msg.VersionMade(1), "b") == []
    assert one.receive(msg.VersionMade(1), "c") == []
    assert do.TakeCut(0) in one.receive(msg.VersionMade(2), "b")


def test_pieces_are_as_small_as_the_slowest_member_wants():
    """Else its part of a piece takes longer than the others wait."""
    one = polling()
    one.receive(promise(pieces=20_000), "b")
    one.receive(promise("c"), "c")
    assert one.start(1).piece_values == 20_000


def test_a_report_of_an_older_attempt_does_not_count():
    """An attempt that was dropped is never decided, even if all report it later."""
    one = reducing()
    one.fail("b")
    assert one.report(1, digest_of("x")) == []
    one.now = 100.0
    one.feed(TimerFired())
    for name in "bc":
        one.receive(promise(name), name)
    one.start(2)
    one.feed(ev.ReductionDone(2, digest_of("x")))
    for name in "bc":
        assert one.receive(msg.Reported(0, 1, digest_of("x")), name) == []
        assert one.receive(msg.Failed(0, 1, "late"), name) == []
    (decision,) = one.report(2, digest_of("x"))
    assert decision.attempt == 2


@pytest.mark.parametrize("decides", [False, True])
def test_an_attempt_whose_line_is_not_in_the_ledger_is_dropped(decides):
    """A full disk must not leave the coordinator in a phase that no other event ends."""
    one = reducing() if decides else polling()
    if decides:
        (effect,) = one.report(1, digest_of("x"))
    else:
        one.receive(promise("b"), "b")
        (effect,) = one.receive(promise("c"), "c")
    effects = one.feed(Done(effect, "disk full"))
    assert [effect.peer for effect in of(effects, Send)] == ["b", "c"]
    assert one.coordinator.phase is CoordinatorPhase.IDLE
    assert one.coordinator.decided == FIRST
    attempt = one.coordinator.attempt
    assert next_attempt(one, "bc") == ["a", "b", "c"]
    assert one.coordinator.attempt == attempt + 1


def test_a_decision_is_in_the_ledger_before_any_member_gets_it():
    """KeepDecision comes alone; the answers follow its line."""
    one, made = reducing(), digest_of("x")
    contributors = {"a": (0, 10), "b": (0, 30), "c": (0, 0)}
    decision = do.KeepDecision(1, 1, made, contributors)
    assert one.report(1, made) == [decision]
    effects = one.feed(Done(decision))
    answer = msg.Decided(1, 1, made, True, RUN)
    assert of(effects, Send) == [Send("b", answer), Send("c", answer)]
    assert do.ReceiveGlobal(answer.decision) in effects
    assert one.receive(ASK, "b")[0].message.counted
    assert not one.receive(ASK, "d")[0].message.counted


def test_work_that_is_rounds_old_weighs_less():
    """1 / sqrt(1 + s) for s rounds that were decided without it."""
    one, held = Group(every=1), ev.Decision(4, 9, G0, RUN)
    cut = ev.Cut(4, 7, digest_of("a"), 5, 15)
    one.feed(ev.GroupsRecovered(held, 4, cut=cut, decided=held, attempt=9))
    one.receive(msg.AskGlobal(4, G0, RUN), "b")
    one.feed(ev.GroupVersion(1))
    one.receive(promise(number=4, behind=3), "b")
    assert [share.weight for share in one.start(10).members] == [0.25, 0.375]


# --- other lineages and runs ---


def test_a_member_of_another_lineage_takes_no_part():
    """A coordinator that was restored from an old backup must not decide a round again."""
    one = polling()
    effects = one.receive(msg.AskGlobal(3, digest_of(3), RUN), "b")
    assert "restore" in effects[0].text
    assert "b" not in one.coordinator.present


def test_a_group_of_another_run_takes_no_part():
    """Both say so: the coordinator may have been started anew under the same name."""
    one = polling()
    note, answer = one.receive(msg.AskGlobal(0, G0, OTHER), "b")
    assert "b is of run 666" in note.text
    assert "b" not in one.coordinator.present
    other = member(adopted=evolve(FIRST, run=OTHER))
    for message in (answer.message, msg.Decided(7, 9, digest_of(7), True, RUN)):
        (note,) = other.receive(message)
        assert "the coordinator now of run 555" in note.text


# --- the member ---


def test_an_adoption_that_fails_fetches_what_is_damaged():
    """The files are looked at again before the next try."""
    one, decided = member(), msg.Decided(1, 3, digest_of(1), False, RUN)
    receive = [do.ReceiveGlobal(decided.decision)]
    assert one.receive(decided) == receive
    assert one.feed(ev.GlobalHeld(1)) == [do.Adopt(decided.decision, counted=False)]
    one.feed(ev.AdoptFailed(1, "altered on disk"))
    assert one.fire() == [Send("", ASK)]
    assert one.receive(decided) == receive


def test_every_attempt_of_a_round_has_the_same_cut():
    """Also after the group merged on, and after a restart."""
    one, promised = member(), [Send("", promise())]
    assert one.receive(msg.Poll(0)) == [do.TakeCut(0)]
    cut = ev.Cut(0, 3, digest_of("b"), 0, 30)
    assert one.feed(ev.CutTaken(cut)) == promised
    one.now = 1000.0
    assert do.ResumeMerges() in one.machine.timer("hold", one.now)
    assert one.receive(msg.Poll(0)) == promised
    assert member(cut=cut).receive(msg.Poll(0)) == promised


def test_a_view_with_another_cut_is_refused():
    """The coordinator sees Failed, and no process starts."""
    one = member(cut=ev.Cut(0, 3, digest_of("b"), 0, 30))
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
