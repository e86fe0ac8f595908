"""How many stripes: doubled while that brings more, taken back where it does not. Pure.

One TCP connection on a line with loss carries what its congestion control lets it, whatever the line could (Mathis et al. 1997: the rate
falls with the round trip and the root of the loss). How many connections fill a line depends on both, so it is tried out.

Rules
  * On a line with a round trip of ``LONG_ROUND_TRIP_S`` or more it begins with ``LONG_FIRST`` where fewer are asked for: one connection takes seconds there
    to get up to speed, and no loss at all keeps it from filling the line.
  * Bytes that arrived are counted for an epoch, after a pause in which connections open and get up to speed. An epoch in which there was
    nothing to send for more than ``IDLE_SHARE`` of the time proves nothing and is measured again.
  * UP: twice as many. With ``GAIN`` more they stay and UP follows at once; otherwise the number from before.
  * UP that brings less than before proves nothing either: one more connection takes nothing away, so the line fell meanwhile. A TCP connection
    begins with a slow start far above what losses leave it later, and falls for ten seconds.
  * DOWN: half as many. Without a loss of ``LOSS`` they stay.
  * After a trial that failed the next one waits, twice as long each time; UP and DOWN in turns. A line that changed is
    found that way.
  * Who owns the object keeps it: the next session on the link begins with what was found.

state      epoch is over, goodput is           -> state     number
HOLD       (the measure of what follows)       -> HOLD      same, while the next trial waits
HOLD       its turn                            -> UP        x 2
HOLD       its turn                            -> DOWN      / 2
UP         GAIN better                         -> UP        x 2
UP         about the same                      -> HOLD      as before, the next trial waits
UP         worse                               -> HOLD      as before, the next trial follows at once
DOWN       as good                             -> HOLD      stays
DOWN       worse                               -> HOLD      as before
"""

from __future__ import annotations

import enum
from typing import Final

GAIN: Final = 1.15
LOSS: Final = 0.95
PAUSE_S: Final = 0.25
EPOCH_S: Final = 0.5
PAUSE_ROUND_TRIPS: Final = 6
EPOCH_ROUND_TRIPS: Final = 8
IDLE_SHARE: Final = 0.1
LONG_ROUND_TRIP_S: Final = 0.02
LONG_FIRST: Final = 8
OPENING_S: Final = 3.0
"""How long connections may take to open before the epoch begins without them."""
FIRST_WAIT_S: Final = 3.0
LONGEST_WAIT_S: Final = 300.0


class Trial(enum.Enum):
    """See the table."""

    HOLD = "hold"
    UP = "up"
    DOWN = "down"


class StripeCount:
    """One direction of one link."""

    def __init__(self, first: int, limit: int) -> None:
        self.limit = limit
        self.count = min(first, limit)
        self.trial = Trial.HOLD
        self._before = self.count  # a trial goes back to this
        self._before_rate = 0.0
        self._asked_at = 0.0
        self._begin_at: float | None = None  # of the epoch; None: the pause has not begun
        self._bytes_at_begin: int | None = None
        self._idle_since: float | None = None
        self._idle_s = 0.0
        self._failures = 0
        self._next_at = 0.0
        self._is_new = True

    def forget_epoch(self) -> None:
        """The session ended, and its count of bytes with it."""
        self._begin_at = None
        self._idle_since = None

    def rest(self, now: float) -> None:
        """From now on there is nothing to send, until the next ``feed``."""
        if self._idle_since is None:
            self._idle_since = now

    def feed(self, now: float, delivered: int, *, open_count: int, round_trip_s: float) -> bool:
        """``delivered`` bytes in all by now, and something waits to be sent. True when ``count`` changed."""
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None
        if self._begin_at is None:
            self._asked_at = now
            self._start(now, round_trip_s)
        if self._is_new and round_trip_s > 0:
            self._is_new = False
            if round_trip_s >= LONG_ROUND_TRIP_S and self.count < LONG_FIRST:
                self.count = min(LONG_FIRST, self.limit)
                return True
        if open_count < self.count and now < self._asked_at + OPENING_S:
            self._start(now, round_trip_s)
            return False
        assert self._begin_at is not None
        if now < self._begin_at:
            return False
        if self._bytes_at_begin is None:
            self._begin_at = now
            self._bytes_at_begin = delivered
            self._idle_s = 0.0
            return False
        if now < self._begin_at + max(EPOCH_S, EPOCH_ROUND_TRIPS * round_trip_s):
            return False
        if self._idle_s > IDLE_SHARE * (now - self._begin_at):
            self._bytes_at_begin = None
            return False
        rate = (delivered - self._bytes_at_begin) / (now - self._begin_at)
        was = self.count
        self._judge(rate, now)
        self._asked_at = now
        self._start(now, round_trip_s)
        return self.count != was

    def _start(self, now: float, round_trip_s: float) -> None:
        self._begin_at = now + max(PAUSE_S, PAUSE_ROUND_TRIPS * round_trip_s)
        self._bytes_at_begin = None

    def _judge(self, rate: float, now: float) -> None:
        if self.trial is Trial.UP:
            if rate >= GAIN * self._before_rate:
                self._failures = 0
                self._try_more(rate)
            elif rate < LOSS * self._before_rate:  # the line fell meanwhile
                self.count = self._before
                self.trial = Trial.HOLD
            else:
                self._back(now)
        elif self.trial is Trial.DOWN:
            if rate >= LOSS * self._before_rate:
                self._hold(now)
            else:
                self._back(now)
        elif now >= self._next_at:
            if self._failures % 2 and self.count > 1:
                self._before, self._before_rate = self.count, rate
                self.count //= 2
                self.trial = Trial.DOWN
            else:
                self._try_more(rate)

    def _try_more(self, rate: float) -> None:
        self._before, self._before_rate = self.count, rate
        self.count = min(2 * self.count, self.limit)
        self.trial = Trial.UP if self.count > self._before else Trial.HOLD

    def _back(self, now: float) -> None:
        self.count = self._before
        self._hold(now)

    def _hold(self, now: float) -> None:
        self._next_at = now + min(FIRST_WAIT_S * 2**self._failures, LONGEST_WAIT_S)
        self._failures += 1
        self.trial = Trial.HOLD
