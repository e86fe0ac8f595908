"""Messages between a client and the split server, and the metadata of their streams.

Read by the same strict rules as those of `fsl_async.roles.sync.messages` (docs/WIRE.md lists the
fields), in a table of their own: neither server accepts the other's messages. An upload's key
travels as its text.

    stream        from     meta            chunks
    up:KEY        client   SmashedMeta     frames of the activations; the last chunk the labels
    down:KEY      server   GradientMeta    frames of the gradient at the cut; of the features, for
                                           the first leg of a U-shape
    aux:CLIENT/V  server   AuxiliaryMeta   frames of version V of the client's auxiliary model
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Self

from attrs import Factory, frozen

from fsl_async.roles.messages import Form, Greeting, Message, MessageError, Meta, Table, optional
from fsl_async.roles.names import MAX_DIGITS, NAME
from fsl_async.roles.sync.messages import Code, OptionalRun, Run

ROLE = "split-client"
PS_ROLE = "parameter-server"
"""The role of a parameter server towards a split server of another process, and its name there.

No client may use that name.
"""
MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 40


@frozen(order=True)
class UploadKey:
    """The identity of one upload: client, incarnation, round, and local step in that round.

    Keys of one incarnation grow. leg: 0, or 1 for the gradient of the features that follows in a
    U-shape. An upload is trained once: the split server answers a key that it has trained as known,
    with its answer if that is still kept.
    """

    client: str
    incarnation: int
    round: int
    step: int
    leg: int = 0

    @property
    def text(self) -> str:
        """The form on the wire and in the ledger.

        `client/incarnation/round/step`, and `/1` for the second leg.
        """
        text = f"{self.client}/{self.incarnation}/{self.round}/{self.step}"
        return f"{text}/{self.leg}" if self.leg else text

    @property
    def position(self) -> tuple[int, int, int]:
        """Round, step and leg: the key within this incarnation of its client."""
        return self.round, self.step, self.leg

    @property
    def first_leg(self) -> UploadKey:
        """The first leg of the same step."""
        return UploadKey(self.client, self.incarnation, self.round, self.step)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `text` back; raises ValueError when it is not a key."""
        client, *numbers = text.split("/")
        fits = all(
            part.isascii() and part.isdecimal() and len(part) <= MAX_DIGITS for part in numbers
        )
        is_named = NAME.fullmatch(client) is not None
        if not (is_named and fits and len(numbers) in {3, 4} and numbers[3:] in ([], ["1"])):
            raise ValueError(f"not an upload key: {text[:120]!r}")
        return cls(client, *(int(part) for part in numbers))


_KEY = Form("an upload key", UploadKey.parse)
Key = Annotated[UploadKey, _KEY]
OptionalKey = Annotated[str, optional(_KEY)]
Role = Annotated[str, Form("a role", NAME.fullmatch)]


@frozen
class SplitHello(Greeting, tag="split_hello/1"):
    """Body of a client's hello: its run, its model, and what it holds.

    run: the parameter server's name for the run. architecture: name -> text, in the order in which
    they are compared (the method and the cut first, then fingerprints); the first that differs is
    named in the refusal. auxiliary: version of the auxiliary model, -1 the common start.
    done_round, done_samples: its last RoundDone, -1 none.
    """

    run: OptionalRun
    role: Role
    shard: int
    architecture: dict[str, Any]
    auxiliary: int
    done_round: int
    done_samples: int

    def __attrs_post_init__(self) -> None:
        """Check what the table's types cannot."""
        if self.done_samples > MAX_SIZE:
            raise MessageError("SplitHello.done_samples is out of range")
        if not all(type(text) is str for text in self.architecture.values()):
            raise MessageError("SplitHello.architecture maps texts to texts", "wrong-type")


@frozen
class PsHello(Greeting, tag="ps_hello/1"):
    """Body of a parameter server's hello."""

    run: Run
    role: Role


@frozen
class SplitWelcome(Greeting, tag="split_welcome/1"):
    """Body of the split server's welcome.

    For a parameter server only the run counts; the other fields are for clients.

    in_flight: uploads that it takes from this client at a time. last: text of the last upload of
    this incarnation that it has trained and not lost ("" none): later ones that the client holds
    are wanted again. auxiliary: version that it keeps for this client.
    """

    run: OptionalRun
    in_flight: int
    last: OptionalKey
    auxiliary: int


@frozen
class RoundDone(Message, tag="round_done/1"):
    """Client: it has trained `samples` in this round, and all uploads of the round are settled.

    errors: relative root mean square that coding has changed so far, by "category direction"; an
    operator sees it.
    """

    round: int
    samples: int
    errors: dict[str, Any] = Factory(dict)

    def __attrs_post_init__(self) -> None:
        """Check what the table's types cannot."""
        if self.samples > MAX_SIZE:
            raise MessageError("RoundDone.samples is out of range")
        if not all(type(one) is float and math.isfinite(one) for one in self.errors.values()):
            raise MessageError("RoundDone.errors maps texts to finite numbers", "wrong-type")


@frozen
class RoundAcknowledged(Message, tag="round_acknowledged/1"):
    """Server: the end of this round is recorded."""

    round: int


@frozen
class RunOver(Message, tag="run_over/1"):
    """Client, or the parameter server itself: the parameter server has ended the run."""

    reason: str


@frozen
class Trained(Message, tag="trained/1"):
    """Server: this upload is trained, and has no answer."""

    key: Key
    loss: float


@frozen
class AlreadyTrained(Message, tag="already_trained/1"):
    """Server: this upload was trained before.

    `answer`: its answer is streamed again; else it is gone.
    """

    key: Key
    answer: bool


@frozen
class UploadRefused(Message, tag="upload_refused/1"):
    """Server: this upload is not trained; with the code "later" it may be offered again."""

    key: Key
    code: Code
    text: str


@frozen
class Durable(Message, tag="durable/1"):
    """Server: all uploads of this client up to this one are in a checkpoint."""

    key: Key


@frozen
class AuxiliaryStays(Message, tag="auxiliary_stays/1"):
    """Server: no newer auxiliary model comes in this round; the client goes on with `version`."""

    round: int
    version: int


@frozen
class Ended(Message, tag="ended/1"):
    """Server: the run is over, and it ends in good order."""

    reason: str


@frozen
class SmashedMeta(Meta, tag="smashed_meta/1"):
    """Stream of an upload.

    version: of x_c, from the parameter server. auxiliary: version of x_a. shape: of the activations
    as sent, without padding. lengths: of the sequences; empty where all are as long as the shape.
    label_bytes: size of the last chunk, 0 when labels stay at home. wants_gradient: an answer is
    waited for. alignment_due: the client expects its auxiliary model to be aligned now.
    """

    key: Key
    version: int
    auxiliary: int
    shape: list[Any]
    lengths: list[Any]
    samples: int
    label_bytes: int
    wants_gradient: bool
    alignment_due: bool

    def __attrs_post_init__(self) -> None:
        """Check what the table's types cannot."""
        sizes = self.shape
        if not 1 <= len(sizes) <= MAX_DIMENSIONS or not all(
            type(size) is int and 1 <= size <= MAX_SIZE for size in sizes
        ):
            text = f"SmashedMeta.shape is not 1 to {MAX_DIMENSIONS} sizes"
            raise MessageError(text, "wrong-form")
        if not all(type(length) is int and 1 <= length <= MAX_SIZE for length in self.lengths):
            raise MessageError("SmashedMeta.lengths are not sizes", "wrong-form")


@frozen
class GradientMeta(Meta, tag="gradient_meta/1"):
    """Stream that answers an upload. updates: of the split server's part before it."""

    key: Key
    loss: float
    updates: int


@frozen
class AuxiliaryMeta(Meta, tag="auxiliary_meta/1"):
    """Stream of an auxiliary model that was aligned in `round`."""

    version: int
    round: int


TABLE = Table(
    SplitHello, PsHello, SplitWelcome,
    RoundDone, RoundAcknowledged, RunOver,
    Trained, AlreadyTrained, UploadRefused, Durable,
    AuxiliaryStays, Ended,
    SmashedMeta, GradientMeta, AuxiliaryMeta,
)  # fmt: skip
to_wire = TABLE.to_wire
from_wire = TABLE.from_wire


def upload_stream(key: str) -> str:
    """Name of the stream that carries an upload."""
    return f"up:{key}"


def answer_stream(key: str) -> str:
    """Name of the stream that carries the answer to an upload."""
    return f"down:{key}"


def auxiliary_stream(client: str, version: int) -> str:
    """Name of the stream that carries an auxiliary model."""
    return f"aux:{client}/{version}"
