"""Events of the machines of groups besides messages, as frozen values."""

from __future__ import annotations

from attrs import field, frozen

from fsl_async.roles.machine import Effect, Event


@frozen
class Cut:
    """What a group offers for a round: its version, and the tokens merged since its last cut.

    begin, end: of the group's total of tokens.
    """

    round: int
    version: int
    digest: str
    begin: int
    end: int


@frozen
class Decision:
    """G_`round` of `run` is the result of `attempt`, and has this digest."""

    round: int
    attempt: int
    digest: str
    run: str


@frozen
class GroupsRecovered(Event, tag="groups_recovered"):
    """The state on disk at start.

    round, digest: of the global weights that the group has adopted; -1: none. run: of that run;
    empty: none yet. since: the round in which the tokens began that no decided round has. cut:
    offered for `round`, or None.
    """

    round: int = -1
    digest: str = ""
    run: str = ""
    since: int = -1
    gained: bool = False
    """Whether the group merged what is in no decided round."""
    cut: Cut | None = None
    decided: Decision | None = None
    """Of the coordinator: the newest decision."""
    attempt: int = 0
    """Of the coordinator: the newest attempt."""
    counted: dict[str, int] = field(factory=dict)
    """Of the coordinator: member -> the newest round that its cut was in."""


@frozen
class PeerHere(Event, tag="group_here"):
    """A session with another parameter server is open. peer: empty for the coordinator."""

    peer: str


@frozen
class PeerGone(Event, tag="group_gone"):
    """A session with another parameter server ended."""

    peer: str
    reason: str


@frozen
class GroupVersion(Event, tag="group_version"):
    """The group made a version of deltas."""

    version: int


@frozen
class GroupEnds(Event, Effect, tag="group_ends"):
    """The group's run is over but for a last global round. Ends in EndGroup.

    It is an effect of the machine of the group's parameter server.
    """


@frozen
class CutTaken(Event, tag="cut_taken"):
    """Answers TakeCut: the cut is durable, and merges are held."""

    cut: Cut


@frozen
class CutFailed(Event, tag="cut_failed"):
    """Answers TakeCut: the disk let no cut be."""

    round: int
    reason: str


@frozen
class AttemptKept(Event, tag="attempt_kept"):
    """Answers KeepAttempt: its line is in the ledger."""

    attempt: int


@frozen
class DecisionKept(Event, tag="decision_kept"):
    """Answers KeepDecision: its line is in the ledger. The round is decided."""

    round: int
    attempt: int


@frozen
class LedgerFailed(Event, tag="groups_ledger_failed"):
    """Answers KeepAttempt or KeepDecision: there is no line, and none may appear later."""

    reason: str


@frozen
class ReductionDone(Event, tag="reduction_done"):
    """Answers StartReduction: the result is durable."""

    attempt: int
    digest: str


@frozen
class ReductionFailed(Event, tag="reduction_failed"):
    """Answers StartReduction: there is no result."""

    attempt: int
    reason: str


@frozen
class GlobalHeld(Event, tag="global_held"):
    """Answers ReceiveGlobal: those weights are durable here."""

    round: int


@frozen
class GlobalLost(Event, tag="global_lost"):
    """Answers ReceiveGlobal: the stream broke off, or had other weights."""

    round: int
    reason: str


@frozen
class Adopted(Event, tag="adopted"):
    """Answers Adopt: the group's version is made of those global weights.

    since, gained: as in GroupsRecovered. At the coordinator also of version 0, which is G_0.
    """

    decision: Decision
    since: int
    gained: bool


@frozen
class AdoptFailed(Event, tag="adopt_failed"):
    """Answers Adopt: the disk did not let it be."""

    round: int
    reason: str
