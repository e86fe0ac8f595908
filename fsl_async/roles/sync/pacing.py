"""Decides how often clients send by themselves, where the run calls no rounds. Pure.

A client sends its progress after `steps` steps, or `seconds` seconds, since it last did; with
neither, when its training function asks for it (`fed.send`). One delta is outstanding at a time, so
a client whose deltas take longer sends less often.

DyLU (Liu et al., arXiv:2401.09135): client w trains H_w = floor(v_w / v_max * H) steps, so that all
deltas take about as long. v_w is the client's speed in steps per second, by its heartbeats.

`Pacing` is the parameter server's part, `Leading` the client's. The training thread counts steps
and reports them (`PaceReached`); seconds are a deadline. Both count from the last snapshot, and at
first from the first version.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from attrs import Factory, field, mutable

from fsl_async.roles.machine import Deadlines, Effect, Send
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.ps_state import Member

if TYPE_CHECKING:
    from fsl_async.config.settings import SyncConfig

KEPT, LEAST_KEPT = 5, 3
"""Speeds of a client of which the median counts, and how many there must be."""

CHANGE = 0.1
"""Relative change of a client's steps that is worth a message."""

ROUNDING = 1e-6
"""Above the error of dividing two speeds, below any difference between two."""

LEAST_SHARE = 1 / 64
"""Least share of the fastest client's speed: a false report of a high speed costs no more."""


@mutable
class _Speed:
    """The last advance in steps of one incarnation of a client, and its last speeds."""

    incarnation: int
    step: int
    at: float
    announced: int
    kept: deque[float] = Factory(lambda: deque(maxlen=KEPT))

    def advance(self, step: int, now: float) -> bool:
        """Count a heartbeat; True when there is another speed."""
        if step < self.step:
            self.step, self.at = step, now
        if step == self.step or now <= self.at:
            return False  # a heartbeat comes more often than a step, or they came together
        self.kept.append((step - self.step) / (now - self.at))
        self.step, self.at = step, now
        return True


@mutable
class Pacing:
    """Paces of a run's clients. It shares the machine's dict of members."""

    sync: SyncConfig
    members: Mapping[str, Member]
    _speeds: dict[str, _Speed] = field(factory=dict)

    def greet(self, effects: Sequence[Effect]) -> list[Effect]:
        """Return the effects, with its pace after the welcome of a client."""
        made: list[Effect] = []
        for effect in effects:
            made.append(effect)
            if self.sync.trigger == "buffer" and isinstance(effect, do.Welcome):
                made.append(self._announce(effect.peer, self._steps(effect.peer)))
        return made

    def heartbeat(self, event: ev.HeartbeatReceived, now: float) -> list[Effect]:
        """Count a client's steps; return the paces that change by that."""
        member = self.members.get(event.peer)
        if self.sync.pace != "speed" or member is None:
            return []
        step = event.payload.get("step")
        if type(step) is not int or step < 0:
            return []
        speed = self._speeds.get(event.peer)
        if speed is None or speed.incarnation != member.incarnation:
            announced = self.sync.local_steps if speed is None else speed.announced
            self._speeds[event.peer] = _Speed(member.incarnation, step, now, announced)
            return []
        before = self._fastest()
        if not speed.advance(step, now):
            return []
        # All paces depend on the fastest client, and else each on its own speed.
        names = list(self._speeds) if self._fastest() != before else [event.peer]
        return [effect for name in names for effect in self._changed(name)]

    def _changed(self, name: str) -> list[Effect]:
        if name not in self.members:
            return []
        steps, announced = self._steps(name), self._speeds[name].announced
        return [self._announce(name, steps)] if abs(steps - announced) >= CHANGE * announced else []

    def _announce(self, name: str, steps: int) -> Effect:
        if name in self._speeds:
            self._speeds[name].announced = steps
        return Send(name, msg.Pace(steps, math.ceil(1000 * self.sync.send_every_s)))

    def _fastest(self) -> float:
        """Speed of the fastest client that is here; 0 while none is known."""
        kept = [one.kept for name, one in self._speeds.items() if name in self.members]
        return max((median(speeds) for speeds in kept if len(speeds) >= LEAST_KEPT), default=0.0)

    def _steps(self, name: str) -> int:
        """Steps of a client from one delta to the next."""
        speed, fastest = self._speeds.get(name), self._fastest()
        is_known = speed is not None and len(speed.kept) >= LEAST_KEPT and fastest > 0.0
        if self.sync.pace != "speed" or speed is None or not is_known:
            return self.sync.local_steps
        share = max(LEAST_SHARE, median(speed.kept) / fastest)
        return max(1, math.floor(min(1.0, share) * self.sync.local_steps + ROUNDING))


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
