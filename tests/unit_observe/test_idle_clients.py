"""Lines about clients whose training brings nothing, and about ranks, labels and norms of sites,
from the journal alone.
"""

import pytest
from facts import client_line, line_of, version_of

from fsl_async.commands.status_report import table
from fsl_async.observe.clients import ClientState
from fsl_async.observe.rounds import saw_delta, site_lines
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


def test_a_client_that_keeps_back_more_and_more_is_told():
    """Where the step is too coarse, what was not sent grows, and weights go astray."""
    run, told = RunState(), []
    for sequence, share in enumerate([0.3, 0.29, *(0.3 + 0.04 * i for i in range(12)), 0.2], 1):
        facts = {"unsent": share}
        delta = {"key": f"a/1/0/{sequence}", "tokens": 9, "steps": 2, "facts": facts, "metrics": {}}
        told.append(run.apply({"t": 1.0, "type": "delta_meta", "peer": "a", "delta": delta}))
        if sequence == 13:
            assert [line for line in table(run, 1.0) if "keeps back more" in line]
    assert [len(news) for news in told] == [0] * 11 + [1] + [0] * 3
    (news,) = told[11]
    assert "each delta, or most of it, 10 times in a row, now 66% of its norm" in news.text
    lines = table(run, 1.0)
    assert "kept back" in lines[0]
    assert lines[1].rstrip().endswith("20%")
    assert not [line for line in lines if "keeps back more" in line]


def test_a_client_that_keeps_most_of_each_delta_back_is_told():
    """With a step of 4 nearly nothing is sent, and the share cannot grow."""
    run, told = RunState(), 0
    for sequence in range(1, 12):
        facts = {"unsent": 0.99 if sequence % 2 else 0.98}
        delta = {"key": f"a/1/0/{sequence}", "tokens": 9, "steps": 2, "facts": facts, "metrics": {}}
        told += len(run.apply({"t": 1.0, "type": "delta_meta", "peer": "a", "delta": delta}))
    assert told == 1


def test_a_site_of_one_class_is_named_once():
    """Label shares come with metrics; the warning has the site, the share and the label."""
    client = ClientState("site-b")
    delta = {
        "facts": {"rank": 2.0, "order": 1.0, "other": 3.0},
        "metrics": {"loss": 0.5, "share_negative": 0.98, "share_positive": 0.02},
    }
    assert "site-b has 98% negative among its records" in saw_delta(client, delta)
    assert saw_delta(client, delta) == ""
    assert client.facts == {"rank": 2.0, "order": 1.0}
    assert client.loss is None
    client.product_norm = 1.25
    assert site_lines([client, ClientState("quiet")]) == [
        "site-b: rank 2, moves products by 1.25, 98% negative, 2% positive"
    ]


@pytest.mark.parametrize("facts", [{"rank": True}, {"rank": "4"}, {"rank": None}, {}])
def test_a_peer_may_report_anything(facts):
    """What is no number is left out."""
    client = ClientState("a")
    assert saw_delta(client, {"facts": facts, "metrics": {"share_x": "much"}}) == ""
    assert site_lines([client]) == []


def test_zeroth_order_is_shown():
    """An operator sees which sites compute no gradients."""
    client = ClientState("a")
    saw_delta(client, {"facts": {"rank": 4.0, "order": 0.0}})
    assert site_lines([client]) == ["a: rank 4, zeroth order"]
