"""Watches a client's training thread: reports when it hangs, and ends the process if set so."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from fsl_async.errors import ExitCode
from fsl_async.process.hang import HangRules, HangWatch, Hung, Recovered

if TYPE_CHECKING:
    from fsl_async.config.settings_training import TrainConfig
    from fsl_async.process.stopper import Stopper

EVERY_S = 0.5
LEAVE_S = 3.0
"""Time for the goodbye of a client that sends nothing any more."""


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
        self._watch = HangWatch(HangRules(settings.hang_factor, settings.hang_least_s))
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
