"""The audit of a split server's ledger: the outcome of every upload, and whether it is a valid one.

It changes nothing. An upload's lines, in order, read (trained (dropped trained)*) with perhaps a
last "dropped", or end in "declined". Dropped is an upload that a split server that died had trained
since its last checkpoint; trained after that, it was sent again. All else is a fault: trained twice
in one lineage, dropped without having been trained, trained after it was declined. A version of a
client's auxiliary model is given once, and versions grow.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from fsl_async.observe.ledger_audit import each_fact
from fsl_async.roles.split.events import UploadKey

LEDGER = "ledger.jsonl"

_NEXT = {
    None: {"trained", "declined"},
    "trained": {"dropped"},
    "dropped": {"trained", "declined"},
    "declined": {"declined"},
}
"""What may follow a line about the same upload; a lost decline is asked for and given again."""


@frozen
class SplitAudit:
    """Counts of uploads by outcome; per client its processes, last round, auxiliary version."""

    trained: int
    declined: int
    dropped: int
    came_back: int
    """Of the trained: were dropped with a split server before."""
    lives: Mapping[str, int]
    rounds: Mapping[str, int]
    auxiliary: Mapping[str, int]
    problems: tuple[str, ...]

    def complaints(self) -> list[str]:
        """One line for each fault."""
        return list(self.problems)


def audit_split(lines: Iterable[Mapping[str, Any]], problems: list[str]) -> SplitAudit:
    """Go through the ledger's lines, and add to the problems."""
    fates: dict[str, str] = {}
    again: set[str] = set()
    lives: dict[str, set[int]] = {}
    rounds: dict[str, int] = {}
    auxiliary: dict[str, int] = {}
    for line in lines:
        if line.get("fact") == "auxiliary":
            client, version = str(line["client"]), int(line["version"])
            if version <= auxiliary.get(client, -1):
                problems.append(
                    f"version {version} of the auxiliary model of {client} was given twice"
                )
            auxiliary[client] = version
            continue
        key, outcome = str(line["key"]), str(line["outcome"])
        before = fates.get(key)
        if outcome not in _NEXT[before]:
            problems.append(f"upload {key} is {outcome} after it was {before or 'never seen'}")
        if before == "dropped" and outcome == "trained":
            again.add(key)
        fates[key] = outcome
        named = UploadKey.parse(key)
        lives.setdefault(named.client, set()).add(named.incarnation)
        if outcome == "trained":
            rounds[named.client] = max(rounds.get(named.client, -1), named.round)
    outcomes = list(fates.values())
    return SplitAudit(
        outcomes.count("trained"),
        outcomes.count("declined"),
        outcomes.count("dropped"),
        sum(fates[key] == "trained" for key in again),
        {name: len(found) for name, found in sorted(lives.items())},
        dict(sorted(rounds.items())),
        dict(sorted(auxiliary.items())),
        tuple(problems),
    )


def fates_of(lines: Iterable[Mapping[str, Any]]) -> dict[UploadKey, str]:
    """Return the last outcome of each upload in a ledger."""
    return {UploadKey.parse(line["key"]): line["outcome"] for line in lines if "key" in line}


def trained_by_life(folder: Path, client: str) -> list[int]:
    """Return how many uploads of each process of a client were trained, in order. OSError."""
    fates = fates_of(each_fact(folder / LEDGER, [])).items()
    trained = (key.incarnation for key, fate in fates if fate == "trained" and key.client == client)
    return [count for _, count in sorted(Counter(trained).items())]


def audit_split_dir(folder: Path) -> SplitAudit:
    """Audit a split server's folder; each damaged line is a problem. Raises OSError.

    A torn last line is left out.
    """
    problems: list[str] = []
    return audit_split(each_fact(folder / LEDGER, problems), problems)
