"""`fsl-node demo` without its processes: settings, checks, summary, errors."""

import json
import os
import subprocess
import sys
import tempfile

import attrs
import pytest

from fsl_async import cli
from fsl_async.commands import demo
from fsl_async.config.load import load
from fsl_async.errors import UsageError
from fsl_async.observe.clients import News
from fsl_async.observe.journal import JournalWriter
from fsl_async.observe.ledger_audit import Audit
from fsl_async.observe.table import news_line
from fsl_async.process.stopper import Stopper
from fsl_async.tools.demo.play import Demo, Played
from fsl_async.tools.demo.run_dir import make_run_dir
from fsl_async.tools.demo.settings import DemoSettings, lengths
from fsl_async.tools.demo.summary import Summary, problems, summarize, text_lines
from fsl_async.tools.evaluation import Evaluated

KEYS = (
    "rounds clients tokens loss_first loss_last eval_loss bytes_raw bytes_sent ratio relaunches"
    " deltas_merged deltas_lost deltas_doubled participation seconds run_dir"
)


@pytest.fixture
def settings(tmp_path):
    return DemoSettings(
        data="",
        seconds=40.0,
        clients=3,
        format="e5m2",
        every_s=4.0,
        seed=3,
        preset="0.5m",
        run_dir=tmp_path,
    )


@pytest.fixture
def played():
    made = Played(killed_s=13.0, detected_s=16.0, relaunched_s=18.0, caught_up_s=19.0, seconds=44.0)
    made.state.ps.version, made.state.ps.digest, made.state.ps.tokens = 7, "d7", 500
    return made


AUDIT = Audit(7, 20, 500, 20, 0, 0, (), (), ())
EVALUATED = Evaluated(7, "d7", 2.5)


def test_the_keys_of_the_result_are_those_promised():
    """Scripts read these keys, and `sim` has the same."""
    assert [field.name for field in attrs.fields(Summary)] == KEYS.split()


def test_a_demo_with_long_round_trips_takes_longer_and_reports_it(settings):
    """By satellite the usual 40 s were over before the second round."""
    assert [demo._late_s(net) for net in (None, "dsl", "transatlantic")] == [0.0, 0.0, 0.0]
    assert lengths(0.0) == (40.0, 5.0)
    late_s = demo._late_s("satellite")
    seconds, every_s = lengths(late_s)
    assert (late_s, seconds, every_s) == (0.5, 70.0, 10.0)
    slow = attrs.evolve(settings, seconds=seconds, every_s=every_s, late_s=late_s)
    found = "\n".join(demo._introduction(slow, "satellite"))
    assert "a round trip takes 0.6 s here" in found
    assert "the last round is at 70 s" in found
    assert "session.expire_after_s=5.0" in slow.overrides()
    assert "round trip" not in "\n".join(demo._introduction(settings, "dsl"))


def test_the_run_is_configured_as_asked(settings):
    """The options must reach the run as settings."""
    config = load(None, settings.overrides())
    assert (config.sync.every_s, config.sync.clients, config.shards) == (4.0, 3, 3)
    assert (config.codec.up, config.codec.down, config.run.seed) == ("e5m2", "e5m2", 3)
    assert (config.train.threads, config.model.preset) == (1, "0.5m")


def test_the_children_are_real_nodes(settings):
    """The parameter server must get a free port, each client its own name and folder."""
    server, client = settings.server(), settings.client("client-2", "tcp://127.0.0.1:5")
    assert server.argv[2:6] == ("-m", "fsl_async.cli", "--role", "ps")
    assert "tcp://127.0.0.1:0" in server.argv
    assert client.argv[-4:-2] == ("--run-dir", str(settings.run_dir / "clients" / "client-2"))
    assert settings.victim == "client-2"
    assert attrs.evolve(settings, clients=1).victim == "client-1"


def test_a_good_demo_has_no_problems(settings, played):
    """A demo that passed must have exit code 0."""
    assert problems(settings, played, AUDIT, EVALUATED) == []


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"killed_s": None}, "was not killed"),
        ({"detected_s": None}, "did not detect"),
        ({"caught_up_s": None}, "did not catch up"),
        ({"faults": ["client-1 ended"]}, "client-1 ended"),
        ({"faults": ["client-2 ended: no disk"], "killed_s": None}, "no disk"),
    ],
)
def test_each_missing_event_is_reported(settings, played, fault, text):
    """A demo without one of its events must not pass."""
    found = problems(settings, attrs.evolve(played, **fault), AUDIT, EVALUATED)
    assert len(found) == 1
    assert text in found[0]


@pytest.mark.parametrize(
    ("audit", "evaluated", "text"),
    [
        (attrs.evolve(AUDIT, lost=("a/1/0/1",)), EVALUATED, "is lost: a/1/0/1"),
        (attrs.evolve(AUDIT, doubled=("a/1/0/1",)), EVALUATED, "merged twice: a/1/0/1"),
        (attrs.evolve(AUDIT, tokens=499), EVALUATED, "499 merged tokens"),
        (None, EVALUATED, "no ledger"),
        (AUDIT, None, "no checkpoint"),
        (AUDIT, Evaluated(6, "d6", 2.5), "last checkpoint is version 6"),
        (AUDIT, Evaluated(7, "dx", 2.5), "last checkpoint is version 7"),
    ],
)
def test_each_failed_check_is_reported(settings, played, audit, evaluated, text):
    """Each check must fail on its own fault."""
    found = problems(settings, played, audit, evaluated)
    assert len(found) == 1
    assert text in found[0]


def test_no_round_is_a_failure(settings, played):
    """Started processes without a merged round must not pass."""
    played.state.ps.version = played.state.ps.tokens = 0
    found = problems(settings, played, attrs.evolve(AUDIT, tokens=0), Evaluated(0, "d7", 5.0))
    assert found == ["no round was merged; give it more --seconds"]


def test_one_client_is_one_client(settings, played):
    """The text must use the singular for one client."""
    one = attrs.evolve(settings, clients=1)
    lines = text_lines(one, played, summarize(one, played, AUDIT, EVALUATED), AUDIT)
    assert "from 1 client in" in lines[0]


def test_the_summary_counts_in_the_ledger_and_names_the_next_command(settings, played):
    """Counts must come from the ledger, and the last line must be a command to paste."""
    summary = summarize(settings, played, attrs.evolve(AUDIT, lost=("x",)), EVALUATED)
    assert (summary.deltas_merged, summary.deltas_lost, summary.eval_loss) == (20, 1, 2.5)
    lines = text_lines(settings, played, summary, AUDIT)
    assert lines[-1] == f"for details: fsl-node status {settings.run_dir}"
    assert any(
        "detected after 3.0 s, back after 5.0 s, caught up after 6.0 s" in line for line in lines
    )


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


class Watcher:
    """A view that keeps the lines it was given."""

    def __init__(self):
        self.lines = []

    def update(self, state, news, now):
        """Keep the news."""
        self.lines += [news_line(state, one) for one in news]

    def close(self):
        """Do nothing."""


def test_a_node_of_a_demo_ends_because_the_demo_is_over(settings):
    """The demo sends the SIGINT itself, so `status` of a finished one had "ended (Ctrl-C)"."""
    child = settings.server()
    script = (
        "import os, signal; from fsl_async.process.stopper import Stopper, stop_on_signals\n"
        "stop = Stopper()\n"
        "with stop_on_signals(stop, quiet=True): os.kill(os.getpid(), signal.SIGINT)\n"
        "print(stop.reason)"
    )
    argv = [sys.executable, "-c", script]
    for env, reason in ((child.env, "the demo is over"), ({}, "Ctrl-C")):
        done = subprocess.run(
            argv, env={**os.environ, **env}, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{reason}\n"


def test_the_lines_are_in_order_and_by_the_clock_of_the_summary(settings):
    """The journal is late by a second: a kill must not be printed before its cause."""
    view = Watcher()
    one = Demo(settings, view, Stopper())
    begun = one.played.state.node.started_at
    with JournalWriter(settings.run_dir / "journal.jsonl", clock=lambda: begun + 4.0) as journal:
        journal.note("node_started", 0.0, role="ps", run="r", address="a")
    one._news += [News(begun + 7.0, "killed", "second"), News(begun + 1.0, "launched", "first")]
    one._read_journal(hold_s=-100.0)
    assert [line.split("s  ")[0].strip() for line in view.lines] == ["1.0", "4.0", "7.0"]
    one._report("killed", "just now")
    one._read_journal()
    assert len(view.lines) == 3  # earlier news may still come
    one.played.killed_s = 0.0
    victim = settings.victim
    one._record(News(begun + 16.0, "gone", "", victim))
    assert one.played.detected_s == pytest.approx(16.0)


def test_a_time_too_short_for_torch_is_one_problem(settings):
    """A list of missing events would hide the one reason."""
    (line,) = problems(settings, Played(), None, None)
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


@pytest.mark.parametrize("links", [False, True])
def test_with_links_every_client_has_one_that_can_be_cut(settings, links):
    """A storm finds the link by the client's name; without it the client dials directly."""
    settings = attrs.evolve(settings, links=links)
    demo = Demo(settings, None, Stopper())
    server = "tcp://127.0.0.1:7100"

    settings.run_dir.mkdir(exist_ok=True)
    assert (demo._address_for("client-1", server) == server) is not links
    for link in demo._links:
        link.close()
    assert (settings.run_dir / "links" / "client-1").exists() is links


@pytest.mark.parametrize("arguments", [["split"], ["--net", "dsl"]])
def test_links_are_refused_where_they_are_not_made(arguments, capsys):
    """Otherwise a storm would miss every cut."""
    assert cli.main(["demo", "--links", *arguments]) == 2
    assert "--links is for a demo on this machine" in capsys.readouterr().err
