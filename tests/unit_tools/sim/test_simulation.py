"""The simulator: complete runs with production code, and proof that its invariants can fail."""

import json

import pytest
from attrs import evolve
from click.testing import CliRunner
from defects import defect, double_weights

from fsl_async.commands import sim as sim_command
from fsl_async.files.memory_files import MemoryFiles
from fsl_async.learn.client.exchange import Exchange
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.deltas import Deltas
from fsl_async.store.commit.newest import Newest
from fsl_async.store.deltas.spool import Spool
from fsl_async.store.store import Store
from fsl_async.tools.sim.settings import PROFILES, FaultProfile, SimulationSettings
from fsl_async.tools.sim.simulation import Simulation
from fsl_async.tools.sim.training import VirtualTraining


def simulate(**changes):
    """Run a small simulation and return it."""
    settings = {"clients": 6, "hours": 3.0, "seed": 1, "faults": "storm", "every_s": 60.0}
    simulation = Simulation(SimulationSettings(**{**settings, **changes}))
    simulation.run()
    return simulation


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (0, *range(2, 20)))]
)
def test_a_storm_breaks_no_invariant(seed):
    """For several seeds, with faults that were injected."""
    simulation = simulate(hours=0.6, seed=seed)
    assert simulation.violations == []
    assert simulation.counts.relaunches > 2 or seed != 1  # not every seed has as many
    assert simulation.network.counts["dropped"] > 0
    assert simulation.invariants.lineage.version > 30
    assert simulation.counts.participation > 0.8


@pytest.mark.parametrize("pace", ["speed", "own", "time"])
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 12))]
)
def test_clients_that_send_by_themselves(pace, seed):
    """No round is called, no client waits in a step, and the books are exact."""
    simulation = simulate(clients=4, hours=0.2, seed=seed, pace=pace)
    assert simulation.violations == []
    assert simulation.counts.called <= 4, "the last round only"
    lineage = simulation.invariants.lineage
    assert len(lineage.merged) > lineage.version > 5


OFTEN_KILLED = evolve(
    PROFILES["storm"], server_kill_every_s=300.0, server_return_s=(1.0, 5.0),
    client_kill_every_s=900.0,
)  # fmt: skip


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 12))]
)
def test_versions_that_use_deltas_again(seed):
    """Through kills of the parameter server: each other client's newest one, and sums are exact."""
    simulation = simulate(hours=0.5, seed=seed, faults=OFTEN_KILLED, pace="own", latest=True)
    assert simulation.violations == []
    assert simulation.counts.kinds["server killed"] > 2
    lineage = simulation.invariants.lineage
    assert lineage.uses_again > lineage.version > 20
    assert lineage.most_uses_again <= 5
    facts = simulation.report(1.0, "")
    assert facts["deltas_reused"] == lineage.uses_again
    assert facts["deltas_doubled"] == facts["deltas_lost"] == 0


def test_servers_that_die_every_few_minutes_lose_nothing(monkeypatch):
    """A server is killed mostly within a round. A checkpoint is written some time after its
    version, so most starts make versions again.
    """
    made, make_again = [], Newest._make_again

    def count(self, checkpoint, *arguments):
        made.append(checkpoint.record.version)
        return make_again(self, checkpoint, *arguments)

    monkeypatch.setattr(Newest, "_make_again", count)
    worse = FaultProfile(
        server_kill_every_s=90.0, server_return_s=(1.0, 5.0), client_kill_every_s=600.0, drop=0.02
    )
    simulation = simulate(hours=0.25, every_s=20.0, faults=worse)
    assert simulation.violations == []
    assert simulation.counts.kinds["server killed"] > 7
    assert simulation.invariants.lineage.version > 40
    assert len(made) > 5


def test_a_server_that_never_runs_for_a_period_still_makes_versions():
    """The schedule continues over restarts instead of waiting a full period after each."""
    faults = FaultProfile(server_kill_every_s=200.0, server_return_s=(5.0, 5.0))
    simulation = simulate(clients=3, hours=3.0, every_s=600.0, faults=faults)
    assert simulation.violations == []
    assert simulation.counts.kinds["server killed"] > 25
    # Of 18; with a whole period after each start about 3.
    assert simulation.invariants.lineage.version > 9


@pytest.mark.parametrize("faults", ["none", "storm"])
def test_at_the_end_nothing_is_left_over(faults):
    """Every trained step is in the last version, and every client holds it. Without faults almost
    every client takes part: a long step may miss the grace window, and its delta is merged a round
    later.
    """
    simulation = simulate(hours=0.5, faults=faults)
    assert simulation.violations == []
    assert simulation.invariants.tokens_unsent == 0
    lineage = simulation.invariants.lineage
    ended = [simulation._ended[name].exchange.version for name in simulation.names]
    assert set(ended) == {lineage.version}
    if faults == "none":
        assert simulation.counts.faults == 0
        assert simulation.counts.participation > 0.99
        assert len(lineage.merged) >= 6 * lineage.version - 6


@defect(Store, "spool_finish")
def _forget_acknowledged(original, self, key):
    result = original(self, key)
    if key.sequence == 3:
        del self._open.run.book.pending[key]
    return result


# The spooled deltas of a version are removed before a checkpoint holds it.
_prune_early = defect(Spool, "retire")(lambda original, self, keep: original(self, ()))
_sync_nothing = defect(MemoryFiles, "sync")(lambda *_: None)
_acknowledge_early = defect(Deltas, "is_acknowledged")(lambda _, self, key: True)


@defect(ClientMachine, "_offer")
def _recompute(original, self):
    if self.delta is not None:
        self.delta = evolve(self.delta, tokens=self.delta.tokens + 1)
    return original(self)


@defect(Exchange, "finish_fetch")
def _skip_a_version(original, self, version):
    digest = original(self, version)
    self._base = self._base + 1
    return digest


@defect(VirtualTraining, "_rebase")
def _lose_steps(original, self, order):
    self.values[0] -= self.unit
    original(self, order)


@defect(ClientMachine, "_snapshotted")
def _forget_sent_work(original, self, event, now):
    effects = original(self, event, now)
    if event.sequence == 4:
        self.delta = None
    return effects


@pytest.mark.sweep
@pytest.mark.parametrize(
    "defect",
    [
        _forget_acknowledged,
        double_weights,
        _prune_early,
        _sync_nothing,
        _lose_steps,
        _acknowledge_early,
        _recompute,
        _skip_a_version,
        _forget_sent_work,
    ],
)
def test_a_defect_is_found(defect, monkeypatch):
    """Each injected defect violates an invariant."""
    defect(monkeypatch)
    worse = evolve(PROFILES["storm"], server_kill_every_s=600.0, power_cuts=1.0)
    assert simulate(seed=2, faults=worse).violations, "with a server that is killed"


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
    assert {"event", "effect", "fact"} == {line["kind"] for line in lines}
    by_number = {line["n"]: line for line in lines}
    caused = [line for line in lines if line["cause"] is not None]
    assert caused
    assert all(by_number[line["cause"]]["kind"] != line["kind"] for line in caused)


@pytest.mark.parametrize("pace", ["time", "steps", "speed", "own"])
def test_newest_deltas_are_used_again_at_each_pace(pace):
    """All but `own` ended with a bug report."""
    simulation = simulate(clients=3, hours=0.1, pace=pace, latest=True)
    assert simulation.violations == []
    assert simulation.invariants.lineage.version > 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--split other", "'other' is not one of 'sl', 'splitfed-v1'"),
        ("--tune full", "'full' is not one of 'lora', 'zeroth'"),
        ("--pace other", "'other' is not one of 'called', 'time'"),
        ("--tune lora --split sl", "--split and --tune are both set"),
        ("--pace time --split sl", "--pace is for pretraining"),
        ("--groups 2 --tune lora", "--groups is for pretraining"),
        ("--groups 2 --pace time", "leave out --pace time"),
        ("--latest", "add --pace own"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments, text):
    """In one line, before anything is simulated."""
    result = CliRunner().invoke(sim_command.command, arguments.split(), standalone_mode=False)
    assert text in str(result.exception)
