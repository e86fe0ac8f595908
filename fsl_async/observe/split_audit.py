"""The audit of a split server's ledger: the outcome of every upload, and whether it is a valid one.

It changes nothing. An upload's lines, in order, read (trained (dropped trained)*) with perhaps a
last "dropped", or end in "declined". Dropped is an upload that a split server that died had trained
since its last checkpoint; trained after that, it was sent again. All else is a fault: trained twice
in one lineage, dropped without having been trained, trained after it was declined. A version of a
client's auxiliary model is given once, and versions grow.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

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


def audit_split(lines: Iterable[Mapping[str, Any]]) -> SplitAudit:
    """Go through the ledger's lines."""
    fates: dict[str, str] = {}
    again: set[str] = set()
    lives: dict[str, set[int]] = {}
    rounds: dict[str, int] = {}
    auxiliary: dict[str, int] = {}
    problems: list[str] = []
    for line in lines:
        if "auxiliary" in line:
            client, version = str(line["auxiliary"]), int(line["version"])
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


def trained_by_life(folder: Path, client: str) -> list[int]:
    """How many uploads of each process of a client were trained, in order. Raises OSError."""
    lives: dict[int, set[str]] = {}
    for line in each_fact(folder / LEDGER, []):
        if line.get("outcome") == "trained":
            key = UploadKey.parse(str(line["key"]))
            if key.client == client:
                lives.setdefault(key.incarnation, set()).add(key.text)
    return [len(lives[life]) for life in sorted(lives)]


def audit_split_dir(folder: Path) -> SplitAudit:
    """The same for a split server's folder, with a problem for each damaged line. Raises OSError.

    A torn last line is left out.
    """
    damaged: list[str] = []
    found = audit_split(each_fact(folder / LEDGER, damaged))
    return evolve(found, problems=(*damaged, *found.problems))
