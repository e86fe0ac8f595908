"""Effects: what a role machine wants done, as frozen values. A shell carries them out, in order.

Effects that take time end in an event (named in the docstring), so a machine never waits.
"""

from __future__ import annotations

from attrs import frozen

from fsl_async.roles.machine import Effect
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta

# --- both roles -------------------------------------------------------------------------------------------


@frozen
class CheckTransfers(Effect, tag="check_transfers"):
    """Say whose streams have moved since the last look. Ends in TransfersChecked, at once."""


# --- parameter server -------------------------------------------------------------------------------------


@frozen
class Admit(Effect, tag="admit"):
    """Write the incarnation of a client down, and with `lends` its provisional lease of that shard. Ends in Admitted."""

    peer: str
    incarnation: int
    lends: int | None


@frozen
class Welcome(Effect, tag="welcome"):
    """Welcome a client to the run, with its data shard."""

    peer: str
    shard: int


@frozen
class UseModel(Effect, tag="use_model"):
    """The model that this client has just attached, of so many values, is the run's from now on."""

    peer: str
    values: int


@frozen
class KeepShard(Effect, tag="keep_shard"):
    """Write down that a client's shard is its own for good. Ends in ShardKept."""

    peer: str
    incarnation: int


@frozen
class ReceiveInitial(Effect, tag="receive_initial"):
    """Take the offered initial weights as version 0. Ends in VersionCommitted, CommitFailed or StreamLost."""

    peer: str
    stream: str


@frozen
class ReceiveDelta(Effect, tag="receive_delta"):
    """Spool the offered delta, from the first chunk not yet held. Ends in DeltaStored or StreamLost.

    `weight`: the one that its Accumulate will most likely have, so that its chunks may be added as they arrive; None
    where that is not known.
    """

    peer: str
    stream: str
    delta: Delta
    weight: float | None = None


@frozen
class SendVersion(Effect, tag="send_version"):
    """Stream a version to a peer: kind "update" (coded, from version - 1) or "full"."""

    peer: str
    kind: str
    version: int


@frozen
class VerifyVersion(Effect, tag="verify_version"):
    """Compare every byte of a version on disk with its digests. Ends in VersionVerified or StoreFailed."""

    version: int


@frozen
class Accumulate(Effect, tag="accumulate"):
    """Add weight times a spooled delta to the accumulator. Carried out in order, before any later Commit."""

    key: DeltaKey
    weight: float


@frozen
class Quarantine(Effect, tag="quarantine"):
    """Keep a stored delta out of the run, on record with the reason; with `held` it may be released."""

    key: DeltaKey
    reason: str
    held: bool = False


@frozen
class Release(Effect, tag="release"):
    """Let a delta that was held wait to be merged again. Carried out in order, before its Accumulate."""

    key: DeltaKey


@frozen
class Average(Effect, tag="average"):
    """Fix the average that `version` is made of: the accumulator times `scale`. CommitFailed where that cannot be."""

    version: int
    merged: tuple[MergedDelta, ...]
    scale: float


@frozen
class Reduce(Effect, tag="reduce"):
    """Reduce the average with those of other parameter servers. Ends in Reduced or CommitFailed."""

    version: int


@frozen
class Commit(Effect, tag="commit"):
    """Make `version` of its average. Ends in VersionCommitted or CommitFailed; in nothing where the average failed."""

    version: int


# --- client -----------------------------------------------------------------------------------------------


@frozen
class SendManifest(Effect, tag="send_manifest"):
    """Tell the parameter server which model this is."""


@frozen
class OfferInitial(Effect, tag="offer_initial"):
    """Offer the attached model's weights as version 0."""


@frozen
class AdoptInitial(Effect, tag="adopt_initial"):
    """The attached model's own weights are version 0. Ends in BaseReplaced (then Rebased)."""


@frozen
class TakeSnapshot(Effect, tag="take_snapshot"):
    """Copy the weights at the next step, and `hold` the training thread there afterwards. Ends in Snapshotted."""

    sequence: int
    hold: bool = False


@frozen
class BeginRound(Effect, tag="begin_round"):
    """Let the training thread train round `round`, copy the weights at its end, and hold it there. Ends in Snapshotted."""

    sequence: int
    round: int


@frozen
class ResumeTraining(Effect, tag="resume_training"):
    """Let a training thread go on that a snapshot holds."""


@frozen
class OfferDelta(Effect, tag="offer_delta"):
    """Offer a delta (again), encoding what is not coded yet. StreamLost if it breaks."""

    delta: Delta


@frozen
class FinishEncoding(Effect, tag="finish_encoding"):
    """Code the rest of delta `sequence` now. Ends in EncodingFinished."""

    sequence: int


@frozen
class DropDelta(Effect, tag="drop_delta"):
    """Forget the coded delta."""

    sequence: int


@frozen
class ReceiveVersion(Effect, tag="receive_version"):
    """Take the offered stream. Ends in FetchReceived or StreamLost."""

    stream: str
    kind: str
    version: int


@frozen
class ReplaceBase(Effect, tag="replace_base"):
    """Apply what was fetched to the base buffer. Ends in BaseReplaced or FetchFailed."""

    version: int


@frozen
class Rebase(Effect, tag="rebase"):
    """Move the weights onto the base at the next step; `discard` drops what was trained since the last snapshot. Ends in Rebased."""

    version: int
    discard: bool = False


@frozen
class EndTraining(Effect, tag="end_training"):
    """Let the training thread's next step return False."""

    reason: str
