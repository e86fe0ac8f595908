"""The sending end of a session's bulk connections ("stripes"): which piece goes where, what arrived, what goes again. Pure.

Chunks are cut into pieces, so that a slow line is not blocked by one chunk and many connections can share one. Pieces of all
streams of a session go over all its stripes and may overtake each other between them; each stripe numbers what it carries.

Rules
  * All stripes together may have as much under way as ``congestion_window.py`` says: so a line is full, and no long queue builds up on it, however many stripes
    there are. No more of them are used than that window is worth.
  * A piece is a third of what its stripe's measured speed brings in the line's round trip (with the window's gain and its allowance for a busy process), at least 16 KiB, at most a chunk.
  * A stripe may have ``window`` bytes of it: ``WINDOW_GAIN`` times what its measured speed brings in the line's round trip, and two
    pieces; before it is measured what it brought so far, and two pieces. Samples taken while there was nothing to send
    make a window larger, never smaller.
  * The next piece goes to the stripe with the largest free share of its window: a slow one takes less, one that stands takes nothing.
  * While nothing has to wait for a window, little is to be sent, and TCP begins with ten segments on each connection that was idle: so it
    goes to the stripe with the least under way, over all that there are, in pieces that are small enough for all of them to get one.
  * A piece that ``asks`` is acknowledged at once: four of them in each window, and the last one there is; each one where there are several stripes, whose
    next piece may be a long time away. An answer costs both ends more than a piece does, so a full window asks for no more. Where it shrank below what
    was sent and nobody asked, one more piece goes out and asks.
  * A stripe keeps its order. What is acknowledged proves that older pieces of that stripe that are not were lost: they go again.
  * A stripe that acknowledges nothing for its patience is suspect: it gets no more pieces, its open ones go again on the others, and an
    empty piece (a probe) asks whether it still stands. Where there are no others nothing goes twice until a probe comes back.
  * Data is kept until it is acknowledged: no more than the windows.

State     event                          -> state     effect
CLOSED    opened, or a probe taken       -> OPEN
OPEN      piece there, window free       -> OPEN      piece
OPEN      taken                          -> OPEN      window measured; lost pieces again
OPEN      patience over                  -> SUSPECT   open pieces elsewhere, probe
SUSPECT   patience over                  -> SUSPECT   probe, patience doubles
SUSPECT   taken                          -> OPEN      lost pieces again
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from fsl_transport.bulk.congestion_window import (
    BUSY_LOOP_BYTES,
    BUSY_LOOP_S,
    CLOCK_S,
    MEMORY_S,
    CongestionWindow,
)
from fsl_transport.errors import PeerError
from fsl_transport.link import Buffer

MEASURED_BYTES: Final = 256 * 1024
"""The first samples of a stripe are of its first few pieces only; it is measured from so much on."""
LEAST_PIECE_BYTES: Final = 16 * 1024
FIRST_FLIGHT_BYTES: Final = 13_000
"""What TCP sends at once on a connection that was idle: ten segments (RFC 6928), less what goes around a piece and what tunnels take off a segment."""
PIECES_PER_WINDOW: Final = 3
"""A piece is this part of what its stripe may have under way: smaller ones cost both ends more, with larger ones a loss or a slow stripe holds up more."""
WINDOW_GAIN: Final = 1.5
PATIENCE_LIMIT_S: Final = 10.0
_ASKS_PER_WINDOW: Final = 4


class Piece:
    """Part of a chunk: ``data`` belongs at ``offset`` of its ``size`` bytes. ``stream_bytes``: about what its stream has in all."""

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
    """A numbered piece under way; ``piece`` is None for a probe, and when nobody wants it any more."""

    __slots__ = ("at", "busy", "bytes", "delivered", "mark", "piece", "seq")

    def __init__(  # noqa: PLR0917 - the hot path passes positions
        self,
        seq: int,
        piece: Piece | None,
        at: float,
        delivered: int,
        mark: tuple[int, float],
        busy: bool,
    ) -> None:
        self.seq = seq
        self.piece = piece
        self.bytes = 0 if piece is None else len(piece.data)
        self.at = at
        self.delivered = delivered
        self.mark = mark
        self.busy = busy


class Stripe:
    """One connection, seen from the sender."""

    __slots__ = (
        "_rate_now", "_rate_old", "_rate_since", "asked", "delivered", "in_flight", "is_open", "is_suspect", "number", "patience_s",
        "piece_bytes", "probed_at", "progress_at", "sent", "seq", "unasked", "window",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.seq = 0
        self.asked = 0  # the newest piece that asks
        self.sent: deque[_Sent] = deque()
        self.in_flight = 0
        self.delivered = 0
        self.window = 2 * LEAST_PIECE_BYTES
        self.piece_bytes = LEAST_PIECE_BYTES
        self.unasked = MEASURED_BYTES
        self.is_open = False
        self.is_suspect = False
        self.progress_at = 0.0
        self.probed_at = -math.inf
        self.patience_s = 0.0
        self._rate_now = self._rate_old = 0.0
        self._rate_since = -math.inf

    @property
    def is_awaited(self) -> bool:
        """Whether an answer to something that is under way was asked for."""
        return bool(self.sent) and self.asked >= self.sent[0].seq

    @property
    def rate(self) -> float:
        """Bytes a second: the fastest of the last one to two spans of ``MEMORY_S``."""
        return max(self._rate_now, self._rate_old)

    def measure(
        self, sent: _Sent, now: float, round_trip_s: float, window_limit: int, piece_limit: int
    ) -> None:
        """Learn from a piece that was acknowledged now. ``round_trip_s`` is the line's."""
        sample = (self.delivered - sent.delivered) / max(now - sent.at, CLOCK_S)
        if sent.busy and now - self._rate_since > MEMORY_S:
            self._rate_old, self._rate_now, self._rate_since = self._rate_now, sample, now
        else:  # while there is not enough to send it is no more than a lower bound
            self._rate_now = max(self._rate_now, sample)
        rate = self.rate
        busy = min(rate * BUSY_LOOP_S, BUSY_LOOP_BYTES)
        window = int(WINDOW_GAIN * rate * round_trip_s + busy)
        piece = LEAST_PIECE_BYTES
        while 2 * piece * PIECES_PER_WINDOW <= window and piece < piece_limit:
            piece *= 2
        self.piece_bytes = piece = min(piece, piece_limit)
        if self.delivered < MEASURED_BYTES:
            window = self.delivered
        self.window = min(window + 2 * piece, window_limit)


class BulkSender:
    """All stripes of one direction of one session."""

    __slots__ = (
        "_again", "_in_flight", "_is_busy", "_loads", "_patience_s", "_piece_limit", "_stripes", "_used", "_wanted",
        "_window_limit", "count", "delivered", "line", "sent_again",
    )  # fmt: skip

    def __init__(self, *, patience_s: float, piece_limit: int, window_limit: int) -> None:
        self.count = 1
        self.delivered = 0
        self.sent_again = 0
        self.line = CongestionWindow(window_limit)
        self._patience_s = patience_s
        self._piece_limit = piece_limit
        self._window_limit = window_limit
        self._stripes: dict[int, Stripe] = {}
        self._loads: deque[Piece] = deque()  # what is left of chunks that are being cut
        self._again: deque[Piece] = deque()
        self._is_busy = False
        self._wanted = 1  # stripes that are of use now
        self._used = 1  # those of them that stand
        self._in_flight = 0
        self.opened(0, 0.0)

    def bound(self, *, patience_s: float, piece_limit: int, window_limit: int) -> None:
        """Other limits from now on."""
        self.line.bound(window_limit)
        self._patience_s = patience_s
        self._piece_limit = piece_limit
        self._window_limit = window_limit

    # What there is to send.

    @property
    def has_room(self) -> bool:
        """Whether another chunk may be added: two wait at the most."""
        return len(self._loads) < 2 and not self._again

    def add(self, stream: int, round_: int, index: int, data: Buffer, chunks: int = 1) -> None:
        """A chunk to send, of a stream of so many. Data that somebody could still change is copied."""
        if type(data) is not bytes and not (type(data) is memoryview and data.readonly):
            data = bytes(data)
        size = len(data)
        self._loads.append(Piece(stream, round_, index, 0, size, data, chunks * size))

    def forget(self, stream: int) -> None:
        """A stream is over, or begins again at another place: send no more of what was added so far."""
        self._loads = deque(one for one in self._loads if one.stream != stream)
        self._again = deque(one for one in self._again if one.stream != stream)
        for stripe in self._stripes.values():
            for sent in stripe.sent:
                if sent.piece is not None and sent.piece.stream == stream:
                    sent.piece = None

    def next(self, now: float, *, more: bool = False) -> tuple[int, int, bool, Piece] | None:
        """``(stripe, number on it, asks, piece)`` to send now, or None. With ``more`` to come the last chunk is left."""
        if not self._again and len(self._loads) <= more:
            self._is_busy = self._is_busy and more
            return None
        stripe = self._freest()
        if stripe is None:
            self._is_busy = True
            return None
        if self._again:
            piece = self._again.popleft()
            self.sent_again += len(piece.data)
        else:
            piece = self._cut(stripe.piece_bytes)
        size = len(piece.data)
        if not stripe.sent:
            stripe.progress_at = now
        mark = self.line.mark(now, is_empty=not self._in_flight)
        stripe.seq += 1
        stripe.in_flight += size
        stripe.unasked += size
        stripe.sent.append(_Sent(stripe.seq, piece, now, stripe.delivered, mark, self._is_busy))
        window = min(stripe.window, self.line.window)
        asks = (
            self._wanted > 1
            or stripe.unasked * _ASKS_PER_WINDOW >= window
            or not (self._loads or self._again)
        )
        if asks:
            stripe.unasked = 0
            stripe.asked = stripe.seq
        return stripe.number, stripe.seq, asks, piece

    def _cut(self, most: int) -> Piece:
        """What goes next, of rather no more than ``most`` bytes."""
        load = self._loads[0]
        left = len(load.data)
        if self._used > 1 and left > FIRST_FLIGHT_BYTES and not self._is_busy:
            share = math.ceil(load.stream_bytes / self._used)
            most = min(most, max(share, FIRST_FLIGHT_BYTES))
            most = math.ceil(left / math.ceil(left / most))  # all of them alike
        if left <= most + most // 2:
            return self._loads.popleft()
        view = memoryview(load.data)
        piece = Piece(load.stream, load.round, load.index, load.offset, load.size, view[:most])
        load.data = view[most:]
        load.offset += most
        return piece

    def _freest(self) -> Stripe | None:
        """The stripe for the next piece; None while the windows are full and an answer is on its way."""
        best, best_load, in_flight, used = None, math.inf, 0, 0
        unasked: Stripe | None = None
        is_awaited = False
        is_busy = self._is_busy
        most = min(self.count, self.line.connections) if is_busy else self.count
        for stripe in self._stripes.values():
            if not stripe.is_open or stripe.is_suspect:
                continue  # what a suspect one holds goes again, and is counted there
            under_way = stripe.in_flight
            in_flight += under_way
            if stripe.is_awaited:
                is_awaited = True
            elif under_way:
                unasked = stripe
            if used < most and stripe.number < self.count:
                used += 1
                load = under_way / stripe.window if is_busy else under_way
                if load < best_load and under_way < stripe.window:
                    best, best_load = stripe, load
        self._in_flight, self._wanted, self._used = in_flight, most, used
        if best is None or in_flight >= self.line.window:
            if best is not None:
                self.line.waited_for()
            return None if is_awaited else unasked
        return best

    # What becomes of it.

    def opened(self, number: int, now: float) -> None:
        """The other side opened a connection. Ignored when that is known."""
        stripe = self._stripes.get(number)
        if stripe is None:
            stripe = self._stripes[number] = Stripe(number)
        if not stripe.is_open:
            stripe.is_open = True
            stripe.progress_at = now

    def taken(self, number: int, first: int, last: int, now: float) -> None:
        """Stripe ``number`` brought its pieces ``first`` to ``last``. ``PeerError`` when they were not sent."""
        stripe = self._stripes.get(number)
        if stripe is None or not 0 < first <= last <= stripe.seq:
            raise PeerError(f"pieces {first} to {last} of stripe {number} were not sent")
        self._lose(stripe, first - 1)
        newest, size = None, 0
        while stripe.sent and stripe.sent[0].seq <= last:
            newest = stripe.sent.popleft()
            stripe.in_flight -= newest.bytes
            size += newest.bytes
        stripe.delivered += size
        self.delivered += size
        stripe.is_open = True
        stripe.is_suspect = False
        stripe.patience_s = 0.0
        stripe.progress_at = now
        if newest is not None and newest.bytes:
            line = self.line
            line.taken(
                size, sent_at=newest.at, then=newest.mark, is_busy=newest.busy, piece_bytes=stripe.piece_bytes,
                now=now,
            )  # fmt: skip
            stripe.measure(newest, now, line.round_trip_s, self._window_limit, self._piece_limit)

    def _lose(self, stripe: Stripe, last: int) -> None:
        """Whatever is open on a stripe up to ``last`` goes again, before what was never sent."""
        lost = []
        while stripe.sent and stripe.sent[0].seq <= last:
            sent = stripe.sent.popleft()
            stripe.in_flight -= sent.bytes
            if sent.piece is not None:
                lost.append(sent.piece)
        self._again.extendleft(reversed(lost))

    # Time.

    def next_deadline(self) -> float:
        """When a stripe loses its credit."""
        return min(
            (
                max(stripe.progress_at, stripe.probed_at) + self._patience(stripe)
                for stripe in self._stripes.values()
                if self._may_stand(stripe)
            ),
            default=math.inf,
        )

    def handle_timer(self, now: float) -> list[tuple[int, int]]:
        """Stripes to probe, with the number of the empty piece. ``next`` may have something to send afterwards."""
        probes = []
        for stripe in self._stripes.values():
            if not self._may_stand(stripe):
                continue
            patience_s = self._patience(stripe)
            if now < max(stripe.progress_at, stripe.probed_at) + patience_s:
                continue
            stripe.patience_s = min(2 * patience_s, PATIENCE_LIMIT_S)
            stripe.probed_at = now
            stripe.is_suspect = True
            if any(one.is_open and not one.is_suspect for one in self._stripes.values()):
                for sent in stripe.sent:  # they still count as under way here
                    if sent.piece is not None:
                        self._again.append(sent.piece)
                        sent.piece = None
            probes.append((stripe.number, self.probe(stripe.number, now)))
        return probes

    def probe(self, number: int, now: float) -> int:
        """Number an empty piece for a stripe, which may be one that is not known to stand."""
        stripe = self._stripes.get(number)
        if stripe is None:
            stripe = self._stripes[number] = Stripe(number)
        stripe.seq += 1
        stripe.asked = stripe.seq
        stripe.sent.append(_Sent(stripe.seq, None, now, stripe.delivered, (0, 0.0), False))
        return stripe.seq

    def _may_stand(self, stripe: Stripe) -> bool:
        """Whether an answer is waited for; nobody waits for connections that are not wanted any more."""
        return bool(stripe.sent) and (stripe.is_open or stripe.number < self.count)

    def _patience(self, stripe: Stripe) -> float:
        if stripe.patience_s:
            return stripe.patience_s
        round_trip_s = self.line.round_trip_s
        if round_trip_s == math.inf:
            return 2 * self._patience_s
        rate = stripe.rate
        queue_s = 2 * stripe.in_flight / rate if rate else 0.0
        queue_s = min(queue_s, PATIENCE_LIMIT_S)  # the rate may be of one tiny piece
        return max(self._patience_s, 4 * round_trip_s + queue_s)

    # For whoever chooses how many there are.

    @property
    def is_busy(self) -> bool:
        """Whether something waits for a window."""
        return self._is_busy

    @property
    def open_count(self) -> int:
        """Stripes that stand."""
        return sum(stripe.is_open for stripe in self._stripes.values())

    @property
    def round_trip_s(self) -> float:
        """The shortest round trip of all; 0 before the first one."""
        shortest = self.line.round_trip_s
        return 0.0 if shortest == math.inf else shortest
