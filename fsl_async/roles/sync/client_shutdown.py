"""How a client comes to its end: why, with which exit code, and how long it waits for what it still has to send. Pure.

The training thread is told to come back first; then what it trained since its last snapshot is sent, after what is outstanding. That is
waited for while its bytes advance, `drain_cap_s` at the most, and `drain_s` without a session.

Who is preempted has a deadline that others set. `goodbye_s` before it the client leaves, whatever is still under way ("goodbye"); and what it
trained last is not even begun where the slowest of its last deltas would not have arrived by then ("late"): a part of a delta is of no use
to anybody, and its bytes are taken from those who share the line. Until then a training step may take its time, beyond `drain_s`.
"""

from __future__ import annotations

from attrs import field, mutable

from fsl_async.roles.machine import Deadlines, Effect, Finish, Note
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.client_state import (
    EXIT_FAILED,
    EXIT_REFUSED,
    EXIT_RELAUNCH,
    MOMENT_S,
    ClientRules,
)
from fsl_async.roles.sync.pace import Pace


@mutable
class ClientShutdown:
    """The client's way out. It shares the machine's deadlines; "end", "late" and "goodbye" are its own. Times in seconds."""

    rules: ClientRules
    deadlines: Deadlines
    reason: str | None = None  # None until the end was asked for
    exit_code: int = 0
    deadline: float | None = None  # of others
    training: bool = True
    ended_at: float = 0.0  # when training did
    emptied: bool = False  # the last snapshot is taken
    refusing: bool = False  # the server takes nothing from this client any more
    finished: bool = False
    pace: Pace = field(factory=Pace)

    @property
    def asked(self) -> bool:
        """Whether this client is to end."""
        return self.reason is not None

    def ask(self, reason: str, exit_code: int, now: float) -> list[Effect]:
        """Let training end, unless that was asked for; finish where it has ended and nothing can be sent any more."""
        if self.refusing and not self.training:
            return self.finish()  # no answer comes any more
        if self.asked:
            return []
        self.reason, self.exit_code = reason, exit_code
        self.deadlines.set("end", now + self.rules.drain_s)
        return [do.EndTraining(reason)]

    def preempt(self, event: ev.Preempting, now: float) -> list[Effect]:
        """Let training end, and be gone before the deadline. Of several deadlines the nearest counts."""
        effects = self.ask(event.source, EXIT_RELAUNCH, now)
        known = self.deadlines.when("goodbye")
        if event.deadline is None or self.finished:
            return effects
        goodbye = max(event.deadline - self.rules.goodbye_s, now)
        if known is not None and known <= goodbye:
            return effects
        self.deadlines.set("goodbye", goodbye)
        self.deadline = event.deadline
        takes_s = self.pace.slowest_s
        late = goodbye if takes_s is None else max(goodbye - takes_s, now)
        if self.training:
            self.deadlines.set("end", max(late, min(now + self.rules.drain_s, goodbye)))
        self.deadlines.set("late", late)
        if late <= now and takes_s is not None:
            text = f"{event.source}: {goodbye - now:.1f} s are left and a delta takes {takes_s:.1f} s; what was trained last is not sent"
            return [Note(text, "warning"), *effects]
        return effects

    def time_is_up(self) -> list[Effect]:
        """The goodbye is due."""
        assert self.reason is not None
        self.reason += "; not all that was trained could be sent in time"
        return self.finish()

    def training_ended(self, error: str | None, now: float, *, joined: bool) -> list[Effect]:
        """Training is over. `joined`: it held a version, so there may be something left to send."""
        self.training = False
        if error is not None:
            # A training function that raises because its node was refused says nothing new.
            if not self.asked or self.exit_code != EXIT_REFUSED:
                self.reason, self.exit_code = error, EXIT_FAILED
            return self.finish()
        if not self.asked:
            self.reason, self.exit_code = "the training function returned", 0
        if self.refusing or not joined:
            return self.finish()
        self.ended_at = now
        self.deadlines.set("end", now + self.rules.drain_s)
        return []

    def transfers_checked(self, event: ev.TransfersChecked, now: float) -> list[Effect]:
        """The wait for the last delta has lasted a while: go on while its bytes advance."""
        until = min(now + self.rules.stalled_s, self.ended_at + self.rules.drain_cap_s)
        if not event.advanced or until <= now + MOMENT_S:
            return self.finish()
        self.deadlines.set("end", until)
        return []

    def finish(self) -> list[Effect]:
        """Nothing is left to wait for."""
        assert self.reason is not None
        self.finished = True
        self.deadlines.clear()
        return [Finish(self.reason, self.exit_code, self.deadline)]
