"""The table of clients, as a terminal of a given width shows it."""

import pytest

from fsl_async.observe.clients import ClientState, NodeState, Volume
from fsl_async.observe.rounds import ParameterServerFigures
from fsl_async.observe.run_state import RunState
from fsl_async.observe.table import client_lines, header


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
    return state


@pytest.mark.parametrize("width", [80, 110, 160])
def test_the_table_fits(width):
    """Many terminals are 80 columns wide; losses and versions must be visible there."""
    lines = client_lines(a_run(), 1000.0, width)
    assert all(len(line) <= width for line in lines)
    titles, *rows = lines
    for title in ("state", "version", "loss", "tokens/s", "deltas", "sent up"):
        assert title in titles
    for row, start in zip(rows, ("client-1", "gpu-nod", "institu"), strict=True):
        assert row.startswith(start)
        for value in ("1234", "2.345", "54,321", "30.8 MB"):
            assert value in row
    assert "gone 100 s" in rows[1] or "gone for 100 s" in rows[1]


def test_a_wide_terminal_shows_details():
    """At 160 columns, what 80 leave out is shown."""
    state = a_run()
    narrow, middle, wide = (
        "\n".join(client_lines(state, 1000.0, width)) for width in (80, 110, 160)
    )
    assert "losses" not in narrow
    assert "institute" not in narrow
    assert "123,456" in middle
    assert "institute-of-physics-a100" in middle
    assert "█" in wide
    assert "relaunched 2x" in wide
    assert "gone for 100 s" in wide
    everything = client_lines(state, 1000.0)
    assert "123.4 MB as 30.8 MB (7.99 bits)" in everything[1]
    assert len({line.index("training") for line in everything[1::2]}) == 1


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60])
def test_a_very_narrow_terminal_still_has_names_and_states(width):
    """The last columns go first, and no line is wrapped."""
    lines = client_lines(a_run(), 1000.0, width)
    assert len(lines) == 4
    assert all(len(line) <= width for line in lines)
    if width >= 30:
        assert "training" in lines[1]


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
    assert header(RunState()) == "the parameter server is starting"
    waiting = header(RunState(NodeState(run="r-1", phase="waiting")))
    assert waiting == "run r-1, waiting for the first client's weights"
