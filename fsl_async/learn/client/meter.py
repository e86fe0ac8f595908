"""Counts the training thread's steps, tokens and metrics, in all and since the last snapshot.

Written by the training thread only. The loop thread reads totals and copies; a value one step old
does no harm there.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from fsl_async.learn.client import script_values
from fsl_async.learn.client.script_values import Metrics, Whole
from fsl_async.roles.sync.training_trouble import NOT_FINITE, SKIPPED

SMOOTHING = 0.95
"""Weight of the past in the running means that heartbeats carry: about the last twenty steps."""

RATE_WINDOW_S = 5.0

EVALUATED = "eval_"
"""Metrics with this prefix are of a version, and rare: heartbeats carry the last one."""

STEPS_KEPT = 64
"""Steps whose times are kept: how long a step takes is learned from them."""


class Meter:
    """Counts. `steps` and `tokens` are totals; `unsent_*` are those since `take` or `forget`.

    now: seconds of a monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.steps = 0
        self.tokens = 0
        self._sent = (0, 0)
        self._sums: dict[str, tuple[float, int]] = {}
        self._means: dict[str, float] = {}
        self._rate_mark = (now(), 0)
        self._tokens_per_s = 0.0
        self._bad_share = 0.0  # running mean, of steps with a metric that is not finite, or skipped
        self.left_out = 0
        """Steps of split learning that were begun and came to nothing."""
        self.step_begun: float | None = None  # None while the training thread is not in a step
        self.step_times: deque[float] = deque(maxlen=STEPS_KEPT)
        self._before_wait_s = 0.0  # of the present step
        self._waited: tuple[float, float | None] = (0.0, None)  # until the wait that has begun then

    @property
    def unsent_tokens(self) -> int:
        """Tokens since the last `take` or `forget`."""
        return self.tokens - self._sent[1]

    @property
    def unsent_steps(self) -> int:
        """Steps since the last `take` or `forget`."""
        return self.steps - self._sent[0]

    def count(
        self, tokens: Whole, metrics: Metrics | None, where: str = "fed.step", what: str = "tokens"
    ) -> None:
        """Count one step: two microseconds, and a wait for the GPU for each metric on one.

        where, what: the call and its argument, for errors. Raises TaskError, and counts nothing,
        for tokens that are not a whole number and for a metric that is not a number.
        """
        count = script_values.whole(f"{where}: {what}", tokens)
        values = script_values.numbers(f"{where}: metrics", metrics) if metrics is not None else {}
        self.steps += 1
        self.tokens += count
        now = self._now()
        since, before = self._rate_mark
        if now - since >= RATE_WINDOW_S:
            self._tokens_per_s = (self.tokens - before) / (now - since)
            self._rate_mark = (now, self.tokens)
        is_bad = False
        for name, value in values.items():
            is_bad = is_bad or not math.isfinite(value) or (name == SKIPPED and value > 0)
            total, times = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, times + 1)
            mean = self._means.get(name, value)
            if name.startswith(EVALUATED):
                self._means[name] = value
            elif mean - mean == 0.0:  # finite: a single NaN must not stay in the mean for ever
                self._means[name] = mean + (1 - SMOOTHING) * (value - mean)
            else:
                self._means[name] = value
        self._bad_share += (1 - SMOOTHING) * (is_bad - self._bad_share)

    def step_ended(self) -> None:
        """The training thread is in fed.step, and may wait there."""
        if self.step_begun is not None:
            self.step_times.append(self._before_wait_s + self._now() - self.step_begun)
        self.step_dropped()

    def step_waits(self) -> bool:
        """Training waits for others within a step, until `step_begins`; False: it is in none."""
        if self.step_begun is None:
            return False
        self._before_wait_s += self._now() - self.step_begun
        self.step_begun = None
        return True

    def step_dropped(self) -> None:
        """Forget the step that was begun."""
        self.step_begun, self._before_wait_s = None, 0.0

    def step_begins(self) -> None:
        """The training thread goes back to the user's code."""
        self.step_begun = self._now()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the block in `waited_s`."""
        self._waited = (self.waited_s, self._now())
        try:
            yield
        finally:
            self._waited = (self.waited_s, None)

    @property
    def waited_s(self) -> float:
        """Seconds that training has waited for answers, calls and versions in a run by rounds."""
        waited, begun = self._waited
        return waited if begun is None else waited + self._now() - begun

    def take(self) -> tuple[int, int, dict[str, float]]:
        """(tokens, steps, mean of each metric) since the last time, which now count as sent."""
        tokens, steps = self.unsent_tokens, self.unsent_steps
        means = {name: total / times for name, (total, times) in self._sums.items()}
        self.forget()
        return tokens, steps, means

    def forget(self) -> None:
        """Count what was trained since the last snapshot as lost: it will not be sent."""
        self._sent = (self.steps, self.tokens)
        self._sums.clear()

    def totals(self) -> dict[str, float]:
        """Counts alone: step, tokens, tokens_per_s (of the last seconds), left_out if there is any.

        And not_finite, 1, while most steps have a metric that is NaN or infinite, or are skipped:
        that says nothing about the data.
        """
        totals = {"step": self.steps, "tokens": self.tokens, "tokens_per_s": self._tokens_per_s}
        if self.left_out:
            totals["left_out"] = self.left_out
        if self._bad_share > 0.5:
            totals[NOT_FINITE] = 1
        return totals

    def report(self) -> dict[str, float]:
        """The totals, and the running mean of each metric."""
        return {**self._means.copy(), **self.totals()}
