"""How a client comes to its end: why, with which exit code, and how long it waits for what it still has to send. Pure.

The training thread is told to come back first; then what it trained since its last snapshot is sent, after what is outstanding. That is
waited for while its bytes advance, `drain_cap_s` at the most, and `drain_s` without a session.
"""

from __future__ import annotations

from attrs import mutable

from fsl_async import effects as do
from fsl_async import events as ev
from fsl_async.deadlines import Deadlines
from fsl_async.effects import Effect
from fsl_async.roles.client_state import EXIT_FAILED, EXIT_REFUSED, MOMENT_S, ClientRules


@mutable
class Leaving:
    """The client's way out. It shares the machine's deadlines; "end" is its own. Times in seconds."""

    rules: ClientRules
    deadlines: Deadlines
    reason: str | None = None  # None until the end was asked for
    exit_code: int = 0
    training: bool = True
    ended_at: float = 0.0  # when training did
    emptied: bool = False  # the last snapshot is taken
    refusing: bool = False  # the server takes nothing from this client any more
    finished: bool = False

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

    def transfers_seen(self, event: ev.TransfersSeen, now: float) -> list[Effect]:
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
        return [do.Finish(self.reason, self.exit_code)]
