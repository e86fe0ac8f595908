"""Split learning in the simulator: complete runs with production machines."""

import pytest

from fsl_async.config.settings_training import SplitConfig
from fsl_async.roles.split.methods import METHODS, names_of
from fsl_async.tools.sim.settings import FaultProfile, SimulationSettings
from fsl_async.tools.sim.split_simulation import SplitSimulation
from fsl_async.tools.sim.split_training import STEPS

WORSE = FaultProfile(
    server_kill_every_s=150.0,
    server_return_s=(1.0, 5.0),
    client_kill_every_s=300.0,
    client_return_s=(1.0, 20.0),
    reset_every_s=60.0,
    partition_every_s=600.0,
    partition_s=(5.0, 60.0),
    drop=0.02,
    duplicate=0.01,
    reorder=0.02,
    delay_s=0.6,
    jitter_s=0.4,
)
"""Worse than any week: everything is killed every few minutes, a connection is reset every minute,
and a second away."""


def run(method, *, clients=3, hours=0.15, seed=2, faults=WORSE, lockstep=False, **rules):
    """Run a small simulation and return it."""
    settings = SimulationSettings(clients, hours, seed, faults, every_s=60.0)
    rules = {"upload_every": 3, "align_every": 2, **rules}
    simulation = SplitSimulation(
        settings, SplitConfig(method=method, mode="lockstep" if lockstep else "free", **rules)
    )
    simulation.run()
    return simulation


USUAL = [("splitfed-v1", False), ("fsl-sage", False), ("splitfed-v2", True), ("fsl-sage", True)]


@pytest.mark.parametrize(
    ("method", "lockstep"),
    [
        pytest.param(
            method, lockstep, marks=() if (method, lockstep) in USUAL else pytest.mark.sweep
        )
        for method in METHODS
        for lockstep in (False, True)
    ],
)
def test_a_storm_breaks_no_invariant(method, lockstep):
    """Any client, the split server or the parameter server is killed at any point, and the run goes
    on correctly.
    """
    simulation = run(method, lockstep=lockstep, hours=0.2 if lockstep else 0.15)
    assert simulation.violations == []
    assert simulation.invariants.lineage.version > 3
    if METHODS[method].has_server:
        assert simulation.counts.kinds["split server killed"] >= 2
        assert simulation.counts.kinds["split server asked to end"] >= 2
        assert simulation.facts()["uploads"]["dropped"] > 0


def test_a_storm_over_a_u_shape():
    """Two legs a step: the second finds the first, or is given up."""
    simulation = run("splitfed-v2", labels_at_home=True)
    assert simulation.violations == []
    assert any(key.leg for key in simulation.lineage.order)


@pytest.mark.parametrize("method", names_of(lambda method: method.has_server))
def test_lockstep_is_the_computation_in_one_process(method):
    """Without faults: clients by shard, each with all its uploads, round after round.

    Nothing is lost, and bytes are counted once.
    """
    simulation = run(method, faults="none", hours=0.08, lockstep=True)
    assert simulation.violations == []
    shard = {name: shell.facts.shard for name, shell in simulation.split_clients.items()}
    rounds = {}
    for key in simulation.lineage.order:
        rounds.setdefault(key.round, []).append((shard[key.client], key.step))
    steps = [step for step in range(STEPS) if simulation.method.uploads_at(step)]
    whole = [rounds[number] for number in sorted(rounds)][:-1]  # the last round was cut off
    assert len(whole) > 3
    for number, trained in enumerate(whole):
        turn = [number % 3] if simulation.method.sequential else range(3)
        assert trained == [(client, step) for client in turn for step in steps]
    assert simulation.client_traffic.payload == simulation.server_traffic.payload
    assert simulation.client_traffic.errors() == dict.fromkeys(
        simulation.client_traffic.errors(), 0.0
    )
    assert set(simulation.facts()["uploads"]) == {"trained"}


@pytest.mark.parametrize(
    "method", [pytest.param("splitfed-v1", marks=pytest.mark.sweep), "fsl-sage"]
)
def test_free_mode_loses_nothing_without_faults(method):
    """Every client takes part in every round, and alignments are made during training."""
    simulation = run(method, faults="none", hours=0.1)
    assert simulation.violations == []
    lineage = simulation.invariants.lineage
    assert lineage.version > 4
    assert len(lineage.merged) >= 3 * lineage.version - 6  # the first round and the last one
    trainings = [training.split for training in simulation.trainings.values()]
    assert sum(training._run.meter.left_out for training in trainings) <= 3 * 2
    if method == "fsl-sage":
        assert all(training.installed > 2 for training in trainings)
