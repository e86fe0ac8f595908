"""Fine-tuning without rounds in the simulator: sites of unequal speed send when they like."""

import functools
from collections import Counter

import numpy as np
import pytest
from storms import STORM

from fsl_async.roles.sync import events as ev
from fsl_async.tools.sim.settings import SimulationSettings
from fsl_async.tools.sim.simulation import Simulation
from fsl_async.tools.sim.training import VirtualTraining
from fsl_async.tools.sim.tune_simulation import ADAPTERS

RATES = (8, 8, 2, 2, 1, 1)
STEPS = 10
"""Steps at most from one delta of the fastest sites to the next."""


class AnarchicTuning(Simulation):
    """Sites tune adapters by a mean of factors, and send at the rates above."""

    def __init__(self, faults, *settings, seed=1, hours=1.0):
        chosen = SimulationSettings(len(RATES), hours, seed, faults, 60.0, pace="own")
        tuned = ("tune.method=lora", "tune.rule=fedit", "tune.rank=2", "codec.up=fp32")
        super().__init__(
            chosen,
            config=chosen.config("sync.trigger=buffer", "sync.buffer=2", *tuned, *settings),
        )
        self.manifest = self.invariants.lineage.manifest = ADAPTERS
        self.invariants.lineage.__attrs_post_init__()
        self.weights, self.deltas = Counter(), Counter()

    def _training(self, launch):
        most = STEPS * max(RATES) // RATES[self.names.index(launch.name)]
        return VirtualTraining(
            launch.clock,
            launch.feed,
            step_s=launch.step_s(),
            initial=np.array([launch.chance.gauss(0.0, 1.0) for _ in range(ADAPTERS.values)]),
            unit=launch.chance.uniform(0.5, 1.5),
            manifest=ADAPTERS,
            own_pace=functools.partial(launch.chance.randint, 1, most),
        )

    def _after_server(self, machine, event, effects):
        for effect in effects:
            if effect.tag == "commit":
                self.weights.update(machine.deltas.weights(effect.scale))
                self.deltas.update(one.key.client for one in effect.merged)
        if isinstance(event, ev.VersionCommitted | ev.Recovered):
            kept = self.invariants.store.run.book.arrivals
            assert list(machine.deltas._arrivals) == list(kept), "a restart weighs as before"
        super()._after_server(machine, event, effects)

    def of_equal(self, counts):
        """Each site's share of something, in equal shares."""
        return [len(RATES) * counts[name] / counts.total() for name in self.names]


@pytest.mark.parametrize(
    "weighing",
    [
        ("outer.aggregation=latest", "sync.weighting=auto"),
        ("sync.weighting=arrivals",),
    ],
)
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 8))]
)
def test_sites_that_send_seldom_have_their_weight_through_a_storm(weighing, seed):
    """Clients and parameter server are killed; no delta is lost or doubled."""
    simulation = AnarchicTuning(STORM, *weighing, seed=seed)
    simulation.run()
    assert simulation.violations == []
    found = simulation.report(1.0, "")
    assert found["deltas_lost"] == found["deltas_doubled"] == 0
    assert {"client killed", "server killed"} <= set(simulation.counts.kinds)
    assert simulation.invariants.lineage.version > 150
    arrivals, weights = map(simulation.of_equal, (simulation.deltas, simulation.weights))
    assert max(arrivals) > 1.7
    assert min(arrivals) < 0.4
    assert min(weights) > 1 / 1.5
    assert max(weights) < 1.5


def test_where_each_delta_counts_the_fast_sites_have_the_weight():
    """Also with AFA-CD, which weighs mean steps."""
    for weighting in ("uniform", "anarchic"):
        simulation = AnarchicTuning("none", f"sync.weighting={weighting}", hours=0.3)
        simulation.run()
        assert simulation.violations == []
        assert max(simulation.of_equal(simulation.weights)) > 1.7
