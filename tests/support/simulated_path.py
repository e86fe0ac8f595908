"""A network path for the stripes' machines, packet by packet, without a clock.

One bottleneck with a queue, random losses, and TCP connections over it. A connection models what
matters of CUBIC (RFC 9438): slow start from ten segments; a lost segment is sent again one RTT
later, with the window cut to 0.7 once, or after a timeout; data behind it waits at the receiver. A
connection that was idle restarts slowly: it loses half of its window for each idle timeout, down to
ten segments (RFC 2861, as in Linux). Acknowledgements are never lost.
"""

from __future__ import annotations

import heapq
import random
from collections import deque

from attrs import frozen

from fsl_transport.bulk.parallelism import Parallelism
from fsl_transport.bulk.reassembly import AckRanges
from fsl_transport.bulk.stripes import BulkSender

SEGMENT_BYTES = 1448
HEADER_BYTES = 66
CHUNK_BYTES = 1 << 18
CONTROL = -1
"""Number of the connection for control messages."""


@frozen(kw_only=True)
class Conditions:
    """``rate`` bytes per second and ``delay_s``, each way; a queue of ``buffer_s``; packet loss."""

    rate: float
    delay_s: float
    buffer_s: float = 0.1
    loss: float = 0.0


@frozen(kw_only=True)
class Span:
    """Results of part of a run.

    ``use`` is the share of the path's rate that payload took, ``queue_s`` the longest queue,
    ``late_s`` the slowest control message.
    """

    use: float
    queue_s: float
    late_s: float
    dropped: int


class Path:
    """As many connections as the production machines open. ``endless``: always data to send."""

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
        self.bulk = BulkSender(min_probe_timeout_s=0.5, piece_limit=1 << 20, window_limit=1 << 26)
        self.parallelism = Parallelism(stripes or 1, stripes or 64)
        self._rng = random.Random(seed)
        self._events: list = []
        self._order = 0
        self._free_at = 0.0
        self._ack_ranges = AckRanges()
        self._connections = {CONTROL: Connection(self, CONTROL), 0: Connection(self, 0)}
        self._index = 0
        self._received = self._dropped = 0
        self._queue_s = 0.0
        self._late: list[float] = []
        self._endless = endless
        self._chunks: deque[int] = deque()
        self._stream_chunks = 1 << 20

    def burst(self, *chunks: int) -> float:
        """Send chunks of these sizes; return the seconds until all have arrived."""
        begun, wanted = self.now, self._received + sum(chunks)
        self._begin()
        self._chunks.extend(chunks)
        self._stream_chunks = len(chunks)
        self._send()
        while self._received < wanted:
            self._step()
        return self.now - begun

    def run(self, seconds: float) -> Span:
        """Let ``seconds`` pass."""
        self._begin()
        end, received, dropped = self.now + seconds, self._received, self._dropped
        self._queue_s = 0.0
        self._late.clear()
        while self._events and self._events[0][0] <= end:
            self._step()
        self.now = end
        return Span(
            use=(self._received - received) / seconds / self.conditions.rate,
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
        self.now, _, call, arguments = heapq.heappop(self._events)
        call(*arguments)

    def at(self, when, call, *arguments):
        """Schedule a call."""
        self._order += 1
        heapq.heappush(self._events, (when, self._order, call, arguments))

    def packet(self, size, call, *arguments):
        """Send a packet into the bottleneck; ``call`` runs when it arrives."""
        queue_s = max(0.0, self._free_at - self.now)
        self._queue_s = max(self._queue_s, queue_s)
        if queue_s > self.conditions.buffer_s:
            self._dropped += 1
            return
        self._free_at = self.now + queue_s + size / self.conditions.rate
        if self._rng.random() >= self.conditions.loss:
            self.at(self._free_at + self.conditions.delay_s, call, *arguments)

    def _open(self):
        self.bulk.count = self.parallelism.count
        for stripe in range(len(self._connections) - 1, self.parallelism.count):
            made = self._connections[stripe] = Connection(self, stripe)
            probe = (stripe, self.bulk.probe(stripe, self.now), True, 0)
            handshakes_s = 4 * self.conditions.delay_s
            self.at(self.now + handshakes_s, made.write, 40, probe)

    def _send(self):
        bulk = self.bulk
        while True:
            while bulk.takes_chunks and (self._endless or self._chunks):
                size = CHUNK_BYTES if self._endless else self._chunks.popleft()
                bulk.add(1, 0, self._index, bytes(size), self._stream_chunks)
                self._index += 1
            found = bulk.next(self.now, more=self._endless or bool(self._chunks))
            if found is None:
                if not bulk.is_busy:
                    self.parallelism.on_idle(self.now)
                return
            stripe, number, asks, piece = found
            size = len(piece.data)
            self._connections[stripe].write(size + 120, (stripe, number, asks, size))

    def received(self, stripe, number, asks, size):
        """The last byte of a message arrived."""
        if stripe == CONTROL:
            self._late.append(self.now - number)
            return
        self._received += size
        for acked in self._ack_ranges.on_piece(stripe, number, asks=asks):
            self.at(self.now + self.conditions.delay_s, self._acked, acked)

    def _acked(self, acked):
        bulk = self.bulk
        bulk.on_ack(*acked, self.now)
        self._send()
        if not bulk.is_busy:
            if self.parallelism.start(bulk.delivered, bulk.rtt_s):
                self._open()
        elif self.parallelism.update(
            self.now,
            bulk.delivered,
            open_count=bulk.open_count,
            rtt_s=bulk.rtt_s,
            useful=bulk.congestion_window.connections,
        ):
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
    """One TCP connection, both its ends. Windows count segments."""

    def __init__(self, path, number):
        self.path, self.number = path, number
        self.window, self.threshold, self.top = 10.0, 1e9, 10.0
        self.next = self.end = self.expected = self.recover = 0
        self.sizes, self.marks = {}, deque()
        self.in_flight, self.lost, self.arrived = {}, deque(), set()
        self.rtt_s = 2 * path.conditions.delay_s
        self.cut_at, self.timer, self.backoff = 0.0, None, 1
        self.sent_at = 0.0

    def write(self, size, mark):
        """Write a message; ``mark`` is handed to ``Path.received`` when it arrives."""
        if not self.in_flight and not self.lost and self.next == self.end:
            self.restart()
        while size > 0:
            self.sizes[self.end] = min(SEGMENT_BYTES, size)
            size -= SEGMENT_BYTES
            self.end += 1
        self.marks.append((self.end, mark))
        self.pump()

    def restart(self):
        """Shrink the window after an idle time."""
        idle_s, timeout_s = self.path.now - self.sent_at, self.rtt_s + 0.2
        if idle_s > timeout_s:
            self.threshold = max(self.threshold, 0.75 * self.window)
            self.window = max(self.window * 0.5 ** (idle_s // timeout_s), min(self.window, 10.0))

    def pump(self):
        """Send what the window allows."""
        self.sent_at = self.path.now
        while len(self.in_flight) < self.window and (self.lost or self.next < self.end):
            if self.lost:
                number = self.lost.popleft()
            else:
                number, self.next = self.next, self.next + 1
            self.in_flight[number] = self.path.now
            self.path.packet(self.sizes[number] + HEADER_BYTES, self.arrive, number)
        if self.in_flight and self.timer is None:
            self.timer = object()
            timeout_s = (self.rtt_s + 0.2) * self.backoff
            self.path.at(self.path.now + timeout_s, self.time_out, self.timer)

    def time_out(self, timer):
        """Nothing was acknowledged: start again with one segment."""
        if timer is not self.timer:
            return
        self.timer = None
        if self.in_flight:
            self.threshold, self.window = max(0.7 * self.window, 2.0), 1.0
            self.backoff, self.recover = min(2 * self.backoff, 64), self.next
            self.lost.extend(sorted(self.in_flight))
            self.in_flight.clear()
            self.pump()

    def arrive(self, number):
        """A segment arrived."""
        if number >= self.expected:
            self.arrived.add(number)
        while self.expected in self.arrived:
            self.arrived.remove(self.expected)
            self.expected += 1
        while self.marks and self.marks[0][0] <= self.expected:
            self.path.received(*self.marks.popleft()[1])
        self.path.at(self.path.now + self.path.conditions.delay_s, self.acknowledged, number)

    def acknowledged(self, number):
        """The acknowledgement of a segment arrived."""
        now = self.path.now
        sent_at = self.in_flight.pop(number, None)
        if sent_at is not None:
            self.rtt_s += 0.1 * (now - sent_at - self.rtt_s)
        self.timer, self.backoff = None, 1
        before = now - 0.9 * self.rtt_s
        lost = sorted(n for n, at in self.in_flight.items() if n < number - 3 and at <= before)
        for one in lost:
            del self.in_flight[one]
        self.lost.extend(lost)
        if lost and lost[-1] >= self.recover:
            self.top, self.recover, self.cut_at = self.window, self.next, now
            self.window = self.threshold = max(2.0, 0.7 * self.window)
        elif not lost and len(self.in_flight) + 1 >= 0.5 * self.window:
            self.grow(now)
        self.pump()

    def grow(self, now):
        """Slow start, then CUBIC."""
        if self.window < self.threshold:
            self.window += 1
            return
        since = now - self.cut_at + self.rtt_s
        cubic = 0.4 * (since - (0.75 * self.top) ** (1 / 3)) ** 3 + self.top
        reno = 0.7 * self.top + 0.53 * since / self.rtt_s
        self.window += min(max(max(cubic, reno) / self.window - 1, 0.0), 0.5)
