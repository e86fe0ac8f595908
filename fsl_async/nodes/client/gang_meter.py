"""What a gang has done, by what its ranks report about once a second. Imports no torch."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

TIMES_KEPT = 64
LARGEST = ("not_finite",)


class GangMeter:
    """Counts over all gangs of a node; the interface of `learn.client.meter.Meter`.

    A step, for the watch of steps that hang, is the time between two reports of rank 0.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.sent_tokens = 0
        """Of those, how many are in a snapshot."""
        self.step_begun: float | None = None
        self.step_times: deque[float] = deque(maxlen=TIMES_KEPT)
        self._before = (0, 0)  # steps and tokens of the gangs before
        self._reports: dict[int, Mapping[str, Any]] = {}

    @property
    def waited_s(self) -> float:
        """Seconds of waiting, which ranks do not report: 0."""
        return 0.0

    def reported(self, rank: int, report: Mapping[str, Any]) -> None:
        """A rank has reported its totals and means."""
        # A new one: the loop's thread reads it meanwhile.
        self._reports = {**self._reports, rank: report}
        if rank == 0:
            now = time.monotonic()
            if self.step_begun is not None:
                self.step_times.append(now - self.step_begun)
            self.step_begun = now
        self.steps = self._before[0] + int(self._numbers("step")[0])
        self.tokens = self._before[1] + int(sum(self._numbers("tokens")))

    def waits(self) -> None:
        """The ranks wait for their node, or are not there."""
        self.step_begun = None

    def lost(self) -> int:
        """The gang is gone; returns how many of its tokens were sent by none of its snapshots."""
        gone = max(0, self.tokens - self.sent_tokens)
        self._before = (self.steps, self.tokens)
        self.sent_tokens = self.tokens
        self._reports = {}
        self.step_begun = None
        return gone

    def totals(self) -> dict[str, float]:
        """Counts alone."""
        found = {"step": float(self.steps), "tokens": float(self.tokens)}
        found["tokens_per_s"] = sum(self._numbers("tokens_per_s"))
        reports = self._reports.values()
        if any("left_out" in report for report in reports):
            found["left_out"] = sum(self._numbers("left_out"))
        for name in LARGEST:
            if any(name in report for report in reports):
                found[name] = max(self._numbers(name))
        return found

    def report(self) -> dict[str, float]:
        """The totals, and of each metric the mean of the ranks."""
        reports = list(self._reports.values())
        means = {}
        for name in dict.fromkeys(name for report in reports for name in report):
            found = [report[name] for report in reports if name in report]
            means[name] = sum(found) / len(found)
        return {**means, **self.totals()}

    def _numbers(self, name: str) -> list[float]:
        return [float(report.get(name, 0.0)) for report in self._reports.values()] or [0.0]
