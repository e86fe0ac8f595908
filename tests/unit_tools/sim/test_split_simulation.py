"""Split learning in the simulator.

Complete runs with production machines, and proof that the invariants can fail.
"""

import attrs
import pytest
from defects import defect

from fsl_async.config.settings_training import SplitConfig
from fsl_async.learn.split.model_parts import Optimizer, ServerPart
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.roles.machine import SERVER, Note, Send
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.client import SplitClientMachine
from fsl_async.roles.split.methods import METHODS, names_of
from fsl_async.roles.split.server import SplitServerMachine
from fsl_async.roles.split.server_state import Checkpoints, Peer, SplitShutdown
from fsl_async.tools.sim.settings import FaultProfile, SimulationSettings
from fsl_async.tools.sim.split_simulation import SplitSimulation
from fsl_async.tools.sim.split_training import STEPS, CheckedTraining

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


@defect(Peer, "refusal")
def _train_again(original, self, key, in_flight):
    found = original(self, key, in_flight)
    return None if found is not None and found.code == "known" else found


def _train_out_of_order(monkeypatch):
    def ready(self):
        found = [key for key, each in self.uploads.items() if each.received and not each.queued]
        for key in found:
            self.uploads[key].queued = True
        return found

    monkeypatch.setattr(Peer, "ready", ready)


def _forget_the_book(monkeypatch):
    original = Checkpoints.due
    stale = []

    def due(self, book):
        stale.append(book())
        return original(self, lambda: stale[-3] if len(stale) > 40 else stale[-1])

    monkeypatch.setattr(Checkpoints, "due", due)


def _give_numbers_twice(monkeypatch):
    recovered, hello = SplitServerMachine._recovered, SplitClientMachine.hello
    monkeypatch.setattr(
        SplitServerMachine, "_recovered",
        lambda self, event, now: recovered(self, attrs.evolve(event, auxiliary_seen={}), now),
    )  # fmt: skip
    monkeypatch.setattr(
        SplitClientMachine, "hello", lambda *given: attrs.evolve(hello(*given), auxiliary=-1)
    )


_average_late = defect(SplitServerMachine, "_average")(lambda _, self, number: None)


def _keep_every_answer(monkeypatch):
    monkeypatch.setattr(SplitServerMachine, "_answer_sent", lambda self, event, now: [])
    original = SplitServerMachine._answer

    def answer(self, peer, event):
        effects = original(self, peer, event)
        return [each for each in effects if each.tag != "drop_answer"]

    monkeypatch.setattr(SplitServerMachine, "_answer", answer)


@defect(SplitClientMachine, "_settle")
def _settle_twice(original, self, sent, settlement, now):
    effects = original(self, sent, settlement, now)
    return effects + [each for each in effects if each.tag == "settle_upload"]


def _keep_everything(monkeypatch):
    original = SplitClientMachine._settle

    def settle(self, *arguments):
        with monkeypatch.context() as keeping:
            keeping.setattr("fsl_async.roles.split.client.RETAIN", 10)
            return original(self, *arguments)

    monkeypatch.setattr(SplitClientMachine, "_settle", settle)
    monkeypatch.setattr(SplitClientMachine, "_durable", lambda self, event, now: [])


def _say_nothing_of_alignments(monkeypatch):
    monkeypatch.setattr(SplitServerMachine, "_stays", lambda self, peer, offer: [])
    monkeypatch.setattr(SplitServerMachine, "_send_auxiliary", lambda self, peer: Note("nothing"))
    monkeypatch.setattr(SplitClientMachine, "_keep_auxiliary", lambda self: [])


@defect(SplitServerMachine, "_decline")
def _decline_without_a_line(original, self, peer, refusal):
    effects = original(self, peer, refusal)
    return [each for each in effects if each.tag != "record_upload"]


def _send_a_model_of_another_lineage(monkeypatch):
    original = CheckedTraining.auxiliary
    kept = []

    def auxiliary(self, client):
        kept.append(original(self, client))
        return kept[0]

    monkeypatch.setattr(CheckedTraining, "auxiliary", auxiliary)


@defect(ServerPart, "step")
def _train_twice(original, self, smashed, *, wants_gradient):
    original(self, smashed, wants_gradient=False)
    return original(self, smashed, wants_gradient=wants_gradient)


_lose_moments = defect(Optimizer, "load")(lambda _, self, state: None)
_lose_checkpoints = defect(ServerDisk, "stage")(lambda *_: lambda: None)


def _send_a_message_of_the_server(monkeypatch):
    ended = [Send(SERVER, msg.Ended("a client"))]
    monkeypatch.setattr(SplitClientMachine, "_report_done", lambda self: ended)


def _end_the_run_when_asked(monkeypatch):
    monkeypatch.setattr(SplitShutdown, "leaves", False)


_leave_without_a_checkpoint = defect(Checkpoints, "request")(lambda _, self: None)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("method", "defect"),
    [
        ("fsl-sage", _end_the_run_when_asked),
        ("fsl-sage", _leave_without_a_checkpoint),
        ("fsl-sage", _send_a_model_of_another_lineage),
        ("splitfed-v2", _train_twice),
        ("splitfed-v2", _lose_moments),
        ("cse-fsl", _lose_checkpoints),
        ("cse-fsl", _send_a_message_of_the_server),
        ("splitfed-v2", _train_again),
        ("splitfed-v2", _train_out_of_order),
        ("cse-fsl", _forget_the_book),
        ("fsl-sage", _give_numbers_twice),
        ("splitfed-v1", _average_late),
        ("splitfed-v2", _keep_every_answer),
        ("splitfed-v2", _settle_twice),
        ("cse-fsl", _keep_everything),
        ("splitfed-v1", _decline_without_a_line),
    ],
)
def test_a_defect_is_found(method, defect, monkeypatch):
    """Each injected defect violates an invariant. Some need a rare event, so more storms."""
    defect(monkeypatch)
    assert any(run(method, hours=0.2, seed=seed).violations for seed in (6, 3, 1))


def test_a_client_that_waits_for_ever_is_seen(monkeypatch):
    """A hang breaks no invariant by itself; fewer rounds show it."""
    healthy = run("fsl-sage", faults="none", lockstep=True)
    _say_nothing_of_alignments(monkeypatch)
    hung = run("fsl-sage", faults="none", lockstep=True)
    versions = [run.invariants.lineage.version + 1 for run in (hung, healthy)]
    assert versions[0] < versions[1] / 2
