"""Decides when to launch a child process again. Pure: `now` is an argument.

One machine for each child.

    state      event                    -> state     effects
    ready      Begin                    -> running   Launch
    running    Exited(0)                -> ended     End("done")
    running    Exited(2)                -> ended     End("bad input"): it would fail again
    running    Exited(else), budget     -> waiting   Wait(seconds)
    running    Exited(else), no budget  -> ended     End("gave up")
    waiting    WaitOver                 -> running   Launch
    waiting    StopAsked                -> ended     End("stopped")
    running    StopAsked                -> stopping  -
    stopping   Exited(any)              -> ended     End("stopped")
    ready      StopAsked                -> ended     End("stopped")
    ready      Seen                     -> running   -: it was launched elsewhere
    waiting    Seen                     -> running   -: it came back by itself
    running    Seen                     -> running   -: its healthy time begins
    ended      any                      -> ended     -

The wait doubles from `first_wait_s` to `longest_wait_s`. After a child ran for `healthy_after_s`,
the next wait is `first_wait_s` and the budget is full again. Exit code 64, which requests a
relaunch, is treated like a crash, so that a program that exits with it at once does not spin.
Where a child ends `ALIKE` times in a row with one error, each further Wait quotes that error.
Any other pair of state and event is an error of the shell and raises AssertionError.
"""

from __future__ import annotations

from enum import Enum, auto

from attrs import frozen

from fsl_async.errors import ExitCode

ALIKE = 3
"""After so many ends in a row with one error, the operator's line quotes the error."""


@frozen(kw_only=True)
class RestartRules:
    """Waits in seconds; `budget` limits relaunches in a row without a healthy time."""

    first_wait_s: float = 0.5
    factor: float = 2.0
    longest_wait_s: float = 60.0
    healthy_after_s: float = 60.0
    budget: int = 20


@frozen
class Begin:
    """Launch the child for the first time."""


@frozen
class Exited:
    """The child exited; `code` is negative for the signal that killed it.

    error: its last error line, or empty where that is unknown.
    """

    code: int
    error: str = ""


@frozen
class WaitOver:
    """The time of the last `Wait` is over."""


@frozen
class StopAsked:
    """The child must end and is not launched again."""


@frozen
class Launch:
    """Start the process now."""


@frozen
class Wait:
    """Asks for WaitOver after `seconds`. why: text of the error that repeats, or empty."""

    seconds: float
    why: str = ""


@frozen
class End:
    """The child will not be launched again; `why` is for people."""

    why: str


@frozen
class Seen:
    """The child runs, however it was launched."""


Event = Begin | Exited | WaitOver | StopAsked | Seen
Effect = Launch | Wait | End


class State(Enum):
    """State of a child."""

    READY = auto()
    RUNNING = auto()
    WAITING = auto()
    STOPPING = auto()
    ENDED = auto()


class Restarts:
    """The machine of one child; see the table above."""

    def __init__(self, rules: RestartRules) -> None:
        self.state = State.READY
        self.launches = 0
        self._rules = rules
        self._in_a_row = 0
        self._error, self._alike = "", 0
        self._launched_at = 0.0
        # Since the last launch.
        self._is_seen = False

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take an event at `now` (monotonic seconds); returns the effects."""
        if self.state is State.ENDED:
            return []
        if isinstance(event, StopAsked):
            return self._stop()
        if isinstance(event, Seen):
            return self._seen(now)
        if isinstance(event, Exited):
            assert self.state in {State.RUNNING, State.STOPPING}, self.state
            return self._exited(event.code, event.error, now)
        expected = State.READY if isinstance(event, Begin) else State.WAITING
        assert self.state is expected, (self.state, event)
        self.state = State.RUNNING
        self.launches += 1
        self._launched_at = now
        self._is_seen = False
        return [Launch()]

    def _stop(self) -> list[Effect]:
        if self.state in {State.RUNNING, State.STOPPING}:
            self.state = State.STOPPING
            return []
        return self._end("stopped")

    def _seen(self, now: float) -> list[Effect]:
        if self.state is not State.STOPPING:
            # The first sighting counts: a job may be queued for hours before it runs, and a running
            # one may begin several sessions.
            if self.state is not State.RUNNING or not self._is_seen:
                self._launched_at = now
            self._is_seen = True
            self.state = State.RUNNING
        return []

    def _exited(self, code: int, error: str, now: float) -> list[Effect]:
        if self.state is State.STOPPING:
            return self._end("stopped")
        if code == ExitCode.DONE:
            return self._end("done")
        if code == ExitCode.BAD_INPUT:
            return self._end("bad input" + (f": {error}" if error else ""))
        self._alike = 0 if not error else self._alike + 1 if error == self._error else 1
        self._error = error
        rules = self._rules
        if now - self._launched_at >= rules.healthy_after_s:
            self._in_a_row = 0
        if self._in_a_row >= rules.budget:
            last = f"; its last error: {error}" if error else ""
            return self._end(f"gave up after {self._in_a_row} relaunches in a row{last}")
        # The exponent is capped because a float power overflows long before a large budget is used.
        wait = rules.first_wait_s * rules.factor ** min(self._in_a_row, 64)
        self._in_a_row += 1
        self.state = State.WAITING
        why = f"it ended {self._alike} times in a row with: {error}" if self._alike >= ALIKE else ""
        return [Wait(min(wait, rules.longest_wait_s), why)]

    def _end(self, why: str) -> list[Effect]:
        self.state = State.ENDED
        return [End(why)]
