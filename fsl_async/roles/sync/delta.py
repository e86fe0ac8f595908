"""A delta: what a client trained since its last snapshot. Pure.

Events, effects, messages and records hold these classes.

    Delta         as its client offers it
    StoredDelta   as it is on the parameter server's disk
    MergedDelta   as it enters a version

`Outcomes` keeps the newest settled delta of each client, which stands for all before it: a client
offers one delta at a time, and takes a higher number only after an answer. So one of an earlier
number was settled, too, and its own outcome is not kept: it is superseded. The parameter server's
machine has one copy, which is ahead of the disk (`roles.sync.deltas`); the store has another, which
is durable (`store.book.book`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

from attrs import evolve, field, frozen

from fsl_async.roles.messages import Form, optional
from fsl_async.roles.names import MAX_DIGITS, NAME

TRAIN, EVALUATE, ROLL_OUT = "train", "evaluate", "rollout"
"""Duties of clients. Those with another one than the first train nothing, and have no shard."""
DIGEST = Form("a digest", re.compile(r"[0-9a-f]{32}").fullmatch)
OptionalDigest = Annotated[str, optional(DIGEST)]


RANK, ORDER, BALANCE, EPSILON, UNSENT = "rank", "order", "balance", "epsilon", "unsent"
NOISE, SAMPLE_RATE, PRIVATE_STEPS = "noise", "sample_rate", "private_steps"
MASKS = "masks"
POSITION = ("data_epoch", "data_at", "data_offset", "data_drawn", "data_check")
"""Where a client is in its part of the data, after what the delta has trained: whole numbers
(`fsl_async.learn.data.packing.Position`). Of the last acknowledged delta they come back to the
client with its welcome."""
FACTS = (
    RANK, ORDER, BALANCE, EPSILON, NOISE, SAMPLE_RATE, PRIVATE_STEPS, UNSENT, MASKS, *POSITION,
)  # fmt: skip
"""Facts of a delta: rank of its site's adapters, order of its steps (0: zeroth, 1: first), balance
of its site's labels (0: one label, 1: equally many of each), the privacy budget that its site has
spent so far, with what that follows from: noise in units of the clipping norm, probability of a
record in a step, steps so far; the norm of what coding has kept back of the client's last delta, in
norms of that delta; the number of the set under whose masks it is (`Roster.number`); and
`POSITION`."""


@frozen(order=True)
class DeltaKey:
    """The identity of a delta: client, incarnation, base version and sequence number.

    A client keeps a delta until its key is acknowledged, and offers it again after any reconnect;
    the parameter server answers a key that it has seen with the same acknowledgement. So every
    delta is merged at most once.
    """

    client: str
    incarnation: int
    base: int
    sequence: int

    @property
    def text(self) -> str:
        """The form used on the wire and in the journal, `client/incarnation/base/sequence`."""
        return f"{self.client}/{self.incarnation}/{self.base}/{self.sequence}"

    @property
    def order(self) -> tuple[int, int]:
        """The place among the deltas of its client, which offers them in this order."""
        return self.incarnation, self.sequence

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `text`; raises ValueError when it is not a key."""
        client, *numbers = text.split("/")
        fits = all(
            part.isascii() and part.isdecimal() and len(part) <= MAX_DIGITS for part in numbers
        )
        if not NAME.fullmatch(client) or len(numbers) != 3 or not fits:
            raise ValueError(f"not a delta key: {text[:120]!r}")
        incarnation, base, sequence = (int(part) for part in numbers)
        return cls(client, incarnation, base, sequence)


Key = Annotated[DeltaKey, Form("a delta key", DeltaKey.parse)]


@frozen
class Delta:
    """A delta without its values: its key, and the work that it stands for."""

    key: Key
    base_digest: OptionalDigest
    """Digest of the base version; empty where a record does not have it."""
    tokens: int
    steps: int
    round: int = 0
    """The round that it answers: the number of the version that the round starts from."""
    metrics: dict[str, Any] = field(factory=dict)
    facts: dict[str, Any] = field(factory=dict)
    """Numbers that the run needs of the work, which no policy withholds; see `FACTS`."""


@frozen
class StoredDelta:
    """A delta that is complete, checked, spooled and synced to disk."""

    delta: Delta
    bytes: int = 0
    """Length of its spool file."""
    norm: float = 0.0
    """Euclidean norm of its values."""
    digest: str = ""
    """BLAKE3 of its spool file, in hexadecimal."""

    @property
    def key(self) -> DeltaKey:
        """The key of the delta."""
        return self.delta.key


@frozen
class Score:
    """An evaluator's findings on a delta. Losses are of its own records; all are finite."""

    by: str
    """Name of the evaluator."""
    loss: float
    """Of the version that the delta is added to."""
    alone: float
    """What the delta alone adds to it."""
    left_out: float = 0.0
    """By how much the loss of the mean of all deltas is above that without it; 0: not measured."""
    refused: bool = False
    """Whether the delta has no weight for that."""


@frozen
class MergedDelta:
    """A delta as it enters a version, or waits for that."""

    delta: Delta
    staleness: int
    """Versions between its base and the version that the merge starts from."""
    weight: float
    """Its factor in the sum; 0 where the aggregation rule left it out."""
    norm: float = 0.0
    product_norm: float = 0.0
    """How much its client changed all modules, for adapters that are merged by products."""
    clip: float = 1.0
    """Share of its length that counts, above 0. The weight has it, unless products are formed."""
    score: Score | None = None

    @property
    def is_refused(self) -> bool:
        """Whether an evaluator has refused it."""
        return self.score is not None and self.score.refused

    @property
    def key(self) -> DeltaKey:
        """The key of the delta."""
        return self.delta.key


def one_each(merged: Iterable[MergedDelta]) -> list[MergedDelta]:
    """Return one delta for each client, with the mean of its tokens, steps and norms."""
    found: dict[str, list[MergedDelta]] = {}
    for one in merged:
        found.setdefault(one.key.client, []).append(one)
    return [
        ones[0]
        if len(ones) == 1
        else evolve(
            ones[0],
            delta=evolve(
                ones[0].delta,
                # Rounded up: full weights must not add up to more than they are divided by.
                tokens=-(-sum(one.delta.tokens for one in ones) // len(ones)),
                steps=-(-sum(one.delta.steps for one in ones) // len(ones)),
                facts=_mean_balance(ones),
            ),
            weight=fmean(one.weight for one in ones),
            norm=fmean(one.norm for one in ones),
        )
        for ones in found.values()
    ]


def _mean_balance(ones: list[MergedDelta]) -> dict[str, Any]:
    found = [one.delta.facts.get(BALANCE) for one in ones]
    numbers = [one for one in found if isinstance(one, int | float)]
    return ones[0].delta.facts | ({BALANCE: fmean(numbers)} if numbers else {})


def mean_cosine(merged: Sequence[MergedDelta], scale: float, average_norm: float) -> float | None:
    """The weighted mean cosine between two deltas of a round, -1 to 1; None with fewer than two.

    It tells whether clients train too long alone. A delta is progress that all clients make, and
    drift that is its client's own; the cosine is about the share of the first: near 1 averaging
    loses nothing, near 0 most of what each client trained is averaged away.

    average_norm: L2 norm of scale * sum_i weight_i * Delta_i. With a_i = weight_i |Delta_i| the
    square of the sum is sum_i a_i^2 + sum_(i != j) a_i a_j cos_ij, so no delta is read again.
    """
    lengths = [one.weight * one.norm for one in merged]
    own = math.fsum(length**2 for length in lengths)
    pairs = math.fsum(lengths) ** 2 - own
    if not scale or pairs <= 1e-9 * own or not math.isfinite(pairs):
        return None
    return max(-1.0, min(1.0, ((average_norm / scale) ** 2 - own) / pairs))


Outcome = Literal["accepted", "merged", "quarantined", "superseded"]


class Keyed(Protocol):
    """Something of a delta."""

    @property
    def key(self) -> DeltaKey:
        """The key of the delta."""


T = TypeVar("T", bound=Keyed)


def newest_of_clients(ones: Iterable[T]) -> dict[str, T]:
    """Return the newest of each client, by client; of equal numbers the last one."""
    return {one.key.client: one for one in sorted(ones, key=lambda one: one.key.order)}


class Outcomes(dict[str, tuple[DeltaKey, Outcome]]):
    """Client -> its newest settled delta, and the outcome of that."""

    def settle(self, key: DeltaKey, outcome: Outcome) -> None:
        """Record the outcome of a delta."""
        if key.client not in self or self[key.client][0].order <= key.order:
            self[key.client] = (key, outcome)

    def settle_all(self, outcomes: Mapping[DeltaKey, Outcome]) -> None:
        """Record the outcomes of deltas, in any order."""
        for key in sorted(outcomes):
            self.settle(key, outcomes[key])

    def unsettle(self, key: DeltaKey) -> None:
        """Forget the outcome of a delta, unless its client has settled another one since."""
        if self.get(key.client, (None,))[0] == key:
            del self[key.client]

    def of(self, key: DeltaKey) -> Outcome | None:
        """Return the outcome of a delta; None: it is not settled."""
        if key.client not in self or key.order > self[key.client][0].order:
            return None
        last, outcome = self[key.client]
        return outcome if key == last else "superseded"
