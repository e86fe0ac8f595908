"""Named deadlines."""

from hypothesis import given
from hypothesis import strategies as st

from fsl_async.roles.machine import Deadlines


def test_the_earliest_counts_and_setting_again_moves():
    """One timer serves many deadlines, so the earliest must be right after every change."""
    deadlines = Deadlines()
    assert deadlines.next() is None
    deadlines.set("b", 2.0)
    deadlines.set("a", 5.0)
    assert deadlines.next() == 2.0
    deadlines.set("b", 9.0)
    assert (deadlines.next(), deadlines.when("b")) == (5.0, 9.0)
    deadlines.cancel("a")
    deadlines.cancel("a")
    assert (deadlines.next(), deadlines.when("a")) == (9.0, None)
    deadlines.clear()
    assert deadlines.next() is None


def test_equal_times_are_ordered_by_name():
    """The order must not depend on the order of arming, or a replay would differ from the run."""
    deadlines = Deadlines()
    for name in ("c", "a", "b"):
        deadlines.set(name, 1.0)
    deadlines.set("late", 1.5)
    deadlines.set("early", 0.5)
    assert deadlines.pop_due(1.0) == ["early", "a", "b", "c"]
    assert deadlines.next() == 1.5


@given(st.dictionaries(st.text(max_size=3), st.floats(-10, 10)), st.floats(-10, 10))
def test_all_due_deadlines_are_disarmed(times, now):
    """A due deadline that stays armed would fire forever."""
    deadlines = Deadlines()
    for name, when in times.items():
        deadlines.set(name, when)
    due = deadlines.pop_due(now)
    assert set(due) == {name for name, when in times.items() if when <= now}
    assert deadlines.pop_due(now) == []
