"""`demo lora`: how records are dealt, what runs, when it ends, what it prints."""

from collections import Counter

import attrs
import pytest

from fsl_async.commands import demo
from fsl_async.config.load import load, resolved
from fsl_async.errors import DataError, StopError, UsageError
from fsl_async.observe.clients import ClientState
from fsl_async.observe.ledger_audit import Audit
from fsl_async.process.stopper import Stopper
from fsl_async.tools.chaos.report import Recovery
from fsl_async.tools.demo import lora
from fsl_async.tools.demo.lora import lines, problems_of, summarize
from fsl_async.tools.demo.scenario import Choices, Played, Stage, overrides

AUDIT = Audit(4, 6, 600, 6, 0, 0, (), (), ())
NAMES = ["client-1", "client-2", "client-3"]
MEASURED = {
    "base": 4.0,
    "federated": 3.25,
    "client-1": 3.5,
    "client-2": 3.75,
    "client-3": 3.625,
    "pooled": 3.0,
}
WORK = {name: Counter(deltas=2, steps=20, tokens=200, bytes=300) for name in NAMES}


@pytest.fixture
def chosen(tmp_path):
    """Three clients and four rounds."""
    return Choices(rounds=4, clients=3, seed=5, run_dir=tmp_path / "run")


@pytest.fixture
def played(chosen, monkeypatch):
    """A demo in which all went well."""
    monkeypatch.setattr(lora, "work_of", lambda _: WORK)
    found = Played(lora.lora(chosen))
    found.faults = [Recovery("kill", "client-2", 10.0, detected=13.0, resumed=14.0, back=20.0)]
    found.state.ps.version, found.state.ps.values, found.audit = 4, 100, AUDIT
    return found


def summary_of(played, measured=MEASURED, *, is_unchanged=True):
    return summarize(played, measured, is_unchanged=is_unchanged)


# --- data ---


@pytest.mark.parametrize("sites", [1, 2, 3, 7, 64])
def test_each_record_goes_to_one_site_and_each_site_gets_some(sites):
    """A topic at two sites would be on both sides of the test; a site without any cannot train."""
    found = lora.topic_records(sites)
    topics = lora.python_topics().values()
    wanted = Counter(record for topic in topics for record in lora.records_of(topic))
    assert sum(map(Counter, found), Counter()) == wanted
    assert len(found) == sites
    assert all(found)


def test_too_few_topics_are_an_error(monkeypatch):
    """One line instead of a site without data."""
    monkeypatch.setattr(lora, "python_topics", lambda: {"a": "text", "b": "text"})
    with pytest.raises(DataError, match="2 topics cannot be dealt to 3 clients"):
        lora.topic_records(3)


# --- the run ---


def test_the_run_is_configured_as_asked(chosen):
    """The options must reach the run as settings."""
    made = lora.lora(attrs.evolve(chosen, rule="ffa", rank=4))
    config = resolved(load(None, overrides(made.settings)))
    assert (config.tune.method, config.tune.rule, config.tune.adapter_rank) == ("lora", "ffa", 4)
    assert (config.sync.trigger, config.tune.steps, config.run.seed) == ("rounds", 4, 5)


def test_a_site_lets_adapters_out_and_nothing_else_of_its_model(chosen):
    """The demo shows that texts and base stay at home."""
    argv = lora.lora(chosen).clients[1].child(address="tcp://127.0.0.1:5").argv
    assert argv[argv.index("--allow") + 1] == "adapters,metrics"
    assert argv[argv.index("--data") + 1] == str(chosen.run_dir / "sites" / "client-2.jsonl")
    assert argv[argv.index("--base") + 1] == str(chosen.run_dir / "base")
    own = lora.lora(attrs.evolve(chosen, base="/models/own")).servers[0]
    assert own.options[:2] == ("--base", "/models/own")


def test_the_run_ends_when_the_killed_client_trains_again(chosen):
    """Rounds alone would end a fast run before the client is back."""
    made = lora.lora(chosen)
    run, (fault,) = Played(made), made.faults
    ps, victim = run.state.ps, ClientState(name="client-2", connected=True, version=1)
    run.state.clients["client-2"] = victim
    assert not fault.when(run)
    ps.version = 1
    assert fault.when(run)
    victim.connected = False
    assert not fault.when(run)
    ps.version = 9
    assert not made.is_over(run)
    run.faults.append(Recovery("kill", "client-2", 5.0))
    assert not made.is_over(run)
    run.faults[0].back, run.faults[0].back_version = 8.0, 9
    assert not made.is_over(run)
    ps.version = 10
    assert made.is_over(run)


def test_a_failure_after_the_run_is_a_problem_and_an_end_is_none(played, monkeypatch):
    """The run itself was good, and its result must be shown; Ctrl-C is not a result."""
    stage = Stage(print, Stopper())

    def measure(*_):
        stage.check()
        raise DataError("no memory")

    monkeypatch.setattr(lora, "measured", measure)
    monkeypatch.setattr(lora, "digest_of", lambda _: "d")
    found = played.scenario.conclude(played, stage)
    assert found.problems[0] == "no memory"
    stage.stop.request()
    with pytest.raises(StopError):
        played.scenario.conclude(played, stage)


# --- the result ---


def test_a_good_demo_has_no_problems(played):
    """A demo that passed must have exit code 0."""
    summary = summary_of(played)
    assert problems_of(played, summary) == []
    found = [summary[name] for name in ("loss_alone", "bytes_up", "bytes_up_fp32", "rank")]
    assert found == [3.625, 150, 400, 8]
    shown = "\n".join(lines(played, summary))
    assert "0 lost, 0 merged twice" in shown
    assert "base's files: unchanged" in shown


@pytest.mark.parametrize(
    ("records", "is_unchanged", "text"),
    [
        (MEASURED, False, "files have changed"),
        (MEASURED | {"federated": 4.0}, True, "not below the base's 4.000"),
        ({"base": 4.0}, True, "not all models were measured"),
    ],
)
def test_a_wrong_result_is_reported(played, records, is_unchanged, text):
    """The exit code stands for the losses and the base too."""
    summary = summary_of(played, records, is_unchanged=is_unchanged)
    found = problems_of(played, summary)
    assert len(found) == 1
    assert text in found[0]


def test_too_few_rounds_and_lost_deltas_are_reported(played):
    """As in the other demos."""
    played.state.ps.version, played.faults = 3, []
    played.audit = attrs.evolve(AUDIT, lost=("a/1/0/1",))
    killed, lost, rounds = problems_of(played, summary_of(played))
    assert "was not killed" in killed
    assert "is lost: a/1/0/1" in lost
    assert "3 of 4 rounds" in rounds


def test_options_of_other_demos_are_refused():
    """One text is not one of several, and a GPT has no base."""
    for options, text in ((["--base", "."], "--base"), (["--data", ".", "--data", "."], "--data")):
        with pytest.raises(UsageError, match=text):
            demo.command.main(options, standalone_mode=False)
