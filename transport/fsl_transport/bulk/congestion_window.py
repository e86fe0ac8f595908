"""Congestion window shared by all connections of one direction of a session. Pure.

Connections that start together know nothing of the path, and each may send before anything is
acknowledged: thirty-two of them block a path of 10 Mbit/s for seconds. One window over all of them
makes their number irrelevant to the path. It follows BBR's model (Cardwell et al. 2016), applied to
a bundle of connections.

Rules
  * The window starts at ``INITIAL_WINDOW_BYTES``, what 10 Mbit/s carry in 50 ms, for all
    connections together.
  * A round lasts from sending a piece to its acknowledgement. The rate is the bytes acknowledged in
    a round, as the maximum of the last seconds and without pieces that a loss delayed, which arrive
    in a burst; or the average over several rounds, if that is higher. ``min_rtt_s`` is the shortest
    round trip of any connection. The window is ``gain`` * rate * ``min_rtt_s`` and two pieces.
  * STARTUP: the gain is 2, so the rate doubles each round until the path is full. It ends when the
    rate has not grown by a quarter in ``STARTUP_FULL_ROUNDS`` rounds, or when there is a queue.
  * There is a queue when the *fastest* piece of a round took longer than ``min_rtt_s`` and an
    allowance. A loss delays one connection and a queue delays all of them, so the fastest piece
    tells them apart (the minimum filter of LEDBAT, RFC 6817). A lost acknowledgement also delays
    all of them for a round, so the gain falls only after two rounds with a queue.
  * PROBE_BW: the gain is 2, or 1.5 if there was a queue. When losses block several connections,
    their pieces fill the window instead of the path: while the window limits sending, pieces are
    delayed by losses, and there is no queue, the gain grows by a quarter each round, up to 8. Then
    TCP's own windows are the limit. A long queue reduces the gain, down to 1.5.
  * PROBE_RTT: ``min_rtt_s`` includes this sender's own queue if no round trip was as short for
    ``PROBE_RTT_EVERY_S``. It is then measured again for a few rounds with half a bandwidth-delay
    product in flight. On an empty path there is no queue: the next piece gives the new value.

state      event                                              -> state      gain
STARTUP    round over, rate grew by a quarter                 -> STARTUP    2
STARTUP    round over, rate stopped growing                   -> PROBE_BW   2
STARTUP    round over, queue                                  -> PROBE_BW   1.5
PROBE_BW   round over, no queue, losses, limited by window    -> PROBE_BW   x 1.25
PROBE_BW   round over, long queue                             -> PROBE_BW   / 1.25
PROBE_BW   min_rtt_s expired                                  -> PROBE_RTT  1/2
PROBE_RTT  a few rounds over                                  -> PROBE_BW   as before

Not exactly BBR: PROBE_RTT may interrupt STARTUP, and the gain is adapted instead of cycled.
"""

from __future__ import annotations

import math
from typing import Final

INITIAL_WINDOW_BYTES: Final = 64 * 1024
CONNECTION_WINDOW_BYTES: Final = 32 * 1024
"""Window that makes one more connection useful; with less, TCP would restart for each piece."""
BUSY_LOOP_S: Final = 0.005
"""The window allows for an event loop that is busy this long, so that the path stays full."""
BUSY_LOOP_BYTES: Final = 4 * 1024 * 1024
GRANULARITY_S: Final = 0.001
"""Timer granularity: event loops may tell the time in such steps."""
STARTUP_GAIN: Final = 2.0
MIN_GAIN: Final = 1.5
MAX_GAIN: Final = 8.0
GAIN_STEP: Final = 1.25
STARTUP_FULL_ROUNDS: Final = 3
RATE_FILTER_S: Final = 2.0
SHORT_QUEUE_S: Final = 0.03
"""A delay up to this, or up to half of ``min_rtt_s``, is not a queue ..."""
LONG_QUEUE_S: Final = 0.1
"""... and from this on, for two rounds, it is too long; less where ``min_rtt_s`` is short."""
PROBE_RTT_EVERY_S: Final = 10.0
PROBE_RTT_ROUNDS: Final = 3
PROBE_RTT_MIN_S: Final = 0.1
MIN_RTT_TOLERANCE: Final = 1.1
LOSS_DELAY_FACTOR: Final = 1.5
"""A piece that took this many times as long as others was delayed by a loss."""
BURST_DELAY_FACTOR: Final = 2.2
"""And this many times: it arrived in the burst that follows a loss."""
AVERAGE_ROUNDS: Final = 8
AVERAGE_S: Final = 0.25


class CongestionWindow:
    """``window`` bytes may be in flight over all connections.

    ``target`` is the window without the allowances for a busy process and for the size of pieces,
    and without the reduction of PROBE_RTT: what the path itself needs in flight.
    """

    __slots__ = (
        "_average",
        "_average_bytes",
        "_average_from",
        "_delivered_at",
        "_full_rate",
        "_full_rounds",
        "_in_startup",
        "_last_round_rtt_s",
        "_long_queue_rounds",
        "_min_rtt_at",
        "_probe_rtt_ends_at",
        "_probed_rtt_s",
        "_rate_now",
        "_rate_old",
        "_rate_since",
        "_round_from",
        "_round_rtt_s",
        "_was_delayed",
        "_was_limited",
        "_window_limit",
        "delivered",
        "gain",
        "min_rtt_s",
        "target",
        "window",
    )  # fmt: skip

    def __init__(self, window_limit: int) -> None:
        self.window = self.target = min(INITIAL_WINDOW_BYTES, window_limit)
        self.min_rtt_s = math.inf
        self.gain = STARTUP_GAIN
        self.delivered = 0  # bytes acknowledged, without those delayed by a loss
        self._delivered_at = 0.0
        self._average = 0.0
        self._average_bytes = 0
        self._average_from = 0.0
        self._window_limit = window_limit
        self._in_startup = True
        self._full_rate = 0.0
        self._full_rounds = self._long_queue_rounds = 0
        self._rate_now = self._rate_old = 0.0
        self._rate_since = -math.inf
        self._round_from = -math.inf  # a piece sent from then on ends the round
        self._round_rtt_s = self._last_round_rtt_s = math.inf  # the fastest piece of each
        self._was_limited = self._was_delayed = False  # in this round
        self._min_rtt_at = 0.0
        self._probe_rtt_ends_at = math.inf
        self._probed_rtt_s = math.inf

    @property
    def rate(self) -> float:
        """Bytes per second over all connections: maximum of one to two spans of RATE_FILTER_S."""
        return max(self._rate_now, self._rate_old, self._average)

    @property
    def connections(self) -> int:
        """Number of connections that the window makes useful."""
        return max(1, self.window // CONNECTION_WINDOW_BYTES)

    def set_limit(self, window_limit: int) -> None:
        """Change the maximum of the window."""
        self._window_limit = window_limit
        self.window = min(self.window, window_limit)
        self.target = min(self.target, window_limit)

    def on_send(self, now: float, *, is_empty: bool) -> tuple[int, float]:
        """A piece is sent. Return the delivery state to remember with it: bytes, and their time.

        ``is_empty``: nothing else is in flight.
        """
        if is_empty:
            self._delivered_at = now
            if now - self._min_rtt_at > PROBE_RTT_EVERY_S and self._probe_rtt_ends_at == math.inf:
                self.min_rtt_s = math.inf
        return self.delivered, self._delivered_at

    def on_limited(self) -> None:
        """A connection could have sent, but for this window."""
        self._was_limited = True

    def on_ack(
        self, size: int, *, sent_at: float, sent_state: tuple[int, float], is_busy: bool,
        piece_bytes: int, now: float,
    ) -> None:  # fmt: skip
        """``size`` bytes were acknowledged, the newest of them sent at ``sent_at``.

        ``sent_state`` is what ``on_send`` returned for it; ``is_busy``: data waited for a window
        then. ``piece_bytes`` is the size of the largest piece that is cut now.
        """
        rtt_s = max(now - sent_at, GRANULARITY_S)
        self._measure_average(size, now)
        usual_s = min(self._last_round_rtt_s, self._round_rtt_s)
        if rtt_s > LOSS_DELAY_FACTOR * usual_s + GRANULARITY_S:
            self._was_delayed = True
        if rtt_s <= BURST_DELAY_FACTOR * usual_s + GRANULARITY_S:
            self.delivered += size
            self._delivered_at = now
            # One acknowledgement covers several pieces, so the interval starts with the last
            # acknowledgement before the piece was sent.
            rate = (self.delivered - sent_state[0]) / max(now - sent_state[1], GRANULARITY_S)
            if is_busy and now - self._rate_since > RATE_FILTER_S:
                self._rate_old, self._rate_now, self._rate_since = self._rate_now, rate, now
            else:
                self._rate_now = max(self._rate_now, rate)
        self._round_rtt_s = min(self._round_rtt_s, rtt_s)
        self._measure_min_rtt(rtt_s, now)
        if sent_at >= self._round_from:
            self._end_round(now)
        product = self.rate * self.min_rtt_s
        target = int(self.gain * product)
        self.target = min(
            max(target, self.target) if self._in_startup else target, self._window_limit
        )
        if self._probe_rtt_ends_at < math.inf:
            window = max(int(product / 2) - piece_bytes, 1)  # one piece is always sent
            self.window = min(window, self._window_limit)
            return
        busy = min(self.rate * BUSY_LOOP_S, BUSY_LOOP_BYTES)
        window = int(self.gain * product + busy) + 2 * piece_bytes
        if self._in_startup:
            window = max(window, self.window)
        self.window = min(window, self._window_limit)

    def _measure_average(self, size: int, now: float) -> None:
        self._average_bytes += size
        seconds = now - self._average_from
        if seconds >= AVERAGE_S and seconds >= AVERAGE_ROUNDS * self.min_rtt_s:
            self._average = self._average_bytes / seconds
            self._average_bytes = 0
            self._average_from = now

    def _measure_min_rtt(self, rtt_s: float, now: float) -> None:
        self._probed_rtt_s = min(self._probed_rtt_s, rtt_s)
        if rtt_s <= MIN_RTT_TOLERANCE * self.min_rtt_s + GRANULARITY_S:
            self._min_rtt_at = now
            self.min_rtt_s = min(self.min_rtt_s, rtt_s)
        if now >= self._probe_rtt_ends_at:
            self.min_rtt_s = self._probed_rtt_s  # measured with a short queue of our own
            self._min_rtt_at = now
            self._probe_rtt_ends_at = math.inf
        elif self._probe_rtt_ends_at == math.inf and now - self._min_rtt_at > PROBE_RTT_EVERY_S:
            self._probe_rtt_ends_at = now + PROBE_RTT_MIN_S + PROBE_RTT_ROUNDS * self.min_rtt_s
            self._probed_rtt_s = math.inf

    def _end_round(self, now: float) -> None:
        min_rtt_s = self.min_rtt_s
        queue_s = self._round_rtt_s - min_rtt_s - GRANULARITY_S
        has_queue = queue_s > min(max(SHORT_QUEUE_S, min_rtt_s / 2), LONG_QUEUE_S, 2 * min_rtt_s)
        is_long = queue_s > min(LONG_QUEUE_S, 2 * min_rtt_s)
        self._long_queue_rounds = self._long_queue_rounds + 1 if is_long else 0
        if self._in_startup:
            if self.rate >= GAIN_STEP * self._full_rate:
                self._full_rate = self.rate
                self._full_rounds = 0
            else:
                self._full_rounds += 1
            if has_queue or self._full_rounds >= STARTUP_FULL_ROUNDS:
                self._in_startup = False
                if has_queue:
                    self.gain = MIN_GAIN
        elif self._long_queue_rounds > 1:
            self.gain = max(self.gain / GAIN_STEP, MIN_GAIN)
        elif not has_queue and self._was_limited and self._was_delayed:
            self.gain = min(self.gain * GAIN_STEP, MAX_GAIN)
        self._round_from = now
        self._last_round_rtt_s = self._round_rtt_s
        self._round_rtt_s = math.inf
        self._was_limited = self._was_delayed = False
