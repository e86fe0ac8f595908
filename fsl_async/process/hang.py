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


@frozen
class HangRules:
    """Limits of a step. factor: times the median; 0 means that no step hangs. least_s: seconds."""

    factor: float = 20.0
    least_s: float = 120.0

    def limit_s(self, step_times_s: Sequence[float]) -> float | None:
        """Return how long a step may take after those; None while there are too few."""
        if not self.factor or len(step_times_s) < FEWEST:
            return None
        return max(self.least_s, self.factor * statistics.median(step_times_s))


@frozen
class Hung:
    """The present step has lasted `seconds`; a usual one takes `median_s`."""

    seconds: float
    median_s: float

    @property
    def words(self) -> str:
        """Return the sentence that reports the hang."""
        return (
            f"training hangs: no step for {self.seconds:.0f} s,"
            f" where one takes {self.median_s:.3g} s"
        )


@frozen
class Recovered:
    """A step was made after `Hung`."""


class HangWatch:
    """Checks a training thread when the caller looks; see the table above."""

    def __init__(self, rules: HangRules) -> None:
        self._rules = rules
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
        limit_s = self._rules.limit_s(step_times_s)
        if begun is None or limit_s is None or now - begun <= limit_s or self.is_hung:
            return None
        self._hung_since = begun
        return Hung(now - begun, statistics.median(step_times_s))
