"""Complete simulated runs with secure sums: processes die, links break, disks fill."""

import importlib.util

import pytest
from attrs import evolve
from secure_simulation import SecureSimulation
from storms import STORM, simulated

from fsl_async.roles.sync import messages as msg

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
    if seed in {2, 7, 26}:
        assert {"client killed", "server killed"} <= set(simulation.counts.kinds)
        assert simulation.asked_again > 0


def test_a_site_that_lies_reveals_nothing_and_stops_no_run():
    """It voids rounds, or is left out of the set; in the end the others still hold versions."""
    simulation = simulated(SecureSimulation, "secure", "none", hours=0.5, liar="c0000")
    assert simulation.violations == []
    assert simulation.audit.problems() == []
    assert simulation.lineage.version > 3


class Garbage(SecureSimulation):
    """A run with a site that seals random bytes, and does all else as it should."""

    def lies(self, message, chance):
        """See `SecureSites.lies`."""
        if type(message) is not msg.SecureShares:
            return [message]
        return [evolve(message, shares=[[one, chance.randbytes(148)] for one, _ in message.shares])]


def test_a_site_that_seals_garbage_voids_no_round():
    """It is named and left out, and each round opens the sum of the others."""
    simulation = simulated(Garbage, "secure", "none", hours=0.2, liar="c0000")
    assert simulation.violations == []
    assert simulation.audit.problems() == []
    assert simulation.audit.opened == simulation.lineage.version > 8
    named = [note for note in simulation.lines if "shares that c0000 sealed" in str(note)]
    assert len(named) > 0.9 * simulation.lineage.version
    assert not any("no sum" in str(note) for note in simulation.lines)
