"""The simulator: complete runs with production code, and proof that its invariants can fail."""

import json

import pytest
from attrs import evolve
from click.testing import CliRunner

from fsl_async.commands import sim as sim_command
from fsl_async.files.memory_files import MemoryFiles
from fsl_async.learn.client.exchange import Exchange
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.deltas import Deltas
from fsl_async.store.commit.newest import Newest
from fsl_async.store.deltas.spool import Spool
from fsl_async.store.store import Store
from fsl_async.store.vectors import vectors
from fsl_async.tools.sim.settings import PROFILES, SimulationSettings
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
    simulation = simulate(hours=1.0, seed=seed)
    assert simulation.violations == []
    assert simulation.counts.relaunches > 2
    assert simulation.network.counts["dropped"] > 0
    assert simulation.invariants.lineage.version > 50
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
    """Through kills of the parameter server: each other client's newest one, and sums are exact."""
    simulation = simulate(hours=0.5, seed=seed, pace="own", latest=True)
    assert simulation.violations == []
    assert simulation.counts.kinds["server killed"] > 2
    lineage = simulation.invariants.lineage
    assert lineage.uses_again > lineage.version > 20
    assert lineage.most_uses_again <= 5
    facts = simulation.report(1.0, "")
    assert facts["deltas_reused"] == lineage.uses_again
    assert facts["deltas_doubled"] == facts["deltas_lost"] == 0


def test_servers_that_die_every_few_minutes_lose_nothing(monkeypatch):
    """A server is killed far more often than in any profile, mostly within a round."""
    from fsl_async.tools.sim import settings as module

    worse = module.PROFILES["storm"].__class__(
        server_kill_every_s=90.0, server_return_s=(1.0, 5.0), client_kill_every_s=600.0, drop=0.02
    )
    monkeypatch.setitem(module.PROFILES, "storm", worse)
    simulation = simulate(hours=0.4, every_s=20.0)
    assert simulation.violations == []
    assert simulation.counts.kinds["server killed"] > 7
    assert simulation.invariants.lineage.version > 40


def test_starts_make_versions_again(monkeypatch):
    """A checkpoint is written some time after its version, so most kills come before it."""
    made = []
    make_again = Newest._make_again

    def count(self, checkpoint, *arguments):
        made.append(checkpoint.record.version)
        return make_again(self, checkpoint, *arguments)

    monkeypatch.setattr(Newest, "_make_again", count)
    worse = evolve(PROFILES["storm"], server_kill_every_s=200.0, server_return_s=(1.0, 5.0))
    monkeypatch.setitem(PROFILES, "storm", worse)
    assert simulate(hours=0.25, every_s=20.0).violations == []
    assert len(made) > 5


def test_a_server_that_never_runs_for_a_period_still_makes_versions(monkeypatch):
    """The schedule continues over restarts instead of waiting a full period after each."""
    from fsl_async.tools.sim import settings as module

    profile = module.PROFILES["none"].__class__(
        server_kill_every_s=200.0, server_return_s=(5.0, 5.0)
    )
    monkeypatch.setitem(module.PROFILES, "storm", profile)
    simulation = simulate(clients=3, hours=6.0, every_s=600.0)
    assert simulation.violations == []
    assert simulation.counts.kinds["server killed"] > 50
    # Of 36; with a whole period after each start about 5.
    assert simulation.invariants.lineage.version > 12


def test_without_faults_almost_every_client_takes_part():
    """A fault-free run loses nothing; a long step may miss the grace window, and its delta is
    merged a round later.
    """
    simulation = simulate(hours=1.0, faults="none")
    assert simulation.counts.faults == 0
    assert simulation.counts.participation > 0.99
    lineage = simulation.invariants.lineage
    assert len(lineage.merged) >= 6 * lineage.version - 6


@pytest.mark.parametrize("faults", ["none", "storm"])
def test_at_the_end_nothing_is_left_over(faults):
    """Every trained step is in the last version, and every client holds it."""
    simulation = simulate(hours=0.5, faults=faults)
    assert simulation.violations == []
    assert simulation.invariants.tokens_unsent == 0
    ended = [simulation._ended[name].exchange.version for name in simulation.names]
    assert set(ended) == {simulation.invariants.lineage.version}


def _forget_acknowledged(monkeypatch):
    original = Store.spool_finish

    def finish(self, key):
        result = original(self, key)
        if key.sequence == 3:
            del self._open.run.book.pending[key]
        return result

    monkeypatch.setattr(Store, "spool_finish", finish)


def _apply_twice(monkeypatch):
    decode = vectors.decode_into

    def twice(frame, out):
        count = decode(frame, out)
        out *= 2
        return count

    monkeypatch.setattr(vectors, "decode_into", twice)


def _prune_early(monkeypatch):
    """Remove the spooled deltas of a version before a checkpoint holds it."""
    retire = Spool.retire
    monkeypatch.setattr(Spool, "retire", lambda self, keep: retire(self, ()))


def _sync_nothing(monkeypatch):
    monkeypatch.setattr(MemoryFiles, "sync", lambda *_: None)


def _acknowledge_early(monkeypatch):
    monkeypatch.setattr(Deltas, "is_acknowledged", lambda self, key: True)


def _recompute(monkeypatch):
    original = ClientMachine._offer

    def offer(self):
        if self.delta is not None:
            self.delta = evolve(self.delta, tokens=self.delta.tokens + 1)
        return original(self)

    monkeypatch.setattr(ClientMachine, "_offer", offer)


def _skip_a_version(monkeypatch):
    original = Exchange.finish_fetch

    def finish(self, version):
        digest = original(self, version)
        self._base = self._base + 1
        return digest

    monkeypatch.setattr(Exchange, "finish_fetch", finish)


def _lose_steps(monkeypatch):
    original = VirtualTraining._rebase

    def rebase(self, order):
        self.values[0] -= self.unit
        original(self, order)

    monkeypatch.setattr(VirtualTraining, "_rebase", rebase)


def _forget_sent_work(monkeypatch):
    original = ClientMachine._snapshotted

    def snapshotted(self, event, now):
        effects = original(self, event, now)
        if event.sequence == 4:
            self.delta = None
        return effects

    monkeypatch.setattr(ClientMachine, "_snapshotted", snapshotted)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "defect",
    [
        _forget_acknowledged,
        _apply_twice,
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
    monkeypatch.setitem(PROFILES, "storm", worse)
    assert simulate(seed=2).violations, "with a server that is killed"


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
