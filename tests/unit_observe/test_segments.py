"""Journals in segments: a reader gets the same lines wherever a segment begins."""

import json
import os
import random
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from facts import client_line, client_of

from fsl_async import cli
from fsl_async.commands import sim as sim_command
from fsl_async.files.checksummed_json import to_checksummed
from fsl_async.observe import segments
from fsl_async.observe.clients import NodeState
from fsl_async.observe.history import Course, as_dict, of_client
from fsl_async.observe.journal import JournalReader, JournalWriter
from fsl_async.observe.ledger_audit import audit_run
from fsl_async.observe.run_state import RunState


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Lines of a run with clients that come and go."""
    path = tmp_path_factory.mktemp("sim") / "journal.jsonl"
    words = ["--clients", "4", "--hours", "2", "--seed", "3", "--journal", str(path)]
    assert CliRunner().invoke(sim_command.command, words, standalone_mode=False).return_value == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    note = {"kind": "note", "cause": None}
    started = {
        "type": "node_started",
        "role": "ps",
        "run": "r",
        "address": "tcp://h:1",
        "pid": 7,
        "every_s": 600.0,
        "encrypted": True,
    }
    for part in (0, 1):
        at = part * len(lines) // 2
        stamp = {"t": lines[at]["t"]}
        traffic = {
            "payload": {"deltas up": 70 + part},
            "coded": {"deltas up": 9},
            "sockets": {"up": 11},
            "error": {"deltas up": 0.25},
        }
        lines[at:at] = [started | note | stamp, note | stamp | {"type": "traffic"} | traffic]
    return lines


def added(state, lines):
    """A state and its news."""
    news = [one for line in lines for one in state.apply(line)]
    return state, news


def fields_of(course):
    """Return the fields of a node's note so_far."""
    return segments.Total(course).as_fields()


def shown(course):
    """Return what a page shows of a history. Sums of floats may differ in their last digits."""
    history, series = course.history, course.history.rounds
    clients = {name: of_client(series, name, 0) for name in series.clients}
    lines = {name: (line.segments(), line.marks) for name, line in history.timelines.items()}
    samples = {name: list(column) for name, column in history.bytes.columns.items()}
    return {**as_dict(series), "clock": 0}, clients, lines, samples


def test_a_segment_begins_with_the_complete_state(simulated):
    """`status` reads the newest segment only, so its first line holds every field of the state."""
    whole, whole_news = added(Course(), simulated)
    assert whole.state.clients
    assert whole.state.ps.version > 2
    assert whole.state.account.as_dict()["payload"] == {"deltas up": 141}
    assert len(whole.history.rounds) > 2
    for cut in [1, *random.Random(5).sample(range(2, len(simulated)), 30)]:
        total = segments.Total(Course())
        total.add(simulated[:cut])
        first = {"t": simulated[cut - 1]["t"], "type": segments.SO_FAR, **total.as_fields()}
        course, _ = added(Course(), [json.loads(json.dumps(first, allow_nan=False))])
        assert course.state == total.sum.state, cut
        assert fields_of(course)["history"] == first["history"], cut
        course, news = added(course, simulated[cut:])
        assert course.state == whole.state, cut
        assert shown(course) == shown(whole), cut
        assert news == whole_news[len(whole_news) - len(news) :]


@pytest.mark.parametrize("text", ["", "x", "AAAA", 3, None])
def test_a_column_that_is_none_is_an_error_that_a_state_takes(text):
    """Anyone may write a journal: what a note has is a history, or the reader begins with none."""
    fields = fields_of(Course())
    fields["history"]["bytes"]["columns"]["t"] = text
    course, _ = added(Course(), [{"t": 1.0, "type": segments.SO_FAR, **fields}])
    assert len(course.history.bytes) == 0
    bomb = segments._packed(bytes(1 << 24))
    assert len(segments.restored(segments.Column, bomb)) <= segments._MOST_OF_A_COLUMN // 8


def test_what_a_client_has_spent_is_that_of_its_newest_delta():
    """Of a private run, also over segments; what is no number changes nothing."""
    course = Course()
    state = course.state
    for sequence, facts in enumerate(({"epsilon": 1.5}, {"epsilon": 2.25}, {"epsilon": "x"}, {})):
        delta = {"key": f"a/1/0/{sequence + 1}", "steps": 1, "tokens": 1, "facts": facts}
        state.apply({"t": 1.0, "type": "delta_meta", "peer": "a", "delta": delta})
    assert state.clients["a"].epsilon == 2.25
    assert '"epsilon": 2.25' in json.dumps(fields_of(course))


def test_of_a_split_server_too():
    """The same for a split server's journal, with its own figures."""
    lines = [
        {"t": 1.0, "type": "node_started", "role": "server", "method": "sl", "address": "a:1",
         "pid": 3, "host": "h", "encrypted": False},
        client_line(2.0, "a", "training", begins=True),
        {"t": 2.5, "type": "round_done", "peer": "a", "errors": {"activations up": 0.5}},
        {"t": 3.0, "type": "upload_trained", "key": "a/1/4/0", "loss": 2.5},
        {"t": 4.0, "type": "traffic", "payload": {"x up": 5}, "coded": {}, "sockets": {},
         "error": {"x up": 0.1}},
        {"t": 5.0, "type": "node_started", "method": "sl", "address": "a:2", "pid": 4, "host": "h"},
        {"t": 6.0, "type": "node_ended"},
    ]  # fmt: skip
    whole = RunState()
    for line in lines:
        whole.apply(line)
    for cut in range(1, len(lines)):
        total, state = segments.Total(Course()), RunState()
        total.add(lines[:cut])
        first = {"t": lines[cut - 1]["t"], "type": segments.SO_FAR, **total.as_fields()}
        for line in [json.loads(json.dumps(first)), *lines[cut:]]:
            state.apply(line)
        assert state == whole


@pytest.mark.parametrize(
    "state", [None, 3, {}, {"clients": 3}, {"news": [{}]}, {"ps": {"version": "x"}}]
)
def test_a_first_line_of_another_release_changes_nothing_or_little(state):
    """A newer release may have other fields, and a state accepts any line."""
    found = RunState(NodeState(run="r"))
    found.apply({"t": 1.0, "type": segments.SO_FAR, "state": state})
    assert found.node.last_t == 1.0


@pytest.fixture
def small(monkeypatch):
    """Segments of a few lines."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 4000)
    monkeypatch.setattr("fsl_async.observe.journal.FLUSH_EVERY_S", 0.01)


def write(writer, count, since=0):
    """Acknowledge deltas, and wait after each until it is in a file."""
    for number in range(since, since + count):
        writer.note("accepted", 0.0, key=f"a/1/0/{number}", filling="x" * 100)
        if number % 7 == 0:
            writer.flush()
            time.sleep(0.03)


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def numbers(lines):
    """Return the numbers of the lines that `write` made."""
    return [int(line["key"].rpartition("/")[2]) for line in lines if line.get("key")]


def test_every_line_is_read_once_by_followers_and_by_later_readers(tmp_path, small, monkeypatch):
    """Across restarts of the writer, and however many segments began between two reads."""
    monkeypatch.setattr(segments, "KEPT", 1000)
    path = tmp_path / "journal.jsonl"
    reader, seen, rng = JournalReader(path), [], random.Random(1)
    for life in range(3):
        with JournalWriter(path) as writer:
            seen += reader.read()
            for part in range(10):
                write(writer, 30, since=300 * life + 30 * part)
                if rng.random() < 0.3:
                    seen += reader.read()
    seen += reader.read()
    assert numbers(seen) == list(range(900))
    older = sorted(tmp_path.glob("journal.*.jsonl"))
    assert len(older) > 5
    assert max(one.stat().st_size for one in [*older, path]) < 12_000
    everything = list(JournalReader(path).read_all())
    assert numbers(everything) == list(range(900))
    assert len({line["n"] for line in everything}) == len(everything)
    *_, newest = JournalReader(path).read()
    assert newest["n"] == max(line["n"] for line in everything)
    first, *rest = JournalReader(path).read()
    assert first["type"] == segments.SO_FAR
    assert len(rest) < 60, "status reads little of it"


def test_what_is_kept_is_bounded_and_the_audit_misses_nothing(tmp_path, small, monkeypatch):
    """The disk does not fill; a delta lost long ago is still found."""
    monkeypatch.setattr(segments, "KEPT", 3)
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as writer:
        write(writer, 400)
        until(lambda: len(list(tmp_path.glob("journal.*.jsonl"))) == 3)
    assert sum(one.stat().st_size for one in tmp_path.glob("journal*jsonl")) < 40_000
    ledger = [{"fact": "version", "version": 0, "tokens_total": 0, "merged": []}]
    ledger += [{"fact": "accepted", "key": f"a/1/0/{n}", "tokens": 1} for n in range(1, 400)]
    (tmp_path / "ledger.jsonl").write_bytes(
        b"".join(to_checksummed(fact) + b"\n" for fact in ledger)
    )
    (tmp_path / "spool").mkdir()
    for number in range(1, 400):
        (tmp_path / "spool" / f"a@1@0@{number}.frames").touch()
    found = audit_run(tmp_path)
    assert (found.acknowledged, found.lost) == (400, ("a/1/0/0",))


def test_what_comes_while_lines_are_added_up_is_added_too(tmp_path, small, monkeypatch):
    """A line in the old segment and not in the sum would be missing in `status`."""
    path, late, add = tmp_path / "journal.jsonl", ["a/1/0/late"], segments.Total.add

    def add_slowly(self, lines):
        add(self, lines)
        while late:
            writer.note("accepted", 0.0, key=late.pop())
            writer.flush()

    monkeypatch.setattr(segments.Total, "add", add_slowly)
    with JournalWriter(path) as writer:
        write(writer, 100)
        until(path.with_suffix(".acknowledged").exists)
    assert "a/1/0/late" in segments.acknowledged_before(path)


def test_what_waits_in_memory_has_no_lower_number_than_the_line_before_it(
    tmp_path, small, monkeypatch
):
    """The next process continues the numbers from the last line: no number is given twice after a
    kill.
    """
    path, add = tmp_path / "journal.jsonl", segments.Total.add

    def add_slowly(self, lines):
        add(self, lines)
        writer.note("Late", 0.0)

    monkeypatch.setattr(segments.Total, "add", add_slowly)
    with JournalWriter(path) as writer:
        write(writer, 100)
        until(older_than(path).__len__)
    found = [line["n"] for line in JournalReader(path).read_all()]
    assert found == sorted(set(found))


def test_a_note_of_lines_that_the_last_segment_did_not_take_has_a_later_number(
    tmp_path, monkeypatch
):
    """They were lost before the new segment's first line: numbers still rise."""
    monkeypatch.setattr("fsl_async.observe.journal.FLUSH_EVERY_S", 3600.0)  # only when asked
    path = tmp_path / "journal.jsonl"
    writer = JournalWriter(path)
    write(writer, 1)
    with monkeypatch.context() as full:
        full.setattr(writer, "_put", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
        writer.note("Lost", 0.0)
        writer.note("Lost", 0.0)
        writer.flush()
        writer._turn(segments.Total(Course()))
    writer.note("Late", 0.0)
    writer.close()
    lines = list(JournalReader(path).read_all())
    assert [line["type"] for line in lines[-3:]] == [segments.SO_FAR, "journal_gap", "Late"]
    assert lines[-2]["lines"] == 2
    found = [line["n"] for line in lines]
    assert found == sorted(set(found))


@pytest.mark.parametrize("dies_in", ["hardlink_to", "replace"])
def test_a_process_that_dies_as_a_segment_begins(tmp_path, small, monkeypatch, dies_in):
    """At each step of it, there is one journal with every line once."""
    path = tmp_path / "journal.jsonl"

    class DiedError(BaseException):
        pass

    def die(*_):
        raise DiedError

    with JournalWriter(path, sum_up=None) as writer:
        write(writer, 50)
    with monkeypatch.context() as broken:
        broken.setattr(type(path), dies_in, die)
        with pytest.raises(DiedError):
            segments.turn(path, b'{"n":50,"type":"so_far"}\n', ["a/1/0/1"])
    assert numbers(JournalReader(path).read()) == list(range(50))
    with JournalWriter(path) as writer:
        assert sorted(one.name for one in tmp_path.glob("journal*jsonl*")) == ["journal.jsonl"]
        write(writer, 50, since=50)
    assert numbers(JournalReader(path).read_all()) == list(range(100))


def test_where_no_segment_can_begin_the_journal_goes_on(tmp_path, small, monkeypatch):
    """On a file system without links, or a full disk, the journal grows instead."""
    tried = []

    def fails(*_):
        tried.append(None)
        raise OSError(95, "Operation not supported")

    path = tmp_path / "journal.jsonl"
    with monkeypatch.context() as broken, JournalWriter(path) as writer:
        broken.setattr(type(path), "hardlink_to", fails)
        write(writer, 200)
        until(lambda: len(tried) > 2)
        assert len(tried) < 20, "not at every line"
        assert not list(tmp_path.glob("*.new"))
        broken.undo()
        write(writer, 300, since=200)  # more than 1.5 times the lines of the last try
        until((tmp_path / "journal.1.jsonl").exists)
    assert numbers(JournalReader(path).read_all()) == list(range(500))


def test_status_of_a_run_in_segments(tmp_path, small, capsys):
    """`status` covers the complete run: starts, address, early clients."""
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as writer:
        writer.note(
            "node_started",
            0.0,
            role="ps",
            run="r-1",
            address="tcp://h:1",
            pid=7,
            host="h",
            every_s=10.0,
        )
        writer.fact(client_of("long-ago", "joining", begins=True), 0.0)
        write(writer, 200)
    assert len(list(tmp_path.glob("journal.*.jsonl"))) > 2
    (tmp_path / "ledger.jsonl").touch()
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["address"], found["starts"]) == ("r-1", "tcp://h:1", 1)
    assert [client["name"] for client in found["clients"]] == ["long-ago"]


def older_than(path):
    """Return the segments before the newest."""
    return sorted(path.parent.glob(f"{path.stem}.*.jsonl"))


@pytest.mark.parametrize("told", ["nan", "-inf"])
def test_a_sum_that_is_not_finite_does_not_end_the_journal(tmp_path, small, told):
    """A diverging loss or a hostile heartbeat does not end the writing thread."""
    path, split = tmp_path / "journal.jsonl", tmp_path / "split.jsonl"
    with JournalWriter(path) as writer, JournalWriter(split) as other:
        writer.fact(client_of("a", "joining", begins=True), 0.0)
        writer.note("heartbeat_received", 0.0, peer="a", payload={"tokens_per_s": float(told)})
        other.note("upload_trained", 0.0, key="a/1/4/0", loss=float(told))
        other.note("round_done", 0.0, peer="a", errors={"activations up": float(told)})
        for one in (writer, other):
            write(one, 100)
            until(older_than(one.path).__len__)
            assert one._flusher.is_alive()
    for one in (path, split):
        assert numbers(JournalReader(one).read_all())[-100:] == list(range(100))
    state, _ = added(RunState(), JournalReader(path).read())
    assert str(state.clients["a"].tokens_per_s) == told
    state = RunState()
    for line in JournalReader(split).read():
        state.apply(line)
    assert str(state.split_server.loss) == told


@pytest.mark.parametrize(
    ("where", "what"),
    [(Path, "open"), (Path, "replace"), (os, "open"), (segments.Total, "add")],
)
def test_whatever_a_turn_fails_with_lines_go_on(tmp_path, small, monkeypatch, where, what):
    """No free descriptor, a disk with errors, a sum that cannot be made."""
    path, tried, real = tmp_path / "journal.jsonl", [], getattr(where, what)

    def fails(*words, **more):
        if threading.current_thread().name != "journal":
            return real(*words, **more)
        tried.append(None)
        raise RuntimeError if where is segments.Total else OSError(24, "Too many open files")

    with JournalWriter(path) as writer:
        with monkeypatch.context() as broken:
            broken.setattr(where, what, fails)
            write(writer, 150)
            until(lambda: len(tried) > 2)
            assert [one.name for one in tmp_path.glob("journal*jsonl*")] == ["journal.jsonl"]
        write(writer, 100, since=150)
        until(older_than(path).__len__)
        write(writer, 50, since=250)
    assert numbers(JournalReader(path).read_all()) == list(range(300))
    keys = {*segments.acknowledged_before(path)}
    keys |= {line["key"] for line in JournalReader(path).read() if "key" in line}
    assert len(keys) == 300, "the audit misses nothing"


def test_half_a_key_of_a_full_disk_is_not_taken_for_one(tmp_path):
    """The key after half a key is read correctly, so the audit reports no loss."""
    path = tmp_path / "journal.jsonl"
    path.touch()
    kept = path.with_suffix(".acknowledged")
    for torn in ("", "a/1/0/0\na/1/"):
        kept.write_text(torn)
        os.close(segments.turn(path, b'{"n":0}\n', ["a/1/0/1", "b/1/0/1"]))
        assert [*segments.acknowledged_before(path)] == [*torn.split()[:1], "a/1/0/1", "b/1/0/1"]


def test_the_journal_of_a_simulation_leaves_other_files_alone(tmp_path):
    """It is never cut into segments, and its folder is the user's."""
    other = tmp_path / "journal.jsonl.new"
    other.touch()
    with JournalWriter(tmp_path / "journal.jsonl", sum_up=None):
        assert other.exists()
