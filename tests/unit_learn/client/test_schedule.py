"""Learning rates follow the run, not a client's own steps."""

import pytest
from client_sides import Sides
from torch import nn

from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.schedule import RunClock, Schedule
from fsl_async.roles.sync.progress import RunPosition


def share(schedule, progress, decays_from=0.7):
    """The factor of a client that is past its warm-up."""
    return schedule.factor(progress, decays_from, steps=10**6, late=False)


@pytest.mark.parametrize(
    ("kind", "found"),
    [("wsd", [1.0, 1.0, 0.55, 0.1]), ("cosine", [1.0, 0.55, 0.1]), ("constant", [1.0, 1.0])],
)
def test_rates_fall_to_the_final_rate_at_a_planned_end(kind, found):
    """A run without a known end does not decay to nothing."""
    schedule = Schedule(kind, final=0.1)
    at = {"wsd": (0.0, 0.7, 0.85, 1.0), "cosine": (0.0, 0.5, 1.0), "constant": (0.0, 1.0)}[kind]
    assert [share(schedule, progress) for progress in at] == pytest.approx(found)
    assert share(schedule, None) == 1.0
    assert share(schedule, 0.85, decays_from=0.85) == 1.0 or kind == "cosine"


def test_a_late_client_warms_up_over_its_own_number_of_steps():
    """Its optimizer has no moments, at whatever rate the others are."""
    schedule = Schedule("wsd", final=0.0, warmup_steps=0, rewarm_steps=3)
    late = [schedule.factor(0.85, 0.7, steps=step, late=True) for step in (0, 1, 3, 9)]
    assert late == pytest.approx([0.125, 0.25, 0.5, 0.5])
    assert schedule.factor(0.85, 0.7, steps=0, late=False) == pytest.approx(0.5)


def test_the_clock_goes_on_between_announcements():
    """Rates fall smoothly however rare versions are."""
    now = [100.0]
    clock = RunClock(lambda: now[0])
    assert clock.progress is None
    clock.announced(RunPosition())
    assert clock.progress is None, "no planned end"
    clock.announced(RunPosition(10, 100, True, 0.5, 0.01, 0.75, 0.8))
    now[0] = 110.0
    assert clock.progress == pytest.approx(0.6)
    assert clock.decays_from == 0.8
    now[0] = 1e6
    assert clock.progress == 0.75, "not beyond the versions that were due"


def test_fed_and_its_scheduler_follow_the_clock():
    """One's own loop gets the schedule in two lines."""
    sides = Sides(publishes=True)
    config = {"train": {"final_rate": 0.0, "warmup_steps": 0}}
    fed = Fed(sides.training, ClientContext("alice", config=config, log=lambda _: None))
    model = nn.Linear(2, 2)
    fed.attach(model)
    optimizer = fed.optimizer(model, optimizer="adamw", learning_rate=0.5)
    scheduler = fed.scheduler(optimizer)
    assert fed.progress is None
    assert optimizer.param_groups[0]["lr"] == 0.5
    sides.training.clock.announced(RunPosition(0, 0, True, 0.85, 0.0, 1.0, 0.7))
    optimizer.step()
    scheduler.step()
    assert fed.progress == 0.85
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.25, 0.25])
