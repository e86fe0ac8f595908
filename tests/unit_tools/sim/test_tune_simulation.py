"""Tuning by rounds in the simulator: complete runs."""

import pytest

from fsl_async.tools.sim.settings import FaultProfile, SimulationSettings
from fsl_async.tools.sim.tune_simulation import MODES, TuneSimulation

WORSE = FaultProfile(
    client_kill_every_s=1200.0,
    client_return_s=(5.0, 60.0),
    reset_every_s=600.0,
    partition_every_s=1200.0,
    partition_s=(10.0, 200.0),
    server_kill_every_s=300.0,
    server_return_s=(2.0, 20.0),
    disk_full_every_s=300.0,
    disk_kills=0.5,
    power_cuts=0.5,
    jitter_s=0.3,
    drop=0.005,
    duplicate=0.003,
    reorder=0.01,
)
"""Links are cut for longer than the history lasts, and processes die every few minutes."""
SHORT_S, LONG_S = 12.0, 3600.0
"""Caps of a round. Many clients need longer than the short one; a client that hangs for the long
one is found."""


def run(mode, every_s, *, faults=WORSE, seed=1, hours=0.25, clients=6):
    """Run a small simulation and return it."""
    settings = SimulationSettings(clients, hours, seed, faults, every_s)
    simulation = TuneSimulation(settings, mode)
    simulation.run()
    return simulation


@pytest.mark.parametrize("every_s", [SHORT_S, LONG_S])
@pytest.mark.parametrize("mode", MODES)
def test_a_storm_breaks_no_invariant(mode, every_s):
    """What makes these runs special has happened in them."""
    simulation = run(mode, every_s)
    assert simulation.violations == []
    assert {"client killed", "server killed", "partition"} <= set(simulation.counts.kinds)
    facts = simulation.facts()
    assert facts["full_fetches"] > 6
    if every_s == SHORT_S:
        assert facts["late"] > 0
        assert facts["stale"] > 30
    if mode == "zeroth":
        assert facts["quarantined"] > 1
        assert facts["replays"] > 100


@pytest.mark.parametrize("mode", MODES)
def test_without_faults_every_client_takes_part(mode):
    """Only rounds in which a client trains nothing are without it."""
    simulation = run(mode, 60.0, faults="none", hours=0.1)
    assert simulation.violations == []
    assert simulation.counts.participation > 0.97
    facts = simulation.facts()
    assert facts["late"] == facts["stale"] == facts["quarantined"] == 0
    assert facts["full_fetches"] == 5, "all but the first client, when they join"
