"""Incoming streams of one session: joins ``chunks.ReceiveStream``, reassembly, memory and sinks.

Runs on the loop thread. A sink may answer at once or later; the memory of a chunk counts until its
sink has answered, also if its stream or session is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from fsl_transport.bulk.chunks import ReceiveStream
from fsl_transport.bulk.reassembly import AckRanges, EagerPieces, Reassembly
from fsl_transport.bulk.receive_budget import ReceiveBudget, Reservation
from fsl_transport.errors import LocalError, PeerError
from fsl_transport.events import StreamFailed, StreamOffered, StreamReceived, Transfer
from fsl_transport.link import Buffer, ChunkSink, StreamContext
from fsl_transport.session import frames
from fsl_transport.session.frames import Chunk
from fsl_transport.settings import TransportSettings

RECHECK_S: Final = 1.0
"""Seconds between checks of a stream that waits for memory."""


class Incoming:
    """One incoming stream."""

    __slots__ = (
        "complete",
        "dropped_round",
        "gone",
        "kept",
        "machine",
        "reassembly",
        "reservation",
        "sink",
        "stream_id",
        "target_bytes",
        "writing",
    )

    def __init__(self, machine: ReceiveStream, stream_id: str, target_bytes: int) -> None:
        self.machine = machine
        self.stream_id = stream_id
        self.target_bytes = target_bytes  # what its path needs in flight, by its sender
        self.sink: ChunkSink | None = None
        self.reassembly: dict[int, Reassembly] = {}
        self.complete: dict[int, Buffer] = {}  # chunks that wait for earlier ones
        self.kept: dict[int, int] = {}  # index -> bytes, of both
        self.writing: dict[int, int] = {}  # index -> bytes
        self.reservation = Reservation()
        self.dropped_round = -1  # in which something was dropped for lack of memory
        self.gone = False


class ReceivingStreams:
    """The incoming streams of one session.

    ``name`` and ``identity`` are the peer's name and the session's id; ``budget`` is the endpoint's
    memory for the streams of all sessions.
    """

    __slots__ = (
        "_ack_ranges",
        "_budget",
        "_context",
        "_eager",
        "_identity",
        "_name",
        "_newest",
        "_orphaned_bytes",
        "_settings",
        "_streams",
        "operations",
    )

    def __init__(
        self, context: StreamContext, budget: ReceiveBudget, name: str, identity: bytes
    ) -> None:
        self._context = context
        self._budget = budget
        self._name = name
        self._identity = identity
        self._settings = context.settings
        self._newest = 0  # number of the newest stream that was offered
        self._ack_ranges = AckRanges()
        self._eager = EagerPieces()
        self._orphaned_bytes = 0  # still being written for streams that are over
        self._streams: dict[int, Incoming] = {}
        self.operations: dict[int, Callable[[list[Any], float], None]] = {
            frames.OFFER: self._on_offer,
            frames.STOP: self._on_stop,
            frames.BLOCKED: self._on_blocked,
        }
        """Handlers of the operations that concern incoming streams: ``handler(fields, now)``."""

    def adopt(self, settings: TransportSettings) -> None:
        """Use other settings from now on."""
        self._settings = settings

    # Calls of the application.

    def accept(self, stream_id: str, sink: ChunkSink, next_chunk: int) -> None:
        """Accept an offered stream from ``next_chunk`` on. Ignored if the id is gone."""
        incoming = self._find(stream_id)
        if incoming is None:
            return
        machine = incoming.machine
        if machine.round >= 0:
            raise LocalError(f"stream {stream_id!r} of {self._name!r} is accepted already")
        if not 0 <= next_chunk <= machine.chunks:
            raise LocalError(
                f"stream {stream_id!r} cannot go on at chunk {next_chunk} of {machine.chunks}"
            )
        incoming.sink = sink
        self._budget.streams += 1
        now = self._context.now()
        eager, missed = self._take_eager(machine.number)
        window = self._budget.first_window(
            incoming.reservation, incoming.target_bytes, self._others_bytes(incoming)
        )
        if eager:  # the window must cover all that may be in flight
            window = max(window, self._settings.eager_bytes)
        machine.accept(next_chunk, window, self._settings.chunk_limit_bytes, now)
        self._context.send_op(frames.ACCEPT, machine.accept_fields())
        for chunk in eager:
            if not incoming.gone:
                self._take_piece(incoming, chunk, now)
        if missed and not incoming.gone and not machine.is_complete:
            machine.resume(now)
            self._context.send_op(frames.ACCEPT, machine.accept_fields())
        self._finish_if_complete(incoming)

    def decline(self, stream_id: str, reason: str) -> None:
        """Decline an offer, or abort a stream that was accepted."""
        incoming = self._find(stream_id)
        if incoming is not None:
            self._abort(incoming, reason)

    def close(self) -> None:
        """The session is gone: forget everything."""
        for incoming in list(self._streams.values()):
            self._remove(incoming)
        self._budget.eager_bytes -= self._eager.bytes
        self._eager = EagerPieces()

    def transfers(self) -> list[Transfer]:
        """Progress of all streams, oldest first."""
        return [
            Transfer(
                self._name,
                incoming.stream_id,
                sending=False,
                accepted=incoming.machine.round >= 0,
                chunks=incoming.machine.chunks,
                done=incoming.machine.written,
            )
            for incoming in self._streams.values()
        ]

    def _find(self, stream_id: str) -> Incoming | None:
        for incoming in self._streams.values():
            if incoming.stream_id == stream_id:
                return incoming
        return None

    # Pieces.

    def handle_chunk(self, chunk: Chunk, now: float) -> None:
        """Handle one piece. ``PeerError`` if it is invalid."""
        self.acknowledge(chunk.stripe, chunk.number, asks=chunk.asks)
        incoming = self._streams.get(chunk.stream)
        if incoming is not None and incoming.machine.round >= 0:
            self._take_piece(incoming, chunk, now)
        elif incoming is not None or chunk.stream > self._newest:  # otherwise its stream is over
            # Twice: a sender that stops a stream may send as much of others before STOP arrives.
            settings, budget = self._settings, self._budget
            free_bytes = min(
                2 * settings.eager_bytes - self._eager.bytes,
                settings.eager_total_bytes - budget.eager_bytes,
            )
            budget.eager_bytes += self._eager.keep(chunk, free_bytes, settings.max_streams)

    def acknowledge(self, stripe: int, number: int, *, asks: bool) -> None:
        """A piece or probe arrived: send the acknowledgements that are due."""
        for acked in self._ack_ranges.on_piece(stripe, number, asks=asks):
            head = frames.pack((frames.PIECE_ACK, self._identity, *acked), frames.TEXT_LIMIT)
            self._context.send_unreliable(head)

    def _take_eager(self, number: int) -> tuple[list[Chunk], bool]:
        before = self._eager.bytes
        found = self._eager.take(number)
        self._budget.eager_bytes -= before - self._eager.bytes
        return found

    def _take_piece(self, incoming: Incoming, chunk: Chunk, now: float) -> None:
        index = chunk.index
        budget = self._budget
        is_new = index not in incoming.kept
        if is_new and index >= incoming.machine.expected:
            if chunk.round <= incoming.dropped_round:
                return  # its sender will go back to an earlier chunk
            if not budget.admits(incoming.reservation, chunk.size) and not self._free_memory(
                incoming, chunk
            ):
                return
        if not incoming.machine.on_piece(chunk.round, index, chunk.size, now):
            return
        if is_new:
            incoming.kept[index] = chunk.size
            budget.used_bytes += chunk.size
            budget.on_chunk(incoming.reservation)
        data = chunk.payload
        if len(data) != chunk.size:
            parts = incoming.reassembly.get(index)
            if parts is None or parts.round < chunk.round:
                # In a new round the chunk is read again and may be cut differently.
                parts = incoming.reassembly[index] = Reassembly(chunk.size, chunk.round)
            elif parts.round > chunk.round:
                return
            whole = parts.add(chunk)
            if whole is None:
                return
            data = whole
        incoming.reassembly.pop(index, None)
        incoming.complete[index] = data
        self._write_ready(incoming, index)

    def _free_memory(self, incoming: Incoming, chunk: Chunk) -> bool:
        """A chunk did not fit: drop what its stream holds beyond a gap. True if it fits now.

        What follows in this round is dropped too: it can only be written after this chunk, and
        would take the memory of all streams that wait.
        """
        machine, budget = incoming.machine, self._budget
        if chunk.round < machine.round:
            return False  # its sender has gone back since
        incoming.dropped_round = machine.round
        if incoming.reservation.may_request(machine.expected):
            budget.wait(incoming.reservation, partial(self._request, incoming))
            if machine.expected not in incoming.kept:
                machine.postpone(self._context.now(), RECHECK_S)
                self._context.rearm(self._context.now())
        gap = machine.first_missing(incoming.kept)
        for index in [index for index in incoming.kept if index > gap]:
            machine.drop(index)
            budget.used_bytes -= incoming.kept.pop(index)
            incoming.reassembly.pop(index, None)
            incoming.complete.pop(index, None)
        return chunk.index <= gap and budget.admits(incoming.reservation, chunk.size)

    def _request(self, incoming: Incoming) -> bool:
        """Resume a stream at what was dropped. False if a stall has resumed it meanwhile."""
        machine = incoming.machine
        if machine.round != incoming.dropped_round:
            return False
        incoming.reservation.requested(machine.expected)
        now = self._context.now()
        machine.resume(now, lacked_memory=True)
        self._context.send_op(frames.ACCEPT, machine.accept_fields())
        self._context.rearm(now)
        return True

    def _write_ready(self, incoming: Incoming, index: int) -> None:
        for ready in incoming.machine.on_complete(index):
            data = incoming.complete.pop(ready)
            size = incoming.writing[ready] = incoming.kept.pop(ready)
            self._budget.writing_bytes += size
            assert incoming.sink is not None
            incoming.sink.write(ready, data, partial(self._wrote, incoming, ready))
            if incoming.gone:
                return

    # Timers.

    def next_deadline(self) -> float:
        """The earliest stall timeout."""
        earliest = math.inf
        for incoming in self._streams.values():
            earliest = min(earliest, incoming.machine.next_deadline())
        return earliest

    def handle_timer(self, now: float) -> None:
        """Resume the streams that stalled."""
        self._budget.handle_timer(now)
        for incoming in list(self._streams.values()):
            machine = incoming.machine
            if self._lacks_memory(incoming):
                if now >= machine.next_deadline():
                    machine.postpone(now, RECHECK_S)
            elif machine.handle_timer(now):
                self._context.send_op(frames.ACCEPT, machine.accept_fields())

    def _lacks_memory(self, incoming: Incoming) -> bool:
        """Whether the next chunk is missing because it was dropped, and still would not fit.

        False if part of that chunk is here: the rest of it was lost on the path.
        """
        machine, reservation = incoming.machine, incoming.reservation
        if machine.round != incoming.dropped_round or machine.expected in incoming.kept:
            return False
        if self._budget.is_waiting(reservation):
            return True
        return not self._budget.admits(reservation, self._settings.chunk_limit_bytes)

    # Operations of the peer.

    def _on_offer(self, fields: list[Any], now: float) -> None:
        number, stream_id, chunks, target_bytes, meta = fields
        if number in self._streams:
            raise PeerError(f"stream number {number} offered twice")
        self._newest = max(self._newest, number)
        if len(self._streams) >= self._settings.max_streams:
            self._take_eager(number)
            text = f"more than {self._settings.max_streams} streams at once"
            self._context.send_op(frames.DECLINE, (number, text))
            return
        old = self._find(stream_id)
        if old is not None:
            self._remove(old)
            self._context.emit(StreamFailed(self._name, stream_id, "offered again"))
        machine = ReceiveStream(number, chunks, self._settings.stall_s)
        self._streams[number] = Incoming(machine, stream_id, target_bytes)
        self._context.emit(StreamOffered(self._name, stream_id, meta, chunks))

    def _on_stop(self, fields: list[Any], now: float) -> None:
        incoming = self._streams.get(fields[0])
        if incoming is not None:
            self._remove(incoming)
            self._context.emit(StreamFailed(self._name, incoming.stream_id, fields[1]))

    def _on_blocked(self, fields: list[Any], now: float) -> None:
        number, limit, target_bytes = fields
        incoming = self._streams.get(number)
        if incoming is None or incoming.machine.round < 0:
            return
        machine = incoming.machine
        others_bytes = self._others_bytes(incoming)
        window_bytes = self._budget.window(target_bytes, others_bytes)
        limit_bytes = self._budget.window_limit(others_bytes)
        if machine.on_blocked(limit, window_bytes, limit_bytes):
            self._context.send_op(frames.CREDIT, (number, machine.credit.limit, machine.written))

    # Writing.

    def _wrote(self, incoming: Incoming, index: int, ok: bool) -> None:
        size = incoming.writing.pop(index, None)
        if size is None:
            return  # a repeated answer
        budget = self._budget
        budget.used_bytes -= size
        budget.writing_bytes -= size
        budget.request_next()
        if incoming.gone:
            self._orphaned_bytes -= size
            return
        if not ok:
            self._abort(incoming, "the receiver could not write it")
            reason = "it could not be written"
            self._context.emit(StreamFailed(self._name, incoming.stream_id, reason))
            return
        machine = incoming.machine
        now = self._context.now()
        if machine.on_written(size, budget.window_limit(), now):
            fields = (machine.number, machine.credit.limit, machine.written)
            self._context.send_op(frames.CREDIT, fields)
        else:
            self._context.rearm(now)
        self._finish_if_complete(incoming)

    def _others_bytes(self, incoming: Incoming) -> int:
        """Credit of the session's other streams, and bytes being written of those that are over."""
        streams = self._streams.values()
        credit = sum(one.machine.committed_bytes for one in streams if one is not incoming)
        return credit + self._orphaned_bytes

    def _finish_if_complete(self, incoming: Incoming) -> None:
        if not incoming.gone and incoming.machine.is_complete:
            self._remove(incoming)
            self._context.send_op(frames.DONE, (incoming.machine.number,))
            self._context.emit(StreamReceived(self._name, incoming.stream_id))

    def _abort(self, incoming: Incoming, reason: str) -> None:
        op = frames.DECLINE if incoming.machine.round < 0 else frames.ABORT
        self._remove(incoming)
        self._context.send_op(op, (incoming.machine.number, frames.short(reason)))

    def _remove(self, incoming: Incoming) -> None:
        incoming.gone = True
        incoming.sink = None  # what it is still writing counts until it answers
        self._orphaned_bytes += sum(incoming.writing.values())
        budget = self._budget
        budget.used_bytes -= sum(incoming.kept.values())
        incoming.kept.clear()
        incoming.reassembly.clear()
        incoming.complete.clear()
        self._take_eager(incoming.machine.number)
        if incoming.machine.round >= 0:
            budget.streams -= 1
        budget.release(incoming.reservation)
        self._streams.pop(incoming.machine.number, None)
        budget.request_next()
