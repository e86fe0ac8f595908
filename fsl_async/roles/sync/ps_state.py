"""The parts of the parameter server's state: phases, members and the open round. Pure.

The clients called at the start of a round are *expected*. One that leaves is expected no longer,
until it reconnects with the same incarnation: a lost client never blocks a round, and a late joiner
or a relaunched client is not counted in this round's quorum. `triggers` decides when a round is
complete.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import TYPE_CHECKING

from attrs import Factory, field, frozen, mutable

from fsl_async.roles.sync.delta import TRAIN
from fsl_async.roles.sync.progress import RunPosition

if TYPE_CHECKING:
    from fsl_async.config.settings import SyncConfig

MAX_OFFSETS = 64
MIN_OFFSETS = 3

GRACE_MADS = 4.0
"""Median absolute deviations beyond the median of arrival times, at which a grace window ends."""


@frozen
class Merging:
    """Facts about the rules that merge deltas, for the machine (`nodes.ps.aggregation`).

    least_clients: that must have pending deltas. reuses: a version also has the newest merged delta
    of other clients. compares: the rule compares deltas, or sees none: unmoved ones count too.
    clips_values: a clipped delta is multiplied, and not its weight.
    """

    least_clients: int = 1
    reuses: bool = False
    compares: bool = False
    clips_values: bool = False


class Phase(enum.Enum):
    """The phases of a run."""

    EMPTY = "empty"
    READY = "ready"
    COLLECTING = "collecting"
    MERGING = "merging"
    DONE = "done"


@mutable
class Member:
    """A client with a session."""

    incarnation: int
    attached: bool = False
    version: int = -1
    shard: int = -1
    position: RunPosition | None = None  # the last one announced
    sent: int = -1  # the version whose scalars were last sent to it
    agrees: bool = False  # its model is the run's
    duty: str = TRAIN

    @property
    def trains(self) -> bool:
        """Whether it takes part in rounds."""
        return self.duty == TRAIN


def _newest(offsets_s: Iterable[float]) -> deque[float]:
    return deque(offsets_s, MAX_OFFSETS)


@mutable
class ArrivalHistory:
    """How long after a call the answers arrived, over the last rounds."""

    offsets_s: deque[float] = field(factory=deque, converter=_newest)

    def grace_until(self, sync: SyncConfig, called_at: float, quorum_at: float) -> float:
        """When the grace window ends, for a round with its call and its quorum at these times."""
        if len(self.offsets_s) < MIN_OFFSETS:
            return quorum_at + sync.first_grace_s
        middle = median(self.offsets_s)
        deviation = median(abs(offset - middle) for offset in self.offsets_s)
        usual = called_at + middle + GRACE_MADS * deviation
        return max(usual, quorum_at + sync.grace_min_s)

    def usual_s(self, sync: SyncConfig) -> float:
        """How long answers usually take; 0 while too few are known."""
        if len(self.offsets_s) < MIN_OFFSETS:
            return 0.0
        return self.grace_until(sync, 0.0, 0.0)


@mutable
class Round:
    """The open round. `expected` maps the called clients to the incarnation that was called."""

    number: int
    called_at: float
    cap_s: float
    expected: dict[str, int]
    last: bool = False  # after it nothing is merged any more
    waiting: list[str] = field(factory=list)  # called later, in this order
    called: int = Factory(lambda self: len(self.expected) + len(self.waiting), takes_self=True)
    left: dict[str, int] = field(factory=dict)
    quorum_at: float | None = None
    # name -> True: sent a delta, False: had nothing that counts
    answered: dict[str, bool] = field(factory=dict)
    asked: dict[str, int] = Factory(lambda self: dict(self.expected), takes_self=True)
    """All that were called so far, as `expected`; also those that left or were dismissed."""

    def answer(self, name: str, *, contributed: bool) -> bool:
        """Record an answer; True when this client was expected and had not answered yet."""
        if name not in self.expected or name in self.answered:
            return False
        self.answered[name] = contributed
        return True

    def next_of(self, present: Mapping[str, int]) -> str | None:
        """Expect the next waiting client that is in `present` (name -> incarnation); returns it."""
        while self.waiting:
            name = self.waiting.pop(0)
            if name in present:
                self.expected[name] = self.asked[name] = present[name]
                return name
        return None

    def awaits(self, name: str, incarnation: int) -> bool:
        """Whether this incarnation of a client was called and has not answered."""
        return self.expected.get(name) == incarnation and name not in self.answered

    def leave(self, name: str, incarnation: int) -> bool:
        """Stop waiting for a client whose session ended. True when it was awaited."""
        if not self.awaits(name, incarnation):
            return False
        del self.expected[name]
        self.left[name] = incarnation
        return True

    def rejoin(self, name: str, incarnation: int) -> None:
        """Expect a called client again that has a new session, if it is the same process."""
        if self.left.get(name) == incarnation:
            self.expected[name] = self.left.pop(name)

    def recall(self, present: dict[str, int]) -> list[str]:
        """Expect those in `present` (name -> incarnation) again that sent no delta; returns them.

        For a round that stays open: they have made progress since, and must not wait for a single
        client that hangs.
        """
        again = sorted(
            name
            for name, contributed in self.answered.items()
            if not contributed and present.get(name) == self.expected[name]
        )
        for name in again:
            del self.answered[name]
        return again

    def dismiss(self, names: Iterable[str]) -> None:
        """Stop waiting for these."""
        for name in names:
            del self.expected[name]

    def missing(self) -> list[str]:
        """The expected clients that have not answered, by name."""
        return sorted(name for name in self.expected if name not in self.answered)

    def contributors(self) -> int:
        """How many expected clients have sent a delta."""
        return sum(self.answered.values())

    def named_missing(self) -> str:
        """Return the names of the first missing clients."""
        missing = self.missing()
        return ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
