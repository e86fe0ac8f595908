"""Effects of split learning: what the split server's machine, and a client's machine towards it, want done.

As `fsl_async.roles.sync.effects`, some of which come here too: Tell, Note, DeclineStream, Refuse, Dismiss, Leave, Finish.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from fsl_async.roles.machine import Effect
from fsl_async.roles.split.events import SplitProgress, UploadKey
from fsl_async.roles.split.messages import SplitWelcome

# --- split server -----------------------------------------------------------------------------------------


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
    key: UploadKey


@frozen
class DropUpload(Effect, tag="drop_upload"):
    """Forget an upload: all that is here of it, or, at a client, its coded frames."""

    key: UploadKey


@frozen
class TrainUpload(Effect, tag="train_upload"):
    """Train on a received upload, and keep what it gives when `wants_answer`. Ends in UploadTrained.

    Carried out one after another, in this order, also with AverageReplicas, Align and Checkpoint. `version` of x_c, for the ledger.
    """

    key: UploadKey
    wants_answer: bool
    version: int


@frozen
class RecordUpload(Effect, tag="record_upload"):
    """Enter into the ledger what became of an upload: trained | declined | dropped. The last line about a key counts."""

    key: UploadKey
    outcome: str
    reason: str = ""


@frozen
class RecordAuxiliary(Effect, tag="record_auxiliary"):
    """Enter into the ledger that this version of a client's auxiliary model is about to be made: its number is given away."""

    client: str
    version: int


@frozen
class SendAnswer(Effect, tag="send_answer"):
    """Stream to the client what its upload gave. Ends in AnswerSent or StreamLost."""

    peer: str
    key: UploadKey


@frozen
class DropAnswer(Effect, tag="drop_answer"):
    """Forget what an upload gave."""

    key: UploadKey


@frozen
class Align(Effect, tag="align"):
    """Align a client's auxiliary model, on its whole buffer and with the half as it is now, to `version`. Ends in Aligned."""

    client: str
    version: int
    round: int


@frozen
class SendAuxiliary(Effect, tag="send_auxiliary"):
    """Stream the auxiliary model that is kept for a client."""

    peer: str
    version: int
    round: int


@frozen
class AverageReplicas(Effect, tag="average_replicas"):
    """Average the replicas of these clients, weighted by samples, and give the average to every replica. Ends in ReplicasAveraged."""

    round: int
    samples: Mapping[str, int]


@frozen
class ForgetSteps(Effect, tag="forget_steps"):
    """U-shape: drop the steps of a client that wait for their second leg; it will not come."""

    client: str


@frozen
class Checkpoint(Effect, tag="checkpoint"):
    """Copy the state as it is now, in order with the training, and write it with `book` in the background.

    Ends in CheckpointWritten or CheckpointFailed; there is never more than one under way.
    """

    number: int
    book: SplitProgress = field(factory=SplitProgress)


# --- client towards the split server ----------------------------------------------------------------------


@frozen
class OfferUpload(Effect, tag="offer_upload"):
    """Offer an upload (again); its coded frames are kept until DropUpload. StreamLost if it breaks.

    The shell fills in shape, lengths and label bytes, as they were in UploadReady.
    """

    key: UploadKey
    version: int
    auxiliary: int
    samples: int
    wants_gradient: bool
    alignment_due: bool


@frozen
class ReceiveAnswer(Effect, tag="receive_answer"):
    """Take an offered answer. Ends in AnswerReceived or StreamLost."""

    stream: str
    key: UploadKey


@frozen
class DeliverAnswer(Effect, tag="deliver_answer"):
    """Hand the answer to the training thread, which waits for it or comes back to it."""

    key: UploadKey
    loss: float


@frozen
class AbandonUpload(Effect, tag="abandon_upload"):
    """Tell the training thread that no answer comes for this upload: its step is left out."""

    key: UploadKey
    reason: str


@frozen
class ReportLoss(Effect, tag="report_loss"):
    """Tell the training thread the server's loss on an upload, for its metrics."""

    key: UploadKey
    loss: float


@frozen
class FreeSlot(Effect, tag="free_slot"):
    """The upload is settled: the training thread may put another one into the queue."""

    key: UploadKey


@frozen
class ReceiveAuxiliary(Effect, tag="receive_auxiliary"):
    """Take an offered auxiliary model. Ends in AuxiliaryReceived or StreamLost."""

    stream: str
    version: int


@frozen
class InstallAuxiliary(Effect, tag="install_auxiliary"):
    """Let the training thread use the received auxiliary model from its next step on; who waits for one goes on."""

    version: int
    round: int


@frozen
class KeepAuxiliary(Effect, tag="keep_auxiliary"):
    """No newer auxiliary model comes for this round: who waits for one goes on with the old."""

    round: int


@frozen
class SettleRound(Effect, tag="settle_round"):
    """The training thread may go from the end of the round to the parameter server."""

    round: int


@frozen
class DialAgain(Effect, tag="dial_again"):
    """Say hello again to the split server, which was about to end."""
