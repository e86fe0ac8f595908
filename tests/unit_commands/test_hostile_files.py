"""Text from untrusted files and programs must not act on the terminal that shows it."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
from facts import client_line

from fsl_async import cli
from fsl_async.cluster.launchers import LaunchError, ask
from fsl_async.cluster.supervisor import ChildExited, Supervisor
from fsl_async.commands.output import Output, encoded
from fsl_async.errors import FslError, describe
from fsl_async.files.checksummed_json import to_checksummed
from fsl_async.observe.journal import JournalReader, JournalWriter, TraceHash
from fsl_async.observe.run_state import RunState
from fsl_async.observe.table import client_lines, header, news_line
from fsl_async.process.stopper import Stopper
from fsl_async.tools.demo.pretrain import pretrain
from fsl_async.tools.demo.runner import Runner
from fsl_async.tools.demo.scenario import Choices, Stage
from fsl_transport.loop import run as run_loop

HOSTILE = "\x1b]0;owned\x07\nps: all good\r\u202e\x9b2J\x7f"
SHOWN = r"\u001b]0;owned\u0007\u000aps: all good\u000d\u202e\u009b2J\u007f"


def check(text):
    """Check that the text is printable lines, and none of them is forged."""
    assert SHOWN in text or json.dumps(HOSTILE)[1:-4] in text
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)
        assert not line.startswith("ps: all good")


def hostile_run(path):
    """A run directory with a hostile journal and ledger."""
    path.mkdir()
    lines = [
        {
            "type": "node_started", "role": "ps", "run": HOSTILE, "address": HOSTILE,
            "host": HOSTILE, "pid": 1, "every_s": 9.0,
            "rules": {HOSTILE: {"class": HOSTILE, "file": HOSTILE, "sha256": HOSTILE}},
        },
        client_line(1.0, HOSTILE, "joining", begins=True),
        client_line(1.0, HOSTILE, "refused", why=HOSTILE),
        client_line(1.0, "a", "joining", begins=True),
        client_line(1.0, "a", "gone", why="bye", goodbye=HOSTILE),
        client_line(1.0, HOSTILE, "joining", begins=True),
        {"type": "note", "text": HOSTILE, "level": "warning"},
        client_line(1.0, HOSTILE, HOSTILE, key=HOSTILE, outcome="held", why=HOSTILE),
        client_line(1.0, HOSTILE, "gone", why=HOSTILE),
        {"type": "finish", "reason": HOSTILE, "exit_code": 0},
        {"type": "node_ended"},
    ]  # fmt: skip
    text = "".join(
        json.dumps({"n": n, **line, "t": 1e6 + n}, ensure_ascii=n % 2 == 0) + "\n"
        for n, line in enumerate(lines)
    )
    (path / "journal.jsonl").write_text(text, "utf-8")
    merged = [{"key": HOSTILE, "tokens": 3}]
    facts = [
        {"fact": "version", "version": 0, "tokens_total": 0, "merged": []},
        {"fact": "version", "version": 1, "tokens_total": 3, "merged": merged},
    ]
    (path / "ledger.jsonl").write_bytes(b"".join(to_checksummed(fact) + b"\n" for fact in facts))
    return path


@pytest.mark.parametrize("options", [[], ["--json"], ["--follow"]])
def test_status_of_a_hostile_journal(options, tmp_path, capsys):
    """Texts, names and keys of peers must not move the cursor or forge a line."""
    assert cli.main(["status", str(hostile_run(tmp_path / "run")), *options]) == 0
    check(capsys.readouterr().out)


@pytest.mark.parametrize("options", [[], ["--json"], ["--follow"]])
def test_status_of_a_hostile_split_servers_files(options, tmp_path, capsys):
    """A split server's journal and ledger must be as harmless."""
    path = tmp_path / "server"
    (path / "checkpoints").mkdir(parents=True)
    lines = [
        {"type": "node_started", "role": "server", "method": HOSTILE, "address": HOSTILE},
        {"type": "split_hello", "peer": HOSTILE, "incarnation": 1, "run": HOSTILE},
        client_line(1.0, HOSTILE, "training", begins=True),
        {"type": "round_done", "peer": "a", "errors": {f"{HOSTILE} up": 0.5}},
        {"type": "finish", "reason": HOSTILE},
        {"type": "node_ended"},
    ]
    text = "".join(json.dumps({**line, "t": 1e6}) + "\n" for line in lines)
    (path / "journal.jsonl").write_text(text)
    fact = {"fact": "auxiliary", "client": HOSTILE, "version": 1}
    (path / "ledger.jsonl").write_bytes((to_checksummed(fact) + b"\n") * 2)
    assert cli.main(["status", str(path), *options]) == 0
    check(capsys.readouterr().out)


def test_quarantine_of_a_hostile_ledger(tmp_path, capsys):
    """The list of keys is shown to people, so it must be printable."""
    path = hostile_run(tmp_path / "run")
    fact = {"fact": "accepted", "key": HOSTILE, "tokens": 1, "steps": 1, "bytes": 1, "norm": 1.0}
    (path / "ledger.jsonl").write_bytes(to_checksummed(fact) + b"\n")
    assert cli.main(["quarantine", str(path)]) != 0
    found = capsys.readouterr()
    assert (found.out + found.err).rstrip("\n").isprintable()


def test_the_table_of_a_hostile_journal(tmp_path):
    """The live table does not use `Output`, so its text must be printable before."""
    state = RunState()
    reader = JournalReader(hostile_run(tmp_path / "run") / "journal.jsonl")
    news = [one for line in reader.read() for one in state.apply(line)]
    shown = [header(state), *client_lines(state, 1e6)]
    shown += [news_line(state, one) for one in news]
    assert len(news) >= 5
    check("\n".join(shown))


def test_a_run_directory_that_is_none_is_one_line(tmp_path, capsys):
    """Errors show names of folders, so these must be escaped."""
    inside = tmp_path / "run" / HOSTILE.replace("\x9b", "")
    hostile_run(tmp_path / "other")
    inside.parent.mkdir()
    (tmp_path / "other").rename(inside)
    assert cli.main(["status", str(inside.parent)]) == 2
    shown = capsys.readouterr().err
    assert r"\u001b]0;owned" in shown
    assert shown.rstrip("\n").isprintable()


def test_all_output_of_a_command_is_printable():
    """`Output` is the last place before the terminal, so it must escape everything."""
    out, err = io.StringIO(), io.StringIO()
    output = Output(out=out, err=err)
    output.say(HOSTILE, HOSTILE)
    output.warn(HOSTILE)
    output.result({"a": HOSTILE, HOSTILE: {"b": HOSTILE}})
    assert out.getvalue().count("\n") == 2 + 1 + 3
    check(out.getvalue())
    check(err.getvalue())
    made = encoded({"a": HOSTILE})
    assert made.isprintable()
    assert json.loads(made) == {"a": HOSTILE}
    assert describe(FslError(HOSTILE)).message.isprintable()


def test_a_journal_is_safe_to_print_and_loses_nothing(tmp_path):
    """`tail -f` must be safe, jq must give the text back, our reader must make it printable."""
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal:
        journal.note("note", 1.0, text=HOSTILE, **{"a\x1b": "\U000e0041\ud800"})
        journal.note("note", 1.0, text='ü ✓ \\ "')
    raw, plain = path.read_text("utf-8").splitlines()
    assert raw.isprintable()
    assert json.loads(raw)["text"] == HOSTILE
    assert json.loads(raw)["a\x1b"] == "\U000e0041\ud800"
    assert "ü ✓" in plain
    first, second = JournalReader(path).read()
    assert first["text"] == SHOWN
    assert first[r"a\u001b"] == r"\U000e0041\ud800"
    assert second["text"] == 'ü ✓ \\ "'
    hashed = TraceHash()
    hashed.note("note", 1.0, text=HOSTILE)
    assert hashed.hexdigest()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_the_answer_of_a_launcher_is_one_printable_line(stream):
    """A launcher may run on another machine by ssh, so its answer is untrusted."""
    code = f"import sys; print({HOSTILE!r}, file=sys.{stream}); sys.exit(3)"
    with pytest.raises(LaunchError) as failed:
        run_loop(ask([sys.executable, "-X", "utf8", "-c", code]))
    shown = str(failed.value)
    assert r"\u001b]0;owned\u0007; ps: all good; \u202e" in shown
    assert shown.isprintable()


def test_the_last_line_of_a_child_is_printable(tmp_path):
    """The line is shown in the demo's news and in its error."""
    demo = Runner(pretrain(Choices(run_dir=tmp_path)), Stage(print, Stopper()), lambda *_: None)
    running = SimpleNamespace(child=SimpleNamespace(name="site-a"), last_line="", last_error="")
    Supervisor(on_line=demo._line)._line(running, HOSTILE)
    ended = ChildExited("site-a", 1, 1.0, None, "exit code 1", running.last_line)
    demo._changed(ended)
    for line in (*demo._deaths.lines(), demo.played.state.news[-1].text):
        assert line.isprintable()
        assert r"\u001b]0;owned" in line
