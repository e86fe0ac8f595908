"""Lines about clients whose training brings nothing, from the journal alone."""

from facts import client_line, line_of, version_of

from fsl_async.commands.status_report import table
from fsl_async.observe.run_state import RunState


def stored(run, name, norm, *, steps=20, sequence=1):
    delta = {"key": f"{name}/1/0/{sequence}", "tokens": 512, "steps": steps, "round": 0}
    line = {"delta": delta, "bytes": 10, "norm": norm}
    return run.apply({"t": 1.0, "type": "delta_stored", "peer": name, "stored": line})


def test_a_client_that_moves_nothing_is_told_within_two_rounds():
    """It sends deltas, reports losses and looks like every other client."""
    run = RunState()
    assert stored(run, "a", 0.0) == []
    (news,) = stored(run, "a", 0.0)
    assert (news.kind, news.client, news.level) == ("does not move", "a", "warning")
    assert news.text.startswith("a trains, but its last 2 deltas change no weight")
    assert stored(run, "a", 0.0) == []
    assert stored(run, "b", 1.0) == []
    assert [line for line in table(run, 1.0) if "change no weight" in line]
    (news,) = stored(run, "a", 1.0)
    assert news.kind == "moves again"
    assert not [line for line in table(run, 1.0) if "change no weight" in line]


def version(run, number, alike, names="abc"):
    """A version of deltas of these clients."""
    for name in names:
        run.apply(client_line(1.0, name, "joining", begins=True))
        stored(run, name, 1.0, sequence=number)
    news = run.apply(line_of(version_of(number, names, alike=alike), 1.0))
    return [one.text for one in news if one.kind == "alike"]


def test_clients_that_train_the_same_are_told_after_three_rounds():
    """One line names both, and comes again only after it has ceased."""
    run, pair = RunState(), {"a/b": 0.99}
    assert [version(run, number, pair) for number in (1, 2)] == [[], []]
    (text,) = version(run, 3, pair)
    assert text.startswith("a, b send almost the same deltas")
    assert "fed.shard" in text
    assert "fed.part" in text
    assert text in table(run, 1.0)
    assert version(run, 4, pair) == []
    assert version(run, 5, {}, names="ac") == [], "b had no delta: nothing is known"
    assert text in table(run, 1.0)
    assert version(run, 6, {}) == []
    assert text not in table(run, 1.0)
    assert [len(version(run, number, pair)) for number in (7, 8, 9)] == [0, 0, 1]
