"""Decides when a client sends by itself: at the pace that the parameter server gave it. Pure.

The training thread counts steps and reports them (`PaceReached`); seconds are a deadline here. Both
count from the last snapshot, and at first from the first version.
"""

from __future__ import annotations

from attrs import mutable

from fsl_async.roles.machine import Deadlines, Effect
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import messages as msg


@mutable
class Leading:
    """A client's pace. It shares the machine's deadlines; "pace" is its own.

    pace: None: the client is called, and sends nothing by itself. reached: its progress is to be
    sent as soon as no delta is outstanding.
    """

    deadlines: Deadlines
    pace: msg.Pace | None = None
    reached: bool = False

    @property
    def is_due(self) -> bool:
        """Whether a delta is to be sent as soon as none is outstanding."""
        return self.reached and self.pace is not None

    def give(self, pace: msg.Pace, now: float, *, begins: bool) -> list[Effect]:
        """Follow `pace` from now on. begins: there is a version to train from."""
        before, self.pace = self.pace, pace
        if begins and (before is None or before.seconds != pace.seconds):
            self.begin(now)
        is_known = before is not None and before.steps == pace.steps
        return [] if is_known else [do.CountSteps(max(0, pace.steps))]

    def stop(self) -> list[Effect]:
        """Send nothing by itself until a pace is given: a session begins."""
        before, self.pace = self.pace, None
        self.deadlines.cancel("pace")
        return [do.CountSteps(0)] if before is not None and before.steps else []

    def begin(self, now: float) -> None:
        """Count the seconds from now."""
        if self.pace is not None and self.pace.seconds:
            self.deadlines.set("pace", now + self.pace.seconds)
        else:
            self.deadlines.cancel("pace")
