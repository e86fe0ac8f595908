"""Effects: what a role machine wants done, as frozen values. A shell carries them out, in order.

Effects that take time end in an event (named in the docstring), so a machine never waits.
"""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from fsl_async.roles.sync.events import DeltaKey
from fsl_async.roles.sync.messages import Message


@frozen
class Effect:
    """Base of all effects."""


# --- both roles -------------------------------------------------------------------------------------------


@frozen
class Send(Effect):
    """Send a control message to a peer; lost with the session if that ends first."""

    peer: str
    message: Message


@frozen
class Note(Effect):
    """Say something to the operator and the journal: a decision and its reason, in a sentence."""

    text: str
    level: str = "info"  # info | warning
    facts: dict[str, int | float | str] = field(factory=dict)


@frozen
class DeclineStream(Effect):
    """Turn an offered stream down."""

    peer: str
    stream: str
    reason: str


@frozen
class CheckTransfers(Effect):
    """Say whose streams have moved since the last look. Ends in TransfersChecked, at once."""


@frozen
class Finish(Effect):
    """This node's part is over: close the link, then end the process with `exit_code`. deadline: when others would end it, where they said so."""

    reason: str
    exit_code: int = 0
    deadline: float | None = None


# --- parameter server -------------------------------------------------------------------------------------


@frozen
class Admit(Effect):
    """Give the peer its data shard (durably) and welcome it to the run, or refuse it when no shard is free."""

    peer: str
    incarnation: int


@frozen
class Refuse(Effect):
    """Answer a hello with a refusal that says why and what to do."""

    peer: str
    code: str
    text: str


@frozen
class EndSession(Effect):
    """End a peer's session."""

    peer: str
    reason: str


@frozen
class ReceiveInitial(Effect):
    """Take the offered initial weights as version 0. Ends in VersionCommitted, CommitFailed or StreamLost."""

    peer: str
    stream: str


@frozen
class ReceiveDelta(Effect):
    """Spool the offered delta, from the first chunk not yet held. Ends in DeltaStored or StreamLost.

    `weight`: what its Accumulate will most likely say, so that its chunks may be added while it comes; None where nobody knows.
    """

    peer: str
    stream: str
    key: DeltaKey
    base_digest: str
    tokens: int
    steps: int
    round: int
    metrics: dict[str, Any] = field(factory=dict)
    weight: float | None = None


@frozen
class SendVersion(Effect):
    """Stream a version to a peer: kind "update" (coded, from version - 1) or "full"."""

    peer: str
    kind: str
    version: int


@frozen
class VerifyVersion(Effect):
    """Compare every byte of a version on disk with its digests. Ends in VersionVerified or StoreFailed."""

    version: int


@frozen
class Accumulate(Effect):
    """Add weight times a spooled delta to the accumulator. Carried out in order, before any later Commit."""

    key: DeltaKey
    weight: float


@frozen
class MergedDelta:
    """One delta as it enters a version."""

    key: DeltaKey
    tokens: int
    steps: int
    staleness: int
    weight: float


@frozen
class Quarantine(Effect):
    """Keep a stored delta out of the run, on record with the reason; with `held` it may be released."""

    key: DeltaKey
    reason: str
    held: bool = False


@frozen
class Release(Effect):
    """Let a delta that was held wait to be merged again. Carried out in order, before its Accumulate."""

    key: DeltaKey


@frozen
class Commit(Effect):
    """Make `version` from the accumulator times `scale`. Ends in VersionCommitted or CommitFailed."""

    version: int
    merged: tuple[MergedDelta, ...]
    scale: float


# --- client -----------------------------------------------------------------------------------------------


@frozen
class SendManifest(Effect):
    """Tell the parameter server which model this is."""


@frozen
class OfferInitial(Effect):
    """Offer the attached model's weights as version 0."""


@frozen
class AdoptInitial(Effect):
    """The attached model's own weights are version 0. Ends in BaseReplaced (then Rebased)."""


@frozen
class TakeSnapshot(Effect):
    """Copy the weights at the next step, and `hold` the training thread there afterwards. Ends in Snapshotted."""

    sequence: int
    hold: bool = False


@frozen
class BeginRound(Effect):
    """Let the training thread train round `round`, copy the weights at its end, and hold it there. Ends in Snapshotted."""

    sequence: int
    round: int


@frozen
class ResumeTraining(Effect):
    """Let a training thread go on that a snapshot holds."""


@frozen
class OfferDelta(Effect):
    """Offer a delta (again), encoding what is not coded yet. StreamLost if it breaks."""

    key: DeltaKey
    base_digest: str
    tokens: int
    steps: int
    round: int
    metrics: dict[str, Any] = field(factory=dict)


@frozen
class FinishEncoding(Effect):
    """Code the rest of delta `sequence` now. Ends in EncodingFinished."""

    sequence: int


@frozen
class DropDelta(Effect):
    """Forget the coded delta."""

    sequence: int


@frozen
class ReceiveVersion(Effect):
    """Take the offered stream. Ends in FetchReceived or StreamLost."""

    stream: str
    kind: str
    version: int


@frozen
class ReplaceBase(Effect):
    """Apply what was fetched to the base buffer. Ends in BaseReplaced or FetchFailed."""

    version: int


@frozen
class Rebase(Effect):
    """Move the weights onto the base at the next step; `discard` drops what was trained since the last snapshot. Ends in Rebased."""

    version: int
    discard: bool = False


@frozen
class SendGoodbye(Effect):
    """Say goodbye to the server now; the training thread may take a moment longer to come back."""

    reason: str


@frozen
class EndTraining(Effect):
    """Let the training thread's next step return False."""

    reason: str
