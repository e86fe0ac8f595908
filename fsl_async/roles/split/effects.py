"""Effects of the split server's machine, and of a client's machine towards it.

Those of `fsl_async.roles.machine` come too: Send, Note, DeclineStream, Refuse, EndSession,
SendGoodbye, Finish.
"""

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from fsl_async.roles.machine import Effect
from fsl_async.roles.split.events import SplitProgress
from fsl_async.roles.split.messages import (
    AuxiliaryMeta,
    GradientMeta,
    SmashedMeta,
    SplitWelcome,
    UploadKey,
)

# --- split server ---


@frozen
class AdmitSplit(Effect, tag="admit_split"):
    """Welcome a client."""

    peer: str
    incarnation: int
    welcome: SplitWelcome


@frozen
class ReceiveUpload(Effect, tag="receive_upload"):
    """Take an offered upload into memory, decoded. Ends in UploadReceived or StreamLost."""

    peer: str
    stream: str
    meta: SmashedMeta


@frozen
class DropUpload(Effect, tag="drop_upload"):
    """Forget an upload: its chunks and values; at a client, its source."""

    key: UploadKey


@frozen
class TrainUpload(Effect, tag="train_upload"):
    """Train on a received upload, and keep its answer when `wants_answer`. Ends in UploadTrained.

    In order with other trainings, AverageReplicas, Align and Checkpoint. version: of x_c, for the
    ledger.
    """

    key: UploadKey
    wants_answer: bool
    version: int


@frozen
class RecordUpload(Effect, tag="record_upload"):
    """Enter the outcome of an upload into the ledger: trained | declined | dropped.

    The last line of a key counts.
    """

    key: UploadKey
    outcome: str
    reason: str = ""


@frozen
class RecordAuxiliary(Effect, tag="record_auxiliary"):
    """Enter into the ledger that this version of a client's auxiliary model is about to be made.

    So no number is given twice.
    """

    client: str
    version: int


@frozen
class SendAnswer(Effect, tag="send_answer"):
    """Stream the answer to an upload to its client. Ends in AnswerSent or StreamLost."""

    peer: str
    meta: GradientMeta


@frozen
class DropAnswer(Effect, tag="drop_answer"):
    """Forget the answer to an upload."""

    key: UploadKey


@frozen
class Align(Effect, tag="align"):
    """Align a client's auxiliary model, on all of its buffer and with x_s as it is now: `version`.

    Ends in Aligned.
    """

    client: str
    version: int
    round: int


@frozen
class SendAuxiliary(Effect, tag="send_auxiliary"):
    """Stream the auxiliary model that is kept for a client."""

    peer: str
    meta: AuxiliaryMeta


@frozen
class AverageReplicas(Effect, tag="average_replicas"):
    """Average these clients' replicas, weighted by samples, into every replica.

    Ends in ReplicasAveraged.
    """

    round: int
    samples: Mapping[str, int]


@frozen
class ForgetSteps(Effect, tag="forget_steps"):
    """U-shape: drop the steps of a client whose second leg will not come."""

    client: str


@frozen
class Checkpoint(Effect, tag="checkpoint"):
    """Copy the state in order with the training, and write it with `progress` in the background.

    One at a time. Ends in CheckpointWritten or CheckpointFailed.
    """

    number: int
    progress: SplitProgress = field(factory=SplitProgress)


# --- client towards the split server ---


@frozen
class OfferUpload(Effect, tag="offer_upload"):
    """Offer an upload (again); it is kept until DropUpload.

    Ends in StreamLost if the stream breaks.
    """

    meta: SmashedMeta


@frozen
class ReceiveVector(Effect, tag="receive_vector"):
    """Take an offered answer or auxiliary model. Ends in VectorReceived or StreamLost."""

    stream: str
    meta: GradientMeta | AuxiliaryMeta


@frozen
class SettleUpload(Effect, tag="settle_upload"):
    """Nothing more comes for an upload: the training thread may put another one into the queue.

    answer: none (not waited for) | here (hand it over, with `loss`) | lost (the step is left out,
    for `reason`).
    """

    key: UploadKey
    answer: Literal["none", "here", "lost"]
    loss: float = 0.0
    reason: str = ""


@frozen
class InstallAuxiliary(Effect, tag="install_auxiliary"):
    """Use the received auxiliary model from the next step on; a wait for one ends."""

    version: int


@frozen
class KeepAuxiliary(Effect, tag="keep_auxiliary"):
    """No newer auxiliary model comes for this round: a wait for one ends, the old one is used."""

    round: int


@frozen
class SettleRound(Effect, tag="settle_round"):
    """The training thread may go from the end of the round to the parameter server."""

    round: int


@frozen
class DialAgain(Effect, tag="dial_again"):
    """Dial the split server again, which was about to end."""
