"""Groups in the simulator: complete runs."""

import pytest

from fsl_async.tools.sim.groups_simulation import GroupsSimulation
from fsl_async.tools.sim.settings import FaultProfile, SimulationSettings


def simulate(**changes):
    """Run a small simulation of groups and return it."""
    settings = {"clients": 2, "groups": 3, "hours": 1.0, "seed": 1, "every_s": 30.0}
    simulation = GroupsSimulation(SimulationSettings(**{**settings, **changes}))
    simulation.run()
    return simulation


WORSE = FaultProfile(
    client_kill_every_s=3600.0,
    server_kill_every_s=1200.0,
    server_return_s=(2.0, 20.0),
    server_pause_every_s=1800.0,
    server_pause_s=(2.0, 120.0),
    group_cut_every_s=600.0,
    partition_s=(5.0, 200.0),
    reduction_fails=0.4,
    reduction_differs=0.1,
    disk_full_every_s=300.0,
    disk_kills=0.5,
    power_cuts=0.5,
    jitter_s=0.1,
    drop=0.01,
    duplicate=0.005,
    reorder=0.01,
)
"""Some fault in most global rounds: few go well at once."""


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 60))]
)
def test_tokens_are_in_one_decided_round_whatever_fails(seed):
    """The checks of `GroupsInvariants` and those of each group, with every kind of fault."""
    simulation = simulate(seed=seed, faults=WORSE)
    assert simulation.violations == []
    found = simulation.facts()
    assert found["global_rounds"] > 3
    assert found["attempts_failed"] > 3
    if seed != 1:  # not every seed has every kind of fault
        return
    assert found["reductions_mixed"] > 0
    assert found["adopted_late"] > 0
    kinds = simulation.counts.kinds
    for kind in (
        "server killed",
        "power cut",
        "disk full",
        "server stopped for a while",
        "partition between parameter servers",
    ):
        assert kinds[kind] > 0, kind


@pytest.mark.sweep
def test_a_day_of_twenty_groups_of_twenty_clients():
    """The promised one: in a storm, a sync in ten minutes."""
    simulation = simulate(groups=20, clients=20, hours=24.0, every_s=600.0)
    assert simulation.violations == []
    found = simulation.facts()
    assert found["global_rounds"] > 18
    assert found["reductions_mixed"] > 0


def test_without_faults_all_groups_take_part_in_each_round():
    """No attempt fails, and merges are held for a reduction only."""
    simulation = simulate(faults="none", hours=0.5)
    assert simulation.violations == []
    found = simulation.facts()
    assert found["attempts_failed"] == 0
    assert found["members_per_round"] == 3.0
    assert found["global_rounds"] >= 8
    assert found["longest_held_s"] < 75.0
    assert found["adopted"] == 3 * found["global_rounds"]
