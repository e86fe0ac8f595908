"""Chooses the number of stripes: doubled while that brings more, reduced where it does not. Pure.

On a path with losses, one TCP connection carries what its congestion control allows, whatever the
path could: the rate falls with the RTT and the square root of the loss (Mathis et al. 1997). How
many connections fill a path depends on both, so the number is found by trial.

Rules
  * STARTUP: on paths with an RTT of at least ``LONG_RTT_S``, open ``LONG_START`` connections, then
    as many as the congestion window makes useful (``congestion_window.py``); it grows with what
    arrives. There, one connection needs seconds to speed up, and losses keep it from filling the
    path. The window bounds what they send together, whatever their number. STARTUP ends with the
    first epoch in which the number was enough. It runs where little is sent, too: over several
    connections TCP needs fewer round trips. If the RTT turns out to be short before a trial has
    shown that the connections help (the first acknowledgements of a busy process may be late), the
    number goes back, and trials begin at once.
  * An epoch measures goodput, after a warm-up in which connections open and speed up. An epoch with
    nothing to send for more than ``IDLE_SHARE`` of its time is measured again.
  * PROBE_UP: twice as many. If they bring ``MIN_GAIN`` times as much, they stay and PROBE_UP
    follows at once; otherwise the number goes back.
  * If PROBE_UP brings less than before, that is in doubt: the path may have slowed meanwhile. (A
    TCP connection starts with a slow start far above what losses leave it later, and falls for ten
    seconds.) One epoch with the old number decides: if PROBE_UP brought less than ``SAME_RATE``
    times that, the connections were the cause. (More connections mean smaller packets, which cost
    the routers on the path more.)
  * PROBE_DOWN: half as many, for ``PROBE_DOWN_S``, because a connection lives on its slow start for
    ten seconds. They stay, and PROBE_DOWN follows at once, unless the average falls below
    ``SAME_RATE``, or two epochs below ``CLEAR_DROP`` (one may have had a pause), times the old
    rate; then the number goes back.
  * If the first number equals the limit, it stays.
  * After a failed trial the next one waits, twice as long each time; PROBE_UP and PROBE_DOWN
    alternate. This finds a path that changed.
  * The object outlives the session: the next one on the path starts with the number found.

state       epoch is over, goodput is           -> state       number
STARTUP     (the baseline for what follows)     -> PROBE_UP    x 2
STARTUP     (a short RTT)                       -> HOLD        as before
HOLD        (the baseline for what follows)     -> HOLD        same, while the next trial waits
HOLD        PROBE_UP is next                    -> PROBE_UP    x 2
HOLD        PROBE_DOWN is next                  -> PROBE_DOWN  / 2
PROBE_UP    MIN_GAIN better                     -> PROBE_UP    x 2
PROBE_UP    about the same                      -> HOLD        as before, the next trial waits
PROBE_UP    worse                               -> HOLD        as before, in doubt
HOLD        in doubt, better than PROBE_UP      -> HOLD        same, the next trial waits
HOLD        in doubt, about the same            -> PROBE_UP    x 2
PROBE_DOWN  as good for PROBE_DOWN_S            -> PROBE_DOWN  / 2
PROBE_DOWN  worse                               -> HOLD        as before
"""

from __future__ import annotations

import enum
from typing import Final

MIN_GAIN: Final = 1.15
SAME_RATE: Final = 0.95
CLEAR_DROP: Final = 0.85
WARM_UP_S: Final = 0.25
EPOCH_S: Final = 0.5
WARM_UP_RTTS: Final = 6
EPOCH_RTTS: Final = 8
IDLE_SHARE: Final = 0.1
LONG_RTT_S: Final = 0.02
LONG_START: Final = 16
RTT_TRUSTED_BYTES: Final = 32 * 1024
"""The RTT counts after this many bytes: the first acknowledgements of a busy process are late."""
OPEN_TIMEOUT_S: Final = 3.0
"""An epoch starts without the connections that take longer to open."""
FIRST_WAIT_S: Final = 3.0
PROBE_DOWN_S: Final = 10.0
MAX_WAIT_S: Final = 300.0


class State(enum.Enum):
    """States of the table."""

    STARTUP = "startup"
    HOLD = "hold"
    PROBE_UP = "probe_up"
    PROBE_DOWN = "probe_down"


class Parallelism:
    """Number of stripes for one direction of one path."""

    def __init__(self, first: int, limit: int) -> None:
        self.limit = limit
        self.count = min(first, limit)
        self.state = State.HOLD
        self._before = self.count  # a failed trial goes back to this
        self._before_rate = 0.0
        self._doubted_rate: float | None = None  # of a PROBE_UP that brought less
        self._startup_from: int | None = None
        """Number before STARTUP, until a trial has shown that more connections help."""
        self._changed_at = 0.0
        self._epoch_at: float | None = None  # start of the epoch; None: not scheduled
        self._epoch_bytes: int | None = None  # delivered at its start; None: still warming up
        self._idle_since: float | None = None
        self._idle_s = 0.0
        self._failures = 0
        self._next_trial_at = 0.0
        self._probe_down_until = 0.0
        self._probe_down_rates: list[float] = []
        self._first = first
        self._is_fixed = first >= limit
        self._is_new = True

    def set_limits(self, first: int, limit: int) -> None:
        """Change the settings; the number found stays as far as they allow."""
        if (first, limit) != (self._first, self.limit):
            self.count = max(min(self.count, limit), min(first, limit))
            if self._startup_from is not None:
                self._startup_from = max(min(self._startup_from, limit), min(first, limit))
            self._doubted_rate = None
            self.limit = limit
            self._first = first
            self._is_fixed = first >= limit
            self.state = State.HOLD
            self._epoch_at = None

    def begin_session(self) -> None:
        """A new session counts its bytes from 0: forget the epoch of the last one."""
        self._epoch_at = None
        self._idle_since = None
        self._doubted_rate = None

    def on_idle(self, now: float) -> None:
        """Note that there is nothing to send until the next ``update``."""
        if self._idle_since is None:
            self._idle_since = now

    def start(self, delivered: int, rtt_s: float) -> bool:
        """Enter STARTUP on a long path, also where nothing ever waits to be sent.

        ``delivered`` is the session's total of acknowledged bytes. True if ``count`` changed.
        """
        if not self._is_new or self._is_fixed or rtt_s <= 0 or delivered < RTT_TRUSTED_BYTES:
            return False
        self._is_new = False
        before = self.count
        if rtt_s >= LONG_RTT_S and before < self.limit:
            self.state = State.STARTUP
            self._startup_from = before
            self.count = max(before, min(LONG_START, self.limit))
        return self.count != before

    def update(
        self, now: float, delivered: int, *, open_count: int, rtt_s: float, useful: int
    ) -> bool:
        """Bytes were acknowledged, ``delivered`` in total, and more wait to be sent.

        ``useful`` is the number of connections that the congestion window makes useful. True if
        ``count`` changed.
        """
        if self._is_fixed:
            return False
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None
        if self._epoch_at is None:
            self._changed_at = now
            self._warm_up(now, rtt_s)
        started = self.start(max(delivered, RTT_TRUSTED_BYTES), rtt_s)
        if self._undo_startup(now, rtt_s) or self._continue_startup(now, rtt_s, useful) or started:
            return True
        if open_count < self.count and now < self._changed_at + OPEN_TIMEOUT_S:
            self._warm_up(now, rtt_s)
            return False
        assert self._epoch_at is not None
        if now < self._epoch_at:
            return False
        if self._epoch_bytes is None:
            self._epoch_at = now
            self._epoch_bytes = delivered
            self._idle_s = 0.0
            return False
        if now < self._epoch_at + max(EPOCH_S, EPOCH_RTTS * rtt_s):
            return False
        if self._idle_s > IDLE_SHARE * (now - self._epoch_at):
            self._epoch_bytes = None
            return False
        rate = (delivered - self._epoch_bytes) / (now - self._epoch_at)
        before = self.count
        self._judge(rate, now)
        self._changed_at = now
        self._warm_up(now, rtt_s)
        return self.count != before

    def _undo_startup(self, now: float, rtt_s: float) -> bool:
        """Whether a path that was taken for a long one turned out to be short."""
        if self._startup_from is None or not 0 < rtt_s < LONG_RTT_S:
            return False
        self.count = self._startup_from
        self._startup_from = self._doubted_rate = None
        self._failures = 0
        self._next_trial_at = now
        self.state = State.HOLD
        self._changed_at = now
        self._warm_up(now, rtt_s)
        return True

    def _continue_startup(self, now: float, rtt_s: float, useful: int) -> bool:
        """Whether STARTUP opened more connections."""
        if self.state is not State.STARTUP:
            return False
        if self.count < min(useful, self.limit):
            self.count = min(useful, self.limit)
            self._changed_at = now
            self._warm_up(now, rtt_s)
            return True
        return False

    def _warm_up(self, now: float, rtt_s: float) -> None:
        self._epoch_at = now + max(WARM_UP_S, WARM_UP_RTTS * rtt_s)
        self._epoch_bytes = None

    def _judge(self, rate: float, now: float) -> None:
        """An epoch is over: move on by the table."""
        doubted_rate, self._doubted_rate = self._doubted_rate, None
        if self.state is State.PROBE_UP:
            if rate >= MIN_GAIN * self._before_rate:
                self._failures = 0
                self._startup_from = None
                self._probe_up(rate)
            elif rate < SAME_RATE * self._before_rate:  # or the path slowed meanwhile
                self.count = self._before
                self.state = State.HOLD
                self._doubted_rate = rate
            else:
                self._go_back(now)
        elif self.state is State.PROBE_DOWN:
            self._judge_probe_down(rate, now)
        elif self.state is State.STARTUP:
            if self.count < self.limit:
                self._probe_up(rate)
            else:
                self.state = State.HOLD
                self._next_trial_at = now + PROBE_DOWN_S
        elif doubted_rate is not None and SAME_RATE * rate > doubted_rate:
            self._hold(now)
        elif now >= self._next_trial_at:
            if self.count > 1 and (self._failures % 2 or self.count == self.limit):
                self._probe_down(rate, now)
            else:
                self._probe_up(rate)

    def _judge_probe_down(self, rate: float, now: float) -> None:
        rates = self._probe_down_rates
        rates.append(rate)
        mean = sum(rates) / len(rates)
        if len(rates) > 1 and max(rates[-2:]) < CLEAR_DROP * self._before_rate:
            self._startup_from = None
            self._go_back(now)
        elif now >= self._probe_down_until:
            if mean < SAME_RATE * self._before_rate:
                self._startup_from = None
                self._go_back(now)
            elif self.count > 1:
                self._probe_down(mean, now)
            else:
                self._hold(now)

    def _probe_up(self, rate: float) -> None:
        self._before, self._before_rate = self.count, rate
        self.count = min(2 * self.count, self.limit)
        self.state = State.PROBE_UP if self.count > self._before else State.HOLD

    def _probe_down(self, rate: float, now: float) -> None:
        self._before, self._before_rate = self.count, rate
        self.count = max(1, self.count // 2)
        self.state = State.PROBE_DOWN
        self._probe_down_until = now + PROBE_DOWN_S
        self._probe_down_rates = []

    def _go_back(self, now: float) -> None:
        self.count = self._before
        self._hold(now)

    def _hold(self, now: float) -> None:
        wait_s = min(FIRST_WAIT_S * 2 ** min(self._failures, 10), MAX_WAIT_S)
        self._next_trial_at = now + wait_s
        self._failures += 1
        self.state = State.HOLD
