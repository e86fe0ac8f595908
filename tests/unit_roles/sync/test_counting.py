"""How much each delta of a version counts: each client once, with limits on what it claims."""

import pytest
from attrs import evolve
from configs import guard_of
from deltas import delta_of

from fsl_async.roles.sync.delta import DeltaKey, MergedDelta
from fsl_async.roles.sync.deltas import Counting
from fsl_async.roles.sync.norm_guard import NormGuard
from fsl_async.roles.sync.weighting import WEIGHTINGS, weighting_named


def merged_of(client, sequence=1, tokens=8, steps=2, norm=1.0, **facts):
    delta = delta_of(DeltaKey(client, 1, 0, sequence), tokens, steps)
    return MergedDelta(evolve(delta, facts=facts), 0, 1.0, norm)


def counted(merged, weighting="tokens", own_pace=False, **rules):
    """Each client's share of the average, the deltas as they count, and the lines."""
    one = weighting_named(weighting)
    made = Counting(one, NormGuard(guard_of(**rules)), own_pace)
    found, work, lines = made.count(merged)
    scale = one.scale(work, 2.0)
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


def test_a_client_has_at_most_a_share_of_the_version():
    """A claim of ten times the tokens is believed in the books, and does not decide."""
    merged = [*(merged_of(name) for name in "abcd"), merged_of("liar", tokens=80)]
    shares, found, lines = counted(merged, max_share=0.33)
    assert shares == pytest.approx({**dict.fromkeys("abcd", 0.67 / 4), "liar": 0.33})
    assert found[-1].delta.tokens == 80
    assert lines == [
        "liar would have more of the version by tokens or labels, and counts as 33% of it"
    ]
    shares, _, _ = counted(merged[2:], max_share=0.33)
    assert shares["liar"] == pytest.approx(0.5), "of three 1.5 times an equal share"
    shares, _, lines = counted(merged[3:], max_share=0.33)
    assert (shares["liar"], lines) == (pytest.approx(80 / 88), []), "between two nothing is known"


@pytest.mark.parametrize("weighting", ["batch", "tokens", "fednova"])
def test_an_honest_version_has_the_weights_that_it_had(weighting):
    """To the bit: where no client has too much, nothing is multiplied."""
    merged = [
        merged_of(name, tokens=count) for name, count in zip("abcd", (8, 9, 10, 11), strict=True)
    ]
    limited, unlimited = (counted(merged, weighting, max_share=most) for most in (0.33, 0.0))
    assert limited == unlimited


def test_a_client_with_all_the_balance_has_twice_an_equal_share():
    """With sites of one label at 1 %, a liar would have half of the average."""
    merged = [
        *(merged_of(f"one{number}", balance=0.0) for number in range(8)),
        merged_of("mixed", balance=1.0),
        merged_of("liar", balance=1.0),
    ]
    shares, _, lines = counted(merged, max_share=0.33)
    assert shares["liar"] == shares["mixed"] == pytest.approx(0.2)
    assert "liar, mixed would have more of the version by tokens or labels" in lines[0]
    shares, _, _ = counted(merged[6:], max_share=0.33)
    assert shares["liar"] == pytest.approx(1 / 2.02), "of four with two mixed sites none is lowered"
    shares, _, lines = counted([merged_of(name, balance=0.2) for name in "abc"], max_share=0.33)
    assert (shares["a"], lines) == (pytest.approx(1 / 3), [])


def test_lies_of_several_deltas_are_those_of_their_mean():
    """Weights and what they are divided by are of the same work."""
    flood = [merged_of("liar", n, tokens=1 + 999 * n, steps=1 + 999 * (n == 0)) for n in range(2)]
    for weighting in ("batch", "tokens"):
        shares, _, _ = counted([*map(merged_of, "abcd"), *flood], weighting)
        assert sum(shares.values()) == pytest.approx(1.0)
    mixed = [merged_of("liar", n, balance=float(n)) for n in range(2)]
    sites = [merged_of(name, balance=0.0) for name in "abcd"]
    shares, _, _ = counted([*sites, *mixed], max_share=0.33)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["liar"] == pytest.approx(0.4)


def test_tokens_count_once_for_a_client_and_version():
    """However many deltas claim them."""
    flood = [merged_of("liar", number, tokens=80) for number in range(40)]
    _, found, lines = counted([*map(merged_of, "abc"), *flood], max_tokens_median=10.0)
    assert sum(one.delta.tokens for one in found) == 3 * 8 + 40 * 2
    assert len(lines) == 1


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
