"""An evaluator scores the deltas of a round: what it may decide, and what it may not."""

import math

import attrs
import pytest
from configs import guard_of
from deltas import delta_of, key, merged_of, stored_of

from fsl_async.roles.machine import Done, Refuse, Send
from fsl_async.roles.messages import MessageError
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import MergedDelta, Score
from fsl_async.store.book.records import VersionRecord

JUDGE = "judge"
SITES = ("a", "b", "c", "d")


@pytest.fixture
def judged(make_server):
    """A run by rounds at version 0, of four sites and an evaluator that holds it."""

    def make(sites=SITES, *, is_here=True, least=1, **limits):
        guard = guard_of(evaluator=JUDGE, evaluator_grace_s=10.0, **limits)
        more = {"round_cap_s": 50.0, "least_clients": least}
        server = make_server(trigger="rounds", guard=guard, **more)
        server.begin(*sites)
        if is_here:
            join(server)
        server.fire()
        return server

    return make


def join(server, incarnation=1):
    """Let the evaluator join; returns the effects of all events."""
    hello = ev.ClientHello(JUDGE, incarnation, "", -1, "", duty="evaluate")
    effects = server.feed(hello)
    for admit in [one for one in effects if isinstance(one, do.Admit)]:
        effects = effects + server.feed(Done(admit))
    effects = effects + server.attach(JUDGE)
    return effects + server.hold(JUDGE, server.machine.version)


def answer_all(server, sites=SITES, **norms):
    """Have all sites answer the open round; returns the effects of the last answer."""
    number = server.machine.version
    effects = []
    for site in sites:
        effects = server.store(key(site, number + 1, number), norm=norms.get(site, 1.0))
    return effects


def score(server, site, alone=0.0, left_out=0.0, *, version=None, loss=1.0, peer=JUDGE):
    """Feed a score of a site's delta."""
    version = server.machine.version if version is None else version
    message = msg.Score(version, key(site, version + 1, version), loss, alone, left_out)
    return server.receive(message, peer)


def committed(effects):
    """The weights of the version that is ordered, by client; None: none is."""
    found = [one for one in effects if isinstance(one, do.Commit)]
    return {one.key.client: one.weight for one in found[0].merged} if found else None


def test_a_complete_round_is_sent_to_the_evaluator_and_waits(judged, look):
    """It gets the question first, then each delta; nothing is merged before it answers."""
    server = judged()
    effects = answer_all(server)
    assert committed(effects) is None
    (question,) = look.sent(effects, JUDGE)
    assert question.version == 0
    assert question.shares == {key(site): 0.25 for site in SITES}
    sent = look.only(effects, do.SendDelta)
    assert [(one.peer, one.delta.key.client) for one in sent] == [(JUDGE, site) for site in SITES]


@pytest.mark.parametrize(
    ("alone", "left_out", "is_refused"),
    [(0.099, 0.0, False), (0.101, 0.0, True), (0.0, 0.0099, False), (0.0, 0.0101, True),
     (-0.5, -0.5, False), (1e30, 0.0, True), (9.0, -0.001, False), (9.0, 0.001, True)],
)  # fmt: skip
def test_a_delta_that_hurts_has_no_weight(judged, alone, left_out, is_refused):
    """Alone by 10 % unless the mean is worse without it, or without it by 1 % of the loss."""
    server = judged()
    answer_all(server)
    for site in "abc":
        assert committed(score(server, site)) is None
    weights = committed(score(server, "d", alone, left_out))
    assert weights == {"a": 8.0, "b": 8.0, "c": 8.0, "d": 0.0 if is_refused else 8.0}


def test_the_limits_are_shares_of_the_loss(judged):
    """Of 100 nats a harm of 1 is within 10 %, and without limits each harm counts."""
    server = judged()
    answer_all(server)
    for site in "abc":
        score(server, site, loss=100.0)
    assert all(committed(score(server, "d", alone=1.0, loss=100.0)).values())
    server = judged(evaluator_alone=0.0)
    answer_all(server)
    for site in "abc":
        score(server, site, loss=100.0)
    assert committed(score(server, "d", alone=1e-9, loss=100.0))["d"] == 0.0


def test_a_refused_delta_is_no_measure_of_the_others(judged):
    """It is refused before deltas are clipped, and its norm is forgotten."""
    server = judged(clip_median=1.5, max_tokens_median=1.0)
    number = server.machine.version
    for site, norm, tokens in (("a", 1.0, 8), ("b", 1.0, 8), ("c", 0.1, 1), ("d", 0.1, 1)):
        server.store(key(site, number + 1, number), norm=norm, tokens=tokens)
    for site in "abc":
        score(server, site, alone=5.0 if site == "c" else 0.0)
    effects = score(server, "d", alone=4.0)
    merged = {one.key.client: one for one in effects[-1].merged}
    assert [(merged[site].clip, merged[site].weight) for site in "ab"] == [(1.0, 8.0)] * 2
    assert {merged[site].weight for site in "cd"} == {0.0}
    assert not {"c", "d"} & server.machine.guard._newest.keys()
    assert merged["c"].score == Score(JUDGE, 1.0, 5.0, 0.0, refused=True)


def test_at_most_half_of_a_round_is_refused_the_worst_ones(judged, look):
    """A liar, or a poor probe, cannot take the run from most of its sites."""
    server = judged()
    answer_all(server)
    score(server, "a", alone=0.5)
    score(server, "b", left_out=0.5)
    score(server, "c", alone=0.2)
    effects = score(server, "d", alone=0.3)
    assert committed(effects) == {"a": 0.0, "b": 0.0, "c": 8.0, "d": 8.0}
    assert "finds 4 of 4 deltas harmful" in look.notes(effects)


def test_the_aggregation_rule_keeps_enough_clients(judged):
    """Else a version could not be made: the median of four sites needs three."""
    server = judged(least=3)
    answer_all(server)
    for site in "abc":
        score(server, site, alone=1.0 if site == "b" else 0.5)
    weights = committed(score(server, "d", alone=0.5))
    assert [site for site, weight in weights.items() if not weight] == ["b"]


def test_one_delta_is_never_refused(judged):
    """The only site of a run goes on, whatever its evaluator answers."""
    server = judged(sites=("a",))
    answer_all(server, "a")
    assert committed(score(server, "a", alone=9.0)) == {"a": 8.0}


def test_without_an_answer_in_time_all_count(judged, look):
    """Those that it has scored by then are decided; and it is asked nothing until it answers."""
    server = judged()
    answer_all(server)
    score(server, "b", alone=3.0)
    before = server.now
    effects = server.fire()
    assert server.now == before + 10.0
    assert committed(effects) == {"a": 8.0, "b": 0.0, "c": 8.0, "d": 8.0}
    assert "scored 1 of 4" in look.notes(effects)
    next_round(server, holds=SITES)
    assert all(committed(answer_all(server)).values()), "it owes answers: no wait"
    for site in "acd":
        assert committed(score(server, site, alone=9.0, version=0)) is None
    next_round(server)
    assert committed(answer_all(server)) is None, "it has answered: it is asked again"


def test_an_evaluator_that_has_moved_on_owes_nothing(judged):
    """It was too late for a version, or could not decode a delta: it scores that no more."""
    server = judged()
    answer_all(server)
    server.fire()
    next_round(server)
    assert committed(answer_all(server)) is None, "it is asked"


def test_a_flood_of_one_client_is_tried_a_few_at_a_time(judged, look):
    """Else none is scored in time, or the last one is merged untried."""
    server = judged(sites=("a", "b"))
    flood = [key("b", number) for number in range(1, 6)]
    for one in flood:
        server.store(one, number=-1)
    server.store(key("b", 6))
    (question,) = look.sent(server.store(key("a")), JUDGE)
    assert set(question.shares) == {key("a"), *flood[:2]}
    for one in question.shares:
        effects = server.receive(msg.Score(0, one, 1.0, 0.0), JUDGE)
    (commit,) = look.only(effects, do.Commit)
    assert {one.key for one in commit.merged} == set(question.shares)
    server.committed(1)
    assert set(server.machine.deltas.pending) == {*flood[2:], key("b", 6)}


def next_round(server, holds=(*SITES, JUDGE)):
    """Commit the version that is ordered, and call the next round."""
    version = server.machine.version + 1
    server.committed(version)
    for name in holds:
        if name in server.machine.members:
            server.hold(name, version)
    server.fire()


def test_an_absent_evaluator_costs_nothing(judged, look):
    """A round without it merges at once, with a line; so does one where it has left before."""
    server = judged(is_here=False)
    effects = answer_all(server)
    assert all(committed(effects).values())
    assert "is not here" in look.notes(effects)


def test_an_evaluator_that_dies_is_asked_again_when_it_is_back(judged, look):
    """Within the wait; after it the round goes on without it."""
    server = judged()
    answer_all(server)
    score(server, "a", alone=3.0)
    assert committed(server.left(JUDGE)) is None
    effects = join(server, incarnation=2)
    assert len(look.only(effects, do.SendDelta)) == 4
    for site in "bc":
        score(server, site)
    assert committed(score(server, "d"))["a"] == 0.0


def test_what_comes_after_the_question_is_in_the_next_version(judged):
    """A client must not wait for the question, and send what no evaluator sees."""
    server = judged()
    answer_all(server)
    server.join("e")
    server.store(key("e"))
    for site in "abc":
        score(server, site)
    assert set(committed(score(server, "d"))) == set(SITES)
    server.committed(1)
    assert set(server.machine.deltas.pending) == {key("e")}


def test_a_merge_that_failed_keeps_its_scores(judged):
    """It is tried again without another question; what came too late decides nothing then."""
    server = judged()
    answer_all(server)
    for site in "ab":
        score(server, site)
    score(server, "d", alone=1.0)
    effects = server.fire()
    score(server, "c", alone=9.0)
    server.feed(Done(effects[-1], "the disk is full"))
    weights = committed(server.fire())
    assert (weights["c"], weights["d"]) == (8.0, 0.0)


def test_scalars_are_not_tried(judged, look):
    """A delta of zeroth order has no values to add; it counts."""
    server = judged()
    for site in "abc":
        server.store(key(site))
    stored = stored_of(key("d"), tokens=8)
    delta = attrs.evolve(stored.delta, facts={"order": 0.0})
    effects = server.feed(ev.DeltaStored("d", attrs.evolve(stored, delta=delta)))
    assert {one.delta.key.client for one in look.only(effects, do.SendDelta)} == set("abc")
    for site in "ab":
        score(server, site)
    assert committed(score(server, "c"))["d"] == 8.0


def test_scores_of_others_of_other_deltas_and_repeated_ones_are_ignored(judged):
    """A site cannot score its rivals, and a score counts once."""
    server = judged()
    answer_all(server)
    score(server, "b", alone=9.0, peer="a")
    score(server, "z", alone=9.0)
    server.receive(msg.Score(7, key("b"), 1.0, 9.0), JUDGE)
    for site in ("b", "b", "a", "c"):
        score(server, site)
    score(server, "b", alone=9.0)
    assert committed(score(server, "d")) == dict.fromkeys(SITES, 8.0)


def test_only_the_named_client_evaluates_and_it_does_nothing_else(judged, look):
    """Others are refused, it has no shard, is not called, publishes nothing and sends no delta."""
    server = judged()
    hello = ev.ClientHello("a", 2, "", -1, "", duty="evaluate")
    (refusal,) = look.only(server.feed(hello), Refuse)
    assert "the evaluator of this run is judge, not a" in refusal.text
    (refusal,) = look.only(server.hello(JUDGE, 2), Refuse)
    assert "start it with --evaluate" in refusal.text
    assert JUDGE not in server.machine.membership.shards.holders
    assert JUDGE not in server.machine.round.expected
    declined = server.offer(key(JUDGE))
    assert [one.reason for one in declined] == ["not yours"]


def test_before_version_0_its_model_is_nothing(make_server, look):
    """A wrong model of the evaluator must not become that of the run, nor its weights version 0."""
    server = make_server(trigger="rounds", guard=guard_of(evaluator=JUDGE))
    effects = join(server)
    assert not [one for one in effects if isinstance(one, do.UseModel | Send)]
    server.join("a")
    server.receive(msg.InitialMeta("f"), "a", "initial:a/1")
    server.committed(0)
    assert not server.machine.members[JUDGE].attached
    assert look.sent(server.attach(JUDGE), JUDGE) == [msg.Announce(0, "d0")]


def test_the_end_of_a_run_does_not_wait_for_it(judged):
    """A client that is behind has time to catch up; an evaluator has no work to lose."""
    server = judged()
    server.machine.members[JUDGE].version = -1
    assert server.machine.serving.behind() == set()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["loss", "alone", "left_out"])
def test_a_score_is_finite(field, value):
    """Else no comparison would decide about the delta."""
    wire = msg.to_wire(msg.Score(1, key("a"), 1.0, 0.5, 0.25)) | {field: value}
    with pytest.raises(MessageError):
        msg.from_wire(wire)


@pytest.mark.parametrize(
    "deltas",
    [[["a/1/0/1", 2.0]], [["a/1/0/1", math.nan]], [["a/1/0/1", 1]], [["a", 0.5]], ["a/1/0/1"],
     [[1, 0.5]], [["a/1/0/1", 0.5, 0]], [["a/1/0/1", 0.0]] * (msg.MOST_SCORED + 1)],
)  # fmt: skip
def test_a_question_has_keys_and_shares(deltas):
    """Anything else ends the session."""
    with pytest.raises(MessageError):
        msg.from_wire({"m": "evaluate/1", "version": 0, "deltas": deltas})


def test_a_score_is_recorded_with_its_version():
    """The ledger shows who decided, and by which numbers."""
    score = Score(JUDGE, 1.0, 2.0, refused=True)
    both = MergedDelta(delta_of(key("a")), 0, 0.0, score=score), merged_of(key("b"))
    made = VersionRecord(3, "", "", 0, "", both, 1.0, 0, 0, 0, 0.0)
    fact = made.to_fact()
    assert [one.get("score") for one in fact["merged"]] == [attrs.asdict(score), None]
    assert [one.score for one in VersionRecord.from_fact(fact).merged] == [score, None]
    assert made.late == ()
