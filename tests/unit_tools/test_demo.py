"""`fsl-node demo` without its processes: settings, checks, summary, errors."""

import json
import tempfile

import attrs
import pytest

from fsl_async import cli
from fsl_async.cluster.supervisor import ChildExited
from fsl_async.config.load import load
from fsl_async.errors import UsageError
from fsl_async.observe.ledger_audit import Audit
from fsl_async.process.stopper import Stopper
from fsl_async.tools.chaos.report import Recovery
from fsl_async.tools.demo.pretrain import pretrain, problems_of
from fsl_async.tools.demo.runner import Runner, make_run_dir
from fsl_async.tools.demo.scenario import Choices, Played, Stage, overrides


@pytest.fixture
def chosen(tmp_path):
    return Choices(format="e5m2", every_s=4.0, seed=3, run_dir=tmp_path)


def demo_of(chosen, victim=(13.0, 16.0, 18.0, 19.0), audit=None, **changes):
    """A demo that is over, at version 7. victim: when it was killed, missed, back, up to date."""
    made = Played(pretrain(chosen), begun=100.0, **changes)
    made.audit = AUDIT if audit is None else audit
    made.state.ps.version, made.state.ps.digest, made.state.ps.tokens = 7, "d7", 500
    begun, *times = (None if at is None else 100.0 + at for at in victim)
    if begun is not None:
        detected, resumed, back = times
        made.faults = [
            Recovery("kill", "client-2", begun, detected=detected, resumed=resumed, back=back)
        ]
    return made


AUDIT = Audit(7, 20, 500, 20, 0, 0, (), (), ())
EVALUATED = (7, "d7", 2.5)


def test_the_run_is_configured_as_asked(chosen):
    """The options must reach the run as settings."""
    config = load(None, overrides(pretrain(chosen).settings))
    assert (config.sync.every_s, config.sync.clients, config.shards) == (4.0, 3, 3)
    assert (config.codec.up, config.codec.down, config.run.seed) == ("e5m2", "e5m2", 3)
    assert (config.train.threads, config.model.preset) == (1, "0.5m")


def test_a_good_demo_has_no_problems(chosen):
    """A demo that passed must have exit code 0."""
    assert problems_of(demo_of(chosen), EVALUATED) == []


@pytest.mark.parametrize(
    ("victim", "faults", "text"),
    [
        ((None,), [], "was not killed"),
        ((13.0, None, None, None), [], "did not detect"),
        ((13.0, 16.0, 18.0, None), [], "did not catch up"),
        ((13.0, 16.0, 18.0, 19.0), ["client-1 ended"], "client-1 ended"),
        ((None,), ["client-2 ended: no disk"], "no disk"),
    ],
)
def test_each_missing_event_is_reported(chosen, victim, faults, text):
    """A demo without one of its events must not pass."""
    found = problems_of(demo_of(chosen, victim, problems=faults), EVALUATED)
    assert len(found) == 1
    assert text in found[0]


@pytest.mark.parametrize(
    ("audit", "evaluated", "text"),
    [
        (attrs.evolve(AUDIT, lost=("a/1/0/1",)), EVALUATED, "is lost: a/1/0/1"),
        (attrs.evolve(AUDIT, doubled=("a/1/0/1",)), EVALUATED, "merged twice: a/1/0/1"),
        (attrs.evolve(AUDIT, tokens=499), EVALUATED, "499 merged tokens"),
        (AUDIT, None, "no checkpoint"),
        (AUDIT, (6, "d6", 2.5), "last checkpoint is version 6"),
        (AUDIT, (7, "dx", 2.5), "last checkpoint is version 7"),
    ],
)
def test_each_failed_check_is_reported(chosen, audit, evaluated, text):
    """Each check must fail on its own fault."""
    found = problems_of(demo_of(chosen, audit=audit), evaluated)
    assert len(found) == 1
    assert text in found[0]


def test_no_round_is_a_failure(chosen):
    """Started processes without a merged round must not pass."""
    played = demo_of(chosen, audit=attrs.evolve(AUDIT, tokens=0))
    played.state.ps.version = played.state.ps.tokens = 0
    found = problems_of(played, (0, "d7", 5.0))
    assert found == ["no round was merged; give it more --seconds"]


def test_run_directories(tmp_path, monkeypatch):
    """Two demos in one second must get two directories, and an old run must be kept."""
    monkeypatch.chdir(tmp_path)
    first, second = (make_run_dir(None, print) for _ in range(2))
    assert first != second
    assert first.parent.name == "runs"
    assert first.is_dir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "ledger.jsonl").touch()
    with pytest.raises(UsageError, match="holds a run already"):
        make_run_dir(tmp_path / "old", print)


def test_a_temporary_directory_is_the_fallback(tmp_path, monkeypatch):
    """A demo must run from a read-only checkout."""
    (tmp_path / "runs").write_text("in the way")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(tmp_path / prefix))
    assert make_run_dir(None, print) == tmp_path / "fsl-demo-"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data", "/no/such/file"],
        ["--clients", "0"],
        ["--preset", "a b"],
        ["--format", "int8"],
        ["--seconds", "1"],
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(arguments, capsys, tmp_path, monkeypatch):
    """Bad input must be an error before any process is launched or directory is made."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])
    assert err.startswith("error: ")


def runner_of(chosen, show=lambda *_: None):
    return Runner(pretrain(chosen), Stage(print, Stopper()), show)


def exited(name, code, error="", relaunch_in_s=None):
    return ChildExited(name, code, 1.0, relaunch_in_s, f"exit code {code}", error)


def test_a_server_that_is_killed_at_the_end_is_a_problem(chosen):
    """Its last round is lost, and clients may have ended without it."""
    one = runner_of(chosen)
    one._ending = True
    one._changed(exited("client-1", -9))
    assert not one.played.problems
    one._changed(exited("server", -9))
    (problem,) = one.played.problems
    assert problem == ("the parameter server did not end after the last round, and was killed")


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (exited("client-1", 2, "no such data"), 2),
        (exited("server", 1, "a bug"), 1),
        (exited("server", -9), 1),
        (exited("client-1", -9, relaunch_in_s=1.0), None),
        (exited("client-1", 0), None),
        (exited("client-1", 1, "a bug", relaunch_in_s=1.0), None),
    ],
)
def test_what_an_end_of_a_node_means(chosen, end, code):
    """A new launch cures neither bad input nor a lost server; a client's crash is news."""
    one = runner_of(chosen)
    one._changed(end)
    assert (one._refused and one._refused.exit_code) == code
    assert bool(one._deaths) is (end.error == "a bug" and end.name == "client-1")
    assert one.played.lost == []


def test_a_time_too_short_for_torch_is_one_problem(chosen):
    """A list of missing events would hide the one reason."""
    (line,) = problems_of(Played(pretrain(chosen)), None)
    assert "no client had started" in line
    assert "--seconds" in line


def test_a_dry_run_prints_the_configuration_and_makes_nothing(tmp_path, monkeypatch, capsys):
    """A dry run must print the configuration, as TOML or JSON, and write nothing."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--dry-run", "--every", "7"]) == 0
    assert "every_s = 7.0" in capsys.readouterr().out
    assert cli.main(["demo", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sync"]["clients"] == 3
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_network_is_refused(capsys):
    """The error must come before any process is started and list the profiles."""
    assert cli.main(["demo", "--net", "moon", "--dry-run"]) == 2
    assert "no profile 'moon'; profiles: lan, campus" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["split"], ["--net", "dsl"]])
def test_links_are_refused_where_they_are_not_made(arguments, capsys):
    """Otherwise a storm would miss every cut."""
    assert cli.main(["demo", "--links", *arguments]) == 2
    assert "--links is for a demo on this machine" in capsys.readouterr().err
