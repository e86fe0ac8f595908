"""`fsl-node status`: what it says of a run directory, and of what is none."""

import json
import os
import socket

import pytest

from fsl_async import cli
from fsl_async.commands.status import server_words
from fsl_async.files.checksummed_json import to_checksummed
from fsl_async.observe.journal import JournalReader, JournalWriter
from fsl_async.observe.state import RunState
from fsl_async.roles.machine import Finish, Note
from fsl_async.roles.sync import events as ev


def make_run(path, *, ended, pid=0, role="ps"):
    """A run directory with one client and, if `ended`, an end."""
    with JournalWriter(path / "journal.jsonl") as journal:
        journal.note(
            "node_started",
            1.0,
            role=role,
            run="r-1",
            address="tcp://h:1",
            pid=pid,
            host=socket.gethostname(),
            every_s=600.0,
        )
        journal.event(ev.Recovered(-1, ""), 1.0)
        journal.event(ev.ClientHello("site-a", 5, "", -1, ""), 1.0)
        journal.event(ev.VersionCommitted(0, "d0", 0, 0.1), 1.0)
        journal.event(ev.VersionHeld("site-a", 0, "d0"), 1.0)
        if ended:
            journal.effect(Finish("Ctrl-C"), 2.0)
            journal.note("node_ended", 2.0)
    version = {"fact": "version", "version": 0, "tokens_total": 0, "merged": []}
    (path / "ledger.jsonl").write_bytes(to_checksummed(version) + b"\n")
    folder = path / "checkpoints" / "v00000000"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(to_checksummed(version) + b"\n")
    return path


def test_a_finished_run(tmp_path, capsys):
    """Years later the directory must still tell its story."""
    assert cli.main(["status", str(make_run(tmp_path, ended=True))]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "run r-1, ended (Ctrl-C), version 0" in out
    assert "checkpoints kept: 0 " in out
    assert "0 lost, 0 doubled" in out
    assert "site-a" in out


def test_an_alarm_is_shown(tmp_path, capsys):
    """As long as the run is looked at, not for as long as the line is among the newest."""
    path = make_run(tmp_path, ended=False)
    assert cli.main(["status", str(path)]) == 0
    assert "ALARM" not in capsys.readouterr().out
    with JournalWriter(path / "journal.jsonl") as journal:
        for kind, text in (("digest", "a computed digest x"), ("verdict", "the damage is at a")):
            journal.effect(Note(text, "warning", {"alarm": kind, "client": "a"}), 3.0)
    assert cli.main(["status", str(path)]) == 0
    assert "ALARM (1 time): the damage is at a" in capsys.readouterr().out


def test_steps_that_came_to_nothing_are_shown(tmp_path, capsys):
    """A client whose batches find no answer trains in vain; its steps and its speed look well."""
    path = make_run(tmp_path, ended=False)
    assert cli.main(["status", str(path)]) == 0
    assert "left out" not in capsys.readouterr().out
    with JournalWriter(path / "journal.jsonl") as journal:
        for incarnation, count in ((5, 2), (5, 1200), (6, 0), (6, 34)):
            journal.event(ev.ClientHello("site-a", incarnation, "", -1, ""), 1.0)
            journal.event(ev.HeartbeatReceived("site-a", {"step": 9, "left_out": count}), 1.0)
        journal.event(ev.HeartbeatReceived("site-b", {"step": 9}), 1.0)
    assert cli.main(["status", str(path)]) == 0
    assert "cannot be trained on: site-a 1,234\n" in capsys.readouterr().out
    assert cli.main(["status", "--json", str(path)]) == 0
    clients = json.loads(capsys.readouterr().out)["clients"]
    assert {one["name"]: one["left_out"] for one in clients} == {"site-a": 1234, "site-b": 0}


def test_json_is_one_object(tmp_path, capsys):
    """Monitoring reads it."""
    assert cli.main(["status", "--json", str(make_run(tmp_path, ended=True))]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["version"], made["phase"], made["checkpoints"]) == (0, "ended", [0])
    assert made["audit"]["lost"] == []
    assert made["clients"][0]["name"] == "site-a"


def test_follow_ends_with_the_run(tmp_path, capsys):
    """A finished run is told once, not waited for."""
    assert cli.main(["status", "--follow", str(make_run(tmp_path, ended=True))]) == 0
    assert capsys.readouterr().out.count("site-a joins") == 2  # on the way, and among the last news


def test_a_damaged_ledger_is_said_and_the_rest_still_shown(tmp_path, capsys):
    """The state of a damaged run is what its operator needs most."""
    run_dir = make_run(tmp_path, ended=True)
    (run_dir / "ledger.jsonl").write_bytes(b'{"fact":"version"}\n')
    assert cli.main(["status", str(run_dir)]) == 0
    assert "problem: line 1 of ledger.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["nothing", "empty", "file", "no line"])
def test_what_is_no_run_directory_is_one_line_and_exit_2(tmp_path, capsys, kind):
    """A mistyped path is the usual mistake."""
    path = tmp_path / "run"
    if kind == "file":
        path.write_text("x")
    elif kind != "nothing":
        path.mkdir()
    if kind == "no line":
        (path / "journal.jsonl").write_text("")
    assert cli.main(["status", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def state_of(path):
    """Read a state back."""
    state = RunState()
    for line in JournalReader(path / "journal.jsonl").read():
        state.apply(line)
    return state


def test_a_living_server_a_killed_one_and_a_distant_one(tmp_path):
    """Whether the server is alive decides what the operator does next."""
    state = state_of(make_run(tmp_path, ended=False, pid=os.getpid()))
    assert server_words(state, state.last_t + 2.0).startswith("running, process")
    state.pid = 2**22 + 5  # above the largest process number
    assert server_words(state, state.last_t).startswith("gone without a last word")
    state.host = "elsewhere"
    assert server_words(state, state.last_t + 5.0).startswith("running")
    assert server_words(state, state.last_t + 500.0).startswith("silent for 500 s")


def test_the_next_sync_is_shown_while_it_runs(tmp_path, capsys):
    """Every ten minutes is long enough to ask."""
    cli.main(["status", "--json", str(make_run(tmp_path, ended=False, pid=os.getpid()))])
    assert 500 < json.loads(capsys.readouterr().out)["next_sync_in_s"] <= 600


def test_the_journal_itself_is_as_good_as_its_directory(tmp_path, capsys):
    """Tab completion ends at the file; nobody should have to go back a step."""
    assert cli.main(["status", str(make_run(tmp_path, ended=True) / "journal.jsonl")]) == 0
    assert f"(in {tmp_path / 'checkpoints'})" in capsys.readouterr().out


def test_another_file_is_called_a_file(tmp_path, capsys):
    """It does exist, so it must not be called missing."""
    path = make_run(tmp_path, ended=True) / "ledger.jsonl"
    assert cli.main(["status", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {path} is a file: give the run directory that the server named, or the journal.jsonl in it\n"
    )


def test_follow_without_a_terminal_shows_the_clients(tmp_path, capsys, monkeypatch):
    """Who watches wants to see who trains; the lines about joins may be hours old."""
    run_dir = make_run(tmp_path, ended=False, pid=os.getpid())

    def end(_):
        with JournalWriter(run_dir / "journal.jsonl") as journal:
            journal.note("node_ended", 2.0)

    monkeypatch.setattr("fsl_async.commands.status.time.sleep", end)
    assert cli.main(["status", "--follow", str(run_dir)]) == 0
    before_the_end = capsys.readouterr().out.partition("server: ended")[0]
    assert [line for line in before_the_end.splitlines() if line.startswith("site-a  training")]


@pytest.mark.parametrize(
    ("encrypted", "words"),
    [(True, "connections are encrypted"), (False, "connections are not encrypted"), (None, "")],
)
def test_whether_a_run_is_encrypted(tmp_path, capsys, encrypted, words):
    """Whoever is asked where the weights went must be able to tell; a journal of an older release does not say."""
    make_run(tmp_path, ended=False)
    if encrypted is not None:
        with JournalWriter(tmp_path / "journal.jsonl") as journal:
            journal.note("node_started", 3.0, role="ps", run="r-1", encrypted=encrypted)
    assert cli.main(["status", str(tmp_path)]) == 0
    out, _ = capsys.readouterr()
    assert words in out
    assert encrypted is not None or "encrypted" not in out
    cli.main(["status", "--json", str(tmp_path)])
    assert json.loads(capsys.readouterr().out)["encrypted"] is encrypted


def test_a_folder_of_run_directories_names_them(tmp_path, capsys):
    """A parameter server and a split server of one run are often kept side by side."""
    for name in ("split/server", "ps"):
        (tmp_path / name).mkdir(parents=True)
        make_run(tmp_path / name, ended=True)
    (tmp_path / "ps").rename(tmp_path / "first")
    (tmp_path / "notes").mkdir()
    assert cli.main(["status", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "no journal.jsonl, but run directories in it: give one of first, split" in err
