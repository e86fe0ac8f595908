"""What is let go where there is too much."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_async.roles.relay.load_shedding import heaviest


def test_the_heaviest_of_the_group_that_weighs_most_goes_first():
    """Again and again, until the others fit."""
    groups = [[(5, "a"), (4, "b"), (3, "c")], [(8, "d")], [(1, "e")]]
    assert heaviest(groups, 21) == []
    assert heaviest(groups, 20) == [(5, "a")]
    assert heaviest(groups, 14) == [(5, "a"), (8, "d")]
    assert heaviest(groups, 0) == [(5, "a"), (8, "d"), (4, "b"), (3, "c"), (1, "e")]
    assert heaviest([], 0) == []
    assert groups[0] == [(5, "a"), (4, "b"), (3, "c")]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=5), st.integers(0, 500))
def test_no_more_goes_than_must(weights, limit):
    """The last one that went was needed, the others fit, and nobody within an equal share lost anything."""
    groups = [
        [(weight, (number, order)) for order, weight in enumerate(group)]
        for number, group in enumerate(weights)
    ]
    whole = sum(map(sum, weights))
    dropped = heaviest(groups, limit)
    left = whole - sum(weight for weight, _ in dropped)
    assert left <= limit
    assert not dropped or left + dropped[-1][0] > limit
    assert len({what for _, what in dropped}) == len(dropped)
    for _, (number, _) in dropped:
        assert sum(weights[number]) * len(weights) > limit
