"""A client's line about its training now and then: by default versions are ten minutes apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

FIRST_S, EVERY_S = 15.0, 60.0


class ProgressLines:
    """Prints training's progress where nothing else has for `EVERY_S`; soon after the first step.

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
        self._timer = loop.call_later(FIRST_S, self._look)

    def told(self, step: float) -> None:
        """Another line has told the progress."""
        self._step = step
        self._timer.cancel()
        self._timer = self._loop.call_later(EVERY_S, self._look)

    def _look(self) -> None:
        report = self._report()
        wait_s = EVERY_S if self._step else FIRST_S
        if report["step"] > self._step:
            self._log(f"training: {self._words(report)}")
            self._step, wait_s = report["step"], EVERY_S
        self._timer = self._loop.call_later(wait_s, self._look)

    def close(self) -> None:
        """Print no more."""
        self._timer.cancel()
