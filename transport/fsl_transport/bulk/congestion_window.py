"""What all connections of one direction together may have under way: one window for the line. Pure.

Many connections that begin at once know nothing of the line, and each may send before anything came back: thirty-two of them stop a line
of 10 Mbit/s for seconds. So there is one window over all of them, and how many there are does not matter to the line.

Rules
  * It begins with ``FIRST_WINDOW_BYTES``, what 10 Mbit/s bring in 50 ms, for all connections together.
  * A round is from sending a piece to its acknowledgement. Speed is what arrived in all over such a time, the fastest of the last
    seconds, without what a loss held up, which comes in a burst; or what arrived over several rounds, where that is more. The base is the shortest round trip of any connection. The window is ``gain`` times speed times base, and two pieces (the model of
    BBR, Cardwell et al. 2016, for a bundle of connections).
  * FILLING: the gain is 2, so that the speed doubles every round as long as the line brings what is sent. It ends when speed has not grown by a
    quarter in ``FLAT_ROUNDS`` rounds, or when there is a queue.
  * There is a queue when the *fastest* piece of a round took more than the base and an allowance. A loss holds up one connection, a queue
    all of them, so the fastest tells one from the other (the minimum filter of LEDBAT, RFC 6817). A loss of an acknowledgement holds up all of
    them too, for a round, so that only a queue of two rounds takes something back.
  * FULL: the gain is 2, or 1.5 where there was a queue. Where losses hold up several connections, their pieces fill the window and not the line: while
    the window is what everybody waits for, pieces are held up, and there is no queue, the gain grows by a quarter every round, to 8. Then TCP's own windows
    are the limit. A long queue takes it back, to 1.5.
  * A queue of our own is in the base when nothing was as short again for ``SEEK_EVERY_S``. Then it is sought anew for a few rounds with half of what
    fills the line (BBR's ProbeRTT). Where the line is empty there is no queue: the base is then what the next piece takes.

state     event                                            -> state     gain
FILLING   round over, faster by a quarter                  -> FILLING   2
FILLING   round over, no faster for long                   -> FULL      2
FILLING   round over, a queue                              -> FULL      1.5
FULL      round over, no queue, held up, waited for it     -> FULL      x 1.25
FULL      round over, a long queue                         -> FULL      / 1.25
FULL      base is old                                      -> SEEKING   a half
SEEKING   a few rounds over                                -> FULL      as before
"""

from __future__ import annotations

import math
from typing import Final

FIRST_WINDOW_BYTES: Final = 64 * 1024
SHARE_BYTES: Final = 32 * 1024
"""A connection is of use from so much of the window on: below, TCP would begin anew with each piece."""
BUSY_LOOP_S: Final = 0.005
"""A process that is busy for so long with something else must not leave the line idle."""
BUSY_LOOP_BYTES: Final = 4 * 1024 * 1024
CLOCK_S: Final = 0.001
"""Event loops may tell the time in steps of so much."""
FILLING_GAIN: Final = 2.0
LEAST_GAIN: Final = 1.5
MOST_GAIN: Final = 8.0
GAIN_STEP: Final = 1.25
FLAT_ROUNDS: Final = 3
MEMORY_S: Final = 2.0
SHORT_QUEUE_S: Final = 0.03
"""Up to so much, or half the base, there is no queue ..."""
LONG_QUEUE_S: Final = 0.1
"""... and from so much on, for two rounds, too much of one; on a line whose round trip is not much shorter itself."""
SEEK_EVERY_S: Final = 10.0
SEEK_ROUNDS: Final = 3
SEEK_LEAST_S: Final = 0.1
AS_SHORT: Final = 1.1
HELD_UP: Final = 1.5
"""What took so many times as long as others was held up by a loss."""
LATE: Final = 2.2
"""And so many times: it comes in a burst."""
AVERAGE_ROUNDS: Final = 8
AVERAGE_S: Final = 0.25


class CongestionWindow:
    """``window`` bytes may be under way, over all connections. ``needs`` is that without allowances for this process and for
    the size of pieces, and as it is while no base is sought.
    """

    __slots__ = (
        "_average", "_average_bytes", "_average_from", "_best_rate", "_delivered_at", "_fastest_s", "_flat_rounds",
        "_is_filling", "_long_rounds", "_rate_now", "_rate_old", "_rate_since", "_round_from", "_seek_ends_at", "_short_at",
        "_sought_s", "_usual_s", "_was_held_up", "_was_waited_for", "_window_limit",
        "delivered", "gain", "needs", "round_trip_s", "window",
    )  # fmt: skip

    def __init__(self, window_limit: int) -> None:
        self.window = self.needs = min(FIRST_WINDOW_BYTES, window_limit)
        self.round_trip_s = math.inf  # the base
        self.gain = FILLING_GAIN
        self.delivered = 0  # bytes, without those that a loss held up
        self._delivered_at = 0.0
        self._average = 0.0
        self._average_bytes = 0
        self._average_from = 0.0
        self._window_limit = window_limit
        self._is_filling = True
        self._best_rate = 0.0
        self._flat_rounds = self._long_rounds = 0
        self._rate_now = self._rate_old = 0.0
        self._rate_since = -math.inf
        self._round_from = -math.inf  # pieces that were sent from then on end the round
        self._fastest_s = self._usual_s = math.inf  # of this round, and the one before
        self._was_waited_for = self._was_held_up = False
        self._short_at = 0.0
        self._seek_ends_at = math.inf
        self._sought_s = math.inf

    @property
    def rate(self) -> float:
        """Bytes a second over all connections: the fastest of the last one to two spans of ``MEMORY_S``."""
        return max(self._rate_now, self._rate_old, self._average)

    @property
    def connections(self) -> int:
        """How many connections the window is worth."""
        return max(1, self.window // SHARE_BYTES)

    def bound(self, window_limit: int) -> None:
        """Another limit from now on."""
        self._window_limit = window_limit
        self.window = min(self.window, window_limit)
        self.needs = min(self.needs, window_limit)

    def mark(self, now: float, *, is_empty: bool) -> tuple[int, float]:
        """What to remember of a piece that is sent: bytes delivered so far, and since when. ``is_empty``: nothing is under way."""
        if is_empty:
            self._delivered_at = now
            if now - self._short_at > SEEK_EVERY_S and self._seek_ends_at == math.inf:
                self.round_trip_s = math.inf
        return self.delivered, self._delivered_at

    def waited_for(self) -> None:
        """Something could have been sent on a connection, but for this window."""
        self._was_waited_for = True

    def taken(
        self, size: int, *, sent_at: float, then: tuple[int, float], is_busy: bool, piece_bytes: int, now: float
    ) -> None:  # fmt: skip
        """``size`` bytes came, of which the newest was sent at ``sent_at``, when ``mark`` said ``then``.

        ``is_busy``: something waited for a window then. ``piece_bytes``: the largest piece that is cut now.
        """
        took_s = max(now - sent_at, CLOCK_S)
        self._measure_average(size, now)
        usual_s = min(self._usual_s, self._fastest_s)
        if took_s > HELD_UP * usual_s + CLOCK_S:
            self._was_held_up = True
        if took_s <= LATE * usual_s + CLOCK_S:
            self.delivered += size
            self._delivered_at = now
            # Answers come for several pieces at once, so the time begins with the answer before it was sent.
            rate = (self.delivered - then[0]) / max(now - then[1], CLOCK_S)
            if is_busy and now - self._rate_since > MEMORY_S:
                self._rate_old, self._rate_now, self._rate_since = self._rate_now, rate, now
            else:
                self._rate_now = max(self._rate_now, rate)
        self._fastest_s = min(self._fastest_s, took_s)
        self._measure_base(took_s, now)
        if sent_at >= self._round_from:
            self._end_round(now)
        product = self.rate * self.round_trip_s
        needs = int(self.gain * product)
        self.needs = min(max(needs, self.needs) if self._is_filling else needs, self._window_limit)
        if self._seek_ends_at < math.inf:
            window = max(int(product / 2) - piece_bytes, 1)  # one piece is always sent
            self.window = min(window, self._window_limit)
            return
        busy = min(self.rate * BUSY_LOOP_S, BUSY_LOOP_BYTES)
        window = int(self.gain * product + busy) + 2 * piece_bytes
        if self._is_filling:
            window = max(window, self.window)
        self.window = min(window, self._window_limit)

    def _measure_average(self, size: int, now: float) -> None:
        self._average_bytes += size
        seconds = now - self._average_from
        if seconds >= AVERAGE_S and seconds >= AVERAGE_ROUNDS * self.round_trip_s:
            self._average = self._average_bytes / seconds
            self._average_bytes = 0
            self._average_from = now

    def _measure_base(self, took_s: float, now: float) -> None:
        self._sought_s = min(self._sought_s, took_s)
        if took_s <= AS_SHORT * self.round_trip_s + CLOCK_S:
            self._short_at = now
            self.round_trip_s = min(self.round_trip_s, took_s)
        if now >= self._seek_ends_at:
            self.round_trip_s = (
                self._sought_s
            )  # as short as it gets, with little of our own before it
            self._short_at = now
            self._seek_ends_at = math.inf
        elif self._seek_ends_at == math.inf and now - self._short_at > SEEK_EVERY_S:
            self._seek_ends_at = now + SEEK_LEAST_S + SEEK_ROUNDS * self.round_trip_s
            self._sought_s = math.inf

    def _end_round(self, now: float) -> None:
        base = self.round_trip_s
        queue_s = self._fastest_s - base - CLOCK_S
        has_queue = queue_s > min(max(SHORT_QUEUE_S, base / 2), LONG_QUEUE_S, 2 * base)
        long_rounds = self._long_rounds + 1 if queue_s > min(LONG_QUEUE_S, 2 * base) else 0
        self._long_rounds = long_rounds
        if self._is_filling:
            if self.rate >= GAIN_STEP * self._best_rate:
                self._best_rate = self.rate
                self._flat_rounds = 0
            else:
                self._flat_rounds += 1
            if has_queue or self._flat_rounds >= FLAT_ROUNDS:
                self._is_filling = False
                if has_queue:
                    self.gain = LEAST_GAIN
        elif long_rounds > 1:
            self.gain = max(self.gain / GAIN_STEP, LEAST_GAIN)
        elif not has_queue and self._was_waited_for and self._was_held_up:
            self.gain = min(self.gain * GAIN_STEP, MOST_GAIN)
        self._round_from = now
        self._usual_s = self._fastest_s
        self._fastest_s = math.inf
        self._was_waited_for = self._was_held_up = False
