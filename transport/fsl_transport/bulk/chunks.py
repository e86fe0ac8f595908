"""One stream of numbered chunks as two pure state machines: its sender and its receiver.

Control operations arrive reliably and in order (``session.py``). Chunks travel in pieces over
several connections, overtake each other, and may be lost and repeated. ``stripes.py`` resends what
a connection loses. These machines decide what is read from the source, what the credit covers and
in which order chunks are written, and recover what is still missing. A transfer never fails for
taking long.

Rules
  * The receiver writes chunks in order. A chunk that arrives early is kept, within the credit; one
    that is there already is dropped.
  * If nothing arrives for ``stall_s`` while no write is pending, the receiver resumes the stream:
    it sends ACCEPT again with ``round + 1``, the chunk it needs and the bytes it holds. The sender
    reads from that chunk on again. The timeout doubles each time; twice the longest wait that ended
    well becomes the new timeout, so that a slow path is not filled with retransmissions.
  * The sender reads one chunk ahead of its credit. A resume at the chunk that it is reading or
    holding does not restart that read, so that a slow source makes progress.
  * Eager (0-RTT): a sender may send the first bytes of a stream with its OFFER, before it is
    accepted, as round 0 and within ``eager_bytes`` of all its streams together. The application
    marks the streams worth it: small ones that the peer is likely to accept. The receiver keeps the
    bytes until its application accepts or declines.
  * Credit counts bytes by their position in the stream (``credit.py``).
  * The sender does not trust the receiver: whatever the credit, at most ``unwritten_limit`` bytes
    are sent and not written; at most ``READS_LIMIT`` reads are open; the receiver may neither
    confirm what was not sent nor resume at what it confirmed; and more than ``RESUMES_LIMIT``
    resumes that cost a read and brought nothing are an error of the peer.

Sender     state     event                           -> state     effect
           OFFERED   accept(chunk, limit)            -> SENDING   reads from chunk on
           OFFERED   decline                         -> (gone)    StreamDeclined
           EAGER     read delivered, eager bytes     -> EAGER     CHUNK of round 0
           EAGER     accept(0)                       -> SENDING   continues where it is
           EAGER     accept(chunk)                   -> SENDING   continues, at least at chunk
           SENDING   read delivered, credit left     -> SENDING   CHUNK
           SENDING   read delivered, no credit       -> SENDING   holds it
           SENDING   credit                          -> SENDING   held CHUNK, next read
           SENDING   accept(round + 1)               -> SENDING   goes back to chunk
           SENDING   read failed                     -> (gone)    STOP, StreamFailed
           SENDING   done                            -> (gone)    StreamSent
           any       abort                           -> (gone)    StreamFailed

Receiver   OFFERED   accept                          -> RECEIVING ACCEPT round 0
           RECEIVING piece, credit left              -> RECEIVING kept
           RECEIVING next chunk complete             -> RECEIVING writes it and those after it
           RECEIVING blocked, writer keeps up        -> RECEIVING CREDIT, wider window
           RECEIVING blocked, writer is behind       -> RECEIVING window at most the path's target
           RECEIVING stall                           -> RECEIVING ACCEPT round + 1
           RECEIVING no memory, then memory is free  -> RECEIVING ACCEPT round + 1
           RECEIVING written                         -> RECEIVING CREDIT, in steps
           RECEIVING last chunk written              -> (gone)    DONE, StreamReceived
           RECEIVING write failed                    -> (gone)    ABORT, StreamFailed
           any       stop                            -> (gone)    StreamFailed
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container
from typing import Final

from fsl_transport.bulk.credit import ReceiveCredit, SendCredit
from fsl_transport.errors import PeerError
from fsl_transport.link import Buffer

BACKOFF_LIMIT: Final = 64
"""A silent stream is resumed at least once in this many timeouts."""
READS_LIMIT: Final = 2
"""Unanswered reads of one source; all but the newest are obsolete."""
RESUMES_LIMIT: Final = 64
"""Resumes in a row that may bring the receiver nothing."""


class SendStream:
    """The sender. Call ``next_read`` and ``take`` after every input."""

    __slots__ = (
        "_ends",
        "_fruitless_resumes",
        "_offset",
        "_open_reads",
        "_resumed_to",
        "_unwritten_limit",
        "_written_bytes",
        "chunks",
        "confirmed",
        "credit",
        "held",
        "is_eager",
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
        self.confirmed = 0  # chunks that the receiver reported as written
        self.credit = SendCredit()
        self.is_eager = False  # sending, not accepted
        self.reading: int | None = None
        self.serial = 0
        self.held: Buffer | None = None
        self._unwritten_limit = unwritten_limit
        self._written_bytes = 0  # of the confirmed chunks, counted from the first accepted one
        self._offset = 0  # the same of the chunks before next_chunk
        self._ends: deque[int] = deque()  # and up to the end of each chunk sent, not confirmed
        self._open_reads: set[int] = set()
        self._resumed_to = 0
        self._fruitless_resumes = 0

    @property
    def is_accepted(self) -> bool:
        """Whether the receiver has sent ACCEPT."""
        return self.round >= 0 and not self.is_eager

    @property
    def is_blocked(self) -> bool:
        """Whether lack of credit is what prevents the next read or chunk."""
        if self.held is not None:
            return not self.credit.covers(len(self.held))
        return self.credit.left <= 0 and self.next_chunk < self.chunks and self.reading is None

    def begin_eager(self, limit: int) -> None:
        """Send up to ``limit`` bytes before the receiver accepts."""
        self.is_eager = True
        self.round = 0
        self.credit.resume(0, limit)

    def _accept_eager(self, chunk: int, received: int, limit: int) -> None:
        self.is_eager = False
        if chunk > self.chunks:
            raise PeerError(f"ACCEPT at chunk {chunk} of {self.chunks}")
        if not chunk:
            self.credit.grant(limit)
            return
        # The receiver holds the first chunks from before and drops what was sent of them. The
        # others are not sent again: cut differently in the same round, pieces would overlap.
        self.confirmed = self._resumed_to = chunk
        self.credit = SendCredit()
        if chunk <= self.next_chunk:
            ends = [self._ends.popleft() for _ in range(chunk)]
            self._ends = deque(end - ends[-1] for end in self._ends)
            self._offset -= ends[-1]
        else:
            self.next_chunk = chunk
            self._offset = 0
            self._ends.clear()
            self.held = self.reading = None
        self.credit.resume(received + self._offset, limit)

    def accept(self, round_: int, chunk: int, received: int, limit: int) -> None:
        """Start at ``chunk`` or go back to it; the receiver holds ``received`` bytes before it."""
        if self.is_eager and not round_:
            self._accept_eager(chunk, received, limit)
            return
        if self.is_eager:
            raise PeerError(f"ACCEPT of round {round_} before that of round 0")
        if round_ != self.round + 1:
            raise PeerError(f"ACCEPT of round {round_} after round {self.round}")
        if chunk > self.chunks:
            raise PeerError(f"ACCEPT at chunk {chunk} of {self.chunks}")
        if round_ == 0:
            self.confirmed = self._resumed_to = chunk
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
        self._offset = self._ends[ahead - 1] if ahead else self._written_bytes

    def _check_resume(self, chunk: int) -> None:
        """``PeerError`` for a resume that no honest receiver requests."""
        if not self.confirmed <= chunk <= self.confirmed + len(self._ends):
            raise PeerError(f"ACCEPT at chunk {chunk}, which is written or was not sent")
        if chunk > self._resumed_to:
            self._resumed_to = chunk
            self._fruitless_resumes = 0
        elif chunk != self.next_chunk:  # otherwise it costs nothing
            self._fruitless_resumes += 1
            if self._fruitless_resumes > RESUMES_LIMIT:
                raise PeerError(f"more than {RESUMES_LIMIT} resumes that brought nothing")

    def grant(self, limit: int, written: int) -> None:
        """``written`` chunks are written, and the credit rises to ``limit``."""
        if not self.is_accepted or written > self.chunks:
            raise PeerError("CREDIT before ACCEPT or beyond the last chunk")
        if written > self.confirmed + len(self._ends):
            raise PeerError("CREDIT for chunks that were not sent")
        self.credit.grant(limit)
        if written > self.confirmed:
            for _ in range(written - self.confirmed):
                self._written_bytes = self._ends.popleft()
            self.confirmed = written
            self._fruitless_resumes = 0
            if self.next_chunk < written:  # chunks to resend arrived from before the resume
                self.credit.spend(self._written_bytes - self._offset)
                self._offset = self._written_bytes
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
            or self._offset - self._written_bytes >= self._unwritten_limit
            or len(self._open_reads) >= READS_LIMIT
        ):
            return None
        self.reading = self.next_chunk
        self.serial += 1
        self._open_reads.add(self.serial)
        return self.next_chunk, self.serial

    def answered(self, serial: int) -> bool:
        """The source answered read ``serial``, with data or not. False if it already had."""
        if serial not in self._open_reads:
            return False
        self._open_reads.remove(serial)
        return True

    def delivered(self, serial: int, data: Buffer) -> None:
        """The source delivered the chunk of read ``serial``."""
        self._open_reads.discard(serial)
        if self.reading is None or serial != self.serial:
            return  # from before a resume
        self.reading = None
        self.held = data

    def is_current(self, serial: int) -> bool:
        """Whether read ``serial`` is still needed."""
        return self.reading is not None and serial == self.serial

    def take(self) -> tuple[int, Buffer] | None:
        """``(index, data)`` to send now, or None."""
        data = self.held
        if (
            data is None
            or not self.credit.covers(len(data))
            or self._offset + len(data) - self._written_bytes > self._unwritten_limit
        ):
            return None
        index = self.next_chunk
        self.held = None
        self.credit.spend(len(data))
        ahead = index - self.confirmed
        if ahead == len(self._ends):
            self._ends.append(self._offset + len(data))
        self._offset = self._ends[ahead]
        self.next_chunk += 1
        return index, data


class ReceiveStream:
    """The receiver. Times are seconds of any one monotonic clock."""

    __slots__ = (
        "_backoff_s",
        "_deadline",
        "_held",
        "_held_bytes",
        "_pending_writes",
        "_progress_at",
        "_ready",
        "_stall_s",
        "_timeout_s",
        "_widened_to",
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
        self.round = -1  # -1: offered, not accepted
        self.expected = 0
        self.written = 0
        self.credit = ReceiveCredit(0, 0)
        self._pending_writes = 0
        self._held: dict[int, int] = {}  # sizes of chunks that are incomplete or out of order
        self._held_bytes = 0
        self._ready: set[int] = set()  # those of them that are complete
        self._window_bytes = 0
        self._widened_to = 0  # the limit when the window was last widened
        self._progress_at = 0.0
        self._deadline = math.inf
        self._stall_s = stall_s
        self._timeout_s = stall_s
        self._backoff_s = stall_s

    def accept(self, chunk: int, window_bytes: int, largest_chunk_bytes: int, now: float) -> None:
        """Start at ``chunk``."""
        self.round = 0
        self.expected = chunk
        self.written = chunk
        self.credit = ReceiveCredit(window_bytes, largest_chunk_bytes)
        self._window_bytes = window_bytes
        self._progress_at = now
        self._deadline = now + self._stall_s

    def first_missing(self, kept: Container[int]) -> int:
        """First chunk of which nothing is in ``kept``. Chunks after it cannot be written yet."""
        index = self.expected
        while index in kept:
            index += 1
        return index

    def drop(self, index: int) -> None:
        """Drop a chunk that is kept and not written; its sender will send it again."""
        self._held_bytes -= self._held.pop(index)
        self._ready.discard(index)

    def resume(self, now: float, *, lacked_memory: bool = False) -> None:
        """Request again what is lost; send ``accept_fields`` afterwards.

        ``lacked_memory``: this side dropped it, so it does not count as silence of the path.
        """
        if lacked_memory:
            self._progress_at = now
            self._backoff_s = self._timeout_s
        self.round += 1
        self._deadline = now + self._backoff_s

    def accept_fields(self) -> tuple[int, int, int, int, int]:
        """Fields of the ACCEPT with this stream's state."""
        return (
            self.number,
            self.round,
            self.expected,
            self.credit.received,
            self.credit.limit,
        )

    def on_piece(self, round_: int, index: int, size: int, now: float) -> bool:
        """A piece of chunk ``index``, which has ``size`` bytes, arrived. False: drop it."""
        if index >= self.chunks or round_ > self.round:
            raise PeerError(f"chunk {index} of {self.chunks} in round {round_} of {self.round}")
        if index < self.expected or index in self._ready:
            return False
        known = self._held.get(index)
        if known is None:
            if not self.credit.covers(self._held_bytes + size):
                return False  # beyond the credit; the stall timer recovers it
            self._held[index] = size
            self._held_bytes += size
        elif known != size:
            raise PeerError(f"chunk {index} has {known} bytes, and then {size}")
        waited = now - self._progress_at
        if waited > self._stall_s and not self._pending_writes:
            self._timeout_s = max(self._timeout_s, 2 * waited)
        self._backoff_s = self._timeout_s
        self._progress_at = now
        self._deadline = now + self._backoff_s
        return True

    def on_complete(self, index: int) -> list[int]:
        """The last piece of a chunk arrived. Return the chunks to write now, in order."""
        self._ready.add(index)
        first = self.expected
        while self.expected in self._ready:
            self._ready.remove(self.expected)
            size = self._held.pop(self.expected)
            self._held_bytes -= size
            self.credit.receive(size)
            self.expected += 1
            self._pending_writes += 1
        return list(range(first, self.expected))

    def on_blocked(self, limit: int, target_bytes: int, window_limit_bytes: int) -> bool:
        """The sender has a chunk beyond ``limit`` to send. True if the limit was raised.

        ``target_bytes`` is the window that suits its path by its measurement. If that was granted
        and is not enough, chunks wait for something else: for one that was lost.
        """
        if limit < self._widened_to:
            return False  # sent before the last raise arrived
        if self.credit.pending > self._window_bytes // 4:  # the writer is the bottleneck
            self._window_bytes = min(self._window_bytes, target_bytes)
            return False
        if target_bytes > self._window_bytes:
            self._window_bytes = target_bytes
        else:
            self._window_bytes = min(2 * self._window_bytes, window_limit_bytes)
        if not self.credit.widen(self._window_bytes):
            return False
        self._widened_to = self.credit.limit
        return True

    def on_written(self, size: int, window_limit_bytes: int, now: float) -> bool:
        """A chunk is written. True if a CREDIT is due.

        ``window_limit_bytes`` may be lower than before; then the window shrinks.
        """
        self._pending_writes -= 1
        self.written += 1
        if self._pending_writes == 0:  # from now on the sender is the bottleneck
            self._progress_at = now
            self._deadline = now + self._backoff_s
        window_bytes = self._window_bytes = min(self._window_bytes, window_limit_bytes)
        return self.credit.consume(size, window_bytes) and self.expected < self.chunks

    def postpone(self, now: float, seconds: float) -> None:
        """The missing chunk was dropped here for lack of memory: check again in ``seconds``."""
        self._deadline = now + seconds

    @property
    def committed_bytes(self) -> int:
        """Bytes that may still arrive within the credit, or arrived and are not written."""
        credit = self.credit
        to_come = (self.chunks - self.expected) * credit.largest
        return credit.pending + min(credit.limit - credit.received, to_come)

    @property
    def is_complete(self) -> bool:
        """Whether every chunk arrived and is written."""
        return self.round >= 0 and self.expected == self.chunks and self._pending_writes == 0

    def next_deadline(self) -> float:
        """Return when to call ``handle_timer``, or infinity."""
        if self.round < 0 or self._pending_writes or self.expected == self.chunks:
            return math.inf  # the writer is the bottleneck, or nothing is missing
        return self._deadline

    def handle_timer(self, now: float) -> bool:
        """True if the stream stalled: send ``accept_fields``."""
        if now < self.next_deadline():
            return False
        self.round += 1
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_LIMIT * self._timeout_s)
        self._deadline = now + self._backoff_s
        return True
