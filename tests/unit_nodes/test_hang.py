"""Detection of a training thread that hangs, without threads or clocks."""

import pytest

from fsl_async.nodes.client.training_watch import HangWatch, Hung, Recovered


@pytest.mark.parametrize(
    ("times", "limit_s"),
    [
        ([1.0] * 4, None),
        ([1.0] * 5, 20.0),
        ([0.01] * 64, 10.0),
        ([1.0, 1.0, 1.0, 600.0, 600.0], 20.0),
    ],
)
def test_what_a_step_may_take(times, limit_s):
    """No limit before steps are known, at least the least, and no effect of a rare evaluation."""
    watch = HangWatch(10.0)
    if limit_s is not None:
        assert watch.look(0.0, times, limit_s) is None
    assert (watch.look(0.0, times, 20.1) is None) is (limit_s is None)
    assert HangWatch(0.0).look(0.0, times, 1e6) is None


def test_a_hang_and_its_end_are_reported_once():
    """The log must not get a line for each look."""
    watch, times = HangWatch(10.0), [1.0] * 8
    assert watch.look(100.0, times, 120.0) is None
    assert watch.look(100.0, times, 120.5) == Hung(20.5, 1.0)
    assert watch.is_hung
    assert watch.look(100.0, times, 500.0) is None
    assert watch.look(500.1, times, 500.2) == Recovered()
    assert not watch.is_hung
    assert watch.look(500.1, times, 520.2) == Hung(pytest.approx(20.1), 1.0)


def test_waiting_for_the_run_is_no_hang():
    """While it waits for a version the training thread is not in a step."""
    watch = HangWatch(10.0)
    assert watch.look(None, [1.0] * 8, 1e6) is None
    assert watch.look(0.0, [], 1e6) is None, "the first steps compile and load"


def test_words_for_people():
    """A person must be able to compare the numbers with the log."""
    assert (
        Hung(125.4, 0.31234).words == "training hangs: no step for 125 s, where one takes 0.312 s"
    )
