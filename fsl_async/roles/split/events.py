"""Events of the split server's machine, and of a client's machine towards it, besides messages.

Those of `fsl_async.roles.machine` come too: TimerFired, DrainAsked, StreamLost, ClientLeft,
SessionLost, HelloRefused, RunEnded, TrainingEnded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from attrs import asdict, field, frozen

from fsl_async.roles.machine import Event
from fsl_async.roles.split.messages import AuxiliaryMeta, GradientMeta, SmashedMeta, UploadKey


@frozen
class ClientProgress:
    """The state of one client at the split server besides tensors.

    Rounds and versions are -1 where there was none.
    """

    incarnation: int = -1
    last: UploadKey | None = None  # the last one trained
    round: int = -1  # of the last one trained, in any incarnation
    auxiliary: int = -1  # version that is kept; -1 is the common start
    auxiliary_seen: int = -1  # highest version ever given: numbers are not given twice
    aligned_round: int = -1
    done_round: int = -1
    done_samples: int = 0


@frozen
class SplitProgress:
    """All that the split server's machine has to keep.

    It is in every checkpoint, beside the tensors.

    round: newest of which an upload was trained. averaged: newest after which replicas were
    averaged. uploads: trained so far.
    """

    run: str = ""
    round: int = -1
    averaged: int = -1
    uploads: int = 0
    clients: Mapping[str, ClientProgress] = field(factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return the progress as values that JSON has."""
        made = asdict(self, recurse=False)
        made["clients"] = {
            name: {**asdict(one, recurse=False), "last": one.last.text if one.last else ""}
            for name, one in self.clients.items()
        }
        return made

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Read `to_plain` back; raises KeyError, TypeError or ValueError for anything else."""
        clients = {
            name: ClientProgress(
                **{**one, "last": UploadKey.parse(one["last"]) if one["last"] else None}
            )
            for name, one in plain["clients"].items()
        }
        return cls(**{**plain, "clients": clients})


# --- split server ---


@frozen
class SplitRecovered(Event, tag="split_recovered"):
    """The disk was read at start: the newest good checkpoint's progress, and the ledger after it.

    lost: uploads whose last line is "trained". auxiliary_seen: client -> highest version in the
    ledger.
    """

    progress: SplitProgress
    lost: tuple[UploadKey, ...] = ()
    auxiliary_seen: Mapping[str, int] = field(factory=dict)


@frozen
class UploadReceived(Event, tag="upload_received"):
    """An upload is complete and decoded; it stays in memory until it is trained or dropped."""

    peer: str
    key: UploadKey


@frozen
class UploadTrained(Event, tag="upload_trained"):
    """The training thread has finished an upload. With a `problem` nothing was changed by it.

    updates: of the part before it. answer: a gradient (or features) is kept for it.
    """

    key: UploadKey
    loss: float
    updates: int
    answer: bool = False
    problem: str | None = None


@frozen
class Aligned(Event, tag="aligned"):
    """The auxiliary model kept for `client` is now `version`.

    With a `problem` it is still the one before.
    """

    client: str
    version: int
    problem: str | None = None


@frozen
class ReplicasAveraged(Event, tag="replicas_averaged"):
    """The replicas are averaged after `round`."""

    round: int


@frozen
class AnswerSent(Event, tag="answer_sent"):
    """The client has all of the answer to an upload."""

    peer: str
    key: UploadKey


@frozen
class CheckpointWritten(Event, tag="checkpoint_written"):
    """Checkpoint `number` is durable."""

    number: int


@frozen
class CheckpointFailed(Event, tag="checkpoint_failed"):
    """Checkpoint `number` could not be written; the one before is untouched."""

    number: int
    reason: str


# --- client towards the split server ---


@frozen
class UploadReady(Event, tag="upload_ready"):
    """The training thread has put an upload into the queue.

    It holds one of the `in_flight` slots until SettleUpload.

    meta: the machine fills in its client, incarnation and version of the auxiliary model. Its step
    counts the local steps of the round in this incarnation: a round that is trained again, because
    its first delta was not taken, goes on counting, so keys grow and another batch has another key.
    """

    meta: SmashedMeta


@frozen
class VectorReceived(Event, tag="vector_received"):
    """An answer or an auxiliary model is complete and decoded."""

    meta: GradientMeta | AuxiliaryMeta


@frozen
class RoundEnded(Event, tag="round_ended"):
    """The last step of a round is done; the training thread waits for SettleRound."""

    round: int
    samples: int


@frozen
class PsEnded(Event, tag="ps_ended"):
    """Split server: the parameter server in the same process has ended the run."""

    reason: str
