"""Detects that a training thread hangs: no step for much longer than steps take. Pure; times in
seconds of the caller's clock.

    steps made    age of the current one          result
    < FEWEST      any                             nothing: the first ones compile, load, warm up
    more          > max(least_s, factor x median) Hung, once
    after Hung    a step was made                 Recovered, once

The median of the last steps instead of their mean: an occasional evaluation or checkpoint of the
task must not count as the time of a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from attrs import frozen

FEWEST = 5


@frozen
class HangRules:
    """factor: 0 means that nothing ever hangs."""

    factor: float = 20.0
    least_s: float = 120.0

    def limit_s(self, step_times_s: Sequence[float]) -> float | None:
        """How long a step may take after those; None while there are too few."""
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
        """For people."""
        return (
            f"training hangs: no step for {self.seconds:.0f} s, where one takes "
            f"{self.median_s:.3g} s"
        )


@frozen
class Recovered:
    """A step was made after all."""


class HangWatch:
    """Looks now and then; see the table above."""

    def __init__(self, rules: HangRules) -> None:
        self._rules = rules
        self._hung_since: float | None = None

    @property
    def is_hung(self) -> bool:
        """Whether it hung at the last look."""
        return self._hung_since is not None

    def look(
        self, begun: float | None, step_times_s: Sequence[float], now: float
    ) -> Hung | Recovered | None:
        """begun: when the present step began; None while the training thread waits for the run, or
        is not in a step.
        """
        if self._hung_since is not None and begun != self._hung_since:
            self._hung_since = None
            return Recovered()
        limit_s = self._rules.limit_s(step_times_s)
        if begun is None or limit_s is None or now - begun <= limit_s or self.is_hung:
            return None
        self._hung_since = begun
        return Hung(now - begun, statistics.median(step_times_s))
