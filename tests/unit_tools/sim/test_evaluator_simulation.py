"""An evaluator in simulated runs by rounds: it works, is late, dies, lies, and stops no run."""

import math

import numpy as np
import pytest
from attrs import evolve
from storms import STORM, simulated

from fsl_async.learn.client.ports import Harm, ScoreOrder
from fsl_async.learn.client.probes import EvaluatorExchange
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.evaluator import EvaluatorMachine
from fsl_async.tools.sim import tune_simulation
from fsl_async.tools.sim.training import WatchedExchange
from fsl_async.tools.sim.tune_simulation import AdapterTraining, TuneSimulation

JUDGE = "judge"
GRACE_S = 20.0
HARM = Harm(0.1, 0.01)
WORSE = evolve(
    STORM,
    client_kill_every_s=300.0,
    partition_every_s=600.0,
    partition_s=(10.0, 60.0),
    server_kill_every_s=400.0,
)


class JudgeExchange(WatchedExchange, EvaluatorExchange):
    """The exchange of an evaluator."""


class Judge(AdapterTraining):
    """Scores deltas by the sum of squares, and answers `late_s` after it was asked."""

    exchange_type = JudgeExchange
    late_s = 0.0

    def ask(self, order):
        """Answer a question `late_s` later."""
        if not isinstance(order, ScoreOrder):
            super().ask(order)
        elif math.isfinite(self.late_s):
            at = self._clock.time() + self.late_s
            self._clock.call_at(at, lambda: order.answer(self.loss, HARM))

    def loss(self, vector):
        """Measure a vector."""
        return float(np.square(vector, dtype=np.float64).sum())


class Hangs(Judge):
    """Never answers a question."""

    late_s = math.inf


class Late(Judge):
    """Answers after the wait."""

    late_s = 1.5 * GRACE_S


class Liar(Judge):
    """Finds any numbers."""

    def loss(self, vector):
        """See `Judge.loss`."""
        return self._chance.choice([1e-30, 1.0, 1e9, math.nan, -5.0])


class Judged(TuneSimulation):
    """A run with an evaluator, whose deltas are compared as in other runs."""

    judge = Judge
    scores = 0

    def __init__(self, *given):
        super().__init__(*given)
        self.names.append(JUDGE)

    def _client(self, name, incarnation):
        return EvaluatorMachine(name, incarnation) if name == JUDGE else super()._client(
            name, incarnation
        )  # fmt: skip

    def _training(self, launch):
        if launch.name != JUDGE:
            return super()._training(launch)
        return self.judge(
            launch.clock, launch.feed, step_s=1.0, chance=launch.chance, fails=0.0
        )  # fmt: skip

    def _after_server(self, machine, event, effects):
        super()._after_server(machine, event, effects)
        self.scores += event.topic is msg.Score
        member = machine.members.get(JUDGE)
        assert member is None or not member.trains
        assert machine.round is None or JUDGE not in machine.round.asked

    def refused(self):
        """The refused and all scored deltas of each version, from the ledger."""
        records = self.invariants.store.records
        return [
            ([one for one in record.merged if one.is_refused],
             [one for one in record.merged if one.score])
            for record in records
        ]  # fmt: skip


@pytest.fixture
def play(monkeypatch):
    """Play a run with an evaluator of a kind; returns it."""

    def played(kind, rule="fedit", *, faults="none", hours=0.1, seed=1, **more):
        wanted = [f"tune.rule={rule}", f"guard.evaluator={JUDGE}", "tune.rank=2",
                  f"guard.evaluator_grace_s={GRACE_S}", *tune_simulation.EXACT]  # fmt: skip
        given = [f"guard.{name}={value}" for name, value in more.items()]
        monkeypatch.setitem(tune_simulation.SETTINGS, "lora", ["tune.method=lora", *wanted, *given])
        monkeypatch.setattr(Judged, "judge", kind)
        return simulated(Judged, "lora", faults, seed=seed, hours=hours, clients=4)

    return played


def test_a_run_is_judged_to_its_end(play):
    """Each delta has a score, in the ledger too, and the run ends in order."""
    run = play(Judge, "flexlora")
    assert run.violations == []
    assert run.scores > 20
    (_, scored), *_ = reversed(run.refused())
    assert {one.key.client for one in scored} == {name for name in run.names if name != JUDGE}
    assert {one.score.by for one in scored} == {JUDGE}


@pytest.mark.parametrize("kind", [Hangs, Late, Liar])
def test_an_evaluator_that_hangs_is_late_or_lies_stops_no_run(play, kind):
    """Versions follow each other, at most one wait slower, and half of each round counts."""
    run = play(kind, "flexlora")
    assert run.violations == []
    versions = len(run.lineage.weights)
    assert versions > (10 if kind is not Late else 5)
    for refused, scored in run.refused():
        assert 2 * len(refused) <= len(scored)
    if kind is Liar:
        assert any(refused for refused, _ in run.refused())
    else:
        assert not any(scored for _, scored in run.refused())


def test_a_storm_with_an_evaluator_breaks_no_invariant(play):
    """It dies, loses its session, and the parameter server dies while it waits."""
    run = play(Judge, "flexlora", faults=WORSE, hours=0.4, evaluator_alone=0.0)
    assert run.violations == []
    assert {"client killed", "server killed", "connection reset"} <= set(run.counts.kinds)
    assert run.scores > 20
    assert any(refused for refused, _ in run.refused())
