"""A parameter server may die between any two effects of a global round."""

from collections import Counter

import pytest
from crash_point import OF_GROUPS, Point, Points, Scheduler, carried_out

from fsl_async.nodes.ps.groups import GroupsShell
from fsl_async.tools.sim.groups_simulation import GroupsSimulation
from fsl_async.tools.sim.settings import SimulationSettings

SETTINGS = SimulationSettings(1, hours=0.17, seed=5, faults="none", every_s=30.0, groups=2)


def play(point=None):
    """Run two groups with crash points around the effects of global rounds.

    Returns the points and the simulation.
    """
    run, points = GroupsSimulation(SETTINGS), Points(point)
    run.world.scheduler.__class__ = Scheduler  # it goes on after a kill in an effect
    for group in run.groups:

        def prepare(*process, group=group, inner=group._prepare):
            inner(*process)
            role = "coordinator" if group.config.leads else "member"
            points.watch(group.shell.node, role, group._server_is_dead)
            points.watch(process[1].node, "ps", group._server_is_dead, OF_GROUPS)

        group._prepare = prepare
    run.run()
    return points, run


@pytest.fixture(scope="module")
def passed():
    """Return the points of a run without a crash."""
    points, run = play()
    assert run.violations == []
    assert len(run.global_rounds.decisions) >= 2
    return points.all()


def test_every_effect_of_a_global_round_has_crash_points(passed):
    """A new effect that neither the run nor one with a killed member reaches must fail here."""
    wanted = carried_out(GroupsShell)
    assert len(wanted) > 6
    points, _ = play(Point("member", "start_reduction", "after"))
    seen = {(point.name, point.stage) for point in [*passed, *points.all()]}
    of_ps = {(point.name, point.stage) for point in passed if point.role == "ps"}
    assert of_ps == {(name, stage) for name in OF_GROUPS for stage in ("before", "after")}
    assert {(name, stage) for name in wanted for stage in ("before", "after")} - seen == set()


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.sweep) for part in range(1, 5))]
)
def test_groups_go_on_from_any_effect_of_a_global_round(passed, part):
    """No delta is lost or doubled, and all groups hold the same global weights at the end.

    Points of the last round are not tried: a member that dies in it comes back when the others have
    gone, and trains on alone.
    """
    times = Counter((point.role, point.name, point.stage) for point in passed)
    for stage in ("before", "after"):
        assert times.pop(("member", "end_group", stage)) == 1
    assert {role for role, _, _ in times} == {"coordinator", "member", "ps"}
    for number, (place, most) in enumerate(times.items()):
        if number % 5 != part:  # in turn before and after an effect
            continue
        point = Point(*place, 1 + number % max(1, most // 2))
        points, run = play(point)
        assert points.fired, point
        assert run.violations == [], point
        assert len(run.global_rounds.decisions) >= 2, point
