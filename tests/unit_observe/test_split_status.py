"""A split server's ledger and journal, read back: what is counted, and what is called a fault."""

import pytest

from fsl_async.accounting.accounts import Account, account_lines
from fsl_async.observe.split_audit import audit_split
from fsl_async.observe.split_state import SplitState


def fates(*pairs):
    return [{"key": key, "outcome": outcome, "reason": ""} for key, outcome in pairs]


def test_what_became_of_uploads_over_two_servers():
    """An upload that died with its server and came back is one that was trained, and says so."""
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
    lines += [{"auxiliary": "a", "version": 0}, {"auxiliary": "a", "version": 2}]
    found = audit_split(lines)
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
        ([{"auxiliary": "a", "version": 3}] * 2, "version 3 of the auxiliary model of a"),
    ],
)
def test_what_no_run_of_a_method_writes_is_a_fault(wrong, words):
    """Twice trained is the one thing that a crash must never do."""
    (problem,) = audit_split(wrong).problems
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


def test_bytes_are_those_of_all_lives():
    """A restarted server counts from nothing; the run does not."""
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
    """Who is here, where it is, and what clients tell of their coding."""
    state = SplitState()
    for line in (
        {
            "type": "node_started",
            "t": 1.0,
            "method": "fsl-sage",
            "address": "tcp://x:1",
            "pid": 4,
            "host": "h",
        },
        {"type": "admit_split", "peer": "a"},
        {"type": "admit_split", "peer": "b"},
        {"type": "upload_trained", "key": "a/1/5/0", "loss": 2.5, "problem": None},
        {"type": "upload_trained", "key": "a/1/6/0", "loss": 0.0, "problem": "odd"},
        {
            "type": "round_done_received",
            "peer": "a",
            "errors": {"activations up": 0.03, "x down": 4},
        },
        {"type": "round_done_received", "peer": "b", "errors": {"activations up": 0.04}},
        {"type": "client_left", "peer": "a", "t": 9.0},
        {"type": "upload_trained"},
    ):
        state.apply(line)
    assert (state.method, state.round, state.loss, state.last_t) == ("fsl-sage", 5, 2.5, 9.0)
    assert state.here == {"a": False, "b": True}
    assert state.traffic()["error"] == {"activations up": pytest.approx(0.03536, rel=1e-3)}
