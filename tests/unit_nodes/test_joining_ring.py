"""A run directory and a place in a roster that do not go together."""

import pytest

from fsl_async.errors import RunDirError
from fsl_async.nodes.ps.joining_ring import check_history
from fsl_async.roles.ring.events import Decision, RingRecovered
from fsl_async.roles.ring.rules import RingRules

ROSTER = ("north", "south")
BEGUN = Decision(0, 0, "0" * 32)


@pytest.mark.parametrize(
    ("name", "version", "state", "words"),
    [
        ("south", 3, RingRecovered(), "would replace: give a new --run-dir"),
        ("north", 9, RingRecovered(2, "1" * 32), "put that one first again"),
    ],
)
def test_a_past_that_would_be_lost_or_not_continued_is_one_line(name, version, state, words):
    """A member's own run would be overwritten; a member that is made the first has no decisions."""
    with pytest.raises(RunDirError, match=words):
        check_history(RingRules(name, ROSTER), version, state)


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [
        ("south", -1, RingRecovered()),
        ("south", 4, RingRecovered(1, "1" * 32)),
        ("north", -1, RingRecovered()),
        ("north", 3, RingRecovered()),
        ("north", 4, RingRecovered(0, BEGUN.digest, decided=BEGUN)),
    ],
)
def test_new_groups_and_those_that_go_on(name, version, state):
    """The first one may bring a run of its own into the groups."""
    check_history(RingRules(name, ROSTER), version, state)
