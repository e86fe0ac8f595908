"""A server's own lines: the texts of `status`, once each, and all of them in the journal."""

import json
import time

import pytest
from deltas import stored_of
from facts import FactWriter, VersionFact, client_of, version_of

from fsl_async.observe.journal import JournalReader, JournalWriter
from fsl_async.observe.run_state import RunState
from fsl_async.observe.table import Reporter
from fsl_async.roles.machine import ClientLeft, Finish, Note, Received
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey

T = 1_000_000.0


@pytest.fixture
def lines():
    return []


@pytest.fixture
def teller(tmp_path, lines):
    with JournalWriter(tmp_path / "journal.jsonl", clock=lambda: T) as journal:
        yield Reporter(journal, lines.append, lambda: 5.0, clock=lambda: T)


def read(tmp_path):
    return list(JournalReader(tmp_path / "journal.jsonl").read())


def a_run(teller):
    """A run of one client and one round, as the server's shell writes it."""
    key = DeltaKey("a", 5, 0, 1)
    teller.note(
        "node_started", 1.0, role="ps", run="r", address="tcp://h:1", every_s=1.0, quorum=0.5
    )
    items = (
        VersionFact(-1, "", 0, "disk"),
        ev.ClientHello("a", 5, "", -1, ""),
        ev.ModelAttached("a", "f", 1000, None),
        VersionFact(0, "d", 0),
        Received("a", msg.Holding(0, "d")),
        ev.HeartbeatReceived(
            "a", {"loss": 1.5, "step": 3, "tokens": 30, "tokens_per_s": float("nan")}
        ),
        ev.DeltaStored("a", stored_of(key, size=800, tokens=100), None),
        version_of(1, "a", tokens=100, gained=100),
        ClientLeft("a", 5, "expired"),
        Finish("Ctrl-C"),
    )
    FactWriter(teller).write(items, 1.0)


def test_a_loss_of_an_earlier_process_is_not_shown_as_this_rounds(teller, lines):
    """The new process of the client keeps its loss to itself."""
    a_run(teller)
    key = DeltaKey("a", 6, 1, 1)
    items = (
        ev.ClientHello("a", 6, "r", 1, "e"),
        ev.DeltaStored("a", stored_of(key, size=800, tokens=100), None),
        version_of(2, "a", tokens=200, gained=100),
    )
    FactWriter(teller).write(items, 1.0)
    (line,) = [one for one in lines if "version 2:" in one]
    assert "loss" not in line


def test_the_lines_are_those_of_the_journal(teller, lines, tmp_path):
    """Printed lines and journal agree on every count."""
    a_run(teller)
    clock = time.strftime("%H:%M:%S", time.localtime(T))
    assert lines == [
        f"{clock}  {text}"
        for text in (
            "a joins, 1 client connected",
            (
                "version 0, the first client's weights, is here: training starts;"
                " the first sync comes after 1 s"
            ),
            (
                "version 1: 1 of 1 called client merged (1 needed); loss 1.500 (running mean);"
                " 100 tokens (+100); 4.0 kB as 0.8 kB (5.0x)"
            ),
            "a left: no message came from it, 0 clients connected",
            "the run ends: Ctrl-C",
        )
    ]
    teller._journal.flush()
    state = RunState()
    told = [news for line in read(tmp_path) for news in state.apply(line)]
    assert [f"{clock}  {news.text}" for news in told if news.kind != "server"] == lines


def test_a_note_is_printed_once_and_a_shells_note_is_journaled(teller, lines, tmp_path):
    """A machine's note is journaled as its effect; a shell's note is in no effect."""
    of_machine = Note("the machine's", "warning")
    teller.effect(of_machine, 1.0)
    teller.say(of_machine)
    teller.say(Note("the shell's", "warning"))
    assert [line[10:] for line in lines] == ["the machine's", "the shell's"]
    teller._journal.flush()
    written = [line for line in read(tmp_path) if line["type"] == "note"]
    assert [(line["kind"], line["text"], line["now"]) for line in written] == [
        ("effect", "the machine's", 1.0),
        ("note", "the shell's", 5.0),
    ]
    json.dumps(written)


def test_causes_and_numbers_are_the_journals(teller, tmp_path):
    """Printing changes no number and no cause in the journal."""
    first = teller.event(ev.ClientHello("a", 5, "", -1, ""), 1.0)
    second = teller.effect(do.Admit("a", 5, 0), 1.0, first)
    teller.note("X", 2.0, second, more=1)
    teller._journal.flush()
    assert [(line["n"], line["cause"]) for line in read(tmp_path)] == [(0, None), (1, 0), (2, 1)]


def test_with_a_record_news_are_objects(tmp_path):
    """With --json, joins and versions are objects beside the result."""
    records, lines = [], []
    with JournalWriter(tmp_path / "journal.jsonl") as journal:
        teller = Reporter(
            journal,
            lines.append,
            lambda: 0.0,
            record=lambda kind, **more: records.append((kind, more)),
        )
        teller.fact(client_of("a", "joining", begins=True), 0.0)
    assert lines == []
    ((kind, fields),) = records
    assert (kind, fields["client"], fields["text"]) == (
        "joined",
        "a",
        "a joins, 1 client connected",
    )


def test_a_split_server_does_not_print_what_the_parameter_server_prints(teller, lines):
    """In one process both have the same clients; the split server's news of them are for its status
    only.
    """
    teller.note("node_started", 1.0, role="server", method="sl", address="tcp://h:2")
    teller.fact(client_of("a", "training", begins=True), 1.0)
    teller.fact(client_of("a", "gone", why="expired"), 1.0)
    teller.effect(Finish("Ctrl-C"), 1.0)
    assert [line[10:] for line in lines] == ["the run ends: Ctrl-C"]
