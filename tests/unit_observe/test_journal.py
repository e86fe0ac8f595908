"""The journal: canonical lines, small values, and no loss except what a crash tears."""

import enum
import errno
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsl_async.observe import journal
from fsl_async.observe.journal import JournalReader, JournalWriter, TraceHash
from fsl_async.observe.journal_lines import encode, plain


@attrs.frozen
class Started:
    """An event without fields."""


@attrs.frozen
class Called:
    """An event with one field."""

    tag = "called"
    round: int


@attrs.frozen
class Key:
    """Like DeltaKey: written as its text."""

    client: str
    sequence: int

    @property
    def text(self):
        """Both parts."""
        return f"{self.client}/{self.sequence}"


@attrs.frozen
class Declined:
    """Has a field called text, unlike Key's property."""

    tag = "declined"
    text: str


@attrs.frozen
class Stored:
    """One field of each kind, two with reserved names."""

    key: Key
    kind: str
    n: int
    loss: float
    data: bytes
    message: object = None


@attrs.frozen
class Colored:
    """Part of an event: it needs no tag."""

    red: int


class Color(enum.IntEnum):
    """An integer that should be written as a name."""

    RED = 1


@pytest.fixture
def path(tmp_path):
    before = threading.active_count()
    yield tmp_path / "run" / "journal.jsonl"
    assert threading.active_count() == before, "a journal was not closed"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_the_documented_form(path):
    """Scripts with grep and jq depend on the exact bytes."""
    with JournalWriter(path, clock=lambda: 100.5) as writer:
        n = writer.event(Called(3), 1.25)
        writer.effect(Stored(Key("a", 7), "full", 2, math.nan, b"abc", Declined("no")), 1.25, n)
        writer.note("node_started", 1.5, n, pid=4, type="x")
        writer.event(Started(), 2.0)
    assert path.read_text().splitlines() == [
        '{"n":0,"t":100.500000,"now":1.25,"kind":"event","type":"called","cause":null,"round":3}',
        (
            '{"n":1,"t":100.500000,"now":1.25,"kind":"effect","type":"Stored","cause":0,'
            '"key":"a/7","kind_":"full",'
            '"n_":2,"loss":"nan","data":{"bytes":3},"message":{"type":"declined","text":"no"}}'
        ),
        (
            '{"n":2,"t":100.500000,"now":1.5,"kind":"note","type":"node_started","cause":0,'
            '"pid":4,"type_":"x"}'
        ),
        '{"n":3,"t":100.500000,"now":2.0,"kind":"event","type":"Started","cause":null}',
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (1 << 70, 1 << 70),
        (0.1, 0.1),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), "nan"),
        (np.int64(5), 5),
        (bytearray(5), {"bytes": 5}),
        (memoryview(bytes(16)).cast("i"), {"bytes": 16}),
        (np.zeros(4), "<ndarray>"),
        ([1, (2, 3)], [1, [2, 3]]),
        (list(range(64)), list(range(64))),
        (range(65), "<range>"),
        (list(range(65)), {"items": 65}),
        ({"b": 2, "a": 1}, {"b": 2, "a": 1}),
        ({str(i): i for i in range(64)}, {str(i): i for i in range(64)}),
        ({i: i for i in range(65)}, {"items": 65}),
        ({3: "x", Key("a", 1): "y", None: 1}, {"3": "x", "a/1": "y", "null": 1}),
        (set("qwertyuiopasdfghjkl"), sorted("qwertyuiopasdfghjkl")),
        (Color.RED, "RED"),
        (Path("/a"), "/a"),
        ("x" * 2001, "x" * 2000 + "... (2001 characters)"),
        (Called(1), {"type": "called", "round": 1}),
        (Colored(1), {"red": 1}),
        (object(), "<object>"),
    ],
)
def test_values_are_small_and_plain(value, expected):
    """A line is at most a few hundred bytes of JSON, whatever an event holds."""
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)


@given(
    st.recursive(
        st.none() | st.floats() | st.integers() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text(), inner),
    )
)
def test_any_value_becomes_one_json_line(value):
    """Payloads are a peer's: each gives one line that parses and hashes."""
    text = encode(plain(value))
    assert "\n" not in text
    json.loads(text)
    TraceHash().note("Any", 0.0, value=value)


@pytest.mark.parametrize(
    "other",
    [
        lambda trace: trace.event(Called(2), 1.0),
        lambda trace: trace.event(Called(1), 1.5),
        lambda trace: trace.effect(Called(1), 1.0, None),
        lambda trace: trace.effect(Called(1), 1.0, 0),
        lambda trace: trace.note("Called", 1.0, round=1),
        lambda trace: trace.event(Started(), 1.0),
    ],
)
def test_any_difference_changes_the_hash(other):
    """Runs that differ in a field, time, kind or cause have different hashes."""
    first, second = TraceHash(), TraceHash()
    first.event(Called(1), 1.0)
    other(second)
    assert first.hexdigest() != second.hexdigest()


def test_the_hash_does_not_depend_on_the_process():
    """Sets iterate in a different order in each process; a seed gives one hash in all."""
    script = (
        "from fsl_async.observe.journal import TraceHash\n"
        "from fsl_async.roles.sync.events import Recovered\n"
        "t = TraceHash(); t.note('N', 1.5, names={'a', 'b', 'c', 'd'}, ok=True)\n"
        "t.event(Recovered(0, '', (), provisional=frozenset('abcd')), 1.0)\n"
        "print(t.hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1


def test_lines_reach_the_file_within_a_second_without_a_further_line(path, monkeypatch):
    """`status` follows a quiet run: the last line does not wait for the next one."""
    monkeypatch.setattr(journal, "FLUSH_EVERY_S", 0.05)
    with JournalWriter(path) as writer:
        writer.event(Called(1), 0.0)
        deadline = time.monotonic() + 5
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(lines(path)) == 1
        writer.event(Called(2), 0.0)
        writer.flush()
        assert len(lines(path)) == 2


def test_a_restarted_process_goes_on_numbering_and_closes_a_torn_line(path):
    """A run is one journal over many processes; kill -9 within a line costs that line only."""
    with JournalWriter(path) as writer:
        for number in range(3):
            writer.event(Called(number), 0.0)
    with path.open("ab") as file:
        file.write(b'{"n":3,"t":1.0,"no')
    with JournalWriter(path) as writer:
        assert writer.event(Called(9), 0.0) == 3
    reader = JournalReader(path)
    assert [line["n"] for line in reader.read()] == [0, 1, 2, 3]
    assert reader.damaged == 1


def test_a_full_disk_loses_lines_and_records_how_many(path, monkeypatch):
    """A full disk does not end training; the journal records the number of lost lines."""
    monkeypatch.setattr(journal, "FLUSH_EVERY_S", 3600.0)  # only when asked
    writer = JournalWriter(path, clock=lambda: 1.0)
    writer.event(Called(0), 0.0)
    writer.flush()
    real, room = os.write, [100]

    def full(file, data):
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(file, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(journal.os, "write", full)
    for number in range(1, 6):
        writer.event(Called(number), 2.0)
    writer.flush()  # one line and a piece of the next fit
    writer.event(Called(6), 3.0)
    writer.flush()  # nothing fits
    monkeypatch.setattr(journal.os, "write", real)
    writer.event(Called(7), 4.0)
    writer.close()
    reader = JournalReader(path)
    kept = list(reader.read())
    assert [line.get("round", line["type"]) for line in kept] == [0, 1, "journal_gap", 7]
    assert kept[2]["lines"] == writer.lines_lost == 5
    assert reader.damaged == 1
    numbers_rise(kept)


def numbers_rise(lines):
    """Check that numbers rise: a note of lost lines has the number of the first, which is not
    reused.
    """
    numbers = [line["n"] for line in lines]
    assert numbers == sorted(set(numbers))


def test_a_gap_that_was_reported_is_not_reported_again(path, monkeypatch):
    """The disk may fill again right after the note: every lost line counts once."""
    monkeypatch.setattr(journal, "FLUSH_EVERY_S", 3600.0)  # only when asked
    writer = JournalWriter(path, clock=lambda: 1.0)
    real, room = os.write, [0]

    def full(file, data):
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(file, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(journal.os, "write", full)
    for number in range(4):
        writer.event(Called(number), 2.0)
    room[0] = 100
    writer.flush()  # one line and a piece of the next
    gap = (
        '{"n":4,"t":1.000000,"now":2.0,"kind":"note","type":"journal_gap","cause":null,"lines":3}\n'
    )
    writer.event(Called(4), 2.0)
    room[0] = 1 + len(gap) + 10
    writer.flush()  # the note and a piece of the next
    monkeypatch.setattr(journal.os, "write", real)
    writer.event(Called(5), 2.0)
    writer.close()
    reader = JournalReader(path)
    lines = list(reader.read())
    assert [line.get("round", line.get("lines")) for line in lines] == [0, 3, 1, 5]
    numbers_rise(lines)
    assert (writer.lines_lost, reader.damaged) == (4, 2)


def test_writing_after_close_is_ignored(path):
    """A late callback at the end of a node does not raise."""
    writer = JournalWriter(path)
    writer.close()
    writer.close()
    writer.event(Called(1), 0.0)
    writer.flush()
    assert path.read_text() == ""


def test_many_threads_write_complete_lines_with_their_own_numbers(path):
    """Loop, workers and training write; here the interpreter switches threads within a line."""

    def slow_clock():
        time.sleep(0)
        return 1.0

    with JournalWriter(path, clock=slow_clock) as writer:
        threads = [
            threading.Thread(
                target=lambda: [writer.note("N", 0.0, x="y" * 500) for _ in range(300)]
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [line["n"] for line in JournalReader(path).read()] == list(range(1200))


def test_the_reader_leaves_an_unfinished_line_for_later(path):
    """A reader beside the writer neither returns half a line nor skips it."""
    path.parent.mkdir()
    path.write_bytes(b'{"n":0}\n{"n":')
    reader = JournalReader(path)
    assert list(reader.read()) == [{"n": 0}]
    with path.open("ab") as file:
        file.write(b'1}\nnot json\n[1]\n{"n":2}\n')
    assert list(reader.read()) == [{"n": 1}, {"n": 2}]
    assert reader.damaged == 2
    assert list(reader.read()) == []


@pytest.fixture
def stuck_disk(monkeypatch):
    """Make writes wait until the test releases them."""
    go, begun, write = threading.Event(), threading.Event(), os.write

    def wait(file, data):
        begun.set()
        assert go.wait(20)
        return write(file, data)

    monkeypatch.setattr(journal.os, "write", wait)
    yield begun, go
    go.set()


def test_a_blocked_disk_blocks_no_other_thread(tmp_path, stuck_disk):
    """Without the writer's thread the event loop would wait for the disk, and heartbeats with
    it.
    """
    begun, go = stuck_disk
    writer = JournalWriter(tmp_path / "j")
    writer.note("First", 0.0)
    assert begun.wait(20)
    for number in range(3000):  # several blocks, each written by the thread that filled it
        writer.note("Later", 0.0, text="x" * 100, number=number)
    assert not go.is_set()
    go.set()
    writer.close()
    assert writer.lines_lost == 0
    assert len(list(JournalReader(tmp_path / "j").read())) == 3001


def test_what_waits_for_a_disk_is_bounded(tmp_path, stuck_disk, monkeypatch):
    """A disk that blocks for hours does not fill the memory; the gap is recorded in its place."""
    begun, go = stuck_disk
    monkeypatch.setattr(journal, "MAX_WAITING_BYTES", 1000)
    writer = JournalWriter(tmp_path / "j")
    writer.note("First", 0.0)
    assert begun.wait(20)
    for number in range(50):
        writer.note("Later", 0.0, number=number)
    go.set()
    writer.flush()
    writer.note("Last", 0.0)
    writer.close()
    found = list(JournalReader(tmp_path / "j").read())
    gaps = [line["lines"] for line in found if line["type"] == "journal_gap"]
    assert gaps == [writer.lines_lost]
    assert len(found) == 52 - writer.lines_lost + 1
    assert [line["type"] for line in found[-2:]] == ["journal_gap", "Last"]
    numbers_rise(found)
