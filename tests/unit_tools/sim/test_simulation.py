"""The simulator: complete runs with production code, and proof that its invariants can fail."""

import functools
import json
from collections import Counter

import pytest
from attrs import evolve
from buffered import K, buffered_by_clock
from click.testing import CliRunner

from fsl_async.commands import sim as sim_command
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.deltas import DeltaBook
from fsl_async.roles.sync.run_end import RunEnd
from fsl_async.roles.sync.triggers import TRIGGERS
from fsl_async.tools.sim import counting
from fsl_async.tools.sim.counting import CountingLearner, CountingStore
from fsl_async.tools.sim.faults import PROFILES
from fsl_async.tools.sim.report import report
from fsl_async.tools.sim.simulation import Simulation, SimulationSettings


def simulate(**changes):
    """Run a small simulation and return it."""
    settings = {"clients": 6, "hours": 3.0, "seed": 1, "faults": "storm", "every_s": 60.0}
    simulation = Simulation(SimulationSettings(**{**settings, **changes}))
    simulation.run()
    return simulation


@functools.cache
def storm(seed):
    """A storm that several tests use."""
    return simulate(seed=seed)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (0, *range(2, 20)))]
)
def test_a_storm_breaks_no_invariant(seed):
    """For several seeds, with faults that were injected."""
    simulation = storm(seed)
    assert simulation.invariants.violations == []
    assert simulation.counts.relaunches > 3
    assert simulation.network.counts["dropped"] > 0
    assert len(simulation.disk.models) > 150
    assert simulation.participation.share > 0.8


@pytest.mark.parametrize("pace", ["speed", "own", "time"])
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 12))]
)
def test_clients_that_send_by_themselves(pace, seed):
    """No round is called, no client waits in a step, and the books are exact."""
    simulation = simulate(clients=4, hours=0.2, seed=seed, pace=pace)
    assert simulation.invariants.violations == []
    assert simulation.participation.called <= 4, "the last round only"
    assert len(simulation.disk.merged) > len(simulation.disk.models) > 5


@pytest.fixture
def often_killed(monkeypatch):
    """A storm that kills processes far more often than in any profile."""
    worse = evolve(
        PROFILES["storm"], server_kill_every_s=300.0, server_return_s=(1.0, 5.0),
        client_kill_every_s=900.0,
    )  # fmt: skip
    monkeypatch.setitem(PROFILES, "storm", worse)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 12))]
)
def test_versions_that_use_deltas_again(often_killed, seed):
    """Through kills of the parameter server: each other client's newest one, and books are exact.

    The store of the simulation knows by itself what is due.
    """
    simulation = simulate(hours=0.5, seed=seed, pace="own", latest=True)
    assert simulation.invariants.violations == []
    assert simulation.counts.kinds["server killed"] > 2
    assert simulation.disk.reuses > len(simulation.disk.models) > 20
    assert simulation.disk.most_reused <= 5
    facts = report(simulation, 1.0, "")
    assert facts.deltas_reused == simulation.disk.reuses
    assert facts.deltas_doubled == facts.deltas_lost == 0


@pytest.mark.parametrize("forgets", ["recovered", "_remember"])
def test_a_use_that_is_missing_is_noticed(monkeypatch, often_killed, forgets):
    """The check of the test above can fail."""
    monkeypatch.setattr(DeltaBook, forgets, lambda *_: None)
    simulation = simulate(hours=0.5, pace="own", latest=True)
    assert "newest deltas are used again" in simulation.invariants.violations[0]


def test_a_client_that_waits_in_a_step_is_noticed(monkeypatch):
    """The check of the test above can fail."""
    take = CountingLearner.request_snapshot
    monkeypatch.setattr(
        CountingLearner,
        "request_snapshot",
        lambda self, sequence, hold=False: take(self, sequence, hold=True),
    )
    simulation = simulate(clients=2, hours=0.2, pace="steps")
    assert "waits in a step" in simulation.invariants.violations[0]


def test_servers_that_die_every_few_minutes_lose_nothing(monkeypatch):
    """A server is killed far more often than in any profile, mostly within a round."""
    from fsl_async.tools.sim import simulation as module

    worse = module.PROFILES["storm"].__class__(
        server_kill_every_s=90.0, server_return_s=(1.0, 5.0), client_kill_every_s=600.0, drop=0.02
    )
    monkeypatch.setitem(module.PROFILES, "storm", worse)
    simulation = simulate(hours=1.0, every_s=20.0)
    assert simulation.invariants.violations == []
    assert simulation.counts.kinds["server killed"] > 20
    assert len(simulation.disk.models) > 100
    # A round of 20 s is shorter than a checkpoint: only late ones are waited for.
    assert 5 < simulation.disk.checkpoints < len(simulation.disk.models) / 2
    assert simulation.disk.replayed > 20


def test_buffered_merging_breaks_no_invariant(monkeypatch):
    """A trigger made of other parts drives complete runs in a storm."""
    monkeypatch.setitem(TRIGGERS, "clock", buffered_by_clock)
    simulation = simulate(hours=2.0)
    assert simulation.invariants.violations == []
    assert simulation.counts.relaunches > 0
    sizes = list(Counter(simulation.disk.merged.values()).values())
    assert len(sizes) > 100
    assert sum(size >= K for size in sizes) > 0.9 * len(sizes)
    assert simulation.participation.share < 0.5, "no round waits for all"


def test_a_server_that_never_runs_for_a_period_still_makes_versions(monkeypatch):
    """The schedule continues over restarts instead of waiting a full period after each."""
    from fsl_async.tools.sim import simulation as module

    profile = module.PROFILES["none"].__class__(
        server_kill_every_s=200.0, server_return_s=(5.0, 5.0)
    )
    monkeypatch.setitem(module.PROFILES, "storm", profile)
    simulation = simulate(hours=6.0, every_s=600.0)
    assert simulation.invariants.violations == []
    assert simulation.counts.kinds["server killed"] > 50
    assert len(simulation.disk.models) > 12  # of 36; with a whole period after each start about 5


def test_without_faults_almost_every_client_takes_part():
    """A fault-free run loses nothing; a long step may miss the grace window, and its delta is
    merged a round later.
    """
    simulation = simulate(hours=1.0, faults="none")
    assert simulation.counts.faults == 0
    assert simulation.participation.share > 0.99
    assert len(simulation.disk.merged) >= 6 * (len(simulation.disk.models) - 1) - 6


@pytest.mark.parametrize("faults", ["none", "storm"])
def test_at_the_end_nothing_is_left_over(faults):
    """Every trained step is in the last version, and every client holds it."""
    simulation = simulate(hours=0.5, faults=faults)
    assert simulation.invariants.violations == []
    assert simulation.invariants.tokens_unsent == 0
    learners = [simulation._ended[name] for name in simulation.names]
    assert all(learner.model == simulation.disk.models[-1] for learner in learners)
    assert simulation.disk.pending == {}


@pytest.mark.parametrize("without", ["hold", "last round"])
def test_the_end_can_fail(monkeypatch, without):
    """The check above finds a defect."""
    if without == "hold":
        original = CountingLearner.request_snapshot
        deaf = lambda self, sequence, **_: original(self, sequence)  # noqa: E731
        monkeypatch.setattr(CountingLearner, "request_snapshot", deaf)
    else:
        at_once = lambda self, reason, now: (self.begin(reason, now), self.finish())[1]  # noqa: E731
        monkeypatch.setattr(RunEnd, "drain", at_once)
    simulation = simulate(hours=0.5, faults="none")
    assert simulation.invariants.violations or simulation.invariants.tokens_unsent > 0


def test_the_same_seed_gives_the_same_trace():
    """A storm that found a defect can be repeated."""
    one, same, other = (simulate(hours=0.5, seed=seed) for seed in (1, 1, 2))
    assert one.counts.faults > 3
    assert one.trace.hexdigest() == same.trace.hexdigest()
    assert one.trace.hexdigest() != other.trace.hexdigest()


def _forget_acknowledged(monkeypatch):
    original = CountingStore.spool_finish

    def finish(self, key):
        result = original(self, key)
        if key.sequence == 3:
            del self.disk.pending[key]
        return result

    monkeypatch.setattr(CountingStore, "spool_finish", finish)


def _merge_again(monkeypatch):
    original = CountingStore.advance

    def advance(self, average):
        if self.disk.merged and average.version % 7 == 0:
            again = next(iter(self.disk.merged))
            self.disk.models[-1] = type(self.disk.models[-1])(
                self.disk.models[-1].version,
                self.disk.models[-1].total + 1000 * len(again.client),
                self.disk.models[-1].digest,
            )
        return original(self, average)

    monkeypatch.setattr(CountingStore, "advance", advance)


def _prune_early(monkeypatch):
    """Forget a merged delta before a checkpoint holds it."""
    original = CountingStore.advance
    monkeypatch.setattr(counting, "CHECKPOINT_S", 500.0)

    def advance(self, average):
        made = original(self, average)
        if self.disk.spool:
            self.disk.spool.popitem()
        return made

    monkeypatch.setattr(CountingStore, "advance", advance)


def _acknowledge_early(monkeypatch):
    monkeypatch.setattr(DeltaBook, "is_acknowledged", lambda self, key: True)


def _recompute(monkeypatch):
    original = ClientMachine._offer

    def offer(self):
        if self.delta is not None:
            self.delta = evolve(self.delta, tokens=self.delta.tokens + 1)
        return original(self)

    monkeypatch.setattr(ClientMachine, "_offer", offer)


def _skip_a_version(monkeypatch):
    original = CountingLearner.finish_fetch

    def finish(self, version):
        original(self, version)
        self.base = type(self.base)(version, self.base.total + 1, self.base.digest)
        return self.base.digest

    monkeypatch.setattr(CountingLearner, "finish_fetch", finish)


def _forget_sent_work(monkeypatch):
    original = ClientMachine._snapshotted

    def snapshotted(self, event, now):
        effects = original(self, event, now)
        if event.sequence == 4:
            self.delta = None
        return effects

    monkeypatch.setattr(ClientMachine, "_snapshotted", snapshotted)


@pytest.mark.parametrize(
    "defect",
    [
        _forget_acknowledged,
        _merge_again,
        _prune_early,
        _acknowledge_early,
        _recompute,
        _skip_a_version,
        _forget_sent_work,
    ],
)
def test_a_defect_is_found(defect, monkeypatch):
    """Each injected defect violates an invariant."""
    defect(monkeypatch)
    assert simulate(seed=2).invariants.violations, "with a server that is killed"


def test_the_command_prints_the_documented_object():
    """Scripts read these keys: the demo's and the simulator's own."""
    arguments = ["--clients", "2", "--hours", "0.5", "--seed", "4", "--faults", "mild", "--json"]
    result = CliRunner().invoke(sim_command.command, arguments, standalone_mode=False)
    assert result.return_value == 0, result.output
    printed = json.loads(result.output.splitlines()[-1])
    demo = (
        "rounds clients tokens loss_first loss_last eval_loss bytes_raw bytes_sent ratio "
        "relaunches deltas_merged"
    )
    demo += " deltas_lost deltas_doubled participation seconds run_dir"
    own = "virtual_hours events faults invariant_violations trace_sha256"
    assert set(f"{demo} {own}".split()) <= set(printed)
    assert printed["rounds"] >= 2
    assert printed["invariant_violations"] == 0


def test_the_journal_of_a_simulation_can_be_kept(tmp_path):
    """To inspect the run of a seed."""
    journal = tmp_path / "journal.jsonl"
    arguments = ["--clients", "2", "--hours", "0.5", "--journal", str(journal)]
    result = CliRunner().invoke(sim_command.command, arguments, standalone_mode=False)
    assert result.return_value == 0, result.output
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert {"event", "effect"} == {line["kind"] for line in lines}
    by_number = {line["n"]: line for line in lines}
    caused = [line for line in lines if line["cause"] is not None]
    assert caused
    assert all(by_number[line["cause"]]["kind"] != line["kind"] for line in caused)
