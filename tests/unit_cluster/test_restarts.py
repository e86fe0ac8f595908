"""When to launch a child again: every row of the table, without processes or clocks."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsl_async.cluster.restarts import End, RestartRules, Restarts, State

RULES = RestartRules(
    first_wait_s=1.0, factor=2.0, longest_wait_s=10.0, healthy_after_s=60.0, budget=6
)


def running():
    machine = Restarts(RULES)
    assert machine.launch(0.0)
    return machine


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
