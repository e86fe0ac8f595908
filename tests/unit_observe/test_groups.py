"""Global rounds in the journal and in ledgers: what status shows, and what an audit finds."""

import pytest
from attrs import evolve
from facts import VersionFact, line_of

from fsl_async.files.checksummed_json import to_checksummed
from fsl_async.observe.journal_lines import as_fields
from fsl_async.observe.ledger_audit import audit_groups
from fsl_async.observe.run_state import RunState
from fsl_async.roles.groups import effects as do
from fsl_async.roles.groups import events as ev
from fsl_async.roles.machine import Done

VERSION = {"fact": "version", "version": 1, "merged": [], "tokens_total": 9}


def state_of(*items):
    """Return the state that the journal's lines of these events and effects add up to."""
    state = RunState()
    for item in items:
        state.apply({"t": 1.0, "type": item.tag, **as_fields(item)})
    return state


def test_status_has_a_line_about_groups():
    """A parameter server alone has none."""
    assert RunState().groups.words() == []
    assert RunState().as_dict(0.0)["groups"] is None
    held, made = ev.Decision(2, 4, "d2", "r"), ev.Decision(3, 5, "d3", "r")
    decision = do.KeepDecision(3, 5, "d3", {"south": (0, 1), "north": (0, 2)})
    state = state_of(
        ev.GroupsRecovered(held),
        ev.PeerHere("south"),
        ev.PeerHere("east"),
        ev.ReductionFailed(4, "x"),
        Done(do.KeepAttempt(3, 5)),
        Done(decision),
        Done(evolve(decision, round=4), "disk full"),
        ev.Adopted(made, 3, gained=False),
        ev.PeerGone("east", "bye"),
    )
    (line,) = state.groups.words()
    assert line == (
        "groups: global weights 3 (d3); 1 round decided here, the newest of north, south;"
        " 1 attempt failed here; connected: south"
    )
    assert state.lines_odd == 0
    member = state_of(ev.GroupsRecovered(), ev.PeerHere(""))
    assert member.groups.words() == ["groups: none yet; connected: the coordinator"]


def test_a_version_of_global_weights_is_no_round_without_clients():
    """No group was late for it."""
    state = RunState()
    state.apply(line_of(VersionFact(5, "g2", 0, "global", 2), 1.0))
    assert [news.text for news in state.news] == ["version 5: global weights 2"]
    assert (state.ps.version, state.ps.digest) == (5, "g2")


def begun():
    return {"fact": "begun", "version": 0, "digest": "d0", "tokens": 0, "run": "r"}


def decided(number, digest, **contributors):
    return {"fact": "global", "round": number, "attempt": number, "digest": digest, "run": "r",
            "contributors": contributors}  # fmt: skip


def adopted(number, digest):
    return VERSION | {"groups": {"round": number, "attempt": 1, "digest": digest, "counted": True}}


@pytest.fixture
def audit(tmp_path):
    """Audit two groups by their facts."""

    def made(north, south):
        for name, facts in (("north", north), ("south", south)):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            lines = b"".join(to_checksummed(fact) + b"\n" for fact in facts)
            (folder / "ledger.jsonl").write_bytes(lines)
        return audit_groups({"north": tmp_path / "north", "south": tmp_path / "south"})

    return made


def test_a_clean_history(audit):
    """Two rounds, one of which south has not adopted yet."""
    found = audit(
        [
            begun(),
            {"fact": "attempt", "round": 0, "attempt": 1},
            decided(1, "d1", north=[0, 5], south=[0, 3]),
            adopted(1, "d1"),
            {"fact": "attempt", "round": 1, "attempt": 2},
            decided(2, "d2", north=[5, 9], south=[3, 3]),
            adopted(2, "d2"),
        ],
        [adopted(1, "d1")],
    )
    assert not found.problems
    assert (found.rounds, found.attempts, found.digest, found.tokens) == (2, 2, "d2", 12)
    assert found.adopted == {"north": 2, "south": 1}
    assert found.members == [2, 2]


@pytest.mark.parametrize(
    ("second", "south", "problem"),
    [
        (decided(2, "d2", south=[2, 6]), [], "tokens of south are counted twice"),
        (decided(2, "d2", south=[4, 6]), [], "tokens of south are lost"),
        (decided(1, "e1", south=[3, 6]), [], "global round 1 is decided twice"),
        (decided(2, "d2"), [adopted(2, "other")], "other global weights 2 than decided"),
        (decided(2, "d2"), [adopted(2, "d2"), adopted(1, "d1")], "from global weights 2 to 1"),
    ],
)
def test_faults_are_found(audit, second, south, problem):
    """Each fault that the design excludes has a sentence."""
    found = audit([begun(), decided(1, "d1", north=[0, 5], south=[0, 3]), second], south)
    assert problem in "\n".join(found.problems)


def test_a_missing_ledger_is_a_problem(tmp_path):
    """A group that never started does not look clean."""
    assert "north has no ledger" in audit_groups({"north": tmp_path}).problems
