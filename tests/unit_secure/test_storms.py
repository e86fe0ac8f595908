"""Complete simulated runs with secure sums: processes die, links break, disks fill."""

import importlib.util

import pytest
from secure_simulation import SecureSimulation
from storms import STORM, simulated

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("cryptography"), reason="needs the extra secure"
)


@pytest.mark.parametrize("mode", ["secure", "secure zeroth"])
def test_without_faults_each_round_opens_the_sum_of_all(mode):
    simulation = simulated(SecureSimulation, mode, "none", hours=0.1)
    assert simulation.violations == []
    assert simulation.audit.problems() == []
    assert simulation.counts.participation > 0.97
    assert simulation.audit.opened == simulation.lineage.version > 10


@pytest.mark.parametrize("mode", ["secure", "secure zeroth"])
@pytest.mark.parametrize(
    "seed", [2, 7, 26, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(20, 70))]
)
def test_a_storm_breaks_no_invariant_and_reveals_no_delta(mode, seed):
    simulation = simulated(SecureSimulation, mode, STORM, seed=seed)
    assert simulation.violations == []
    assert simulation.audit.problems() == []
    assert simulation.lineage.version > 3
    assert {"client killed", "server killed"} <= set(simulation.counts.kinds)
    if seed in {2, 7, 26}:
        assert simulation.asked_again > 0


def test_a_site_that_lies_reveals_nothing_and_stops_no_run():
    """It voids rounds, or is left out of the set; in the end the others still hold versions."""
    simulation = simulated(SecureSimulation, "secure", "none", hours=0.5, liar="c0000")
    assert simulation.violations == []
    assert simulation.audit.problems() == []
    assert simulation.lineage.version > 3
