"""Decides how long the end of a run, and of a client, waits. Pure. Times in seconds.

Each step to the end of a run (`run_end`) waits `drain_s`, and then goes on waiting for clients
whose transfers advance, `STALLED_S` at a time: a slow path may still deliver. Everything together
waits at most `DRAIN_CAP_S`.

A client ends training first. Then the progress since the last snapshot is sent, after the
outstanding delta. The client waits for it while its bytes advance, as long as a run does, and
`DRAIN_S` without a session.

A preempted client has a deadline set by others. It leaves `GOODBYE_S` before it, whatever is still
under way (timer "goodbye"). It does not begin its last delta if the slowest of its recent ones
would arrive too late (timer "late"): part of a delta is useless, and its bytes are taken
from the others on the path. Until then a training step may last longer than `DRAIN_S`.
"""

from __future__ import annotations

from collections import deque

from attrs import field, mutable

from fsl_async.errors import ExitCode
from fsl_async.roles.machine import Deadlines, Effect, Finish, Note
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev

MOMENT_S = 0.1
"""Shorter waits are left out."""
STALLED_S = 60.0
"""How long a step waits for a transfer to advance. Receivers report every 2 MiB at least."""
DRAIN_CAP_S = 3600.0

DRAIN_S = 10.0
"""A client's wait at the end for the training thread, for a session, and for a transfer to begin.
"""
LOSSES = 3
"""How many lost sessions a client that has ended training waits after, for another one."""
GOODBYE_S = 2.0
"""Time before a deadline of others: to say goodbye and to end the process."""
KEPT = 3
"""Deltas of which the slowest tells how long the next one takes."""


def longer(began_at: float, now: float) -> float | None:
    """Until when an end waits for transfers that advance; None when the time is used up."""
    until = min(now + STALLED_S, began_at + DRAIN_CAP_S)
    return until if until > now + MOMENT_S else None


@mutable
class RunShutdown:
    """The state of a run's end. Times in seconds."""

    drain_s: float
    reason: str | None = None
    """None until the run is to end."""
    began_at: float = 0.0
    last_round_over: bool = False

    @property
    def asked(self) -> bool:
        """Whether the run is to end."""
        return self.reason is not None

    def begin(self, reason: str, now: float) -> None:
        """Record that the run is to end, for `reason`."""
        self.reason, self.began_at = reason, now

    def first_wait_s(self, usual_s: float) -> float:
        """How long a step waits at first: drain_s or the usual time of answers, within the cap."""
        return min(max(self.drain_s, usual_s), DRAIN_CAP_S)


class UploadTimes:
    """Measures how long this client's deltas take, from snapshot to acknowledgement, one at a time.

    Deltas of a run have one size, so the next one takes about as long as the last ones: that
    includes coding, the path's bandwidth and the parameter server's disk. The estimate is the
    slowest of the last `KEPT`, because too low an estimate loses the delta.
    """

    __slots__ = ("_began", "_last")

    def __init__(self) -> None:
        self._began: float | None = None
        self._last: deque[float] = deque(maxlen=KEPT)

    @property
    def slowest_s(self) -> float | None:
        """The longest of the last few; None before the first one arrived."""
        return max(self._last, default=None)

    def begin(self, now: float) -> None:
        """Start to measure a delta."""
        self._began = now

    def arrived(self, now: float) -> None:
        """Record the time of the acknowledged delta."""
        if self._began is not None:
            self._last.append(now - self._began)
            self._began = None

    def interrupt(self) -> None:
        """Discard the measurement: a lost session or a "later" would distort it."""
        self._began = None


@mutable
class ClientShutdown:
    """The end of a client. Times in seconds.

    It shares the machine's deadlines; "end", "late" and "goodbye" are its own.
    """

    deadlines: Deadlines
    reason: str | None = None  # None until the end was asked for
    exit_code: int = 0
    deadline: float | None = None  # when others end this process
    training: bool = True
    ended_at: float = 0.0  # when training ended
    emptied: bool = False  # the last snapshot is taken
    refusing: bool = False  # the parameter server accepts nothing from this client any more
    finished: bool = False
    uploads: UploadTimes = field(factory=UploadTimes)
    losses: int = 0
    """Sessions lost while it waits to send, since bytes advanced."""

    @property
    def asked(self) -> bool:
        """Whether this client is to end."""
        return self.reason is not None

    def ask(self, reason: str, exit_code: int, now: float) -> list[Effect]:
        """End training, once; finish if it has ended and nothing can be sent any more."""
        if self.refusing and not self.training:
            return self.finish()  # no answer comes any more
        if self.asked:
            return []
        self.reason, self.exit_code = reason, exit_code
        self.deadlines.set("end", now + DRAIN_S)
        return [do.EndTraining(reason)]

    def preempt(self, event: ev.Preempting, now: float) -> list[Effect]:
        """End training, and leave before the deadline. Of several deadlines the earliest counts."""
        effects = self.ask(event.source, ExitCode.RELAUNCH, now)
        known = self.deadlines.when("goodbye")
        if event.deadline is None or self.finished:
            return effects
        goodbye = max(event.deadline - GOODBYE_S, now)
        if known is not None and known <= goodbye:
            return effects
        self.deadlines.set("goodbye", goodbye)
        self.deadline = event.deadline
        takes_s = self.uploads.slowest_s
        late = goodbye if takes_s is None else max(goodbye - takes_s, now)
        if self.training:
            self.deadlines.set("end", max(late, min(now + DRAIN_S, goodbye)))
        self.deadlines.set("late", late)
        if late <= now and takes_s is not None:
            text = (
                f"{event.source}: {goodbye - now:.1f} s are left and a delta takes {takes_s:.1f} s;"
                " what was trained last is not sent"
            )
            return [Note(text, "warning"), *effects]
        return effects

    def time_is_up(self) -> list[Effect]:
        """Finish: the goodbye is due."""
        assert self.reason is not None
        self.reason += "; not all that was trained could be sent in time"
        return self.finish()

    def training_ended(self, error: str | None, now: float, *, joined: bool) -> list[Effect]:
        """Finish, or wait to send. joined: the client held a version, so a delta may be left."""
        self.training = False
        if error is not None:
            # After a refusal, the error of the training function is only a consequence of it.
            if not self.asked or self.exit_code != ExitCode.BAD_INPUT:
                self.reason, self.exit_code = error, ExitCode.BUG
            return self.finish()
        if not self.asked:
            self.reason, self.exit_code = "the training function returned", 0
        if self.refusing or not joined:
            return self.finish()
        self.ended_at = now
        self.deadlines.set("end", now + DRAIN_S)
        return []

    def session_lost(self, now: float) -> None:
        """Wait for another session; not longer if those end too before anything is sent."""
        self.losses += 1
        if self.losses <= LOSSES:
            self.deadlines.set("end", now + DRAIN_S)

    def transfers_checked(self, event: ev.TransfersChecked, now: float) -> list[Effect]:
        """Go on waiting for the last delta while its bytes advance."""
        until = longer(self.ended_at, now)
        if not event.advanced or until is None:
            return self.finish()
        self.losses = 0
        self.deadlines.set("end", until)
        return []

    def finish(self) -> list[Effect]:
        """End this client."""
        assert self.reason is not None
        self.finished = True
        self.deadlines.clear()
        return [Finish(self.reason, self.exit_code, self.deadline)]
