"""The live table and the table of clients, as a terminal of a given width shows them."""

import io

import pytest
from rich.console import Console

from fsl_async.observe.clients import ClientState, News, Volume
from fsl_async.observe.rounds import ParameterServerFigures
from fsl_async.observe.run import NodeState
from fsl_async.observe.run_state import RunState
from fsl_async.observe.table import LiveTable, client_lines, header


def a_client(name, **changed):
    """A client in the middle of a run of some days."""
    made = ClientState(name, incarnations=3, doing="training", connected=True, version=1234)
    made.step, made.tokens_per_s, made.deltas_merged = 123_456, 54_321.0, 1234
    made.losses.extend([4.0, 3.0, 2.345])
    made.up = Volume(123_400_000, 30_800_000)
    for key, value in changed.items():
        setattr(made, key, value)
    return made


def a_run():
    """Three clients, one of them gone and two with long names."""
    node = NodeState("ps", "run-0123abcd", phase="ready", started_at=1000.0, last_t=1000.0)
    state = RunState(node, ps=ParameterServerFigures(version=1234, tokens=987_654_321))
    gone = {"doing": "gone", "gone_at": 900.0, "gone_why": "no message came from it"}
    names = ["client-1", "institute-of-physics-a100", "gpu-node-17.cluster.example.org"]
    state.clients = {name: a_client(name) for name in names[:2]}
    state.clients[names[2]] = a_client(names[2], **gone)
    for number in range(8):
        words = "1 of 3 called clients merged (2 needed), late: client-1; loss 2.345 over the round"
        state.news.append(News(1000.0 + number, "version", f"version {number}: {words}"))
    return state


def rendered(width, state, height=24):
    """Return what the live table leaves on a screen of that size."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    table = LiveTable(console=console)
    table.update(state, [], 1000.0)
    table.close()
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 110, 160])
def test_the_live_table_fits(width):
    """Many terminals are 80 columns wide; losses and versions must be visible there."""
    lines = rendered(width, a_run())
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= 24
    titles, *rows = lines[next(i for i, line in enumerate(lines) if line.startswith("client ")) :]
    for title in ("state", "version", "loss", "tokens/s", "deltas", "sent up"):
        assert title in titles
    for row, start in zip(rows, ("client-1", "gpu-nod", "institu"), strict=False):
        assert row.startswith(start)
        for value in ("1234", "2.345", "54,321", "30.8 MB"):
            assert value in row
    assert "gone 100 s" in rows[1] or "gone for 100 s" in rows[1]
    assert any("version 7:" in line for line in lines)  # the newest line is there


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60])
def test_a_very_narrow_terminal_still_has_names_and_states(width):
    """The last columns go first, and no line is wrapped."""
    lines = client_lines(a_run(), 1000.0, width)
    assert len(lines) == 4
    assert all(len(line) <= width for line in lines)
    if width >= 30:
        assert "training" in lines[1]


def test_more_clients_than_lines():
    """A screen that scrolls cannot be redrawn in place."""
    state = a_run()
    state.clients = {f"client-{i}": a_client(f"client-{i}") for i in range(50)}
    lines = rendered(80, state)
    assert len(lines) <= 24
    assert any(line.startswith("and ") and line.endswith("more") for line in lines)


def test_a_private_run_shows_what_its_clients_have_spent():
    """In no other run is there a column for it."""
    state = a_run()
    assert "epsilon" not in client_lines(state, 1000.0)[0]
    state.clients["client-1"].epsilon = 4.7239
    titles, *rows = client_lines(state, 1000.0)
    assert titles.endswith("epsilon")
    assert rows[0].endswith("   4.72")
    assert rows[1].endswith("      -")


def test_the_header_before_there_is_anything():
    """The first thing that a user sees."""
    assert header(RunState(), 0.0) == "the parameter server is starting"
    waiting = header(RunState(NodeState(run="r-1", phase="waiting")), 0.0)
    assert waiting == "run r-1, waiting for the first client's weights"
    assert header(a_run(), 0.0, 5.0).endswith("5 s left")
