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
