"""The messages between clients and the parameter server, and the metadata of their streams.

Messages travel on the control lane and are read by the rules of `fsl_async.roles.messages`. Weights
and deltas travel as streams; the metadata of a stream's offer is one of the last three messages.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar

from attrs import field, frozen

from fsl_async.roles.messages import MAX_BYTES, Form, Message, Meta, Table, optional
from fsl_async.roles.names import NAME
from fsl_async.roles.sync.delta import (
    DIGEST,
    EVALUATE,
    ORDER,
    ROLL_OUT,
    TRAIN,
    Delta,
    DeltaKey,
    Key,
    OptionalDigest,
)
from fsl_async.roles.sync.progress import RunPosition
from fsl_async.roles.sync.roster import KEY_BYTES, Roster, rows

DUTY = Form("a duty", {TRAIN, EVALUATE, ROLL_OUT}.__contains__)
RUN = Form("the name of a run", re.compile(r"[A-Za-z0-9._-]{1,128}").fullmatch)

Client = Annotated[str, Form("the name of a client", NAME.fullmatch)]
OptionalClient = Annotated[str, optional(Form("the name of a client", NAME.fullmatch))]
Run = Annotated[str, RUN]
OptionalRun = Annotated[str, optional(RUN)]
Digest = Annotated[str, DIGEST]
Code = Annotated[str, Form("a code", re.compile(r"[a-z][a-z0-9-]{0,63}").fullmatch)]
KINDS = {"update", "seeds", "full", "global", "global_full"}
VersionKind = Annotated[str, Form("a kind of version", KINDS.__contains__)]


@frozen
class Attach(Message, tag="attach/3"):
    """Client: my model has this manifest (`Manifest.to_wire()`), and `frozen` tensors.

    frozen: `Manifest.frozen_to_wire()`, of those that are neither exchanged nor trained.
    """

    fingerprint: Digest
    manifest: list[Any]
    frozen: list[Any]


@frozen
class Fetch(Message, tag="fetch/1"):
    """Client: I hold `version` (-1: none) with `digest`; send the current version.

    global_digest: of the newest global weights that I have kept; empty: none.
    """

    version: int
    digest: OptionalDigest
    global_digest: OptionalDigest = ""


@frozen
class Holding(Message, tag="holding/1"):
    """Client: I train on `version` and computed `digest` over it."""

    version: int
    digest: Digest


@frozen
class Measured(Message, tag="measured/1"):
    """Client: a delta that is one frame of scalars (`fsl_codecs.seeds`), offered and sent at once.

    It is of this session's client and incarnation; base and round are the round of the frame.
    digest: of the base, which the client holds. facts: but for the order, which is 0. The answer is
    that to the offer of a stream.
    """

    sequence: int
    digest: Digest
    tokens: int
    steps: int
    frame: bytes
    metrics: dict[str, Any] = field(factory=dict)
    facts: dict[str, Any] = field(factory=dict)

    def delta(self, client: str, incarnation: int, base: int) -> Delta:
        """The delta of a frame of round `base`."""
        key = DeltaKey(client, incarnation, base, self.sequence)
        facts = {ORDER: 0.0, **self.facts}
        return Delta(key, self.digest, self.tokens, self.steps, base, self.metrics, facts)


@frozen
class Score(Message, tag="score/1"):
    """Evaluator: the loss of `version` on its own records, and what this delta changes in it.

    alone: what the delta adds to it; left_out: by how much the loss of the mean of all deltas is
    above that of the mean without this one; 0: not measured.
    """

    version: int
    key: Key
    loss: float
    alone: float
    left_out: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not all(math.isfinite(one) for one in (self.loss, self.alone, self.left_out)):
            raise ValueError("a score is finite")


@frozen
class Skip(Message, tag="skip/1"):
    """Client: nothing to send for this round."""

    round: int
    reason: str


@frozen
class Publish(Message, tag="publish/1"):
    """Parameter server: offer your initial weights as version 0."""


@frozen
class Call(Message, tag="call/1"):
    """Parameter server: round `round` is open; send your pseudo-gradient.

    last: after this round nothing is merged.
    """

    trains: ClassVar[bool] = False
    """Whether the client is to train a full round, instead of sending its progress."""
    round: int
    last: bool = False


_SEALED_BYTES = 256
OWN_PACE = -1
"""The round of a delta that answers no call: its client sends by itself."""


@frozen
class Turn(Call, tag="turn/1"):
    """Parameter server: train round `round` from the version of that number and send the delta.

    Then wait for the resulting version.
    """

    trains = True


@frozen
class Pace(Message, tag="pace/1"):
    """Parameter server: send a delta by yourself, this long after the last one.

    steps, milliseconds: whichever comes first; 0: not by that. Both 0: when your task asks for it.
    """

    steps: int
    milliseconds: int

    @property
    def seconds(self) -> float:
        """The same in seconds; 0 for a negative value."""
        return max(0, self.milliseconds) / 1000


MOST_SCORED = 1024
"""Deltas of a round that an evaluator is asked about."""


@frozen
class Evaluate(Message, tag="evaluate/1"):
    """Parameter server, to its evaluator: score these deltas of `version`; each comes as a stream.

    deltas: the key of each and its share of their mean, [text, float].
    """

    version: int
    deltas: list[Any]

    def __attrs_post_init__(self) -> None:
        if len(self.deltas) > MOST_SCORED:
            raise ValueError(f"{len(self.deltas)} deltas are too many")
        for one in self.deltas:
            is_row = type(one) is list and [type(part) for part in one] == [str, float]
            if not is_row or not 0.0 <= one[1] <= 1.0:
                raise ValueError("a delta is a key and a share from 0 to 1")
            DeltaKey.parse(one[0])

    @property
    def shares(self) -> dict[DeltaKey, float]:
        """The deltas, in their order."""
        return {DeltaKey.parse(key): share for key, share in self.deltas}


MOST_ANSWERS = 1024
"""Answers of a group."""


@frozen
class Rollout(Message, tag="rollout/1"):
    """Client that rolls out: a prompt and a group of answers of `version`, each with its reward.

    Parameter server: the same, to a client that trains. site: whose they are; empty towards the
    parameter server. prompt: token ids, little-endian uint32. record: JSON, what a reward function
    gets. answers: [token ids, their log-probabilities as little-endian fp32, reward float] of each.
    """

    version: int
    prompt: bytes
    record: bytes
    answers: list[Any]
    site: OptionalClient = ""

    def __attrs_post_init__(self) -> None:
        if not self.prompt or len(self.prompt) % 4 or not 2 <= len(self.answers) <= MOST_ANSWERS:
            raise ValueError("a prompt is of token ids, and has at least two answers")
        size = len(self.prompt) + len(self.record)
        for one in self.answers:
            is_row = type(one) is list and [type(part) for part in one] == [bytes, bytes, float]
            if not is_row or not one[0] or len(one[0]) % 4 or len(one[0]) != len(one[1]):
                raise ValueError("an answer is token ids, as many log-probabilities, and a reward")
            if not math.isfinite(one[2]):
                raise ValueError("a reward is finite")
            size += len(one[0]) + len(one[1])
        if size > MAX_BYTES:
            raise ValueError(f"a group of answers has more than {MAX_BYTES:,} bytes")


@frozen
class Disputed(Message, tag="disputed/1"):
    """Client that trains: the answers of this client are rated otherwise here, or are nonsense."""

    site: Client


@frozen
class Accepted(Message, tag="accepted/1"):
    """Parameter server: this delta is durable here."""

    key: Key


@frozen
class Declined(Message, tag="declined/1"):
    """Parameter server: this delta will never be merged; with code "later": offer it again."""

    key: Key
    code: Code
    text: str


@frozen
class Announce(Message, tag="announce/2"):
    """Parameter server: the run is at `version`, and this far towards its end."""

    version: int
    digest: Digest
    position: RunPosition = field(factory=RunPosition)


@frozen
class Scalars(Message, tag="scalars/1"):
    """Parameter server: an announcement, and what leads to that version in a run of zeroth order.

    frame: the scalars of all versions since one that the client holds or held (`fsl_codecs.seeds`).
    position: the default where it is about that of the last announcement in this session.
    """

    version: int
    digest: Digest
    frame: bytes
    position: RunPosition = field(factory=RunPosition)


@frozen
class Reject(Message, tag="reject/1"):
    """Parameter server: this client cannot take part, for this reason."""

    code: Code
    text: str


@frozen
class Stop(Message, tag="stop/1"):
    """Parameter server: the run has ended."""

    reason: str


@frozen
class OfSum(Message, tag="of_sum"):
    """Base of the messages about an attempt at the secure sum of a round."""

    round: int
    attempt: int

    @property
    def attempted(self) -> tuple[int, int]:
        """The round, and the attempt at its sum."""
        return self.round, self.attempt


@frozen
class SecureCall(OfSum, tag="secure_call/1"):
    """Parameter server: send new keys for this attempt."""


@frozen
class SecureKey(OfSum, tag="secure_key/1"):
    """Client: my long-term X25519 key, and the one of this attempt."""

    site: bytes
    key: bytes

    def __attrs_post_init__(self) -> None:
        if not len(self.site) == len(self.key) == KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes")


@frozen
class SecureSet(Message, tag="secure_set/1"):
    """Parameter server: these sites take part in the sum, with these keys."""

    roster: Roster


@frozen
class SecureShares(OfSum, tag="secure_shares/1"):
    """Client: shares of my secrets, each sealed for one neighbour. Parameter server: those for you.

    shares: rows of a site's name and bytes.
    """

    shares: list[Any]

    def __attrs_post_init__(self) -> None:
        rows("shares", self.shares, _SEALED_BYTES)


@frozen
class Unmasked(SecureShares, tag="unmasked/1"):
    """Client: of each site whose shares I hold, one of them."""


@frozen
class Unmask(OfSum, tag="unmask/1"):
    """Parameter server: the deltas of these sites are here; send what opens their sum."""

    survivors: list[Any]

    def __attrs_post_init__(self) -> None:
        rows("survivors", [[one] for one in self.survivors])


@frozen
class SharesRefused(OfSum, tag="shares_refused/1"):
    """Client: what these sites have sealed for me cannot be opened, so I have no masks."""

    sites: list[Any]

    def __attrs_post_init__(self) -> None:
        rows("sites", [[one] for one in self.sites])


@frozen
class InitialMeta(Meta, tag="initial_meta/1"):
    """Stream of initial weights: fp32 frames of the flat vector, one per chunk."""

    fingerprint: Digest


@frozen
class DeltaMeta(Meta, tag="delta_meta/3"):
    """Stream of a delta: one coded frame per chunk."""

    delta: Delta


@frozen
class VersionMeta(Meta, tag="version_meta/1"):
    """Stream of a version.

    kind: "update" (coded outer delta from version - 1), "seeds" (one frame of the scalars since an
    earlier version), "full" (fp32), "global" (coded, from the global weights of the digest that the
    client named) or "global_full" (fp32 of global weights, which the client keeps a copy of).
    """

    kind: VersionKind
    version: int


TABLE = Table(
    Attach, Fetch, Holding, Measured, Score, Skip, Publish, Call, Turn, Pace, Evaluate, Accepted,
    Declined, Announce, Scalars, Reject, Stop, SecureCall, SecureKey, SecureSet, SecureShares,
    SharesRefused, Unmask, Unmasked, Rollout, Disputed,
    InitialMeta, DeltaMeta, VersionMeta,
)  # fmt: skip
to_wire = TABLE.to_wire
from_wire = TABLE.from_wire


def delta_stream(key: str) -> str:
    """Name of the stream that carries a delta."""
    return f"delta:{key}"


def initial_stream(client: str, incarnation: int) -> str:
    """Name of the stream that carries a client's initial weights."""
    return f"initial:{client}/{incarnation}"


def version_stream(kind: str, version: int) -> str:
    """Name of the stream of a version. kind: as in `VersionMeta`."""
    return f"{kind}:{version}"
