"""One synchronisation round: who was called, who answered, and when it is time to merge. Pure.

Rules
- The clients called at the start are *expected*. One that leaves is expected no longer, until it is back in the same life:
  eviction never blocks a round, and a late joiner or a relaunched client is not counted in this round's quorum.
- All of the still expected have answered: merge at once.
- A quorum of them has answered: wait for the others during a grace window, learnt from how long answers took in past
  rounds (median + k times the median absolute deviation, after hivemind#676: fixed time-outs are what users have to guess
  and get wrong), and never beyond the round's cap.
- No quorum at the cap: the round stays open as long again, then it merges what it has. Clients that live but hang must not
  stop the others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

from attrs import field, frozen, mutable

from fsl_async.roles.phrasing import share_of

MAX_OFFSETS = 64
MIN_OFFSETS = 3


@frozen
class RoundRules:
    """How a round decides. Times in seconds."""

    quorum: float = 0.5  # fraction of the expected clients, at least one client
    grace_mad_factor: float = 4.0
    grace_min_s: float = 1.0  # at least this long after the quorum
    patience: float = 2.0  # caps after which a round without a quorum merges what it has
    first_grace_s: float = 60.0  # this long after the quorum while too few arrivals are known


@mutable
class ArrivalHistory:
    """How long after a call the answers came, over the last rounds."""

    offsets_s: deque[float] = field(factory=lambda: deque(maxlen=MAX_OFFSETS))

    def grace_until(self, rules: RoundRules, called_at: float, quorum_at: float) -> float:
        """Until when a round called at `called_at`, with a quorum since `quorum_at`, waits for the rest."""
        if len(self.offsets_s) < MIN_OFFSETS:
            return quorum_at + rules.first_grace_s
        middle = median(self.offsets_s)
        deviation = median(abs(offset - middle) for offset in self.offsets_s)
        usual = called_at + middle + rules.grace_mad_factor * deviation
        return max(usual, quorum_at + rules.grace_min_s)

    def usual_s(self, rules: RoundRules) -> float:
        """How long answers take; 0 while too few are known."""
        if len(self.offsets_s) < MIN_OFFSETS:
            return 0.0
        return self.grace_until(rules, 0.0, 0.0)


@frozen
class Verdict:
    """What to do with a round now: merge, close it empty, or wait (until `until`, if that is known), and why."""

    action: str  # "merge" | "close" | "wait"; for some triggers also "next" | "pass"
    reason: str
    until: float | None = None


@mutable
class Round:
    """The open round. `expected` maps the called clients to the incarnation that was called."""

    number: int
    called_at: float
    cap_s: float
    expected: dict[str, int]
    last: bool = False  # after it nothing is merged any more
    waiting: list[str] = field(factory=list)  # whose turn comes later
    called: int = 0
    left: dict[str, int] = field(factory=dict)
    quorum_at: float | None = None
    # name -> True: sent a delta, False: had nothing that counts
    answered: dict[str, bool] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.called = len(self.expected) + len(self.waiting)

    def answer(self, name: str, *, contributed: bool) -> bool:
        """Note an answer; True when this client was expected and had not answered yet."""
        if name not in self.expected or name in self.answered:
            return False
        self.answered[name] = contributed
        return True

    def next_of(self, present: Mapping[str, int]) -> str | None:
        """Expect the next one whose turn it is, of those in `present` (name -> incarnation); None when there is none."""
        while self.waiting:
            name = self.waiting.pop(0)
            if name in present:
                self.expected[name] = present[name]
                return name
        return None

    def awaits(self, name: str, incarnation: int) -> bool:
        """Whether this life of a client was called and has not answered."""
        return self.expected.get(name) == incarnation and name not in self.answered

    def leave(self, name: str, incarnation: int) -> bool:
        """A session ended: no longer wait for this client unless it has answered. True when it was waited for."""
        if not self.awaits(name, incarnation):
            return False
        del self.expected[name]
        self.left[name] = incarnation
        return True

    def rejoin(self, name: str, incarnation: int) -> None:
        """A called client that had lost its session is back in the same life: expect it again."""
        if self.left.get(name) == incarnation:
            self.expected[name] = self.left.pop(name)

    def recall(self, present: dict[str, int]) -> list[str]:
        """Expect those in `present` (name -> incarnation) again who answered that they have nothing; returns them.

        For a round that stays open: by now they have trained something, and one client that hangs must not be all
        that the others wait for.
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
        """Wait for these no longer."""
        for name in names:
            del self.expected[name]

    def missing(self) -> list[str]:
        """The expected clients that have not answered, by name."""
        return sorted(name for name in self.expected if name not in self.answered)

    def contributors(self) -> int:
        """How many expected clients have sent a delta."""
        return sum(self.answered.values())

    def verdict(
        self, rules: RoundRules, history: ArrivalHistory, now: float, *, pending: int
    ) -> Verdict:
        """Decide; `pending` is the number of acknowledged deltas that wait to be merged, late ones included."""
        contributors = self.contributors()
        sent = f"{share_of(contributors, self.called)} sent a delta"
        # Asked after every answer of what may be a thousand clients: count first, name the missing only when they are said.
        if len(self.answered) >= len(self.expected) and not self.missing():
            if pending:
                return Verdict("merge", f"{sent}, all have answered")
            return Verdict("close", "nobody had anything to send")
        needed = max(1, math.ceil(rules.quorum * len(self.expected)))
        if contributors >= needed and pending:
            if self.quorum_at is None:
                self.quorum_at = now
            until = history.grace_until(rules, self.called_at, self.quorum_at)
            until = min(until, max(self.called_at + self.cap_s, self.quorum_at))
            if now >= until:
                return Verdict(
                    "merge",
                    f"{sent} and the grace window of {until - self.called_at:.1f} s"
                    f" is over; without {self.named_missing()}",
                )
            return Verdict("wait", f"quorum of {needed} reached", until)
        waited_s = now - self.called_at
        if pending and waited_s >= rules.patience * self.cap_s:
            text = f"no quorum after {waited_s:.1f} s ({sent}, {needed} needed); merged without {self.named_missing()}"
            return Verdict("merge", text)
        reason = f"{sent}, {needed} needed"
        if now >= self.called_at + self.cap_s:
            reason += f"; waiting for {self.named_missing()}"
        return Verdict("wait", reason)

    def named_missing(self) -> str:
        """A few of the missing, for people."""
        missing = self.missing()
        return ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
