"""Watches a client's training thread: reports when it hangs, and ends the process if set so.

A step hangs that takes much longer than steps usually take:

    steps made    age of the present step          result
    < FEWEST      any                              none: the first ones compile, load, and warm up
    more          > max(least_s, 20 x median)   Hung, once
    after Hung    a step was made                  Recovered, once

Times are seconds of the caller's clock. The median, unlike the mean, does not change when a few
steps contain an evaluation or a checkpoint of the task.

`ProgressLines` prints its progress now and then: by default versions are ten minutes apart.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from fsl_async.errors import ExitCode

if TYPE_CHECKING:
    from fsl_async.config.settings_training import TrainConfig
    from fsl_async.process.stopper import Stopper

EVERY_S = 0.5
FIRST_LINE_S, LINE_EVERY_S = 15.0, 60.0
LEAVE_S = 3.0
"""Time for the goodbye of a client that sends nothing any more."""

FEWEST = 5
HANG_FACTOR = 20.0


@frozen
class Hung:
    """The present step has lasted `seconds`; a usual one takes `median_s`."""

    seconds: float
    median_s: float

    @property
    def words(self) -> str:
        """Return the line for the client's log."""
        return (
            f"training hangs: no step for {self.seconds:.0f} s,"
            f" where one takes {self.median_s:.3g} s"
        )


@frozen
class Recovered:
    """A step was made after `Hung`."""


class HangWatch:
    """Checks a training thread when the caller looks; see the table above."""

    def __init__(self, least_s: float) -> None:
        """least_s: 0 means that no step hangs."""
        self._least_s = least_s
        self._hung_since: float | None = None

    @property
    def is_hung(self) -> bool:
        """Whether the thread hung at the last look."""
        return self._hung_since is not None

    def look(
        self, begun: float | None, step_times_s: Sequence[float], now: float
    ) -> Hung | Recovered | None:
        """Check at `now`.

        begun: when the present step began; None while the training thread waits for the run, or is
            not in a step.
        """
        if self._hung_since is not None and begun != self._hung_since:
            self._hung_since = None
            return Recovered()
        if begun is None or not self._least_s or len(step_times_s) < FEWEST or self.is_hung:
            return None
        median_s = statistics.median(step_times_s)
        if now - begun <= max(self._least_s, HANG_FACTOR * median_s):
            return None
        self._hung_since = begun
        return Hung(now - begun, median_s)


class Steps(Protocol):
    """The training thread's steps (`learn.client.meter.Meter`). Times of time.monotonic."""

    step_begun: float | None
    step_times: deque[float]


class TrainingWatch:
    """Checks every `EVERY_S` until closed. On the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        steps: Steps,
        settings: TrainConfig,
        stop: Stopper,
        log: Callable[[str], None],
    ) -> None:
        self._loop, self._steps, self._stop, self._log = loop, steps, stop, log
        self._restart = settings.hang_restart
        self._watch = HangWatch(settings.hang_least_s)
        self._timer = loop.call_later(EVERY_S, self._look)

    def summary(self) -> dict[str, float]:
        """For heartbeats: how long training hangs; empty when it does not."""
        begun = self._steps.step_begun
        if not self._watch.is_hung or begun is None:
            return {}
        return {"hung_s": round(time.monotonic() - begun, 1)}

    def _look(self) -> None:
        self._timer = self._loop.call_later(EVERY_S, self._look)
        # Copied, because the training thread appends. If it appends during the copy, the next check
        # follows.
        try:
            times = tuple(self._steps.step_times)
        except RuntimeError:
            return
        found = self._watch.look(self._steps.step_begun, times, time.monotonic())
        if isinstance(found, Recovered):
            self._log("training makes steps again")
        elif isinstance(found, Hung):
            self._log(found.words)
            if self._restart:
                deadline = time.monotonic() + LEAVE_S
                code = ExitCode.RELAUNCH
                self._stop.request(reason=found.words, exit_code=code, deadline=deadline)

    def close(self) -> None:
        """Stop checking."""
        self._timer.cancel()


class ProgressLines:
    """Prints progress where nothing else has for `LINE_EVERY_S`, and soon after the first step.

    report: the fields of a heartbeat. words: makes text of them. On the loop's thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[], Mapping[str, float]],
        words: Callable[[Mapping[str, float]], str],
        log: Callable[[str], None],
    ) -> None:
        self._loop, self._report, self._words, self._log = loop, report, words, log
        self._step = 0.0
        self._timer = loop.call_later(FIRST_LINE_S, self._look)

    def printed(self, step: float) -> None:
        """Begin the wait again: another line has printed the progress."""
        self._step = step
        self._timer.cancel()
        self._timer = self._loop.call_later(LINE_EVERY_S, self._look)

    def _look(self) -> None:
        report = self._report()
        wait_s = LINE_EVERY_S if self._step else FIRST_LINE_S
        if report["step"] > self._step:
            self._log(f"training: {self._words(report)}")
            self._step, wait_s = report["step"], LINE_EVERY_S
        self._timer = self._loop.call_later(wait_s, self._look)

    def close(self) -> None:
        """Print no more."""
        self._timer.cancel()
