"""When a round merges, and the reason."""

import pytest

from fsl_async.roles.phrasing import here_of
from fsl_async.roles.sync.round import ArrivalHistory, Round, RoundRules
from fsl_async.roles.sync.triggers.completion import QuorumAndGrace

RULES = RoundRules(quorum=0.5, grace_mad_factor=4.0, grace_min_s=1.0, first_grace_s=60.0)


def open_round(*names, cap_s=100.0):
    return Round(3, 1000.0, cap_s, dict.fromkeys(names, 1))


def decide(open_, now, pending=1, history=None):
    return QuorumAndGrace(RULES).verdict(open_, history or ArrivalHistory(), now, pending=pending)


def test_all_have_answered():
    """No client is missing."""
    open_ = open_round("a", "b")
    assert open_.answer("a", contributed=True)
    assert open_.answer("b", contributed=False)
    verdict = decide(open_, 1001.0)
    assert (verdict.action, verdict.reason) == (
        "merge",
        "1 of 2 called clients sent a delta, all have answered",
    )


def test_no_client_had_a_delta():
    """A round without a delta makes no version, unless a late delta is pending."""
    open_ = open_round("a")
    open_.answer("a", contributed=False)
    assert decide(open_, 1001.0, pending=0).action == "close"
    assert decide(open_, 1001.0, pending=1).action == "merge"


def test_an_answer_counts_once_and_only_if_asked():
    """A delta offered again must not count twice for the quorum."""
    open_ = open_round("a", "b")
    assert open_.answer("a", contributed=True)
    assert not open_.answer("a", contributed=True)
    assert not open_.answer("uncalled", contributed=True)
    assert (open_.contributors(), open_.missing()) == (1, ["b"])


def test_first_rounds_give_a_fixed_grace_from_the_quorum_on():
    """Too few arrivals are known."""
    open_ = open_round("a", "b")
    assert decide(open_, 1005.0).action == "wait"
    open_.answer("a", contributed=True)
    assert decide(open_, 1010.0).until == 1070.0
    assert decide(open_, 1069.9).until == 1070.0
    over = decide(open_, 1070.0)
    assert over.action == "merge"
    assert "without b" in over.reason


def test_grace_is_computed_from_past_arrivals():
    """Median plus four deviations after the call, and at least the minimum after the quorum."""
    history = ArrivalHistory()
    history.offsets_s.extend([10.0, 12.0, 14.0])
    assert history.grace_until(RULES, 1000.0, 1010.0) == 1000.0 + 12.0 + 4.0 * 2.0
    assert history.grace_until(RULES, 1000.0, 1030.0) == 1031.0


def test_the_cap_bounds_the_grace_but_a_late_quorum_merges_at_once():
    """Waiting must not delay the next round."""
    open_ = open_round("a", "b", cap_s=20.0)
    open_.answer("a", contributed=True)
    assert decide(open_, 1010.0).until == 1020.0
    late = open_round("a", "b", cap_s=20.0)
    late.answer("a", contributed=True)
    assert decide(late, 1050.0).action == "merge"


def test_without_a_quorum_it_stays_open():
    """A version needs a quorum, but clients that hang must not stop the others forever."""
    open_ = open_round(*"abcdefgh")
    open_.answer("a", contributed=True)
    verdict = decide(open_, 1150.0)
    assert (verdict.action, verdict.until) == ("wait", None)
    assert verdict.reason.endswith("waiting for b, c, d, e, f, ...")
    assert "1 of 8 called clients sent a delta, 4 needed" in verdict.reason
    assert decide(open_, 1200.0).action == "merge"
    assert decide(open_, 1200.0, pending=0).action == "wait", "there is nothing to merge"


def test_a_quorum_whose_deltas_are_merged_already_waits_on():
    """Without a pending delta there is nothing to merge, even with a quorum."""
    open_ = open_round("a", "b")
    open_.answer("a", contributed=True)
    assert decide(open_, 5000.0, pending=0).action == "wait"


def test_leaving_rejoining_and_other_incarnations():
    """Only the incarnation that was called counts, while it is connected."""
    open_ = open_round("a", "b")
    assert not open_.leave("a", 2)
    assert open_.leave("a", 1)
    assert not open_.leave("a", 1)
    assert open_.missing() == ["b"]
    open_.rejoin("a", 2)
    assert open_.missing() == ["b"]
    open_.rejoin("a", 1)
    assert open_.awaits("a", 1)
    open_.answer("a", contributed=True)
    assert not open_.leave("a", 1), "it has answered"
    assert open_.contributors() == 1


def test_giving_up_on_the_missing():
    """The last round of a run ends at its cap."""
    open_ = open_round("a", "b")
    open_.answer("a", contributed=True)
    open_.dismiss(open_.missing())
    assert decide(open_, 1001.0).action == "merge"


def test_recall_of_clients_that_skipped():
    """In a round that stays open they have progress by now; clients that left are not recalled."""
    open_ = open_round("a", "b", "c", "d")
    open_.answer("a", contributed=False)
    open_.answer("b", contributed=False)
    open_.answer("c", contributed=True)
    assert open_.recall({"a": 1, "b": 2, "c": 1, "d": 1}) == ["a"]
    assert open_.missing() == ["a", "d"]


@pytest.mark.parametrize(("quorum", "needed"), [(0.0, 1), (0.5, 2), (0.51, 3), (1.0, 4)])
def test_quorum_rounds_up_and_is_at_least_one(quorum, needed):
    """Half of four is two, and zero is never enough."""
    open_ = open_round("a", "b", "c", "d")
    rules = RoundRules(quorum=quorum)
    verdict = QuorumAndGrace(rules).verdict(open_, ArrivalHistory(), 1001.0, pending=0)
    assert verdict.reason.endswith(f"0 of 4 called clients sent a delta, {needed} needed")


@pytest.mark.parametrize(
    ("here", "needed", "words"),
    [
        (1, 2, "1 client is here, 2 are needed"),
        (0, 1, "0 clients are here, 1 is needed"),
        (1, 1200, "1 client is here, 1,200 are needed"),
    ],
)
def test_one_and_many(here, needed, words):
    """The line is a correct sentence."""
    assert here_of(here, needed) == words
