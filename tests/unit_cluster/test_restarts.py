"""When to launch a child again: every row of the table, without processes or clocks."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsl_async.cluster.restarts import End, RestartRules, Restarts, State, Wait

RULES = RestartRules(
    first_wait_s=1.0, factor=2.0, longest_wait_s=10.0, healthy_after_s=60.0, budget=6
)


def running():
    machine = Restarts(RULES)
    assert machine.launch(0.0)
    return machine


@pytest.mark.parametrize(("code", "why"), [(0, "done"), (2, "bad input")])
def test_done_and_bad_input_are_not_launched_again(code, why):
    """After 0 there is nothing to do, and after 2 it would fail again."""
    machine = running()
    assert machine.exited(code, 1.0) == End(why)
    assert machine.state is State.ENDED


@pytest.mark.parametrize("code", [1, 64, 130, -9, -15])
def test_everything_else_is_launched_again(code):
    """Crashes, preemption (64) and kills must be followed by a launch."""
    machine = running()
    assert machine.exited(code, 1.0) == Wait(1.0)
    assert machine.launch(2.0)
    assert machine.launches == 2


def test_waits_double_up_to_the_longest_then_the_budget_ends_it():
    """A child that cannot start must neither spin nor be launched for ever."""
    machine, waits = running(), []
    while isinstance(effect := machine.exited(1, 0.0), Wait):
        waits.append(effect.seconds)
        machine.launch(0.0)
    assert waits == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert effect == End("gave up after 6 relaunches in a row")


def test_a_healthy_minute_restores_the_budget():
    """A node that is preempted once a day must be launched soon, also after a month."""
    machine, now = running(), 0.0
    for _ in range(5):
        machine.exited(1, now)
        machine.launch(now)
    now += 59.5
    assert machine.exited(1, now) == Wait(10.0)
    machine.launch(now)
    now += 60.0
    assert machine.exited(1, now) == Wait(1.0)


def test_stop_in_every_state():
    """After a stop no child may be launched again."""
    machine = Restarts(RULES)
    machine.stop()
    assert machine.state is State.ENDED
    assert not machine.launch(0.0)

    machine = running()
    machine.stop()
    machine.stop()
    assert machine.exited(-15, 0.0) == End("stopped")

    machine = running()
    machine.exited(1, 0.0)
    machine.stop()
    assert machine.state is State.ENDED
    assert not machine.launch(0.0)


def test_a_child_that_others_launched_counts_from_when_it_was_seen():
    """Its healthy time begins when it is seen; a child that is back during the wait is not
    launched.
    """
    machine = Restarts(RULES)
    machine.seen(100.0)
    assert machine.exited(1, 110.0) == Wait(1.0)
    machine.seen(200.0)
    assert machine.state is State.RUNNING
    assert machine.exited(1, 210.0) == Wait(2.0)
    machine.seen(300.0)
    machine.seen(350.0)
    assert machine.exited(1, 361.0) == Wait(1.0), "a healthy minute since 300"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are busy
@given(st.lists(st.tuples(st.sampled_from([0, 1, 2, 64, -9]), st.floats(0, 200)), max_size=60))
def test_waits_stay_within_bounds_and_launches_within_budget(lives):
    """In any sequence waits are bounded, and at most `budget` short runs follow each other."""
    machine, now, short = running(), 0.0, 0
    for code, seconds in lives:
        now += seconds
        effect = machine.exited(code, now)
        short = 0 if seconds >= RULES.healthy_after_s else short
        if isinstance(effect, End):
            assert code in {0, 2} or short == RULES.budget
            return
        short += 1
        assert RULES.first_wait_s <= effect.seconds <= RULES.longest_wait_s
        assert short <= RULES.budget
        machine.launch(now)
