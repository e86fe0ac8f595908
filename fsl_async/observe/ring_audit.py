"""Audits the global rounds of several parameter servers, by their ledgers alone.

one decision for each round         in the ledger of the coordinator
the same digest at every group      versions made of those weights name it
each group's tokens once            the ranges of its cuts follow each other without a gap
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen, mutable

from fsl_async.observe.ledger_audit import LEDGER, each_fact

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


@frozen
class RingAudit:
    """What the audit found. problems: one sentence for each fault."""

    rounds: int
    """Decided ones."""
    attempts: int
    digest: str
    """Of the newest decision."""
    adopted: dict[str, int]
    """Group -> its newest global weights; -1: none."""
    members: tuple[int, ...]
    """Contributors of each round."""
    tokens: int
    """Of all contributors' cuts."""
    problems: tuple[str, ...]


@mutable
class _Found:
    decided: dict[int, str] = field(factory=dict)
    attempts: set[int] = field(factory=set)
    members: list[int] = field(factory=list)
    ends: dict[str, int] = field(factory=dict)
    tokens: int = 0
    problems: list[str] = field(factory=list)

    def decision(self, fact: Mapping[str, Any]) -> None:
        """Take a line of the coordinator's ledger with a decision."""
        number = fact["round"]
        if number in self.decided:
            self.problems.append(f"global round {number} is decided twice")
        self.decided[number] = fact["digest"]
        self.members.append(len(fact["contributors"]))
        for name, (begin, end) in fact["contributors"].items():
            if begin != self.ends.get(name, 0):
                what = "counted twice" if begin < self.ends.get(name, 0) else "lost"
                self.problems.append(f"global weights {number}: tokens of {name} are {what}")
            self.ends[name] = end
            self.tokens += end - begin


def audit_ring(run_dirs: Mapping[str, Path]) -> RingAudit:
    """Audit groups by name; the first one coordinates. A missing ledger is a problem."""
    found, problems = _Found(), list[str]()
    ledgers: dict[str, list[dict[str, Any]]] = {}
    for name, run_dir in run_dirs.items():
        try:
            ledgers[name] = list(each_fact(run_dir / LEDGER, problems))
        except FileNotFoundError:
            problems.append(f"{name} has no ledger")
            ledgers[name] = []
    first = next(iter(ledgers.values()), [])
    for fact in first:
        if fact["fact"] == "begun":
            found.decided[0] = fact["digest"]
            found.ends[next(iter(run_dirs))] = fact["tokens"]
        elif fact["fact"] == "attempt":
            found.attempts.add(fact["attempt"])
        elif fact["fact"] == "global":
            found.decision(fact)
    adopted = {name: _adopted(name, facts, found) for name, facts in ledgers.items()}
    newest = max(found.decided, default=-1)
    return RingAudit(
        rounds=len(found.members),
        attempts=len(found.attempts),
        digest=found.decided.get(newest, ""),
        adopted=adopted,
        members=tuple(found.members),
        tokens=found.tokens,
        problems=(*problems, *found.problems),
    )


def _adopted(name: str, facts: Iterable[Mapping[str, Any]], found: _Found) -> int:
    """The newest global weights of a group, after checks of all that it adopted."""
    newest = -1
    for fact in facts:
        if fact["fact"] == "begun":
            newest = 0
        ring = fact.get("ring") if fact["fact"] == "version" else None
        if ring is None:
            continue
        if ring["digest"] != found.decided.get(ring["round"]):
            found.problems.append(f"{name} holds other global weights {ring['round']} than decided")
        if ring["round"] <= newest:
            found.problems.append(f"{name} went from global weights {newest} to {ring['round']}")
        newest = ring["round"]
    return newest
