"""Effects of split learning: what the split server's machine, and a client's machine towards it, want done.

As `fsl_async.roles.sync.effects`, some of which come here too: Tell, Note, DeclineStream, Refuse, Dismiss, Leave, Finish.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from fsl_async.roles.split.events import SplitProgress, UploadKey
from fsl_async.roles.split.messages import SplitWelcome
from fsl_async.roles.sync.effects import Effect

# --- split server -----------------------------------------------------------------------------------------


@frozen
class AdmitSplit(Effect):
    """Welcome a client."""

    peer: str
    incarnation: int
    welcome: SplitWelcome


@frozen
class ReceiveUpload(Effect):
    """Take an offered upload into memory, decoded. Ends in UploadReceived or StreamLost."""

    peer: str
    stream: str
    key: UploadKey


@frozen
class DropUpload(Effect):
    """Forget an upload: all that is here of it, or, at a client, its coded frames."""

    key: UploadKey


@frozen
class TrainUpload(Effect):
    """Train on a received upload, and keep what it gives when `wants_answer`. Ends in UploadTrained.

    Carried out one after another, in this order, also with AverageReplicas, Align and Checkpoint. `version` of x_c, for the ledger.
    """

    key: UploadKey
    wants_answer: bool
    version: int


@frozen
class RecordUpload(Effect):
    """Enter into the ledger what became of an upload: trained | declined | dropped. The last line about a key counts."""

    key: UploadKey
    outcome: str
    reason: str = ""


@frozen
class RecordAuxiliary(Effect):
    """Enter into the ledger that this version of a client's auxiliary model is about to be made: its number is given away."""

    client: str
    version: int


@frozen
class SendAnswer(Effect):
    """Stream to the client what its upload gave. Ends in AnswerSent or StreamLost."""

    peer: str
    key: UploadKey


@frozen
class DropAnswer(Effect):
    """Forget what an upload gave."""

    key: UploadKey


@frozen
class Align(Effect):
    """Align a client's auxiliary model, on its whole buffer and with the half as it is now, to `version`. Ends in Aligned."""

    client: str
    version: int
    round: int


@frozen
class SendAuxiliary(Effect):
    """Stream the auxiliary model that is kept for a client."""

    peer: str
    version: int
    round: int


@frozen
class AverageReplicas(Effect):
    """Average the replicas of these clients, weighted by samples, and give the average to every replica. Ends in ReplicasAveraged."""

    round: int
    samples: Mapping[str, int]


@frozen
class ForgetSteps(Effect):
    """U-shape: drop the steps of a client that wait for their second leg; it will not come."""

    client: str


@frozen
class Checkpoint(Effect):
    """Copy the state as it is now, in order with the training, and write it with `book` in the background.

    Ends in CheckpointWritten or CheckpointFailed; there is never more than one under way.
    """

    number: int
    book: SplitProgress = field(factory=SplitProgress)


# --- client towards the split server ----------------------------------------------------------------------


@frozen
class OfferUpload(Effect):
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
class ReceiveAnswer(Effect):
    """Take an offered answer. Ends in AnswerReceived or StreamLost."""

    stream: str
    key: UploadKey


@frozen
class DeliverAnswer(Effect):
    """Hand the answer to the training thread, which waits for it or comes back to it."""

    key: UploadKey
    loss: float


@frozen
class AbandonUpload(Effect):
    """Tell the training thread that no answer comes for this upload: its step is left out."""

    key: UploadKey
    reason: str


@frozen
class ReportLoss(Effect):
    """Tell the training thread the server's loss on an upload, for its metrics."""

    key: UploadKey
    loss: float


@frozen
class FreeSlot(Effect):
    """The upload is settled: the training thread may put another one into the queue."""

    key: UploadKey


@frozen
class ReceiveAuxiliary(Effect):
    """Take an offered auxiliary model. Ends in AuxiliaryReceived or StreamLost."""

    stream: str
    version: int


@frozen
class InstallAuxiliary(Effect):
    """Let the training thread use the received auxiliary model from its next step on; who waits for one goes on."""

    version: int
    round: int


@frozen
class KeepAuxiliary(Effect):
    """No newer auxiliary model comes for this round: who waits for one goes on with the old."""

    round: int


@frozen
class SettleRound(Effect):
    """The training thread may go from the end of the round to the parameter server."""

    round: int


@frozen
class DialAgain(Effect):
    """Say hello again to the split server, which was about to end."""
