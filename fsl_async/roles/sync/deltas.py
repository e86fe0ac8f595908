"""The book of deltas at the parameter server: which are acknowledged, which are settled, what each one weighs. Pure.

A delta's life: offered -> (refused before transfer) or stored -> acknowledged and pending -> merged; a stored delta
that is not finite is quarantined instead. A client offers one at a time and moves to the next sequence number only after an
answer, so the last settled key of a client stands for all before it and the book stays small however long the run.
"""

from __future__ import annotations

from attrs import mutable

from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta, StoredDelta
from fsl_async.roles.sync.effects import Accumulate
from fsl_async.roles.sync.weighting import Weighting

MAX_TOKENS = 10**12
"""In one delta. Together with the store's limit on a delta's norm it keeps every sum far inside fp32."""
REMEMBERED_VERSIONS = 256
"""Digests of past versions, so that a client that was away for long is still known to be of this lineage."""


@mutable
class Settled:
    """What became of a client's last settled delta."""

    incarnation: int
    sequence: int
    outcome: str  # "merged" | "quarantined"


class DeltaBook:
    """Pending and settled deltas, and the versions that a delta may be based on."""

    def __init__(self, weighting: Weighting, *, max_staleness: int, keep_versions: int) -> None:
        self.weighting = weighting
        self.max_staleness = max_staleness
        self.pending: dict[DeltaKey, MergedDelta] = {}
        self.merging: tuple[MergedDelta, ...] = ()
        self.settled: dict[str, Settled] = {}
        self.version = -1
        self.digests: dict[int, str] = {}
        self._memory = max(max_staleness, keep_versions, REMEMBERED_VERSIONS)

    def advance(self, version: int, digest: str) -> int:
        """A version is durable: what was merging is merged. Returns the tokens that entered it."""
        self.version = version
        self.digests[version] = digest
        self.digests.pop(version - self._memory - 1, None)
        tokens = 0
        for merged in self.merging:
            del self.pending[merged.key]
            self.settle(merged.key, "merged")
            tokens += merged.delta.tokens
        self.merging = ()
        return tokens

    def begin_merge(self) -> tuple[tuple[MergedDelta, ...], float]:
        """Fix what enters the next version: all that is pending now. Returns it and the scale of the average."""
        self.merging = tuple(self.pending.values())
        return self.merging, self.weighting.scale(self.merging)

    def abandon_merge(self) -> None:
        """The merge failed before it was durable; everything is pending again (and still in the accumulator)."""
        self.merging = ()

    @property
    def clients_pending(self) -> int:
        """How many clients have something that waits to be merged."""
        return len({key.client for key in self.pending})

    def settle(self, key: DeltaKey, outcome: str) -> None:
        """Note the outcome of a delta."""
        last = self.settled.get(key.client)
        if last is None or (last.incarnation, last.sequence) <= (key.incarnation, key.sequence):
            self.settled[key.client] = Settled(key.incarnation, key.sequence, outcome)

    def unsettle(self, key: DeltaKey) -> None:
        """What was said of a delta holds no longer, unless its client has gone on since."""
        last = self.settled.get(key.client)
        if last is not None and (last.incarnation, last.sequence) == (
            key.incarnation,
            key.sequence,
        ):
            del self.settled[key.client]

    def settled_as(self, key: DeltaKey) -> str | None:
        """Return "merged", "quarantined", "superseded" (of an earlier life), or None: not settled."""
        last = self.settled.get(key.client)
        if last is None or (key.incarnation, key.sequence) > (last.incarnation, last.sequence):
            return None
        if key.incarnation < last.incarnation:
            return "superseded"
        return last.outcome if key.sequence == last.sequence else "merged"

    def is_acknowledged(self, key: DeltaKey) -> bool:
        """Whether the answer to an offer of `key` is the acknowledgement that it got before."""
        return key in self.pending or self.settled_as(key) == "merged"

    def objection(self, offer: Delta) -> tuple[str, str] | None:
        """Why an offered delta will never be merged, as a code and a sentence; None when it is welcome."""
        key = offer.key
        outcome = self.settled_as(key)
        if outcome is not None:
            return outcome, f"this delta is {outcome}"
        if offer.tokens > MAX_TOKENS or offer.steps > MAX_TOKENS:
            return (
                "absurd",
                f"nobody trains {offer.tokens} tokens in {offer.steps} steps between two syncs",
            )
        if offer.tokens < 1 or offer.steps < 1:
            return (
                "empty",
                f"a delta of {offer.tokens} tokens in {offer.steps} steps counts for nothing",
            )
        if (
            self.version < 0
            or key.base > self.version
            or self.digests.get(key.base, offer.base_digest) != offer.base_digest
        ):
            text = (
                f"version {key.base} with digest {offer.base_digest} is not of this run's lineage"
            )
            return "lineage", text
        if self.staleness(key) > self.max_staleness:
            text = (
                f"computed from version {key.base}, the run is at {self.version};"
                f" at most {self.max_staleness} versions behind is merged"
            )
            return "stale", text
        return None

    def staleness(self, key: DeltaKey) -> int:
        """Versions between a delta's base and the version that the next free merge starts from.

        If a merge that is under way fails and is tried again, a delta that came meanwhile joins it; it keeps the
        staleness, and so the weight, with which it is already in the accumulator.
        """
        return max(0, self.version + (1 if self.merging else 0) - key.base)

    def weight(self, delta: Delta) -> float:
        """The weight of a delta in the next free merge."""
        return self.weighting.weight(delta, self.staleness(delta.key))

    def acknowledge(self, stored: StoredDelta, clip: float = 1.0) -> Accumulate:
        """Book a durable delta for the next free merge; returns how it enters the accumulator. `clip` lowers its weight."""
        delta = stored.delta
        weight = clip * self.weight(delta)
        self.pending[delta.key] = MergedDelta(delta, self.staleness(delta.key), weight, stored.norm)
        return Accumulate(delta.key, weight)
