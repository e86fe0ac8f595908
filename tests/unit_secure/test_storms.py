"""Complete simulated runs with secure sums: processes die, links break, disks fill."""

import importlib.util

import pytest
from secure_simulation import SecureSimulation

from fsl_async.tools.sim.settings import FaultProfile, SimulationSettings

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("cryptography"), reason="needs the extra secure"
)
STORM = FaultProfile(
    client_kill_every_s=900.0,
    client_return_s=(5.0, 60.0),
    reset_every_s=300.0,
    partition_every_s=900.0,
    partition_s=(10.0, 200.0),
    server_kill_every_s=200.0,
    server_return_s=(2.0, 20.0),
    disk_full_every_s=600.0,
    disk_kills=0.5,
    power_cuts=0.5,
    jitter_s=0.3,
    drop=0.005,
    duplicate=0.003,
    reorder=0.01,
)


def run(mode, faults, *, seed=1, hours=0.25, clients=5, every_s=60.0, liar=""):
    settings = SimulationSettings(clients, hours, seed, faults, every_s)
    simulation = SecureSimulation(settings, mode, liar=liar)
    simulation.run()
    return simulation


@pytest.mark.parametrize("mode", ["secure", "secure zeroth"])
def test_without_faults_each_round_opens_the_sum_of_all(mode):
    simulation = run(mode, "none", hours=0.1)
    assert simulation.violations == []
    assert simulation.audit.problems() == []
    assert simulation.counts.participation > 0.97
    assert simulation.audit.opened == simulation.lineage.version > 10


@pytest.mark.parametrize("mode", ["secure", "secure zeroth"])
@pytest.mark.parametrize(
    "seed", [2, 7, 26, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(20, 70))]
)
def test_a_storm_breaks_no_invariant_and_reveals_no_delta(mode, seed):
    simulation = run(mode, STORM, seed=seed)
    assert simulation.violations == []
    assert simulation.audit.problems() == []
    assert simulation.lineage.version > 3
    assert {"client killed", "server killed"} <= set(simulation.counts.kinds)
    if seed in {2, 7, 26}:
        assert simulation.asked_again > 0


def test_a_site_that_lies_reveals_nothing_and_stops_no_run():
    """It voids rounds, or is left out of the set; in the end the others still hold versions."""
    simulation = run("secure", "none", clients=5, hours=0.5, liar="c0000")
    assert simulation.violations == []
    assert simulation.audit.problems() == []
    assert simulation.lineage.version > 3
