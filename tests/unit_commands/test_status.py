"""`fsl-node status` of run directories and of other paths."""

import json
import os
import socket

import pytest
from facts import RoundFact, VersionFact, client_of

from fsl_async import cli
from fsl_async.commands.status_report import alive_words
from fsl_async.files.checksummed_json import to_checksummed
from fsl_async.observe.journal import JournalReader, JournalWriter
from fsl_async.observe.run_state import RunState
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
        journal.fact(client_of("site-a", "joining", incarnation=5, begins=True), 1.0)
        journal.fact(VersionFact(0, "d0", 0), 1.0)
        journal.fact(RoundFact("ready", next_at=601.0), 1.0)
        journal.fact(client_of("site-a", "training", 0, 5), 1.0)
        if ended:
            journal.effect(Finish("Ctrl-C"), 2.0)
            journal.note("node_ended", 2.0)
    version = {"fact": "version", "version": 0, "tokens_total": 0, "merged": []}
    (path / "ledger.jsonl").write_bytes(to_checksummed(version) + b"\n")
    folder = path / "checkpoints" / "v00000000"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(to_checksummed(version) + b"\n")
    return path


@pytest.fixture
def status(capsys):
    """Call the command; return the lines, or with --json the object, that it prints."""

    def call(path, *options):
        assert cli.main(["status", str(path), *options]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return json.loads(out) if "--json" in options else out

    return call


def test_a_finished_run(tmp_path, status):
    """Years later the directory must still show its history."""
    out = status(make_run(tmp_path, ended=True))
    assert "run r-1, ended (Ctrl-C), version 0" in out
    assert "checkpoints kept: 0 " in out
    assert "0 lost, 0 doubled" in out
    assert "site-a" in out


def test_an_alarm_is_shown(tmp_path, status):
    """It must be shown as long as the run is, not only while its line is among the newest."""
    path = make_run(tmp_path, ended=False)
    assert "ALARM" not in status(path)
    with JournalWriter(path / "journal.jsonl") as journal:
        for kind, text in (("digest", "a computed digest x"), ("verdict", "the damage is at a")):
            journal.effect(Note(text, "warning", {"alarm": kind, "client": "a"}), 3.0)
    assert "ALARM (1 time): the damage is at a" in status(path)


def test_versions_that_are_gone_are_counted(tmp_path, status):
    """Clients held them when the parameter server was started from an older copy."""
    path = make_run(tmp_path, ended=False)
    with JournalWriter(path / "journal.jsonl") as journal:
        for gone in (5, 4):
            facts = {"alarm": "rollback", "client": "a", "gone": gone}
            journal.effect(Note("a holds a version", "warning", facts), 3.0)
    assert "gone, by what clients held: 5 versions" in status(path)
    found = status(path, "--json")
    assert (found["gone"], found["alarms"]) == (5, 2)


def test_held_out_losses_of_versions_are_shown(tmp_path, status):
    """Those that the command left beside the journal, for people and for programs."""
    path = make_run(tmp_path, ended=True)
    row = {"version": 0, "loss": 1.5, "of": "weights", "bits_per_byte": 2.164}
    (path / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    assert "held-out loss 1.5000 nats a token (perplexity 4.482" in status(path)
    (found,) = status(path, "--json")["evaluations"]
    assert (found["version"], found["loss"]) == (0, 1.5)


def test_lost_steps_are_shown(tmp_path, status):
    """A client whose uploads get no answer trains in vain, but its steps and speed look normal."""
    path = make_run(tmp_path, ended=False)
    assert "left out" not in status(path)
    with JournalWriter(path / "journal.jsonl") as journal:
        for incarnation, count in ((5, 2), (5, 1200), (6, 0), (6, 34)):
            journal.fact(client_of("site-a", "joining", -1, incarnation, begins=True), 1.0)
            journal.event(ev.HeartbeatReceived("site-a", {"step": 9, "left_out": count}), 1.0)
        journal.event(ev.HeartbeatReceived("site-b", {"step": 9}), 1.0)
    assert "cannot be trained on: site-a 1,234\n" in status(path)
    clients = status(path, "--json")["clients"]
    assert {one["name"]: one["left_out"] for one in clients} == {"site-a": 1234, "site-b": 0}


def test_json_is_one_object(tmp_path, status):
    """Monitoring programs read it."""
    made = status(make_run(tmp_path, ended=True), "--json")
    assert (made["version"], made["phase"], made["checkpoints"]) == (0, "ended", [0])
    assert made["audit"]["lost"] == []
    assert made["clients"][0]["name"] == "site-a"


def test_follow_ends_with_the_run(tmp_path, status):
    """A finished run must be shown once, and not waited for."""
    assert (
        status(make_run(tmp_path, ended=True), "--follow").count("site-a joins") == 2
    )  # on the way, and among the last news


def test_a_damaged_ledger_is_reported_and_the_rest_shown(tmp_path, status):
    """An operator needs the state of a damaged run most."""
    run_dir = make_run(tmp_path, ended=True)
    (run_dir / "ledger.jsonl").write_bytes(b'{"fact":"version"}\n')
    assert "problem: line 1 of ledger.jsonl" in status(run_dir)


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
    """Read the state of a run directory."""
    state = RunState()
    for line in JournalReader(path / "journal.jsonl").read():
        state.apply(line)
    return state


def test_a_running_a_killed_and_a_distant_parameter_server(tmp_path):
    """The operator's next step depends on whether the parameter server runs."""
    state = state_of(make_run(tmp_path, ended=False, pid=os.getpid()))
    assert alive_words(state.node, state.node.last_t + 2.0, "version 0").startswith(
        "running, process"
    )
    state.node.pid = 2**22 + 5  # above the largest process number
    assert alive_words(state.node, state.node.last_t, "version 0").startswith(
        "gone without a last word"
    )
    state.node.host = "elsewhere"
    assert alive_words(state.node, state.node.last_t + 5.0, "version 0").startswith("running")
    assert alive_words(state.node, state.node.last_t + 500.0, "version 0").startswith(
        "silent for 500 s"
    )


def test_the_next_sync_is_shown_while_it_runs(tmp_path, status):
    """At ten minutes a sync, operators ask for it."""
    assert (
        500
        < status(make_run(tmp_path, ended=False, pid=os.getpid()), "--json")["next_sync_in_s"]
        <= 600
    )


def test_the_journal_itself_is_as_good_as_its_directory(tmp_path, status):
    """Tab completion ends at the file."""
    assert f"(in {tmp_path / 'checkpoints'})" in status(
        make_run(tmp_path, ended=True) / "journal.jsonl"
    )


def test_another_file_is_called_a_file(tmp_path, capsys):
    """It exists, so it must not be called missing."""
    path = make_run(tmp_path, ended=True) / "ledger.jsonl"
    assert cli.main(["status", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {path} is a file: give the run directory that the server named, or the"
        " journal.jsonl in it\n"
    )


def test_follow_without_a_terminal_shows_the_clients(tmp_path, status, monkeypatch):
    """The user must see which clients train; the lines about joins may be hours old."""
    run_dir = make_run(tmp_path, ended=False, pid=os.getpid())

    def end(_):
        with JournalWriter(run_dir / "journal.jsonl") as journal:
            journal.note("node_ended", 2.0)

    monkeypatch.setattr("fsl_async.commands.status.time.sleep", end)
    before_the_end = status(run_dir, "--follow").partition("server: ended")[0]
    assert [line for line in before_the_end.splitlines() if line.startswith("site-a  training")]


@pytest.mark.parametrize(
    ("encrypted", "words"),
    [(True, "connections are encrypted"), (False, "connections are not encrypted"), (None, "")],
)
def test_whether_a_run_is_encrypted(tmp_path, status, encrypted, words):
    """An operator must see whether weights were encrypted; old journals do not record it."""
    make_run(tmp_path, ended=False)
    if encrypted is not None:
        with JournalWriter(tmp_path / "journal.jsonl") as journal:
            journal.note("node_started", 3.0, role="ps", run="r-1", encrypted=encrypted)
    out = status(tmp_path)
    assert words in out
    assert encrypted is not None or "encrypted" not in out
    assert status(tmp_path, "--json")["encrypted"] is encrypted


def test_the_operators_own_rules_are_named_with_their_digest(tmp_path, status):
    """Which code makes versions must be seen without its machine."""
    make_run(tmp_path, ended=False)
    rule = {"class": "Mine", "file": "/a/mine.py", "sha256": "0123456789abcdef"}
    with JournalWriter(tmp_path / "journal.jsonl") as journal:
        journal.note("node_started", 3.0, role="ps", run="r-1", rules={"outer.aggregation": rule})
    line = "your own rule: outer.aggregation = Mine of /a/mine.py (SHA-256 01234567)"
    assert line in status(tmp_path)


@pytest.mark.parametrize("secure", [True, False])
def test_it_says_what_the_server_reads_of_deltas(tmp_path, status, secure):
    """A data officer looks there."""
    make_run(tmp_path, ended=False)
    more = {"secure": True} if secure else {}
    with JournalWriter(tmp_path / "journal.jsonl") as journal:
        journal.note("node_started", 3.0, role="ps", run="r-1", needs=["adapters"], **more)
    words = "clients send: adapters (masked: this server reads sums of 3 or more clients)"
    assert (words in status(tmp_path)) is secure
    assert status(tmp_path, "--json")["secure"] is secure


def test_a_folder_of_run_directories_names_them(tmp_path, capsys):
    """The run directories of a parameter server and a split server are often in one folder."""
    for name in ("split/server", "ps"):
        (tmp_path / name).mkdir(parents=True)
        make_run(tmp_path / name, ended=True)
    (tmp_path / "ps").rename(tmp_path / "first")
    (tmp_path / "notes").mkdir()
    assert cli.main(["status", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "no journal.jsonl, but run directories in it: give one of first, split" in err


def make_split_run(path, *, ended):
    """The run directory of a split server with one client and one upload."""
    with JournalWriter(path / "journal.jsonl") as journal:
        started = {"role": "server", "method": "fsl-sage", "address": "tcp://h:2"}
        journal.note("node_started", 1.0, pid=os.getpid(), host=socket.gethostname(), **started)
        journal.fact(client_of("site-a", "training", incarnation=5, begins=True), 1.0)
        journal.note("upload_trained", 1.0, key="site-a/5/3/0", loss=2.5, problem=None)
        if ended:
            journal.note("node_ended", 2.0)
    fate = {"key": "site-a/5/3/0", "outcome": "trained", "reason": ""}
    (path / "ledger.jsonl").write_bytes(to_checksummed(fate) + b"\n")
    return path


@pytest.mark.parametrize("inside", [False, True])
def test_a_split_server_is_shown_by_the_same_command(tmp_path, status, inside):
    """Alone, or in one process with a parameter server."""
    if inside:
        (tmp_path / "ps").mkdir()
        make_run(tmp_path / "ps", ended=True)
    (tmp_path / "server").mkdir()
    make_split_run(tmp_path / "server", ended=True)
    shown = tmp_path if inside else tmp_path / "server"
    out = status(shown)
    assert "split server (fsl-sage): ended at" in out
    assert "uploads: 1 trained" in out
    assert ("run r-1, ended (Ctrl-C), version 0" in out) is inside
    found = status(shown, "--json")
    split = found["split_server"] if inside else found
    assert (split["role"], split["round"], split["loss"]) == ("server", 3, 2.5)
    assert (split["uploads"]["trained"], split["clients"][0]["uploads"]) == (1, 1)


def test_a_split_server_is_followed_to_its_end(tmp_path, status, monkeypatch):
    """Like a parameter server."""
    run_dir = make_split_run(tmp_path, ended=False)

    def end(_):
        with JournalWriter(run_dir / "journal.jsonl") as journal:
            journal.fact(client_of("site-a", "gone", incarnation=5, why="expired"), 2.0)
            journal.note("node_ended", 2.0)

    monkeypatch.setattr("fsl_async.commands.status.time.sleep", end)
    before_the_end = status(run_dir, "--follow").partition("split server (fsl-sage): ended")[0]
    assert "site-a joins, 1 client connected" in before_the_end
    assert [line for line in before_the_end.splitlines() if line.startswith("site-a  training")]
    assert "site-a left: no message came from it" in before_the_end
