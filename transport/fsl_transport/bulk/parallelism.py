"""How many stripes: doubled while that brings more, taken back where it does not. Pure.

One TCP connection on a line with loss carries what its congestion control lets it, whatever the line could (Mathis et al. 1997: the rate
falls with the round trip and the root of the loss). How many connections fill a line depends on both, so it is tried out.

Rules
  * GROWING: a line with a round trip of ``LONG_ROUND_TRIP_S`` or more begins with ``LONG_FIRST``, and gets as many as the line's window is worth
    (``congestion_window.py``), which grows with what arrives: one connection takes seconds there to get up to speed, and losses keep it from filling the line.
    What they may send together is bounded by that window, not by their number. It ends with the first epoch in which the number was enough.
    So it is begun where little is sent, too: TCP needs fewer round trips for it over several. Where the round trip turns out to be short after all (a process may be
    late with its first answers) before a trial has shown that they are of use, the number is what it was before, and trials begin at once.
  * Bytes that arrived are counted for an epoch, after a pause in which connections open and get up to speed. An epoch in which there was
    nothing to send for more than ``IDLE_SHARE`` of the time proves nothing and is measured again.
  * UP: twice as many. With ``GAIN`` more they stay and UP follows at once; otherwise the number from before.
  * UP that brings less than before proves nothing yet: the line may have fallen meanwhile. A TCP connection
    begins with a slow start far above what losses leave it later, and falls for ten seconds. With the number from before it is seen: where UP brought less than LOSS
    of what that brings, it was the connections. More of them mean smaller packets, and these cost whoever passes them on.
  * DOWN: half as many, for ``DOWN_S``, because a connection lives on its slow start for ten seconds. Without a loss of ``LOSS`` on
    average, or ``DEEP_LOSS`` in two epochs (one may have had a pause), they stay, and DOWN follows at once; otherwise the number from before.
  * Where it begins with the limit there is nothing to find out: it stays.
  * After a trial that failed the next one waits, twice as long each time; UP and DOWN in turns. A line that changed is
    found that way.
  * Who owns the object keeps it: the next session on the link begins with what was found.

state      epoch is over, goodput is           -> state     number
GROWING    (the measure of what follows)       -> UP        x 2
GROWING    (a short round trip)                -> HOLD      as before
HOLD       (the measure of what follows)       -> HOLD      same, while the next trial waits
HOLD       its turn                            -> UP        x 2
HOLD       its turn                            -> DOWN      / 2
UP         GAIN better                         -> UP        x 2
UP         about the same                      -> HOLD      as before, the next trial waits
UP         worse                               -> HOLD      as before, in doubt
HOLD       in doubt, better than UP was        -> HOLD      same, the next trial waits
HOLD       in doubt, about the same            -> UP        x 2
DOWN       as good for ``DOWN_S``              -> DOWN      / 2
DOWN       worse                               -> HOLD      as before
"""

from __future__ import annotations

import enum
from typing import Final

GAIN: Final = 1.15
LOSS: Final = 0.95
DEEP_LOSS: Final = 0.85
PAUSE_S: Final = 0.25
EPOCH_S: Final = 0.5
PAUSE_ROUND_TRIPS: Final = 6
EPOCH_ROUND_TRIPS: Final = 8
IDLE_SHARE: Final = 0.1
LONG_ROUND_TRIP_S: Final = 0.02
LONG_FIRST: Final = 16
BEGIN_BYTES: Final = 32 * 1024
"""So much must have arrived before the round trip is believed: a process may be late with its first answers."""
OPENING_S: Final = 3.0
"""How long connections may take to open before the epoch begins without them."""
FIRST_WAIT_S: Final = 3.0
DOWN_S: Final = 10.0
LONGEST_WAIT_S: Final = 300.0


class Trial(enum.Enum):
    """See the table."""

    GROWING = "growing"
    HOLD = "hold"
    UP = "up"
    DOWN = "down"


class Parallelism:
    """One direction of one link."""

    def __init__(self, first: int, limit: int) -> None:
        self.limit = limit
        self.count = min(first, limit)
        self.trial = Trial.HOLD
        self._before = self.count  # a trial goes back to this
        self._before_rate = 0.0
        self._worse_rate: float | None = None  # of the trial before, which is in doubt
        self._grown_from: int | None = None
        """Before a long line's first connections, as long as no trial has shown what they are good for."""
        self._asked_at = 0.0
        self._begin_at: float | None = None  # of the epoch; None: the pause has not begun
        self._bytes_at_begin: int | None = None
        self._idle_since: float | None = None
        self._idle_s = 0.0
        self._failures = 0
        self._next_at = 0.0
        self._down_until = 0.0
        self._down_rates: list[float] = []
        self._first = first
        self._is_fixed = first >= limit
        self._is_new = True

    def bound(self, first: int, limit: int) -> None:
        """Other settings: what was found stays as far as they allow."""
        if (first, limit) != (self._first, self.limit):
            self.count = max(min(self.count, limit), min(first, limit))
            if self._grown_from is not None:
                self._grown_from = max(min(self._grown_from, limit), min(first, limit))
            self._worse_rate = None
            self.limit = limit
            self._first = first
            self._is_fixed = first >= limit
            self.trial = Trial.HOLD
            self._begin_at = None

    def forget_epoch(self) -> None:
        """The session ended, and its count of bytes with it."""
        self._begin_at = None
        self._idle_since = None
        self._worse_rate = None

    def rest(self, now: float) -> None:
        """From now on there is nothing to send, until the next ``feed``."""
        if self._idle_since is None:
            self._idle_since = now

    def begin(self, delivered: int, round_trip_s: float) -> bool:
        """``delivered`` bytes in all by now. On a long line several are begun with, also where nothing ever waits to be sent. True when ``count`` changed."""
        if not self._is_new or self._is_fixed or round_trip_s <= 0 or delivered < BEGIN_BYTES:
            return False
        self._is_new = False
        before = self.count
        if round_trip_s >= LONG_ROUND_TRIP_S and before < self.limit:
            self.trial = Trial.GROWING
            self._grown_from = before
            self.count = max(before, min(LONG_FIRST, self.limit))
        return self.count != before

    def feed(
        self, now: float, delivered: int, *, open_count: int, round_trip_s: float, worth: int
    ) -> bool:
        """``delivered`` bytes in all by now, and something waits to be sent; ``worth``: connections that the line's window is worth.

        True when ``count`` changed.
        """
        if self._is_fixed:
            return False
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None
        if self._begin_at is None:
            self._asked_at = now
            self._start(now, round_trip_s)
        began = self.begin(max(delivered, BEGIN_BYTES), round_trip_s)
        if self._is_short(now, round_trip_s) or self._grows(now, round_trip_s, worth) or began:
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

    def _is_short(self, now: float, round_trip_s: float) -> bool:
        """The line was taken for a long one, and is none."""
        if self._grown_from is None or not 0 < round_trip_s < LONG_ROUND_TRIP_S:
            return False
        self.count = self._grown_from
        self._grown_from = self._worse_rate = None
        self._failures = 0
        self._next_at = now
        self.trial = Trial.HOLD
        self._asked_at = now
        self._start(now, round_trip_s)
        return True

    def _grows(self, now: float, round_trip_s: float, worth: int) -> bool:
        """GROWING goes on, or is over."""
        if self.trial is not Trial.GROWING:
            return False
        if self.count < min(worth, self.limit):
            self.count = min(worth, self.limit)
            self._asked_at = now
            self._start(now, round_trip_s)
            return True
        return False

    def _start(self, now: float, round_trip_s: float) -> None:
        self._begin_at = now + max(PAUSE_S, PAUSE_ROUND_TRIPS * round_trip_s)
        self._bytes_at_begin = None

    def _judge(self, rate: float, now: float) -> None:
        worse_rate, self._worse_rate = self._worse_rate, None
        if self.trial is Trial.UP:
            if rate >= GAIN * self._before_rate:
                self._failures = 0
                self._grown_from = None
                self._try_more(rate)
            elif rate < LOSS * self._before_rate:  # or the line fell meanwhile
                self.count = self._before
                self.trial = Trial.HOLD
                self._worse_rate = rate
            else:
                self._back(now)
        elif self.trial is Trial.DOWN:
            self._judge_fewer(rate, now)
        elif self.trial is Trial.GROWING:
            if self.count < self.limit:
                self._try_more(rate)
            else:
                self.trial = Trial.HOLD
                self._next_at = now + DOWN_S
        elif worse_rate is not None and LOSS * rate > worse_rate:
            self._hold(now)
        elif now >= self._next_at:
            if self.count > 1 and (self._failures % 2 or self.count == self.limit):
                self._try_fewer(rate, now)
            else:
                self._try_more(rate)

    def _judge_fewer(self, rate: float, now: float) -> None:
        self._down_rates.append(rate)
        mean = sum(self._down_rates) / len(self._down_rates)
        if len(self._down_rates) > 1 and max(self._down_rates[-2:]) < DEEP_LOSS * self._before_rate:
            self._grown_from = None
            self._back(now)
        elif now >= self._down_until:
            if mean < LOSS * self._before_rate:
                self._grown_from = None
                self._back(now)
            elif self.count > 1:
                self._try_fewer(mean, now)
            else:
                self._hold(now)

    def _try_more(self, rate: float) -> None:
        self._before, self._before_rate = self.count, rate
        self.count = min(2 * self.count, self.limit)
        self.trial = Trial.UP if self.count > self._before else Trial.HOLD

    def _try_fewer(self, rate: float, now: float) -> None:
        self._before, self._before_rate = self.count, rate
        self.count = max(1, self.count // 2)
        self.trial = Trial.DOWN
        self._down_until = now + DOWN_S
        self._down_rates = []

    def _back(self, now: float) -> None:
        self.count = self._before
        self._hold(now)

    def _hold(self, now: float) -> None:
        self._next_at = now + min(FIRST_WAIT_S * 2 ** min(self._failures, 10), LONGEST_WAIT_S)
        self._failures += 1
        self.trial = Trial.HOLD
