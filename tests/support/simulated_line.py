"""A line for the stripes' machines, packet by packet and without a clock: one bottleneck with a queue, random losses, TCP connections over it.

A connection is what matters of CUBIC (RFC 9438): slow start from ten segments, a segment that is lost is sent again a round trip later, with the
window cut to 0.7 once, or after a time-out, and everything behind it waits at the other end for its turn. One that was idle begins with ten
segments again: half of its window is lost with each time-out that it was idle (RFC 2861, as Linux does it). Acknowledgements are never lost.
"""

from __future__ import annotations

import heapq
import random
from collections import deque

from attrs import frozen

from fsl_transport.bulk.parallelism import Parallelism
from fsl_transport.bulk.reassembly import Arrivals
from fsl_transport.bulk.stripes import BulkSender

SEGMENT_BYTES = 1448
HEADER_BYTES = 66
CHUNK_BYTES = 1 << 18
CONTROL = -1
"""The connection of control messages."""


@frozen(kw_only=True)
class Conditions:
    """``rate`` bytes a second after ``delay_s``, each way; a queue of ``buffer_s``; each packet is lost with chance ``loss``."""

    rate: float
    delay_s: float
    buffer_s: float = 0.1
    loss: float = 0.0


@frozen(kw_only=True)
class Span:
    """What a part of a run brought. ``use``: the share of the line that payload took; ``queue_s``: the longest queue; ``late_s``: the slowest control message."""

    use: float
    queue_s: float
    late_s: float
    dropped: int


class Line:
    """Over as many connections as the production machines ask for; with ``endless``, always something to send."""

    def __init__(
        self,
        conditions: Conditions,
        *,
        seed: int = 1,
        stripes: int | None = None,
        endless: bool = True,
    ) -> None:
        self.conditions = conditions
        self.now = 0.0
        self.bulk = BulkSender(patience_s=0.5, piece_limit=1 << 20, window_limit=1 << 26)
        self.count = Parallelism(stripes or 1, stripes or 64)
        self._chance = random.Random(seed)
        self._events: list = []
        self._order = 0
        self._free_at = 0.0
        self._arrivals = Arrivals()
        self._connections = {CONTROL: Connection(self, CONTROL), 0: Connection(self, 0)}
        self._index = 0
        self._got = self._dropped = 0
        self._queue_s = 0.0
        self._late: list[float] = []
        self._endless = endless
        self._chunks: deque[int] = deque()
        self._stream_chunks = 1 << 20

    def burst(self, *chunks: int) -> float:
        """Send chunks of so many bytes; seconds until all of them are there."""
        begun, wanted = self.now, self._got + sum(chunks)
        self._begin()
        self._chunks.extend(chunks)
        self._stream_chunks = len(chunks)
        self._send()
        while self._got < wanted:
            self._step()
        return self.now - begun

    def run(self, seconds: float) -> Span:
        """Go on for so long."""
        self._begin()
        end, got, dropped = self.now + seconds, self._got, self._dropped
        self._queue_s = 0.0
        self._late.clear()
        while self._events and self._events[0][0] <= end:
            self._step()
        self.now = end
        return Span(
            use=(self._got - got) / seconds / self.conditions.rate,
            queue_s=self._queue_s,
            late_s=max(self._late, default=0.0),
            dropped=self._dropped - dropped,
        )

    def _begin(self):
        if not self._order:
            self._open()
            self._send()
            self._tick()

    def _step(self):
        self.now, _, call, words = heapq.heappop(self._events)
        call(*words)

    def at(self, when, call, *words):
        """Call later."""
        self._order += 1
        heapq.heappush(self._events, (when, self._order, call, words))

    def packet(self, size, call, *words):
        """Into the bottleneck."""
        queue_s = max(0.0, self._free_at - self.now)
        self._queue_s = max(self._queue_s, queue_s)
        if queue_s > self.conditions.buffer_s:
            self._dropped += 1
            return
        self._free_at = self.now + queue_s + size / self.conditions.rate
        if self._chance.random() >= self.conditions.loss:
            self.at(self._free_at + self.conditions.delay_s, call, *words)

    def _open(self):
        self.bulk.count = self.count.count
        for stripe in range(len(self._connections) - 1, self.count.count):
            made = self._connections[stripe] = Connection(self, stripe)
            probe = (stripe, self.bulk.probe(stripe, self.now), True, 0)
            self.at(
                self.now + 4 * self.conditions.delay_s, made.write, 40, probe
            )  # after its handshakes

    def _send(self):
        bulk = self.bulk
        while True:
            while bulk.has_room and (self._endless or self._chunks):
                size = CHUNK_BYTES if self._endless else self._chunks.popleft()
                bulk.add(1, 0, self._index, bytes(size), self._stream_chunks)
                self._index += 1
            found = bulk.next(self.now, more=self._endless or bool(self._chunks))
            if found is None:
                if not bulk.is_busy:
                    self.count.rest(self.now)
                return
            stripe, number, asks, piece = found
            size = len(piece.data)
            self._connections[stripe].write(size + 120, (stripe, number, asks, size))

    def came(self, stripe, number, asks, size):
        """The last byte of a message is there."""
        if stripe == CONTROL:
            self._late.append(self.now - number)
            return
        self._got += size
        for told in self._arrivals.piece(stripe, number, asks=asks):
            self.at(self.now + self.conditions.delay_s, self._taken, told)

    def _taken(self, told):
        bulk = self.bulk
        bulk.taken(*told, self.now)
        self._send()
        if not bulk.is_busy:
            if self.count.begin(bulk.delivered, bulk.round_trip_s):
                self._open()
        elif self.count.feed(
            self.now, bulk.delivered, open_count=bulk.open_count, round_trip_s=bulk.round_trip_s,
            worth=bulk.line.connections,
        ):  # fmt: skip
            self._open()
            self._send()

    def _tick(self):
        if self.now >= self.bulk.next_deadline():
            for stripe, number in self.bulk.handle_timer(self.now):
                self._connections[stripe].write(40, (stripe, number, True, 0))
            self._send()
        self._connections[CONTROL].write(60, (CONTROL, self.now, False, 0))
        self.at(self.now + 0.05, self._tick)


class Connection:
    """One TCP connection, both its ends."""

    def __init__(self, line, number):
        self.line, self.number = line, number
        self.window, self.threshold, self.top = 10.0, 1e9, 10.0
        self.next = self.end = self.expected = self.recover = 0
        self.sizes, self.marks = {}, deque()
        self.out, self.again, self.there = {}, deque(), set()
        self.round_trip_s = 2 * line.conditions.delay_s
        self.cut_at, self.timer, self.waits = 0.0, None, 1
        self.sent_at = 0.0

    def write(self, size, mark):
        """A message of so many bytes."""
        if not self.out and not self.again and self.next == self.end:
            self.rested()
        while size > 0:
            self.sizes[self.end] = min(SEGMENT_BYTES, size)
            size -= SEGMENT_BYTES
            self.end += 1
        self.marks.append((self.end, mark))
        self.pump()

    def rested(self):
        """Nothing was under way for a while."""
        idle_s, wait_s = self.line.now - self.sent_at, self.round_trip_s + 0.2
        if idle_s > wait_s:
            self.threshold = max(self.threshold, 0.75 * self.window)
            self.window = max(self.window * 0.5 ** (idle_s // wait_s), min(self.window, 10.0))

    def pump(self):
        """Send what the window allows."""
        self.sent_at = self.line.now
        while len(self.out) < self.window and (self.again or self.next < self.end):
            if self.again:
                number = self.again.popleft()
            else:
                number, self.next = self.next, self.next + 1
            self.out[number] = self.line.now
            self.line.packet(self.sizes[number] + HEADER_BYTES, self.arrive, number)
        if self.out and self.timer is None:
            self.timer = object()
            wait_s = (self.round_trip_s + 0.2) * self.waits
            self.line.at(self.line.now + wait_s, self.time_out, self.timer)

    def time_out(self, timer):
        """Nothing was heard: begin with one segment."""
        if timer is not self.timer:
            return
        self.timer = None
        if self.out:
            self.threshold, self.window = max(0.7 * self.window, 2.0), 1.0
            self.waits, self.recover = min(2 * self.waits, 64), self.next
            self.again.extend(sorted(self.out))
            self.out.clear()
            self.pump()

    def arrive(self, number):
        """A segment is there."""
        if number >= self.expected:
            self.there.add(number)
        while self.expected in self.there:
            self.there.remove(self.expected)
            self.expected += 1
        while self.marks and self.marks[0][0] <= self.expected:
            self.line.came(*self.marks.popleft()[1])
        self.line.at(self.line.now + self.line.conditions.delay_s, self.acknowledged, number)

    def acknowledged(self, number):
        """The answer to a segment is there."""
        now = self.line.now
        sent_at = self.out.pop(number, None)
        if sent_at is not None:
            self.round_trip_s += 0.1 * (now - sent_at - self.round_trip_s)
        self.timer, self.waits = None, 1
        before = now - 0.9 * self.round_trip_s
        lost = sorted(n for n, at in self.out.items() if n < number - 3 and at <= before)
        for one in lost:
            del self.out[one]
        self.again.extend(lost)
        if lost and lost[-1] >= self.recover:
            self.top, self.recover, self.cut_at = self.window, self.next, now
            self.window = self.threshold = max(2.0, 0.7 * self.window)
        elif not lost and len(self.out) + 1 >= 0.5 * self.window:
            self.grow(now)
        self.pump()

    def grow(self, now):
        """Slow start, then CUBIC."""
        if self.window < self.threshold:
            self.window += 1
            return
        since = now - self.cut_at + self.round_trip_s
        cubic = 0.4 * (since - (0.75 * self.top) ** (1 / 3)) ** 3 + self.top
        reno = 0.7 * self.top + 0.53 * since / self.round_trip_s
        self.window += min(max(max(cubic, reno) / self.window - 1, 0.0), 0.5)
