"""Sending end of a session's bulk connections ("stripes"): scheduling, loss and resending. Pure.

Chunks are cut into pieces, so that one chunk does not block a slow path and many connections can
share it. The pieces of all streams of a session use all its stripes and may overtake each other
between stripes; each stripe numbers its own pieces.

Rules
  * All stripes together may have as much in flight as ``congestion_window.py`` allows: the path is
    full without a long queue, however many stripes there are. At most as many stripes are used as
    that window makes useful.
  * A piece is a third of what its stripe's measured rate delivers in the path's RTT (times the
    window's gain, plus its allowance for a busy process), at least 16 KiB, at most a chunk.
  * A stripe's ``window`` is ``WINDOW_GAIN`` times what its measured rate delivers in the path's
    RTT, and two pieces; before it is measured, what it delivered so far, and two pieces. Samples
    taken while there was nothing to send only make a window larger.
  * The next piece goes to the stripe with the largest free share of its window: a slow stripe gets
    less, one that stands still gets nothing.
  * While nothing waits for a window, little is being sent, and TCP restarts with ten segments on
    each connection that was idle. So pieces go to the stripe with the least in flight, over all
    stripes, and are small enough for each of them to get one.
  * A piece that ``asks`` is acknowledged at once: four in each window, and the last one there is;
    with several stripes every one, because a stripe's next piece may be a long time away. An
    acknowledgement costs both ends more than a piece, so a full window does not ask more often. If
    the window shrank below what is in flight and nothing in flight asked, one more piece is sent
    that asks.
  * A stripe keeps its order. An acknowledgement shows that older pieces of the stripe without one
    were lost; they are sent again.
  * A stripe that acknowledges nothing for its probe timeout is suspect: it gets no more pieces, its
    pieces in flight are sent again on other stripes, and an empty piece (a probe) tests it. If
    there is no other stripe, nothing is sent twice until a probe is acknowledged.
  * Data is kept until it is acknowledged; the windows bound it.

State     event                          -> state     effect
CLOSED    opened, or a probe acked       -> OPEN
OPEN      piece ready, window free       -> OPEN      piece
OPEN      acknowledgement                -> OPEN      window measured; lost pieces sent again
OPEN      probe timeout                  -> SUSPECT   pieces sent again elsewhere, probe
SUSPECT   probe timeout                  -> SUSPECT   probe, timeout doubles
SUSPECT   acknowledgement                -> OPEN      lost pieces sent again
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from fsl_transport.bulk.congestion_window import (
    BUSY_LOOP_BYTES,
    BUSY_LOOP_S,
    GRANULARITY_S,
    RATE_FILTER_S,
    CongestionWindow,
)
from fsl_transport.errors import PeerError
from fsl_transport.link import Buffer

MEASURED_BYTES: Final = 256 * 1024
"""A stripe counts as measured after this many bytes: early samples cover a few pieces only."""
MIN_PIECE_BYTES: Final = 16 * 1024
INITIAL_FLIGHT_BYTES: Final = 13_000
"""Bytes that TCP sends at once on an idle connection: ten segments (RFC 6928), less the overhead of
a piece and of tunnels."""
PIECES_PER_WINDOW: Final = 3
"""Smaller pieces cost both ends more; with larger ones a loss or a slow stripe delays more."""
WINDOW_GAIN: Final = 1.5
MAX_PROBE_TIMEOUT_S: Final = 10.0
_ASKS_PER_WINDOW: Final = 4


class Piece:
    """Part of a chunk: ``data`` belongs at ``offset`` of its ``size`` bytes.

    ``stream_bytes`` is the approximate size of its stream.
    """

    __slots__ = ("data", "index", "offset", "round", "size", "stream", "stream_bytes")

    def __init__(  # noqa: PLR0917 - the hot path passes positions
        self,
        stream: int,
        round_: int,
        index: int,
        offset: int,
        size: int,
        data: Buffer,
        stream_bytes: int = 0,
    ) -> None:
        self.stream = stream
        self.round = round_
        self.index = index
        self.offset = offset
        self.size = size
        self.data = data
        self.stream_bytes = stream_bytes


class _Sent:
    """A numbered piece in flight. ``piece`` is None for a probe, or if it is not needed again."""

    __slots__ = ("at", "busy", "bytes", "delivered", "number", "path_state", "piece")

    def __init__(  # noqa: PLR0917 - the hot path passes positions
        self,
        number: int,
        piece: Piece | None,
        at: float,
        delivered: int,
        path_state: tuple[int, float],
        busy: bool,
    ) -> None:
        self.number = number
        self.piece = piece
        self.bytes = 0 if piece is None else len(piece.data)
        self.at = at
        self.delivered = delivered
        self.path_state = path_state
        self.busy = busy


class Stripe:
    """One connection, seen from the sender."""

    __slots__ = (
        "_rate_now", "_rate_old", "_rate_since", "asked", "delivered", "in_flight", "is_open",
        "is_suspect", "last_number", "number", "piece_bytes", "probe_timeout_s", "probed_at",
        "progress_at", "sent", "since_ask", "window",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.last_number = 0  # of the newest piece
        self.asked = 0  # number of the newest piece that asks
        self.sent: deque[_Sent] = deque()
        self.in_flight = 0
        self.delivered = 0
        self.window = 2 * MIN_PIECE_BYTES
        self.piece_bytes = MIN_PIECE_BYTES
        self.since_ask = MEASURED_BYTES  # bytes sent since the last piece that asks
        self.is_open = False
        self.is_suspect = False
        self.progress_at = 0.0
        self.probed_at = -math.inf
        self.probe_timeout_s = 0.0  # 0: not backed off
        self._rate_now = self._rate_old = 0.0
        self._rate_since = -math.inf

    @property
    def awaits_ack(self) -> bool:
        """Whether a piece in flight asks for an acknowledgement."""
        return bool(self.sent) and self.asked >= self.sent[0].number

    @property
    def rate(self) -> float:
        """Bytes per second: maximum of the last one to two spans of RATE_FILTER_S."""
        return max(self._rate_now, self._rate_old)

    def measure(
        self, sent: _Sent, now: float, rtt_s: float, window_limit: int, piece_limit: int
    ) -> None:
        """Update rate, window and piece size: ``sent`` was acknowledged now.

        ``rtt_s`` is the path's.
        """
        sample = (self.delivered - sent.delivered) / max(now - sent.at, GRANULARITY_S)
        if sent.busy and now - self._rate_since > RATE_FILTER_S:
            self._rate_old, self._rate_now, self._rate_since = self._rate_now, sample, now
        else:  # while there is too little to send, a sample is only a lower bound
            self._rate_now = max(self._rate_now, sample)
        rate = self.rate
        busy = min(rate * BUSY_LOOP_S, BUSY_LOOP_BYTES)
        window = int(WINDOW_GAIN * rate * rtt_s + busy)
        piece = MIN_PIECE_BYTES
        while 2 * piece * PIECES_PER_WINDOW <= window and piece < piece_limit:
            piece *= 2
        self.piece_bytes = piece = min(piece, piece_limit)
        if self.delivered < MEASURED_BYTES:
            window = self.delivered
        self.window = min(window + 2 * piece, window_limit)


class BulkSender:
    """All stripes of one direction of one session."""

    __slots__ = (
        "_in_flight", "_is_busy", "_min_probe_timeout_s", "_piece_limit", "_queue", "_resend",
        "_stripes", "_usable", "_useful", "_window_limit", "congestion_window", "count",
        "delivered", "resent_bytes",
    )  # fmt: skip

    def __init__(self, *, min_probe_timeout_s: float, piece_limit: int, window_limit: int) -> None:
        self.count = 1
        self.delivered = 0
        self.resent_bytes = 0
        self.congestion_window = CongestionWindow(window_limit)
        self._min_probe_timeout_s = min_probe_timeout_s
        self._piece_limit = piece_limit
        self._window_limit = window_limit
        self._stripes: dict[int, Stripe] = {}
        self._queue: deque[Piece] = deque()  # rests of the chunks that are being cut
        self._resend: deque[Piece] = deque()
        self._is_busy = False
        self._useful = 1  # stripes that the congestion window makes useful
        self._usable = 1  # those of them that are open
        self._in_flight = 0
        self.opened(0, 0.0)

    def set_limits(
        self, *, min_probe_timeout_s: float, piece_limit: int, window_limit: int
    ) -> None:
        """Use other limits from now on."""
        self.congestion_window.set_limit(window_limit)
        self._min_probe_timeout_s = min_probe_timeout_s
        self._piece_limit = piece_limit
        self._window_limit = window_limit

    # Sending.

    @property
    def takes_chunks(self) -> bool:
        """Whether another chunk may be added: at most two wait."""
        return len(self._queue) < 2 and not self._resend

    def add(self, stream: int, round_: int, index: int, data: Buffer, chunks: int = 1) -> None:
        """Queue a chunk of a stream of ``chunks`` chunks. Mutable data is copied."""
        if type(data) is not bytes and not (type(data) is memoryview and data.readonly):
            data = bytes(data)
        size = len(data)
        self._queue.append(Piece(stream, round_, index, 0, size, data, chunks * size))

    def forget(self, stream: int) -> None:
        """A stream is over or goes back: send nothing more of the chunks added so far."""
        self._queue = deque(one for one in self._queue if one.stream != stream)
        self._resend = deque(one for one in self._resend if one.stream != stream)
        for stripe in self._stripes.values():
            for sent in stripe.sent:
                if sent.piece is not None and sent.piece.stream == stream:
                    sent.piece = None

    def next(self, now: float, *, more: bool = False) -> tuple[int, int, bool, Piece] | None:
        """``(stripe, number on it, asks, piece)`` to send now, or None.

        ``more``: other chunks follow soon, so the last one is left in the queue.
        """
        if not self._resend and len(self._queue) <= more:
            self._is_busy = self._is_busy and more
            return None
        stripe = self._pick_stripe()
        if stripe is None:
            self._is_busy = True
            return None
        if self._resend:
            piece = self._resend.popleft()
            self.resent_bytes += len(piece.data)
        else:
            piece = self._cut(stripe.piece_bytes)
        size = len(piece.data)
        if not stripe.sent:
            stripe.progress_at = now
        path_state = self.congestion_window.on_send(now, is_empty=not self._in_flight)
        number = stripe.last_number = stripe.last_number + 1
        stripe.in_flight += size
        stripe.since_ask += size
        stripe.sent.append(_Sent(number, piece, now, stripe.delivered, path_state, self._is_busy))
        window = min(stripe.window, self.congestion_window.window)
        asks = (
            self._useful > 1
            or stripe.since_ask * _ASKS_PER_WINDOW >= window
            or not (self._queue or self._resend)
        )
        if asks:
            stripe.since_ask = 0
            stripe.asked = number
        return stripe.number, number, asks, piece

    def _cut(self, most: int) -> Piece:
        """Take the next piece from the queue, of at most 1.5 * ``most`` bytes."""
        rest = self._queue[0]
        left = len(rest.data)
        if self._usable > 1 and left > INITIAL_FLIGHT_BYTES and not self._is_busy:
            share = math.ceil(rest.stream_bytes / self._usable)
            most = min(most, max(share, INITIAL_FLIGHT_BYTES))
            most = math.ceil(left / math.ceil(left / most))  # equal pieces
        if left <= most + most // 2:
            return self._queue.popleft()
        view = memoryview(rest.data)
        piece = Piece(rest.stream, rest.round, rest.index, rest.offset, rest.size, view[:most])
        rest.data = view[most:]
        rest.offset += most
        return piece

    def _pick_stripe(self) -> Stripe | None:
        """The stripe for the next piece; None while windows are full and an ack is expected."""
        best, best_load, in_flight, used = None, math.inf, 0, 0
        unasked: Stripe | None = None
        awaits_ack = False
        is_busy = self._is_busy
        window = self.congestion_window
        most = min(self.count, window.connections) if is_busy else self.count
        for stripe in self._stripes.values():
            if not stripe.is_open or stripe.is_suspect:
                continue  # the pieces of a suspect stripe are sent again, and counted there
            own = stripe.in_flight
            in_flight += own
            if stripe.awaits_ack:
                awaits_ack = True
            elif own:
                unasked = stripe
            if used < most and stripe.number < self.count:
                used += 1
                load = own / stripe.window if is_busy else own
                if load < best_load and own < stripe.window:
                    best, best_load = stripe, load
        self._in_flight, self._useful, self._usable = in_flight, most, used
        if best is None or in_flight >= window.window:
            if best is not None:
                window.on_limited()
            return None if awaits_ack else unasked
        return best

    # Acknowledgements.

    def opened(self, number: int, now: float) -> None:
        """The peer opened a connection. No effect if that is known."""
        stripe = self._stripes.get(number)
        if stripe is None:
            stripe = self._stripes[number] = Stripe(number)
        if not stripe.is_open:
            stripe.is_open = True
            stripe.progress_at = now

    def on_ack(self, number: int, first: int, last: int, now: float) -> None:
        """Pieces ``first`` to ``last`` of a stripe arrived. ``PeerError`` if they were not sent."""
        stripe = self._stripes.get(number)
        if stripe is None or not 0 < first <= last <= stripe.last_number:
            raise PeerError(f"pieces {first} to {last} of stripe {number} were not sent")
        self._mark_lost(stripe, first - 1)
        newest, size = None, 0
        while stripe.sent and stripe.sent[0].number <= last:
            newest = stripe.sent.popleft()
            stripe.in_flight -= newest.bytes
            size += newest.bytes
        stripe.delivered += size
        self.delivered += size
        stripe.is_open = True
        stripe.is_suspect = False
        stripe.probe_timeout_s = 0.0
        stripe.progress_at = now
        if newest is not None and newest.bytes:
            window = self.congestion_window
            window.on_ack(
                size, sent_at=newest.at, sent_state=newest.path_state, is_busy=newest.busy,
                piece_bytes=stripe.piece_bytes, now=now,
            )  # fmt: skip
            stripe.measure(newest, now, window.min_rtt_s, self._window_limit, self._piece_limit)

    def _mark_lost(self, stripe: Stripe, last: int) -> None:
        """Resend the pieces in flight on a stripe up to ``last``, before anything new."""
        lost = []
        while stripe.sent and stripe.sent[0].number <= last:
            sent = stripe.sent.popleft()
            stripe.in_flight -= sent.bytes
            if sent.piece is not None:
                lost.append(sent.piece)
        self._resend.extendleft(reversed(lost))

    # Probe timeouts.

    def next_deadline(self) -> float:
        """Return when a probe timeout expires, or infinity."""
        earliest = math.inf
        for stripe in self._stripes.values():
            if self._expects_ack(stripe):
                waits_from = max(stripe.progress_at, stripe.probed_at)
                earliest = min(earliest, waits_from + self._probe_timeout(stripe))
        return earliest

    def handle_timer(self, now: float) -> list[tuple[int, int]]:
        """Return ``(stripe, number)`` of the probes to send. Call ``next`` afterwards."""
        probes = []
        for stripe in self._stripes.values():
            if not self._expects_ack(stripe):
                continue
            timeout_s = self._probe_timeout(stripe)
            if now < max(stripe.progress_at, stripe.probed_at) + timeout_s:
                continue
            stripe.probe_timeout_s = min(2 * timeout_s, MAX_PROBE_TIMEOUT_S)
            stripe.probed_at = now
            stripe.is_suspect = True
            if any(one.is_open and not one.is_suspect for one in self._stripes.values()):
                for sent in stripe.sent:  # they still count as in flight here
                    if sent.piece is not None:
                        self._resend.append(sent.piece)
                        sent.piece = None
            probes.append((stripe.number, self.probe(stripe.number, now)))
        return probes

    def probe(self, number: int, now: float) -> int:
        """Number an empty piece for a stripe, which may not be open yet."""
        stripe = self._stripes.get(number)
        if stripe is None:
            stripe = self._stripes[number] = Stripe(number)
        stripe.asked = stripe.last_number = stripe.last_number + 1
        stripe.sent.append(_Sent(stripe.asked, None, now, stripe.delivered, (0, 0.0), False))
        return stripe.asked

    def _expects_ack(self, stripe: Stripe) -> bool:
        """Whether an acknowledgement is due. A stripe that is no longer used need not answer."""
        return bool(stripe.sent) and (stripe.is_open or stripe.number < self.count)

    def _probe_timeout(self, stripe: Stripe) -> float:
        if stripe.probe_timeout_s:
            return stripe.probe_timeout_s
        min_rtt_s = self.congestion_window.min_rtt_s
        if min_rtt_s == math.inf:
            return 2 * self._min_probe_timeout_s
        rate = stripe.rate
        queue_s = 2 * stripe.in_flight / rate if rate else 0.0
        queue_s = min(queue_s, MAX_PROBE_TIMEOUT_S)  # the rate may be that of one tiny piece
        return max(self._min_probe_timeout_s, 4 * min_rtt_s + queue_s)

    # Measurements for ``Parallelism``.

    @property
    def is_busy(self) -> bool:
        """Whether data waits for a window."""
        return self._is_busy

    @property
    def open_count(self) -> int:
        """Number of open stripes."""
        return sum(stripe.is_open for stripe in self._stripes.values())

    @property
    def rtt_s(self) -> float:
        """The path's shortest RTT; 0 before the first acknowledgement."""
        min_rtt_s = self.congestion_window.min_rtt_s
        return 0.0 if min_rtt_s == math.inf else min_rtt_s
