"""Effects of the machines of pretraining, as frozen values. A shell carries them out, in order.

An effect that takes time ends in an event, named in its docstring, so a machine never waits.
"""

from __future__ import annotations

from attrs import field, frozen

from fsl_async.roles.machine import Effect
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta
from fsl_async.roles.sync.messages import Rollout
from fsl_async.roles.sync.progress import Decay, RunPosition
from fsl_async.roles.sync.roster import Answers, Roster

# --- both roles -----------------------------------------------------------------------------------


@frozen
class CheckTransfers(Effect, tag="check_transfers"):
    """Report whose streams advanced since the last check. Ends in TransfersChecked, at once."""


# --- parameter server -----------------------------------------------------------------------------


@frozen
class Admit(Effect, tag="admit"):
    """Write the incarnation of a client to disk. Ends in Done.

    shard: also write a provisional lease of it.
    """

    peer: str
    incarnation: int
    shard: int | None


@frozen
class Welcome(Effect, tag="welcome"):
    """Welcome a client to the run, with its data shard."""

    peer: str
    shard: int


@frozen
class UseModel(Effect, tag="use_model"):
    """Make the model that this client has just attached the run's. values: its size."""

    peer: str
    values: int


@frozen
class KeepShard(Effect, tag="keep_shard"):
    """Write to disk that a client's lease is permanent. Ends in Done."""

    peer: str
    incarnation: int


@frozen
class ReceiveInitial(Effect, tag="receive_initial"):
    """Receive the initial weights as version 0. Ends in StreamLost or, once all are here, in Done.

    After Done come VersionCommitted, or Done with the problem of writing the version.
    """

    peer: str
    stream: str


@frozen
class ReceiveDelta(Effect, tag="receive_delta"):
    """Spool the offered delta from the first missing chunk. Ends in DeltaStored or StreamLost."""

    peer: str
    stream: str
    delta: Delta


@frozen
class SendVersion(Effect, tag="send_version"):
    """Stream a version to a peer.

    kind: "update" (coded, from version - 1), "seeds" (scalars, from version `since`), "full",
    "global" (coded, from the global weights that the peer has kept) or "global_full" (full, of a
    version that is global weights).
    position: of the announcement that goes with scalars.
    """

    peer: str
    kind: str
    version: int
    since: int = -1
    digest: str = ""
    position: RunPosition = field(factory=RunPosition)


@frozen
class SendDelta(Effect, tag="send_delta"):
    """Stream a delta from the spool to the evaluator."""

    peer: str
    delta: Delta


@frozen
class TakeRollout(Effect, tag="take_rollout"):
    """Give the training thread answers of another client."""

    message: Rollout


@frozen
class VerifyVersion(Effect, tag="verify_version"):
    """Verify every byte of a version on disk. Ends in Done or StoreFailed.

    Done has a problem if a byte was not as written, after the damage is repaired.
    """

    version: int


@frozen
class Quarantine(Effect, tag="quarantine"):
    """Exclude a stored delta from the run and record the reason. held: it may be released."""

    key: DeltaKey
    reason: str
    held: bool = False


@frozen
class Release(Effect, tag="release"):
    """Make a held delta pending again."""

    key: DeltaKey


@frozen
class KeepDecay(Effect, tag="keep_decay"):
    """Write to disk that rates decay from now on. Ends in Done or StoreFailed."""

    decay: Decay


@frozen
class Commit(Effect, tag="commit"):
    """Make `version` of `scale` times the sum of weight x delta, or by the aggregation rule.

    Ends in VersionCommitted, StoreFailed, or Done with a problem (the disk is full): deltas and the
    last version are unchanged.
    """

    version: int
    merged: tuple[MergedDelta, ...]
    scale: float
    position: RunPosition = field(factory=RunPosition)
    """Where the run is once the version is made."""
    reused: tuple[MergedDelta, ...] = ()
    """Merged by earlier versions, and a part of this one again; weights as of this version."""


@frozen
class KeepSum(Effect, tag="keep_sum"):
    """Write to disk which sites a secure sum will be of; none: it is not opened.

    Ends in Done or StoreFailed.
    """

    roster: Roster
    survivors: tuple[str, ...]


@frozen
class OpenSum(Effect, tag="open_sum"):
    """Add up the masked deltas of these keys, and write their mean. Ends in SumOpened."""

    keys: tuple[DeltaKey, ...]
    answers: Answers


# --- client ---------------------------------------------------------------------------------------


@frozen
class SendManifest(Effect, tag="send_manifest"):
    """Send the manifest of the attached model to the parameter server."""


@frozen
class OfferInitial(Effect, tag="offer_initial"):
    """Offer the attached model's weights as version 0."""


@frozen
class TakeSnapshot(Effect, tag="take_snapshot"):
    """Copy the weights at the next step, or at the end of a round. Ends in Snapshotted.

    hold: then stop training there. round: the round to train first; -1: none.
    """

    sequence: int
    hold: bool = False
    round: int = -1


@frozen
class CountSteps(Effect, tag="count_steps"):
    """From now on report `steps` steps after a snapshot by PaceReached; 0: none."""

    steps: int


@frozen
class ResumeTraining(Effect, tag="resume_training"):
    """Resume the training thread that was stopped at a snapshot."""


@frozen
class OfferDelta(Effect, tag="offer_delta"):
    """Offer a delta (again), coding the chunks not coded yet. StreamLost if it breaks."""

    delta: Delta


@frozen
class FinishEncoding(Effect, tag="finish_encoding"):
    """Code the rest of delta `sequence` now. Ends in Done: base and snapshot may be replaced."""

    sequence: int


@frozen
class DropDelta(Effect, tag="drop_delta"):
    """Forget the coded delta."""

    sequence: int


@frozen
class ReceiveVersion(Effect, tag="receive_version"):
    """Accept the offered stream. Ends in Done (all chunks are here, still coded) or StreamLost."""

    stream: str
    kind: str
    version: int


@frozen
class ScoreDeltas(Effect, tag="score_deltas"):
    """Score deltas that are here, on `version`, in the training thread. Ends in Scored.

    shares: of each in their mean.
    """

    version: int
    shares: dict[DeltaKey, float]


@frozen
class ReplaceBase(Effect, tag="replace_base"):
    """Apply the fetched frames to the base buffer. Ends in BaseReplaced, or Done with a problem.

    is_own: there are none; use the attached model's own weights, as version 0.
    """

    version: int
    is_own: bool = False


@frozen
class Rebase(Effect, tag="rebase"):
    """Move the weights to the base at the next step. Ends in Rebased.

    discard: drop the progress since the last snapshot.
    """

    version: int
    discard: bool = False


@frozen
class EndTraining(Effect, tag="end_training"):
    """Make the training thread's next step return False."""

    reason: str
