"""Detects a training thread that hangs: a step takes much longer than steps usually take. Pure.

    steps made    age of the present step          result
    < FEWEST      any                              none: the first ones compile, load, and warm up
    more          > max(least_s, factor x median)  Hung, once
    after Hung    a step was made                  Recovered, once

Times are seconds of the caller's clock. The median, unlike the mean, does not change when a few
steps contain an evaluation or a checkpoint of the task.
"""

import statistics
from collections.abc import Sequence

from attrs import frozen

FEWEST = 5
LEAST_S = 120.0


@frozen
class Hung:
    """The present step has lasted `seconds`; a usual one takes `median_s`."""

    seconds: float
    median_s: float

    @property
    def words(self) -> str:
        """For people."""
        return (
            f"training hangs: no step for {self.seconds:.0f} s,"
            f" where one takes {self.median_s:.3g} s"
        )


@frozen
class Recovered:
    """A step was made after `Hung`."""


class HangWatch:
    """Checks a training thread when the caller looks; see the table above."""

    def __init__(self, factor: float, least_s: float = LEAST_S) -> None:
        """factor: times the median; 0 means that no step hangs."""
        self._factor, self._least_s = factor, least_s
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
        if begun is None or not self._factor or len(step_times_s) < FEWEST or self.is_hung:
            return None
        median_s = statistics.median(step_times_s)
        if now - begun <= max(self._least_s, self._factor * median_s):
            return None
        self._hung_since = begun
        return Hung(now - begun, median_s)
