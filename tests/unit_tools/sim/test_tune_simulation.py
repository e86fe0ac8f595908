"""Tuning by rounds in the simulator: complete runs, and proof that the invariants can fail."""

import pytest
from attrs import evolve
from defects import defect

from fsl_async.learn.client.fetching import Replay
from fsl_async.nodes.ps.serving import Serving as ShellServing
from fsl_async.roles.sync.deltas import Deltas
from fsl_async.roles.sync.effects import SendVersion
from fsl_async.roles.sync.version_serving import Serving
from fsl_async.roles.sync.version_sync import VersionSync
from fsl_async.store.merge.merge_products import ProductsMerge
from fsl_async.store.merge.merge_rows import by_client
from fsl_async.store.rules.adapters import FlexLoRA
from fsl_async.store.rules.adapters.base import AdapterRule
from fsl_async.store.store import Store
from fsl_async.tools.sim.settings import FaultProfile, SimulationSettings
from fsl_async.tools.sim.tune_simulation import MODES, TuneSimulation
from fsl_codecs import decode_seeds, encode_seeds

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
        assert facts["late"] > 3
        assert facts["stale"] > 30
    if mode == "zeroth":
        assert facts["quarantined"] > 1
        assert facts["replays"] > 100


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("every_s", [8.0, 14.0, LONG_S])
@pytest.mark.parametrize("mode", MODES)
def test_many_storms_break_no_invariant(mode, every_s, seed):
    assert run(mode, every_s, seed=seed, hours=0.5, clients=8).violations == []


@pytest.mark.parametrize("mode", MODES)
def test_without_faults_every_client_takes_part(mode):
    """Only rounds in which a client trains nothing are without it."""
    simulation = run(mode, 60.0, faults="none", hours=0.1)
    assert simulation.violations == []
    assert simulation.counts.participation > 0.97
    facts = simulation.facts()
    assert facts["late"] == facts["stale"] == facts["quarantined"] == 0
    assert facts["full_fetches"] == 5, "all but the first client, when they join"


@defect(Deltas, "__init__")
def _no_base(original, self, *arguments, one_base, **options):
    original(self, *arguments, **options)


def _weigh_late(monkeypatch):
    _no_base(monkeypatch)
    monkeypatch.setattr(ProductsMerge, "_fresh", lambda _, weights, version: by_client(weights))


def _average_factors(monkeypatch):
    monkeypatch.setattr(FlexLoRA, "merge", AdapterRule.merge)


def _version_of_late(monkeypatch):
    monkeypatch.setattr(Deltas, "fresh", property(lambda self: len(self.pending)))


_keep_versions = defect(ShellServing, "caught_up")(lambda _, self, peer: None)


@defect(VersionSync, "receive")
def _take_during_a_replay(original, self, *given, **_):
    return original(self, *given, here=False)


@defect(Serving, "announce_to")
def _leave_a_fetch_unanswered(original, self, peer, now):
    held = max(self.members[peer].version, self.members[peer].sent)
    effects = original(self, peer, now)
    if isinstance(effects[0], SendVersion):
        self._pushed[peer] = self.version, held
    return effects


def _replay_one_step_more(monkeypatch):
    read, init = Store.read_seeds, Replay.__init__

    def start(self, *arguments, since, **options):
        init(self, *arguments, since=max(0, since - 1), **options)

    def read_seeds(self, since, version):
        return read(self, max(0, since - 1), version)

    monkeypatch.setattr(Store, "read_seeds", read_seeds)
    monkeypatch.setattr(Replay, "__init__", start)


@defect(Store, "read_seeds")
def _lose_a_step(original, self, since, version):
    frame = original(self, since, version)
    if version - since == 2 and frame is not None:
        found = decode_seeds(frame)
        found.scalars[0] = 0.0
        return encode_seeds(found.first, found.scalars)
    return frame


def _forget_quarantine(monkeypatch):
    original = Store.spool_finish
    monkeypatch.setattr(
        Store, "spool_finish", lambda self, key: evolve(original(self, key), problem=None)
    )


@defect(VersionSync, "later")
def _decline_silently(original, self, now, pause_s):
    original(self, now, pause_s)
    self.deadlines.cancel("fetch")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("defect", "mode", "every_s", "seed"),
    [
        (_weigh_late, "lora", SHORT_S, 1),
        (_average_factors, "lora", LONG_S, 1),
        (_no_base, "zeroth", SHORT_S, 1),
        (_version_of_late, "lora", SHORT_S, 1),
        (_keep_versions, "zeroth", LONG_S, 1),
        (_take_during_a_replay, "zeroth", SHORT_S, 2),
        (_leave_a_fetch_unanswered, "zeroth", LONG_S, 4),
        (_replay_one_step_more, "zeroth", SHORT_S, 1),
        (_lose_a_step, "zeroth", SHORT_S, 1),
        (_forget_quarantine, "zeroth", LONG_S, 2),
        (_decline_silently, "zeroth", LONG_S, 4),
    ],
)
def test_a_defect_is_found(defect, mode, every_s, seed, monkeypatch):
    """Each injected defect violates an invariant."""
    defect(monkeypatch)
    assert run(mode, every_s, seed=seed).violations
