"""Weighting: each strategy against its definition, computed another way."""

import attrs
import numpy as np
import pytest
from deltas import delta_of, merged_of
from hypothesis import given
from hypothesis import strategies as st

from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.roles.sync.weighting import WEIGHTINGS, rarity, weighting_named

KEY = DeltaKey("a", 1, 0, 1)


def work(tokens, steps, staleness=0):
    return merged_of(KEY, tokens=tokens, steps=steps, staleness=staleness)


def of_client(name, **counts):
    return merged_of(DeltaKey(name, 1, 0, 1), staleness=0, **counts)


def one_each(merged):
    """The same work, each of another client."""
    return [
        of_client(f"client-{index}", tokens=one.delta.tokens, steps=7)
        for index, one in enumerate(merged)
    ]


contributions = st.lists(
    st.builds(work, st.integers(1, 10**9), st.integers(1, 5000), st.integers(0, 20)),
    min_size=1,
    max_size=12,
)


def average(strategy, merged, deltas):
    weights = [strategy.weight(one.delta, one.staleness) for one in merged]
    total = sum(weight * delta for weight, delta in zip(weights, deltas, strict=True))
    return strategy.scale(merged) * total


@pytest.mark.parametrize("name", list(WEIGHTINGS))
@given(merged=contributions)
def test_equal_fresh_deltas_average_to_themselves(name, merged):
    """A weighting may prefer a client, but must not change a delta that all agree on."""
    fresh = one_each(merged)
    strategy = weighting_named(name)
    assert average(strategy, fresh, [3.0] * len(fresh)) == pytest.approx(3.0)


@given(merged=contributions)
def test_tokens_is_the_average_over_the_data(merged):
    """Every token counts the same at every client."""
    deltas = np.arange(len(merged), dtype=float)
    discounts = [(1 + one.staleness) ** -0.5 for one in merged]
    tokens = np.array([one.delta.tokens for one in merged], dtype=float)
    expected = np.sum(tokens / tokens.sum() * discounts * deltas)
    assert average(weighting_named("tokens"), merged, deltas) == pytest.approx(expected)


def test_batch_weighs_a_step_by_its_tokens_and_a_client_once():
    """Data parallel's weights; work that arrives in two deltas counts as in one."""
    strategy = weighting_named("batch")
    fast, slow = of_client("a", tokens=400, steps=40), of_client("b", tokens=200, steps=10)
    # 10 and 20 tokens a step: a third and two thirds
    assert average(strategy, [fast, slow], [8.0, 2.0]) == pytest.approx(4.0)
    halves = [of_client("a", tokens=200, steps=20)] * 2
    assert average(strategy, [*halves, slow], [4.0, 4.0, 2.0]) == pytest.approx(4.0)


@given(merged=contributions)
def test_uniform_is_the_mean(merged):
    """Every client counts the same."""
    deltas = np.arange(len(merged), dtype=float)
    discounts = np.array([(1 + one.staleness) ** -0.5 for one in merged])
    expected = np.mean(discounts * deltas)
    assert average(weighting_named("uniform"), merged, deltas) == pytest.approx(expected)


@given(merged=contributions)
def test_fednova_is_its_paper(merged):
    """Normalized steps: sum_i p_i H_i times sum_i p_i Delta_i / H_i, p_i: share of the tokens."""
    fresh = [work(one.delta.tokens, one.delta.steps) for one in merged]
    deltas = np.arange(len(fresh), dtype=float)
    tokens = np.array([one.delta.tokens for one in fresh], dtype=float)
    steps = np.array([one.delta.steps for one in fresh], dtype=float)
    share = tokens / tokens.sum()
    expected = np.sum(share * steps) * np.sum(share * deltas / steps)
    assert average(weighting_named("fednova"), fresh, deltas) == pytest.approx(expected)


def test_anarchic_weighs_mean_steps():
    """Clients that train 1 and 50 steps count alike, times the steps that are usual in the run."""
    strategy = weighting_named("anarchic")
    merged = [work(100, 1), work(100, 50)]
    weights = [strategy.weight(one.delta, 0) for one in merged]
    assert weights == [1.0, 0.02]
    assert strategy.scale(merged, 20.0) * sum((1.0 * 1, 0.02 * -50)) == 0.0
    assert strategy.scale(merged, 20.0) == 10.0


@pytest.mark.parametrize("name", list(WEIGHTINGS))
def test_a_stale_delta_counts_less_even_alone(name):
    """The discount is not normalized away, so a single stale delta makes a smaller step."""
    strategy = weighting_named(name)
    values = [average(strategy, [work(10, 10, stale)], [1.0]) for stale in (0, 3, 8)]
    exponent = 0.25 if name in {"latest-tuned", "arrivals"} else 0.5  # for sites that send seldom
    assert values == pytest.approx([1.0, 4**-exponent, 9**-exponent])


def test_rarity_makes_sums_of_deltas_equal():
    """A site with half of the arrivals of four counts half, and one with few up to 3 times."""
    found = rarity([*"a" * 32, *"b" * 16, *"c" * 12, *"d" * 4])
    assert found == {"a": 0.5, "b": 1.0, "c": 16 / 12, "d": 3.0}
    assert rarity([]) == {}
    assert rarity(["a"]) == {"a": 1.0}


@pytest.mark.parametrize("name", list(WEIGHTINGS))
def test_no_work_at_all_is_no_change(name):
    """Deltas without tokens or steps give zero instead of a division by zero."""
    strategy = weighting_named(name)
    assert strategy.scale([]) == 0.0
    for idle in (work(0, 5), work(5, 0), work(0, 0)):
        assert np.isfinite(average(strategy, [idle], [1.0]))


@pytest.mark.parametrize(
    ("reported", "counts_as"),
    [
        (1.0, 1.0),
        (0.25, 0.25),
        (0.0, 0.01),
        (3.0, 1.0),
        (-1.0, 0.01),
        (float("nan"), 0.01),
        (None, 1.0),
        ("1", 1.0),
        (True, 1.0),
    ],
)
def test_rows_count_by_the_balance_of_their_labels(reported, counts_as):
    """A site of one label hardly counts beside others; a peer may report anything."""
    strategy = weighting_named("tokens")
    facts = {} if reported is None else {"balance": reported}
    even = delta_of(KEY, tokens=100, steps=10)
    skewed = attrs.evolve(even, facts=facts)
    assert strategy.weight(skewed, 0) == pytest.approx(counts_as * strategy.weight(even, 0))
