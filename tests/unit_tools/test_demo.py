"""`fsl-node demo` without its processes: settings, checks, summary, errors."""

import json

import attrs
import pytest

from fsl_async import cli
from fsl_async.commands import demo
from fsl_async.commands.output import Output
from fsl_async.config.load import load
from fsl_async.observe.client_state import News
from fsl_async.observe.journal import JournalWriter
from fsl_async.observe.ledger_audit import Audit
from fsl_async.observe.table import news_line
from fsl_async.process.stopper import Stopper
from fsl_async.roles.machine import Finish, Note
from fsl_async.tools.demo.evaluate import Evaluated
from fsl_async.tools.demo.play import Demo, Played, _error_of
from fsl_async.tools.demo.settings import DemoSettings, lengths
from fsl_async.tools.demo.summary import Summary, complaints, summarise, words

KEYS = (
    "rounds clients tokens loss_first loss_last eval_loss bytes_raw bytes_sent ratio relaunches deltas_merged"
    " deltas_lost deltas_doubled participation seconds run_dir"
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
    made = Played(killed_s=13.0, noticed_s=16.0, relaunched_s=18.0, caught_up_s=19.0, seconds=44.0)
    made.state.version, made.state.digest, made.state.tokens = 7, "d7", 500
    return made


AUDIT = Audit(7, 20, 500, 20, 0, 0, (), (), ())
EVALUATED = Evaluated(7, "d7", 2.5)


def test_the_keys_of_the_result_are_those_promised():
    """Scripts read them; `sim` has the same."""
    assert [field.name for field in attrs.fields(Summary)] == KEYS.split()


def test_a_demo_over_a_long_line_takes_longer_and_says_so(settings):
    """Over a satellite the demo's 40 s were over before its second round."""
    assert [demo._late_s(net) for net in (None, "dsl", "transatlantic")] == [0.0, 0.0, 0.0]
    assert lengths(0.0) == (40.0, 5.0)
    late_s = demo._late_s("satellite")
    seconds, every_s = lengths(late_s)
    assert (late_s, seconds, every_s) == (0.5, 70.0, 10.0)
    slow = attrs.evolve(settings, seconds=seconds, every_s=every_s, late_s=late_s)
    said = "\n".join(demo._introduction(slow, "satellite"))
    assert "a round trip takes 0.6 s here" in said
    assert "the last round is at 70 s" in said
    assert "session.expire_after_s=5.0" in slow.overrides()
    assert "round trip" not in "\n".join(demo._introduction(settings, "dsl"))


def test_the_run_is_configured_as_asked(settings):
    """The options reach the run by the same --set that a user has."""
    config = load(None, settings.overrides())
    assert (config.sync.every_s, config.sync.clients, config.shards) == (4.0, 3, 3)
    assert (config.codec.up, config.codec.down, config.run.seed) == ("e5m2", "e5m2", 3)
    assert (config.train.threads, config.model.preset) == (1, "0.5m")


def test_the_children_are_real_nodes(settings):
    """A server on a free port, each client with its own name and journal."""
    server, client = settings.server(), settings.client("client-2", "tcp://127.0.0.1:5")
    assert server.argv[2:6] == ("-m", "fsl_async.cli", "--role", "ps")
    assert "tcp://127.0.0.1:0" in server.argv
    assert client.argv[-4:-2] == ("--run-dir", str(settings.run_dir / "clients" / "client-2"))
    assert settings.victim == "client-2"
    assert attrs.evolve(settings, clients=1).victim == "client-1"


def test_a_good_demo_has_nothing_to_complain_of(settings, played):
    """Otherwise exit code 0 would never be seen."""
    assert complaints(settings, played, AUDIT, EVALUATED) == []


@pytest.mark.parametrize(
    ("fault", "words_said"),
    [
        ({"killed_s": None}, "was not killed"),
        ({"noticed_s": None}, "did not notice"),
        ({"caught_up_s": None}, "did not catch up"),
        ({"faults": ["client-1 ended"]}, "client-1 ended"),
    ],
)
def test_each_thing_that_did_not_happen_is_said(settings, played, fault, words_said):
    """A demo that shows nothing must not pass."""
    said = complaints(settings, attrs.evolve(played, **fault), AUDIT, EVALUATED)
    assert len(said) == 1
    assert words_said in said[0]


@pytest.mark.parametrize(
    ("audit", "evaluated", "words_said"),
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
def test_each_broken_promise_is_said(settings, played, audit, evaluated, words_said):
    """These are the checks that could fail, so each of them must be able to."""
    said = complaints(settings, played, audit, evaluated)
    assert len(said) == 1
    assert words_said in said[0]


def test_no_round_is_a_failure(settings, played):
    """Starting processes is not yet a run."""
    played.state.version = played.state.tokens = 0
    said = complaints(settings, played, attrs.evolve(AUDIT, tokens=0), Evaluated(0, "d7", 5.0))
    assert said == ["no round was merged; give it more --seconds"]


def test_one_client_is_one_client(settings, played):
    """`1 clients` is the first line that a careful reader sees."""
    one = attrs.evolve(settings, clients=1)
    lines = words(one, played, summarise(one, played, AUDIT, EVALUATED), AUDIT)
    assert "from 1 client in" in lines[0]


def test_the_summary_counts_in_the_ledger_and_tells_where_to_look(settings, played):
    """Numbers from the ledger, and the next command to paste."""
    summary = summarise(settings, played, attrs.evolve(AUDIT, lost=("x",)), EVALUATED)
    assert (summary.deltas_merged, summary.deltas_lost, summary.eval_loss) == (20, 1, 2.5)
    lines = words(settings, played, summary, AUDIT)
    assert lines[-1] == f"look further: fsl-node status {settings.run_dir}"
    assert any(
        "noticed after 3.0 s, back after 5.0 s, caught up after 6.0 s" in line for line in lines
    )


def test_run_directories(tmp_path, monkeypatch):
    """By default one of its own for each demo, also for two in one second."""
    monkeypatch.chdir(tmp_path)
    first, second = (demo._make_directory(None, Output()) for _ in range(2))
    assert first != second
    assert first.parent.name == "runs"
    assert first.is_dir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "ledger.jsonl").touch()
    with pytest.raises(demo.UsageError, match="holds a run already"):
        demo._make_directory(tmp_path / "old", Output())


def test_where_nothing_can_be_written_a_temporary_directory_serves(tmp_path, monkeypatch):
    """A demo from a read-only checkout still runs."""
    (tmp_path / "runs").write_text("in the way")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: str(tmp_path / prefix))
    assert demo._make_directory(None, Output()) == tmp_path / "fsl-demo-"


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
    """Before any process is launched and any directory is made."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])
    assert err.startswith("error: ")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("error: no such preset", "no such preset"),
        ('{"error": "full", "kind": "x"}', "full"),
        ("hello", ""),
        ("[1]", ""),
    ],
)
def test_what_a_child_said_went_wrong(line, error):
    """Its one line becomes ours."""
    assert _error_of(line) == error


class Watcher:
    """A view that keeps the lines it was given."""

    def __init__(self):
        self.lines = []

    def update(self, state, news, now):
        """Keep."""
        self.lines += [news_line(state, one) for one in news]

    def close(self):
        """Nothing."""


@pytest.mark.parametrize(
    ("asked", "ending", "words"),
    [("", True, "its time is over"), ("SIGTERM", True, "SIGTERM"), ("", False, "Ctrl-C")],
)
def test_the_demo_says_why_its_run_ends(settings, asked, ending, words):
    """It ends the server as Ctrl-C would; "the run ends: Ctrl-C" made people think that somebody had pressed it."""
    view, stop = Watcher(), Stopper()
    one = Demo(settings, view, stop)
    if asked:
        stop.request(reason=asked)
    one._ending = ending
    with JournalWriter(settings.run_dir / "journal.jsonl") as journal:
        journal.effect(Note("ending: Ctrl-C; one last round"), 0.0)
        journal.effect(Finish("Ctrl-C"), 0.0)
    one._look(hold_s=-100.0)
    said = [f"ending: {words}; one last round", f"the run ends: {words}"]
    assert [line.rpartition("  ")[2] for line in view.lines] == said
    assert [news.text for news in one.played.state.news] == said
    assert one.played.state.ending == words


def test_the_lines_are_in_order_and_by_the_clock_of_the_summary(settings):
    """The journal is a second behind what the demo does itself; a kill must not stand before what led to it."""
    view = Watcher()
    one = Demo(settings, view, Stopper())
    begun = one.played.state.started_at
    with JournalWriter(settings.run_dir / "journal.jsonl", clock=lambda: begun + 4.0) as journal:
        journal.note("node_started", 0.0, role="ps", run="r", address="a")
    one._news += [News(begun + 7.0, "killed", "second"), News(begun + 1.0, "launched", "first")]
    one._look(hold_s=-100.0)
    assert [line.split("s  ")[0].strip() for line in view.lines] == ["1.0", "4.0", "7.0"]
    one._tell("killed", "just now")
    one._look()
    assert len(view.lines) == 3  # others may belong before it
    one.played.killed_s = 0.0
    victim = settings.victim
    one._notice(News(begun + 16.0, "gone", "", victim))
    assert one.played.noticed_s == pytest.approx(16.0)


def test_a_time_too_short_for_torch_is_said(settings):
    """Four complaints about what did not happen hide the one reason."""
    (line,) = complaints(settings, Played(), None, None)
    assert "no client had started" in line
    assert "--seconds" in line


def test_a_dry_run_prints_the_configuration_and_makes_nothing(tmp_path, monkeypatch, capsys):
    """As with the server itself."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--dry-run", "--every", "7"]) == 0
    assert "every_s = 7.0" in capsys.readouterr().out
    assert cli.main(["demo", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sync"]["clients"] == 3
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_network_is_refused(capsys):
    """Before any process is started; the line has the names that there are."""
    assert cli.main(["demo", "--net", "moon", "--dry-run"]) == 2
    assert "no profile 'moon'; profiles: lan, campus" in capsys.readouterr().err


@pytest.mark.parametrize("links", [False, True])
def test_with_links_every_client_has_one_that_can_be_cut(settings, links):
    """A storm looks for it by the client's name; without it the client dials the server itself."""
    settings = attrs.evolve(settings, links=links)
    demo = Demo(settings, None, Stopper())
    server = "tcp://127.0.0.1:7100"

    settings.run_dir.mkdir(exist_ok=True)
    assert (demo._way_for("client-1", server) == server) is not links
    for link in demo._links:
        link.close()
    assert (settings.run_dir / "links" / "client-1").exists() is links


@pytest.mark.parametrize("words_", [["split"], ["--net", "dsl"]])
def test_links_are_refused_where_they_are_not_made(words_, capsys):
    """Rather than a storm that misses every cut."""
    assert cli.main(["demo", "--links", *words_]) == 2
    assert "--links is for a demo on this machine" in capsys.readouterr().err
