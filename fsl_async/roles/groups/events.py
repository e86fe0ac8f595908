"""Events of the machines of groups besides messages, as frozen values."""

from __future__ import annotations

from attrs import field, frozen

from fsl_async.roles.machine import Effect, Event


@frozen
class Cut:
    """A group's contribution to a global round: one of its versions, and the tokens it stands for.

    Those are from `begin` to `end` of the group's total: merged since its last cut that counted.
    """

    round: int
    version: int
    digest: str
    begin: int
    end: int


@frozen
class Decision:
    """The weights G_`round` of `run`, the result of `attempt`, have this digest."""

    round: int
    attempt: int
    digest: str
    run: str


@frozen
class GroupsRecovered(Event, tag="groups_recovered"):
    """The state on disk at start.

    adopted: the global weights that the group's versions go back to. since: the round in which the
    tokens began that are in no decided round. cut: the contribution to the round under way.
    """

    adopted: Decision | None = None
    since: int = -1
    gained: bool = False
    """Whether the group merged deltas that are in no decided round."""
    cut: Cut | None = None
    decided: Decision | None = None
    """The newest decision; at the coordinator only, like the fields below."""
    attempt: int = 0
    """The newest attempt."""
    counted: dict[str, int] = field(factory=dict)
    """Member -> the newest round that counted its cut."""


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

    An effect of the machine of the group's parameter server, and an event of the member.
    """


@frozen
class CutTaken(Event, tag="cut_taken"):
    """Answers TakeCut: the cut is durable, and merges are held."""

    cut: Cut


@frozen
class CutFailed(Event, tag="cut_failed"):
    """Answers TakeCut: the cut could not be written."""

    round: int
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
    """Answers Adopt: the group has made a version of those global weights.

    since, gained: as in GroupsRecovered. The coordinator also adopts its own version 0, as G_0.
    """

    decision: Decision
    since: int
    gained: bool


@frozen
class AdoptFailed(Event, tag="adopt_failed"):
    """Answers Adopt: the version could not be written, and nothing has changed."""

    round: int
    reason: str
