"""Decides when an open round is complete. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from attrs import frozen

from fsl_async.roles.phrasing import share_of
from fsl_async.roles.sync.round import ArrivalHistory, Round

if TYPE_CHECKING:
    from fsl_async.config.settings import SyncConfig

PATIENCE = 2.0
"""Caps after which a round without a quorum merges what it has."""


@frozen
class Verdict:
    """What to do with a round now, and why. until: when a "wait" is over, if that is known.

    merge   make a version of the pending deltas
    close   end the round without a version
    wait    wait for answers
    next    call the next client of those that wait for their turn
    pass    stop waiting for the missing clients
    """

    action: Literal["merge", "close", "wait", "next", "pass"]
    reason: str
    until: float | None = None


class Completion(Protocol):
    """A rule of completion. any_delta: evaluate the round also at a delta for another round."""

    any_delta: ClassVar[bool]

    def verdict(
        self, open_: Round, history: ArrivalHistory, now: float, *, pending: int
    ) -> Verdict:
        """Decide. pending: acknowledged deltas that can make a version, late ones included."""
        ...


@frozen
class QuorumAndGrace:
    """A quorum of the expected clients, then a grace window for the others.

    - All expected clients have answered: merge at once.
    - A quorum has answered: wait for the others during a grace window, computed from the times of
      answers in past rounds (median + k times the median absolute deviation, after hivemind#676:
      fixed timeouts have to be guessed), and never beyond the round's cap.
    - No quorum at the cap: the round stays open for `PATIENCE` caps, then it merges the pending
      deltas. Connected clients that hang must not stop the others.
    """

    any_delta: ClassVar[bool] = False

    sync: SyncConfig

    def verdict(
        self, open_: Round, history: ArrivalHistory, now: float, *, pending: int
    ) -> Verdict:
        """Decide by quorum, then by grace window."""
        contributors = open_.contributors()
        sent = f"{share_of(contributors, open_.called)} sent a delta"
        # Evaluated after every answer, perhaps a thousand times: count first, and name the missing
        # only where the reason needs it.
        if len(open_.answered) >= len(open_.expected) and not open_.missing():
            if pending:
                return Verdict("merge", f"{sent}, all have answered")
            return Verdict("close", "no client had a delta to send")
        needed = max(1, math.ceil(self.sync.quorum * len(open_.expected)))
        if contributors >= needed and pending:
            if open_.quorum_at is None:
                open_.quorum_at = now
            until = history.grace_until(self.sync, open_.called_at, open_.quorum_at)
            until = min(until, max(open_.called_at + open_.cap_s, open_.quorum_at))
            if now >= until:
                return Verdict(
                    "merge",
                    f"{sent} and the grace window of {until - open_.called_at:.1f} s"
                    f" is over; without {open_.named_missing()}",
                )
            return Verdict("wait", f"quorum of {needed} reached", until)
        waited_s = now - open_.called_at
        if pending and waited_s >= PATIENCE * open_.cap_s:
            return Verdict(
                "merge",
                f"no quorum after {waited_s:.1f} s ({sent}, {needed} needed);"
                f" merged without {open_.named_missing()}",
            )
        reason = f"{sent}, {needed} needed"
        if now >= open_.called_at + open_.cap_s:
            reason += f"; waiting for {open_.named_missing()}"
        return Verdict("wait", reason)


@frozen
class Buffered:
    """`size` deltas are pending, whichever clients they are of, or one is and `every_s` is over.

    After FedBuff (Nguyen et al., arXiv:2106.06639). The last round of a run calls all clients, and
    waits for them up to its cap.
    """

    any_delta: ClassVar[bool] = True

    size: int
    every_s: float

    def verdict(
        self, open_: Round, history: ArrivalHistory, now: float, *, pending: int
    ) -> Verdict:
        """Decide by the number of pending deltas, then by time."""
        buffered = f"{pending} of {self.size} deltas are buffered"
        if open_.last:
            sent = f"{share_of(open_.contributors(), open_.called)} sent a last delta"
            if open_.missing() and not (pending and now >= open_.called_at + open_.cap_s):
                return Verdict("wait", sent)
            return Verdict("merge" if pending else "close", sent)
        if pending >= self.size:
            return Verdict("merge", buffered)
        due_at = open_.called_at + self.every_s
        if pending and now >= due_at:
            return Verdict("merge", f"{buffered} after {now - open_.called_at:.1f} s")
        return Verdict("wait", buffered, due_at if now < due_at else now + self.every_s)


@frozen
class AllAnswered:
    """All called clients that are still here have answered, each within the cap.

    passes: at the cap, the turn of the missing client is over. Else pending deltas are merged
    without the missing clients; a round without any delta waits for all.
    """

    any_delta: ClassVar[bool] = False

    passes: bool

    def verdict(
        self, open_: Round, history: ArrivalHistory, now: float, *, pending: int
    ) -> Verdict:
        """Decide by missing answers, then by the cap."""
        missing = open_.missing()
        sent = f"{share_of(open_.contributors(), open_.called)} sent a delta"
        if not missing:
            if open_.waiting:
                return Verdict("next", sent)
            return Verdict("merge" if pending else "close", sent)
        if now < open_.called_at + open_.cap_s:
            return Verdict("wait", sent)
        late = f"{sent}, none from {open_.named_missing()} in time"
        if self.passes:
            return Verdict("pass", late)
        return Verdict("merge" if pending else "wait", late)
