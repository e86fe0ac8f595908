"""Tuning by rounds in the simulator: complete runs."""

import pytest
from attrs import evolve
from storms import STORM, simulated

from fsl_async.tools.sim.tune_simulation import MODES, TuneSimulation

WORSE = evolve(
    STORM,
    client_kill_every_s=1200.0,
    reset_every_s=600.0,
    partition_every_s=1200.0,
    server_kill_every_s=300.0,
    disk_full_every_s=300.0,
)
"""Links are cut for longer than the history lasts, and processes die every few minutes."""
SHORT_S, LONG_S = 12.0, 3600.0
"""Caps of a round. Many clients need longer than the short one; a client that hangs for the long
one is found."""


@pytest.mark.parametrize("every_s", [SHORT_S, LONG_S])
@pytest.mark.parametrize("mode", MODES)
def test_a_storm_breaks_no_invariant(mode, every_s):
    """What makes these runs special has happened in them."""
    simulation = simulated(TuneSimulation, mode, WORSE, clients=6, every_s=every_s)
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
    simulation = simulated(TuneSimulation, mode, "none", hours=0.1, clients=6)
    assert simulation.violations == []
    assert simulation.counts.participation > 0.97
    facts = simulation.facts()
    assert facts["late"] == facts["stale"] == facts["quarantined"] == 0
    assert facts["full_fetches"] == 5, "all but the first client, when they join"
