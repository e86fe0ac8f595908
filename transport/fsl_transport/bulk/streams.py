"""The streams of one session: joins the pure machines with sources (``outgoing.py``) and sinks (here).

Everything runs on the loop thread. Sources and sinks may answer at once or later; answers that
come after the stream or its session is gone are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from fsl_transport.bulk.chunks import ReceiveStream
from fsl_transport.bulk.outgoing import Sender
from fsl_transport.bulk.parallelism import Parallelism
from fsl_transport.bulk.reassembly import Arrivals, Assembly, EagerChunks
from fsl_transport.bulk.receive_budget import Reservation
from fsl_transport.bulk.stream_context import StreamContext, Transfer, find
from fsl_transport.errors import LocalError, PeerError
from fsl_transport.events import StreamFailed, StreamOffered, StreamReceived
from fsl_transport.link import Buffer, ChunkSink
from fsl_transport.session import frames
from fsl_transport.session.frames import Chunk, Data, Probe

LOOK_AGAIN_S: Final = 1.0
"""A stream that waits for room looks whether there is some, should nobody tell it."""


class _Incoming:
    __slots__ = (
        "assemblies",
        "complete",
        "gone",
        "kept",
        "line_bytes",
        "machine",
        "reservation",
        "short_round",
        "sink",
        "stream_id",
        "writing",
    )

    def __init__(self, machine: ReceiveStream, stream_id: str, line_bytes: int) -> None:
        self.machine = machine
        self.stream_id = stream_id
        self.line_bytes = line_bytes  # what its sender may have under way, as it measured
        self.sink: ChunkSink | None = None
        self.assemblies: dict[int, Assembly] = {}
        self.complete: dict[int, Buffer] = {}  # whole chunks that wait for those before them
        self.kept: dict[int, int] = {}  # index -> bytes, of both
        self.writing: dict[int, int] = {}  # index -> bytes
        self.reservation = Reservation()
        self.short_round = -1  # in which something came that there was no room for
        self.gone = False


class Streams(Sender):
    """Both directions of one session's streams. ``peer`` is the endpoint's record of the peer."""

    __slots__ = ("_arrivals", "_eager", "_incoming", "_left_bytes", "_newest", "_takes")

    def __init__(
        self, context: StreamContext, peer: Any, name: str, identity: bytes, count: Parallelism
    ) -> None:
        super().__init__(context, peer, name, identity, count)
        self._newest = 0  # number of the newest stream that was offered to us
        self._arrivals = Arrivals()
        self._eager = EagerChunks()
        self._left_bytes = 0  # that writers have, of streams that are over
        self._incoming: dict[int, _Incoming] = {}
        self._takes: dict[int, Callable[[list[Any], float], None]] = {
            frames.OFFER: self._on_offer,
            frames.ACCEPT: self._on_accept,
            frames.DECLINE: self._on_decline,
            frames.CREDIT: self._on_credit,
            frames.DONE: self._on_done,
            frames.STOP: self._on_stop,
            frames.ABORT: self._on_abort,
            frames.BLOCKED: self._on_blocked,
            frames.STRIPES: self._on_stripes,
        }

    # What the owner calls.

    def accept(self, stream_id: str, sink: ChunkSink, next_chunk: int) -> None:
        """Take an offered stream from ``next_chunk`` on. An id that is gone is ignored."""
        incoming = find(self._incoming, stream_id)
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
        self._context.receive_budget.streams += 1
        now = self._context.now()
        eager, missed = self._take_eager(machine.number)
        window = self._context.receive_budget.first_window(
            self._settings, incoming.line_bytes, self._others_bytes(incoming), incoming.reservation
        )
        if eager:  # all that may be on its way must fit
            window = max(window, self._settings.eager_bytes)
        machine.accept(next_chunk, window, self._settings.chunk_limit_bytes, now)
        self._context.send_op(self._peer, frames.ACCEPT, machine.accept_fields())
        for chunk in eager:
            if not incoming.gone:
                self._take_piece(incoming, chunk, now)
        if missed and not incoming.gone and not machine.is_complete:
            machine.ask_again(now)
            self._context.send_op(self._peer, frames.ACCEPT, machine.accept_fields())
        self._finish_if_complete(incoming)

    def decline(self, stream_id: str, reason: str) -> None:
        """Send an offer back, or end a stream that comes in."""
        incoming = find(self._incoming, stream_id)
        if incoming is not None:
            self._abort(incoming, reason)

    def cancel(self, stream_id: str, reason: str) -> None:
        """End the stream of this id, whichever way it goes."""
        outgoing = find(self._outgoing, stream_id)
        if outgoing is not None:
            self._stop(outgoing, reason)
        self.decline(stream_id, reason)

    def close(self) -> None:
        """The session is gone: forget everything."""
        for outgoing in self._outgoing.values():
            outgoing.gone = True
        for incoming in list(self._incoming.values()):
            self._forget(incoming)
        self._context.early_held_bytes -= self._eager.bytes
        self._eager = EagerChunks()
        self._outgoing.clear()

    def transfers(self) -> list[Transfer]:
        """A snapshot of all streams, oldest first, sending ones first."""
        rows = []
        for _, out in sorted(self._outgoing.items()):
            sending = out.machine
            rows.append(
                Transfer(
                    self._name,
                    out.stream_id,
                    sending=True,
                    accepted=sending.is_accepted,
                    chunks=sending.chunks,
                    done=sending.confirmed,
                )
            )
        for incoming in self._incoming.values():
            taking = incoming.machine
            rows.append(
                Transfer(
                    self._name,
                    incoming.stream_id,
                    sending=False,
                    accepted=taking.round >= 0,
                    chunks=taking.chunks,
                    done=taking.written,
                )
            )
        return rows

    # What the network brings.

    def handle(self, data: Data, now: float) -> None:
        """One stream operation from the control lane. ``PeerError`` when it makes no sense."""
        self._takes[data.op](data.fields, now)

    def handle_chunk(self, chunk: Chunk, now: float) -> None:
        """One piece from the bulk lane. ``PeerError`` when it makes no sense."""
        self._tell(self._arrivals.piece(chunk.stripe, chunk.number, asks=chunk.asks))
        incoming = self._incoming.get(chunk.stream)
        if incoming is not None and incoming.machine.round >= 0:
            self._take_piece(incoming, chunk, now)
        elif incoming is not None or chunk.stream > self._newest:  # else of a stream that is over
            # Twice: a sender that stops a stream may send as much of others before we hear of it.
            settings, context = self._settings, self._context
            receive_budget = min(
                2 * settings.eager_bytes - self._eager.bytes,
                settings.eager_total_bytes - context.early_held_bytes,
            )
            context.early_held_bytes += self._eager.keep(
                chunk, receive_budget, settings.max_streams
            )

    def _take_eager(self, number: int) -> tuple[list[Chunk], bool]:
        before = self._eager.bytes
        found = self._eager.take(number)
        self._context.early_held_bytes -= before - self._eager.bytes
        return found

    def handle_probe(self, probe: Probe, now: float) -> None:
        """An empty piece: the stripe stands."""
        self._tell(self._arrivals.piece(probe.stripe, probe.number, asks=True))
        self._bulk.opened(probe.stripe, now)
        self._drain()

    def _tell(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        for told in ranges:
            head = frames.pack((frames.TAKEN, self._identity, *told), frames.TEXT_LIMIT)
            self._context.send_head(self._peer, head)

    def _take_piece(self, incoming: _Incoming, chunk: Chunk, now: float) -> None:
        index = chunk.index
        receive_budget = self._context.receive_budget
        is_new = index not in incoming.kept
        if is_new and index >= incoming.machine.expected:
            if chunk.round <= incoming.short_round:
                return  # its sender will go back to what came before it
            if not receive_budget.fits(
                self._settings, chunk.size, incoming
            ) and not self._make_room(incoming, chunk):
                return
        if not incoming.machine.begin(chunk.round, index, chunk.size, now):
            return
        if is_new:
            incoming.kept[index] = chunk.size
            receive_budget.taken_bytes += chunk.size
            receive_budget.came(incoming)
        data = chunk.payload
        if len(data) != chunk.size:
            assembly = incoming.assemblies.get(index)
            if assembly is None or assembly.round < chunk.round:
                # It was read again and may be cut otherwise.
                assembly = incoming.assemblies[index] = Assembly(chunk.size, chunk.round)
            elif assembly.round > chunk.round:
                return
            whole = assembly.add(chunk)
            if whole is None:
                return
            data = whole
        incoming.assemblies.pop(index, None)
        incoming.complete[index] = data
        self._write_ready(incoming, index)

    def _make_room(self, incoming: _Incoming, chunk: Chunk) -> bool:
        """A chunk did not fit. What is kept of its stream beyond a gap, and what comes after it in this round, is dropped: it could only be written after it, and would take the room of all who wait. Whether it fits now."""
        machine, receive_budget = incoming.machine, self._context.receive_budget
        if chunk.round < machine.round:
            return False  # its sender has gone back since
        incoming.short_round = machine.round
        if incoming.reservation.is_worth_asking(machine.expected):
            receive_budget.wait(incoming, partial(self._ask_for, incoming))
            if machine.expected not in incoming.kept:
                machine.put_off(self._context.now(), LOOK_AGAIN_S)
                self._context.rearm(self._peer, self._context.now())
        gap = machine.first_missing(incoming.kept)
        for index in [index for index in incoming.kept if index > gap]:
            machine.forget(index)
            receive_budget.taken_bytes -= incoming.kept.pop(index)
            incoming.assemblies.pop(index, None)
            incoming.complete.pop(index, None)
        return chunk.index <= gap and receive_budget.fits(self._settings, chunk.size, incoming)

    def _write_ready(self, incoming: _Incoming, index: int) -> None:
        for ready in incoming.machine.arrived(index):
            data = incoming.complete.pop(ready)
            size = incoming.writing[ready] = incoming.kept.pop(ready)
            self._context.receive_budget.writing_bytes += size
            assert incoming.sink is not None
            incoming.sink.write(ready, data, partial(self._wrote, incoming, ready))
            if incoming.gone:
                return

    def next_deadline(self) -> float:
        """The earliest stall among the streams that come in and the stripes that go out."""
        earliest = self._bulk.next_deadline()
        for incoming in self._incoming.values():
            earliest = min(earliest, incoming.machine.next_deadline())
        return earliest

    def handle_timer(self, now: float) -> None:
        """Ask again for what stalled."""
        receive_budget = self._context.receive_budget
        receive_budget.look(self._settings, now)
        for incoming in list(self._incoming.values()):
            machine = incoming.machine
            if self._is_short(incoming):
                if now >= machine.next_deadline():
                    machine.put_off(now, LOOK_AGAIN_S)
            elif machine.handle_timer(now):
                self._context.send_op(self._peer, frames.ACCEPT, incoming.machine.accept_fields())
        if now >= self._bulk.next_deadline():
            for stripe, number in self._bulk.handle_timer(now):
                self._probe(stripe, number)
            self._drain()

    def _is_short(self, incoming: _Incoming) -> bool:
        """Whether the chunk that is missing is missing for want of room, which there still is not. A part of it that is lost on its way is not."""
        machine, receive_budget = incoming.machine, self._context.receive_budget
        if machine.round != incoming.short_round or machine.expected in incoming.kept:
            return False
        largest = self._settings.chunk_limit_bytes
        return receive_budget.has_waiting(incoming) or not receive_budget.fits(
            self._settings, largest, incoming
        )

    # Operations.

    def _on_offer(self, fields: list[Any], now: float) -> None:
        number, stream_id, chunks, line_bytes, meta = fields
        if number in self._incoming:
            raise PeerError(f"stream number {number} offered twice")
        self._newest = max(self._newest, number)
        if len(self._incoming) >= self._settings.max_streams:
            self._take_eager(number)
            text = f"more than {self._settings.max_streams} streams at once"
            self._context.send_op(self._peer, frames.DECLINE, (number, text))
            return
        old = find(self._incoming, stream_id)
        if old is not None:
            self._forget(old)
            self._context.emit(StreamFailed(self._name, stream_id, "offered again"))
        machine = ReceiveStream(number, chunks, self._settings.stall_s)
        self._incoming[number] = _Incoming(machine, stream_id, line_bytes)
        self._context.emit(StreamOffered(self._name, stream_id, meta, chunks))

    def _ask_for(self, incoming: _Incoming) -> bool:
        """There is room for what was dropped. False when it was asked for meanwhile, after a silence."""
        machine = incoming.machine
        if machine.round != incoming.short_round:
            return False
        incoming.reservation.asked(machine.expected)
        now = self._context.now()
        machine.ask_again(now, is_for_room=True)
        self._context.send_op(self._peer, frames.ACCEPT, machine.accept_fields())
        self._context.rearm(self._peer, now)
        return True

    def _on_stop(self, fields: list[Any], now: float) -> None:
        incoming = self._incoming.get(fields[0])
        if incoming is not None:
            self._forget(incoming)
            self._context.emit(StreamFailed(self._name, incoming.stream_id, fields[1]))

    def _on_blocked(self, fields: list[Any], now: float) -> None:
        number, limit, line_bytes = fields
        incoming = self._incoming.get(number)
        if incoming is not None and incoming.machine.round >= 0:
            machine = incoming.machine
            receive_budget = self._context.receive_budget
            others_bytes = self._others_bytes(incoming)
            needs = receive_budget.window(self._settings, line_bytes, others_bytes)
            limit_bytes = receive_budget.window_limit(self._settings, others_bytes)
            if machine.blocked(limit, needs, limit_bytes):
                credit = (number, machine.credit.limit, machine.written)
                self._context.send_op(self._peer, frames.CREDIT, credit)

    # The receiving side.

    def _wrote(self, incoming: _Incoming, index: int, ok: bool) -> None:
        size = incoming.writing.pop(index, None)
        if size is None:
            return  # told twice
        receive_budget = self._context.receive_budget
        receive_budget.taken_bytes -= size
        receive_budget.writing_bytes -= size
        receive_budget.use(self._settings)
        if incoming.gone:
            self._left_bytes -= size
            return
        if not ok:
            self._abort(incoming, "the receiver could not write it")
            reason = "it could not be written"
            self._context.emit(StreamFailed(self._name, incoming.stream_id, reason))
            return
        machine = incoming.machine
        now = self._context.now()
        if machine.wrote(size, receive_budget.window_limit(self._settings), now):
            fields = (machine.number, machine.credit.limit, machine.written)
            self._context.send_op(self._peer, frames.CREDIT, fields)
        else:
            self._context.rearm(self._peer, now)
        self._finish_if_complete(incoming)

    def _others_bytes(self, incoming: _Incoming) -> int:
        """Credit of all other streams that come in, and what is still being written of such as are over."""
        streams = self._incoming.values()
        promised = sum(one.machine.promised_bytes for one in streams if one is not incoming)
        return promised + self._left_bytes

    def _finish_if_complete(self, incoming: _Incoming) -> None:
        if not incoming.gone and incoming.machine.is_complete:
            self._forget(incoming)
            self._context.send_op(self._peer, frames.DONE, (incoming.machine.number,))
            self._context.emit(StreamReceived(self._name, incoming.stream_id))

    def _abort(self, incoming: _Incoming, reason: str) -> None:
        op = frames.DECLINE if incoming.machine.round < 0 else frames.ABORT
        self._forget(incoming)
        self._context.send_op(self._peer, op, (incoming.machine.number, frames.short(reason)))

    def _forget(self, incoming: _Incoming) -> None:
        incoming.gone = True
        incoming.sink = None  # what it still writes stays counted until it says so
        self._left_bytes += sum(incoming.writing.values())
        receive_budget = self._context.receive_budget
        receive_budget.taken_bytes -= sum(incoming.kept.values())
        incoming.kept.clear()
        incoming.assemblies.clear()
        incoming.complete.clear()
        self._take_eager(incoming.machine.number)
        if incoming.machine.round >= 0:
            receive_budget.streams -= 1
        receive_budget.leave(incoming, incoming.reservation)
        self._incoming.pop(incoming.machine.number, None)
        receive_budget.use(self._settings)
