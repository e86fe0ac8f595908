"""How much each delta of a version counts: each client once, with limits on what it claims."""

import pytest
from attrs import evolve
from deltas import delta_of

from fsl_async.roles.sync.counting import Counting, most_balance
from fsl_async.roles.sync.delta import DeltaKey, MergedDelta
from fsl_async.roles.sync.norm_guard import GuardRules, NormGuard
from fsl_async.roles.sync.weighting import WEIGHTINGS, weighting_named


def merged_of(client, sequence=1, tokens=8, steps=2, norm=1.0, **facts):
    delta = delta_of(DeltaKey(client, 1, 0, sequence), tokens, steps)
    return MergedDelta(evolve(delta, facts=facts), 0, 1.0, norm)


def counted(merged, weighting="tokens", own_pace=False, **rules):
    """Each client's share of the average, the deltas as they count, and the lines."""
    one = weighting_named(weighting)
    made = Counting(one, NormGuard(GuardRules(**rules)), own_pace)
    found, lines = made.count(merged)
    scale = one.scale(made.by_client(found), 2.0)
    shares = {}
    for delta in found:
        shares[delta.key.client] = shares.get(delta.key.client, 0.0) + scale * delta.weight
    return shares, found, lines


@pytest.mark.parametrize("weighting", [name for name in WEIGHTINGS if name != "latest"])
def test_a_client_counts_once_in_a_version(weighting):
    """Its 26 deltas have the share of one, with every weighting."""
    flood = [merged_of("liar", number) for number in range(26)]
    shares, _, lines = counted([merged_of("a"), *flood, merged_of("b")], weighting)
    assert shares == pytest.approx(dict.fromkeys(["a", "liar", "b"], 1 / 3))
    assert lines == []


def test_deltas_at_the_client_s_own_pace_are_its_work():
    """A buffer collects as many as a fast client sends."""
    both = [merged_of("fast", 1), merged_of("fast", 2)]
    shares, _, _ = counted([*both, merged_of("a")], "anarchic", own_pace=True)
    assert shares == pytest.approx({"fast": 2 / 3, "a": 1 / 3})


def test_tokens_count_up_to_a_multiple_of_the_median():
    """From the first version on, so that one client neither ends the run nor is all of it."""
    merged = [merged_of("a"), merged_of("b"), merged_of("liar", tokens=10**12)]
    _, found, lines = counted(merged, max_tokens_median=10.0)
    assert [one.delta.tokens for one in found] == [8, 8, 80]
    assert lines == ["80 of the 1000000000000 tokens that liar claims count: 10 x the median of 8"]
    assert [one.delta.tokens for one in counted(merged[1:], max_tokens_median=10.0)[1]] == [
        8,
        10**12,
    ], "between two there is no median"


def test_a_client_with_all_the_balance_has_twice_its_share():
    """With sites of one label at 1 %, a liar would have half of the average."""
    merged = [
        *(merged_of(name, balance=0.0) for name in "abc"),
        merged_of("mixed", balance=1.0),
        merged_of("liar", balance=1.0),
    ]
    shares, _, lines = counted(merged)
    assert shares == pytest.approx(
        {"a": 1 / 15, "b": 1 / 15, "c": 1 / 15, "mixed": 0.4, "liar": 0.4}
    )
    assert "balance of labels of liar, mixed counts as 0.06" in lines[0]
    shares, _, lines = counted([merged_of(name, balance=0.2) for name in "abc"])
    assert (shares["a"], lines) == (pytest.approx(1 / 3), [])


@pytest.mark.parametrize(
    ("clients", "most"),
    [
        ([(1, 1.0)] * 3, 1.0),
        ([(1, 0.01)] * 3, 0.01),
        ([(1, 1.0), (1, 0.01)], 1.0),
        ([(10, 1.0), (1, 0.01)], 1.0),
        ([(1, 1.0), (1, 0.5), (1, 0.01), (1, 0.01), (1, 0.01)], 0.06),
    ],
)
def test_the_balance_that_gives_nobody_more_than_twice_its_share(clients, most):
    """By hand; where none has more, none is lowered."""
    found = most_balance(clients)
    assert found == pytest.approx(most) or found > most
    lowered = [(count, min(balance, found)) for count, balance in clients]
    total = sum(count for count, _ in clients)
    mean = sum(count * balance for count, balance in lowered) / total
    assert all(balance <= 2 * mean + 1e-9 for _, balance in lowered)


def test_what_is_clipped_is_said_in_one_line():
    """With norms, for at most some of them."""
    merged = [*(merged_of(f"c{number}") for number in range(11)), merged_of("far", norm=1e18)]
    _, found, lines = counted(merged, clip_median=1.5)
    assert lines == ["far's delta of norm 1e+18 counts as one of 1.5"]
    assert found[-1].weight == pytest.approx(8 * 1.5e-18)
    assert found[-1].clip == pytest.approx(1.5e-18)
    many = [merged_of(f"far{number}", norm=9.0 + number) for number in range(5)]
    _, _, lines = counted(merged[:11] + many, clip_median=1.5)
    assert lines[0].endswith("far3's delta of norm 12 counts as one of 1.5 and 1 more")
