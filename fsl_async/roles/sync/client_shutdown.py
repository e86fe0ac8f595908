"""Decides how a client ends: why, with which exit code, and how long it waits to send. Pure.

First training ends. Then the progress since the last snapshot is sent, after the outstanding delta.
The client waits for it while its bytes advance, at most `DRAIN_CAP_S`, and `DRAIN_S` without a
session.

A preempted client has a deadline set by others. It leaves `GOODBYE_S` before it, whatever is still
under way (timer "goodbye"). It does not begin its last delta if the slowest of its recent ones
would arrive too late (timer "late"): part of a delta is useless, and its bytes are taken
from the others on the path. Until then a training step may last longer than `DRAIN_S`.
"""

from __future__ import annotations

from attrs import field, mutable

from fsl_async.roles.machine import Deadlines, Effect, Finish, Note
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.client_state import (
    DRAIN_S,
    EXIT_FAILED,
    EXIT_REFUSED,
    EXIT_RELAUNCH,
    GOODBYE_S,
    LOSSES,
    MOMENT_S,
)
from fsl_async.roles.sync.pace import Pace
from fsl_async.roles.sync.shutdown import DRAIN_CAP_S, STALLED_S


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
    pace: Pace = field(factory=Pace)
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
        effects = self.ask(event.source, EXIT_RELAUNCH, now)
        known = self.deadlines.when("goodbye")
        if event.deadline is None or self.finished:
            return effects
        goodbye = max(event.deadline - GOODBYE_S, now)
        if known is not None and known <= goodbye:
            return effects
        self.deadlines.set("goodbye", goodbye)
        self.deadline = event.deadline
        takes_s = self.pace.slowest_s
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
            if not self.asked or self.exit_code != EXIT_REFUSED:
                self.reason, self.exit_code = error, EXIT_FAILED
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
        until = min(now + STALLED_S, self.ended_at + DRAIN_CAP_S)
        if not event.advanced or until <= now + MOMENT_S:
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
