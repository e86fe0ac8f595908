"""A split server's ledger and journal, read back: what is counted, and what is a fault."""

import pytest
from facts import client_line

from fsl_async.accounting.sizes import Account, account_lines
from fsl_async.files.checksummed_json import to_checksummed
from fsl_async.observe.ledger_audit import LEDGER, audit_split, audit_split_dir
from fsl_async.observe.run_state import RunState
from fsl_async.observe.table import client_lines, header


def fates(*pairs):
    return [{"fact": "upload", "key": key, "outcome": outcome} for key, outcome in pairs]


def given(version):
    return {"fact": "auxiliary", "client": "a", "version": version}


def test_what_became_of_uploads_over_two_servers():
    """An upload that was lost with its split server and offered again counts as trained once."""
    lines = fates(
        ("a/1/0/0", "trained"),
        ("a/1/0/1", "trained"),
        ("b/7/0/0", "declined"),
        ("b/7/0/0", "declined"),
        ("a/1/0/1", "dropped"),
        ("a/1/0/0", "dropped"),
        ("a/1/0/1", "trained"),
        ("a/2/3/0", "trained"),
    )
    lines += [given(0), given(2)]
    found = audit_split(lines, [])
    assert (found.trained, found.declined, found.dropped, found.came_back) == (2, 1, 1, 1)
    assert (found.lives, found.rounds) == ({"a": 2, "b": 1}, {"a": 3})
    assert found.auxiliary == {"a": 2}
    assert found.problems == ()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (fates(("a/1/0/0", "trained"), ("a/1/0/0", "trained")), "trained after it was trained"),
        (fates(("a/1/0/0", "dropped")), "dropped after it was never seen"),
        (fates(("a/1/0/0", "declined"), ("a/1/0/0", "trained")), "trained after it was declined"),
        (fates(("a/1/0/0", "trained"), ("a/1/0/0", "declined")), "declined after it was trained"),
        ([given(3)] * 2, "version 3 of the auxiliary model of a"),
    ],
)
def test_what_no_run_of_a_method_writes_is_a_fault(wrong, words):
    """No crash may lead to an upload trained twice."""
    (problem,) = audit_split(wrong, []).problems
    assert words in problem


def note(up, error=None):
    line = {
        "type": "traffic",
        "payload": {"activations up": up},
        "coded": {"activations up": up // 2},
    }
    line |= {
        "sockets": {"up": up, "down": 7},
        "error": {} if error is None else {"activations up": error},
    }
    return line


def test_bytes_are_those_of_all_incarnations():
    """A restarted server counts from 0; the run's bytes are the sum."""
    account = Account()
    for line in (
        note(10),
        note(100, 0.3),
        {"type": "node_started"},
        note(300, 0.1),
        {"type": "traffic"},
    ):
        account.apply(line)
    found = account.as_dict()
    assert found["payload"] == {"activations up": 400}
    assert found["coded"] == {"activations up": 200}
    assert found["sockets"] == {"down": 14, "up": 400}
    assert found["error"]["activations up"] == pytest.approx(((9 + 3) / 400) ** 0.5, rel=1e-3)
    text = "\n".join(account_lines("split server", found))
    assert "400" in text
    assert "17.32%" in text
    assert account_lines("ps", Account().as_dict()) == []


def test_the_journal_of_a_split_server():
    """Its clients, its address, and the coding errors that clients report."""
    state = RunState()
    news = []
    for line in (
        {
            "type": "node_started",
            "t": 1.0,
            "role": "server",
            "method": "fsl-sage",
            "address": "tcp://x:1",
            "pid": 4,
            "host": "h",
        },
        client_line(1.0, "a", "training", begins=True),
        client_line(1.0, "b", "training", incarnation=7, begins=True),
        {"type": "upload_trained", "key": "a/1/5/0", "loss": 2.5, "problem": None},
        {"type": "upload_trained", "key": "a/1/6/0", "loss": 0.0, "problem": "odd"},
        {
            "type": "round_done",
            "peer": "a",
            "errors": {"activations up": 0.03, "x down": 4},
        },
        {"type": "round_done", "peer": "b", "errors": {"activations up": 0.04}},
        client_line(9.0, "a", "gone", why="expired"),
        {"type": "upload_trained"},
    ):
        news += [one.text for one in state.apply(line)]
    split = state.split_server
    assert (split.method, split.round, split.loss, state.node.last_t) == ("fsl-sage", 5, 2.5, 9.0)
    assert {one.name: one.connected for one in state.clients.values()} == {"a": False, "b": True}
    assert [one.uploads for one in state.clients.values()] == [1, 0]
    assert news == [
        "the split server listens at tcp://x:1",
        "a joins, 1 client connected",
        "b joins, 2 clients connected",
        "a left: no message came from it, 1 client connected",
    ]
    titles, first, _ = client_lines(state, 10.0)
    assert titles.split() == ["client", "state", "loss", "uploads", "losses"]
    assert first.split()[-3:] == ["2.500", "1", "▁"]
    assert header(state) == (
        "split server (fsl-sage) of run none yet, starting, newest round 5, loss 2.500,"
        " 1 client connected"
    )
    assert state.traffic()["error"] == {"activations up": pytest.approx(0.03536, rel=1e-3)}


def test_a_damaged_line_hides_no_later_one(tmp_path):
    """The lines behind it are audited, and the damage is a problem; a torn last line is none."""
    first, second, third = (
        to_checksummed({"key": f"a/1/{number}/0", "outcome": "trained"}) for number in range(3)
    )
    damaged = second.replace(b"trained", b"dropped")
    (tmp_path / LEDGER).write_bytes(b"\n".join([first, damaged, third, first[:20]]))
    found = audit_split_dir(tmp_path)
    assert found.trained == 2
    assert found.problems == ("line 2 of ledger.jsonl does not match its checksum",)
