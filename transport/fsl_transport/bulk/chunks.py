"""One stream of numbered chunks, as two machines: what the sender does, what the receiver does.

Control operations arrive reliably and in order (``session.py``); chunks travel in pieces over several connections, overtake each
other, and may be lost and repeated. What a connection loses is sent again by ``stripes.py``; these machines decide what is read from
the source, what the credit allows, what is written in which order, and mend what is left. A transfer never fails for taking long.

Rules
  * The receiver writes chunks in order. What comes before its turn is kept, within the credit; what is there already is dropped.
  * When nothing came for ``stall_s`` while nothing waits to be written, the receiver resumes: it sends ACCEPT again with
    ``round + 1``, the chunk it needs and the bytes it holds, and doubles its patience; the longest wait that ended well is
    remembered (times two), so that a slow line is not filled with repetitions. The sender reads from that chunk on again.
  * The sender reads one chunk ahead of its credit. A resume for the very chunk it is reading or
    holding does not start that reading again, so that a slow source gets on.
  * Early: a sender may send the first bytes of a stream with its OFFER, before it is accepted, as round 0 and
    within ``eager_bytes`` of all its streams together. Their owner says which streams are worth it: small ones that the
    other side wants. The receiver keeps them until its owner accepts or declines.
  * Credit counts bytes by their place in the stream (``credit.py``).
  * The sender believes the receiver little: whatever the credit, no more than
    ``unwritten_limit`` bytes are under way; at most ``READS_LIMIT`` readings are open; nothing
    that was not sent is written, nothing written is asked for again; and after
    ``RESUMES_LIMIT`` resumes that cost a reading and brought nothing the peer is in error.

Sender     state     event                           -> state     effect
           OFFERED   accept(chunk, limit)            -> SENDING   reads from chunk on
           OFFERED   decline                         -> (gone)    StreamDeclined
           EARLY     read delivered, early bytes     -> EARLY     CHUNK of round 0
           EARLY     accept(0)                       -> SENDING   goes on where it is
           EARLY     accept(chunk)                   -> SENDING   goes on, at chunk at the least
           SENDING   read delivered, credit there    -> SENDING   CHUNK
           SENDING   read delivered, no credit       -> SENDING   holds it
           SENDING   credit                          -> SENDING   held CHUNK, next read
           SENDING   accept(round + 1)               -> SENDING   goes back to chunk
           SENDING   read failed                     -> (gone)    STOP, StreamFailed
           SENDING   done                            -> (gone)    StreamSent
           any       abort                           -> (gone)    StreamFailed

Receiver   OFFERED   accept                          -> TAKING    ACCEPT round 0
           TAKING    piece, credit there             -> TAKING    kept
           TAKING    expected chunk complete         -> TAKING    write it, and complete ones after it
           TAKING    blocked, writer keeps up        -> TAKING    CREDIT, wider window
           TAKING    blocked, writer is behind       -> TAKING    window no wider than the line needs
           TAKING    stall                           -> TAKING    ACCEPT round + 1
           TAKING    no room, and then there is      -> TAKING    ACCEPT round + 1
           TAKING    written                         -> TAKING    CREDIT, now and then
           TAKING    last chunk written              -> (gone)    DONE, StreamReceived
           TAKING    write failed                    -> (gone)    ABORT, StreamFailed
           any       stop                            -> (gone)    StreamFailed
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container
from typing import Final

from fsl_transport.bulk.credit import Granting, Spending
from fsl_transport.errors import PeerError
from fsl_transport.link import Buffer

PATIENCE_LIMIT: Final = 64
"""A silent stream is asked for at least once in this many patiences."""
READS_LIMIT: Final = 2
"""Readings of one stream that its source has not answered; the older ones are of no use by now."""
RESUMES_LIMIT: Final = 64
"""Resumes in a row that may bring the receiver nothing."""


class SendStream:
    """The sender's machine. ``next_read`` and ``take`` are asked after every input."""

    __slots__ = (
        "_asked_to",
        "_ends",
        "_idle_resumes",
        "_open_reads",
        "_place",
        "_unwritten_limit",
        "_written",
        "chunks",
        "confirmed",
        "credit",
        "eager",
        "held",
        "next_chunk",
        "number",
        "reading",
        "round",
        "serial",
    )

    def __init__(self, number: int, chunks: int, unwritten_limit: int) -> None:
        self.number = number
        self.chunks = chunks
        self.round = -1  # -1: offered, not accepted
        self.next_chunk = 0
        self.confirmed = 0  # chunks the receiver wrote, as far as it said
        self.credit = Spending()
        self.eager = False  # sending on its own account, not accepted
        self.reading: int | None = None
        self.serial = 0
        self.held: Buffer | None = None
        self._unwritten_limit = unwritten_limit
        self._written = 0  # bytes of the confirmed chunks, counted from the first accepted one
        self._place = 0  # the same of the chunks before next_chunk
        self._ends: deque[int] = deque()  # and of each chunk sent and not confirmed
        self._open_reads: set[int] = set()
        self._asked_to = 0
        self._idle_resumes = 0

    @property
    def is_accepted(self) -> bool:
        """Whether the receiver has said ACCEPT."""
        return self.round >= 0 and not self.eager

    @property
    def is_starved(self) -> bool:
        """Whether it is for want of credit that nothing is read or sent."""
        if self.held is not None:
            return not self.credit.fits(len(self.held))
        return self.credit.left <= 0 and self.next_chunk < self.chunks and self.reading is None

    def begin_eager(self, limit: int) -> None:
        """Send up to ``limit`` bytes before the receiver accepts."""
        self.eager = True
        self.round = 0
        self.credit.resume(0, limit)

    def _accept_eager(self, chunk: int, received: int, limit: int) -> None:
        self.eager = False
        if chunk > self.chunks:
            raise PeerError(f"ACCEPT at chunk {chunk} of {self.chunks}")
        if not chunk:
            self.credit.grant(limit)
            return
        # It has the first ones from before; what was sent of them is dropped there. Of the others nothing is sent again: cut otherwise in the same round it would not fit.
        self.confirmed = self._asked_to = chunk
        self.credit = Spending()
        if chunk <= self.next_chunk:
            ends = [self._ends.popleft() for _ in range(chunk)]
            self._ends = deque(end - ends[-1] for end in self._ends)
            self._place -= ends[-1]
        else:
            self.next_chunk = chunk
            self._place = 0
            self._ends.clear()
            self.held = self.reading = None
        self.credit.resume(received + self._place, limit)

    def accept(self, round_: int, chunk: int, received: int, limit: int) -> None:
        """Start, or go back to ``chunk``; the receiver holds ``received`` bytes before it."""
        if self.eager and not round_:
            self._accept_eager(chunk, received, limit)
            return
        if self.eager:
            raise PeerError(f"ACCEPT of round {round_} before that of round 0")
        if round_ != self.round + 1:
            raise PeerError(f"ACCEPT of round {round_} after round {self.round}")
        if chunk > self.chunks:
            raise PeerError(f"ACCEPT at chunk {chunk} of {self.chunks}")
        if round_ == 0:
            self.confirmed = self._asked_to = chunk
        else:
            self._check_resume(chunk)
        self.round = round_
        self.credit.resume(received, limit)
        if self.held is not None and chunk != self.next_chunk:
            self.held = None
        if self.reading is not None and self.reading != chunk:
            self.reading = None  # its delivery will carry an old serial
        self.next_chunk = chunk
        ahead = chunk - self.confirmed
        self._place = self._ends[ahead - 1] if ahead else self._written

    def _check_resume(self, chunk: int) -> None:
        """``PeerError`` for a resume that no honest receiver asks for."""
        if not self.confirmed <= chunk <= self.confirmed + len(self._ends):
            raise PeerError(f"ACCEPT at chunk {chunk}, which is written or was not sent")
        if chunk > self._asked_to:
            self._asked_to = chunk
            self._idle_resumes = 0
        elif chunk != self.next_chunk:  # otherwise it costs nothing
            self._idle_resumes += 1
            if self._idle_resumes > RESUMES_LIMIT:
                raise PeerError(f"more than {RESUMES_LIMIT} resumes that brought nothing")

    def grant(self, limit: int, written: int) -> None:
        """More credit, because ``written`` chunks are written."""
        if not self.is_accepted or written > self.chunks:
            raise PeerError("CREDIT before ACCEPT or beyond the last chunk")
        if written > self.confirmed + len(self._ends):
            raise PeerError("CREDIT for chunks that were not sent")
        self.credit.grant(limit)
        if written > self.confirmed:
            for _ in range(written - self.confirmed):
                self._written = self._ends.popleft()
            self.confirmed = written
            self._idle_resumes = 0
            if self.next_chunk < written:  # what a resume asked for arrived from before it
                self.credit.spend(self._written - self._place)
                self._place = self._written
                self.next_chunk = written
                self.held = self.reading = None

    def next_read(self) -> tuple[int, int] | None:
        """``(index, serial)`` to read from the source now, or None."""
        if (
            self.round < 0
            or self.reading is not None
            or self.held is not None
            or self.next_chunk >= self.chunks
            or self.credit.left <= 0
            or self._place - self._written >= self._unwritten_limit
            or len(self._open_reads) >= READS_LIMIT
        ):
            return None
        self.reading = self.next_chunk
        self.serial += 1
        self._open_reads.add(self.serial)
        return self.next_chunk, self.serial

    def answered(self, serial: int) -> bool:
        """The source answered ``serial``, well or badly. False when it had done so before."""
        if serial not in self._open_reads:
            return False
        self._open_reads.remove(serial)
        return True

    def delivered(self, serial: int, data: Buffer) -> None:
        """The source delivered what ``next_read`` asked for under ``serial``."""
        self._open_reads.discard(serial)
        if self.reading is None or serial != self.serial:
            return  # from before a resume
        self.reading = None
        self.held = data

    def is_current(self, serial: int) -> bool:
        """Whether the reading under ``serial`` still matters."""
        return self.reading is not None and serial == self.serial

    def take(self) -> tuple[int, Buffer] | None:
        """``(index, data)`` to send now, or None."""
        data = self.held
        if (
            data is None
            or not self.credit.fits(len(data))
            or self._place + len(data) - self._written > self._unwritten_limit
        ):
            return None
        index = self.next_chunk
        self.held = None
        self.credit.spend(len(data))
        ahead = index - self.confirmed
        if ahead == len(self._ends):
            self._ends.append(self._place + len(data))
        self._place = self._ends[ahead]
        self.next_chunk += 1
        return index, data


class ReceiveStream:
    """The receiver's machine. Times are seconds of any one monotonic clock."""

    __slots__ = (
        "_advanced_at",
        "_deadline",
        "_patience_s",
        "_pending",
        "_ready",
        "_sizes",
        "_sizes_sum",
        "_stall_s",
        "_wait_s",
        "_widened_at",
        "_window_bytes",
        "chunks",
        "credit",
        "expected",
        "number",
        "round",
        "written",
    )

    def __init__(self, number: int, chunks: int, stall_s: float) -> None:
        self.number = number
        self.chunks = chunks
        self.round = -1  # -1: offered to us, not accepted
        self.expected = 0
        self.written = 0
        self.credit = Granting(0, 0)
        self._pending = 0
        self._sizes: dict[
            int, int
        ] = {}  # of chunks of which pieces are there, and that wait for others
        self._sizes_sum = 0
        self._ready: set[int] = set()  # those that are complete
        self._window_bytes = 0
        self._widened_at = 0  # the limit as of then
        self._advanced_at = 0.0
        self._deadline = math.inf
        self._stall_s = stall_s
        self._patience_s = stall_s
        self._wait_s = stall_s

    def accept(self, chunk: int, window_bytes: int, largest_chunk_bytes: int, now: float) -> None:
        """Begin at ``chunk``."""
        self.round = 0
        self.expected = chunk
        self.written = chunk
        self.credit = Granting(window_bytes, largest_chunk_bytes)
        self._window_bytes = window_bytes
        self._advanced_at = now
        self._deadline = now + self._stall_s

    def first_missing(self, kept: Container[int]) -> int:
        """The first chunk of which nothing is ``kept``: what comes after it cannot be written before that one."""
        index = self.expected
        while index in kept:
            index += 1
        return index

    def forget(self, index: int) -> None:
        """A chunk that is kept and was not written is dropped: its sender will send it again."""
        self._sizes_sum -= self._sizes.pop(index)
        self._ready.discard(index)

    def ask_again(self, now: float, *, is_for_room: bool = False) -> None:
        """Something that was sent is known to be lost: send ``accept_fields`` again. ``is_for_room``: by us, which says nothing of the line."""
        if is_for_room:
            self._advanced_at = now
            self._wait_s = self._patience_s
        self.round += 1
        self._deadline = now + self._wait_s

    def accept_fields(self) -> tuple[int, int, int, int, int]:
        """The fields of the ACCEPT that says where this stream stands."""
        return (
            self.number,
            self.round,
            self.expected,
            self.credit.received,
            self.credit.limit,
        )

    def begin(self, round_: int, index: int, size: int, now: float) -> bool:
        """A piece of chunk ``index``, which has ``size`` bytes, came: whether it is wanted."""
        if index >= self.chunks or round_ > self.round:
            raise PeerError(f"chunk {index} of {self.chunks} in round {round_} of {self.round}")
        if index < self.expected or index in self._ready:
            return False
        known = self._sizes.get(index)
        if known is None:
            if not self.credit.fits(self._sizes_sum + size):
                return False  # beyond its credit; the stall timer will set it right
            self._sizes[index] = size
            self._sizes_sum += size
        elif known != size:
            raise PeerError(f"chunk {index} has {known} bytes, and then {size}")
        waited = now - self._advanced_at
        if waited > self._stall_s and not self._pending:
            self._patience_s = max(self._patience_s, 2 * waited)
        self._wait_s = self._patience_s
        self._advanced_at = now
        self._deadline = now + self._wait_s
        return True

    def arrived(self, index: int) -> list[int]:
        """The last piece of a chunk came: the chunks that can be written now, in order."""
        self._ready.add(index)
        first = self.expected
        while self.expected in self._ready:
            self._ready.remove(self.expected)
            size = self._sizes.pop(self.expected)
            self._sizes_sum -= size
            self.credit.receive(size)
            self.expected += 1
            self._pending += 1
        return list(range(first, self.expected))

    def blocked(self, limit: int, line_window_bytes: int, window_limit_bytes: int) -> bool:
        """The next chunk is beyond ``limit``, and its sender could send it. True when the limit was raised.

        ``line_window_bytes`` is what is right for its line, as it was measured. Where that was given and is not enough, chunks wait for something else: for one that was lost.
        """
        if limit < self._widened_at:
            return False  # it has not heard of the last time
        if self.credit.pending > self._window_bytes // 4:  # everybody waits for our writer
            self._window_bytes = min(self._window_bytes, line_window_bytes)
            return False
        if line_window_bytes > self._window_bytes:
            self._window_bytes = line_window_bytes
        else:
            self._window_bytes = min(2 * self._window_bytes, window_limit_bytes)
        if not self.credit.widen(self._window_bytes):
            return False
        self._widened_at = self.credit.limit
        return True

    def wrote(self, size: int, window_limit_bytes: int, now: float) -> bool:
        """A chunk is written. True when a CREDIT should go out. The window may have to shrink to what it may be now."""
        self._pending -= 1
        self.written += 1
        if self._pending == 0:  # from here on the sender is waited for, not the writer
            self._advanced_at = now
            self._deadline = now + self._wait_s
        window_bytes = self._window_bytes = min(self._window_bytes, window_limit_bytes)
        return self.credit.consume(size, window_bytes) and self.expected < self.chunks

    def put_off(self, now: float, seconds: float) -> None:
        """What is missing is not lost: there is no room for it here. Look again in so many seconds, without less patience."""
        self._deadline = now + seconds

    @property
    def promised_bytes(self) -> int:
        """What may come, or has come and is not written yet."""
        credit = self.credit
        to_come = (self.chunks - self.expected) * credit.largest
        return credit.pending + min(credit.limit - credit.received, to_come)

    @property
    def is_complete(self) -> bool:
        """Every chunk came and is written."""
        return self.round >= 0 and self.expected == self.chunks and self._pending == 0

    def next_deadline(self) -> float:
        """When to call ``handle_timer``, or infinity."""
        if self.round < 0 or self._pending or self.expected == self.chunks:
            return math.inf  # our own writer is what everybody waits for, or nothing is missing
        return self._deadline

    def handle_timer(self, now: float) -> bool:
        """True when the stream stalled: send ``accept_fields`` again."""
        if now < self.next_deadline():
            return False
        self.round += 1
        self._wait_s = min(2 * self._wait_s, PATIENCE_LIMIT * self._patience_s)
        self._deadline = now + self._wait_s
        return True
