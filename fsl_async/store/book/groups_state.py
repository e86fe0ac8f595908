"""Groups state: what a ledger adds up to about global rounds. Pure.

In a global round the parameter servers of a roster average what their groups gained since the
global weights G_k; the result is G_(k+1), once the coordinator has decided it.

    fact       effect
    begun      version `version` is G_0 of `run`, and the tokens up to `tokens` are in it; only the
               coordinator's ledger has it
    cut        the group offers a cut for `round`, of version `version` with `digest`; it stands for
               the tokens from `begin` to `end`
    attempt    the coordinator used this number
    global     the coordinator decided: G_`round` is the result of `attempt`, has `digest`, and
               counts the cuts of `contributors` (name -> begin, end)
    version    with `groups`: the version was made of G_`round`; the cut ends here, whether it
               `counted` or not

A rollback to a version before the one made of the newest global weights is not possible: what was
pending then may be in a decided round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from fsl_async.roles.groups.events import Cut, Decision, GroupsRecovered
from fsl_async.roles.sync.deltas import REMEMBERED_GLOBAL

if TYPE_CHECKING:
    from collections.abc import Mapping


@frozen
class Adoption(Decision):
    """Member `groups` of a version's record: the global weights that the version is made of.

    counted: the group's cut is in them. base: the digest of the global weights that a coded update
    leads from; empty: there is none.
    """

    counted: bool
    base: str = ""


@define
class GroupsState:
    """The state after the facts so far."""

    adopted: Adoption | None = None
    """The newest global weights of which the group made a version, or at the coordinator G_0."""
    version: int = -1
    """That version."""
    versions: int = 0
    """Number of versions after version 0 that were made of global weights."""
    newest: list[int] = field(factory=list)
    """The newest of them."""
    since: int = -1
    reference: int = 0
    """Tokens of the group, of its total, that are in decided rounds."""
    cut: Cut | None = None
    decided: Decision | None = None
    attempt: int = 0
    counted: dict[str, int] = field(factory=dict)

    def begun(self, fact: Mapping[str, Any]) -> None:
        """Apply a line with "begun"."""
        self.adopted = Adoption(0, 0, fact["digest"], fact["run"], counted=True)
        self.decided = Decision(0, 0, fact["digest"], fact["run"])
        self.version, self.reference, self.since = fact["version"], fact["tokens"], 0

    def offered(self, fact: Mapping[str, Any]) -> None:
        """Apply a line with "cut"."""
        self.cut = Cut(*(fact[name] for name in ("round", "version", "digest", "begin", "end")))

    def attempted(self, fact: Mapping[str, Any]) -> None:
        """Apply a line with "attempt"."""
        self.attempt = max(self.attempt, fact["attempt"])

    def decide(self, fact: Mapping[str, Any]) -> None:
        """Apply a line with "global"."""
        self.decided = Decision(fact["round"], fact["attempt"], fact["digest"], fact["run"])
        self.counted |= dict.fromkeys(fact["contributors"], fact["round"] - 1)

    def adopt(self, version: int, groups: Mapping[str, Any], tokens_total: int) -> None:
        """Apply `groups` of a line with "version"."""
        adoption = Adoption(**groups)
        if adoption.counted and self.cut is not None:
            self.reference = self.cut.end
        if self.adopted is None:  # the run's weights came from a global round
            self.reference = tokens_total
        if adoption.counted or self.reference == tokens_total:
            self.since = adoption.round
        self.adopted, self.version, self.cut = adoption, version, None
        if version:
            self.versions += 1
            self.newest = [*self.newest, version][-REMEMBERED_GLOBAL:]

    def recovered(self, tokens_total: int) -> GroupsRecovered:
        """Return the event for the machine. tokens_total: those of the group."""
        gained = self.adopted is not None and tokens_total > self.reference
        return GroupsRecovered(
            self.adopted, self.since, gained, self.cut, self.decided, self.attempt, self.counted
        )
