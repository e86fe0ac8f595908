"""The streams of one session: joins the pure machines with sources (``outgoing.py``) and sinks (here).

Everything runs on the loop thread. Sources and sinks may answer at once or later; answers that
come after the stream or its session is gone are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from fsl_transport import frames
from fsl_transport.arrivals import Arrivals, Assembly, Early
from fsl_transport.chunks import ReceiveStream
from fsl_transport.errors import LocalError, PeerError
from fsl_transport.events import StreamFailed, StreamOffered, StreamReceived
from fsl_transport.frames import Chunk, Data, Probe
from fsl_transport.link import Buffer, ChunkSink
from fsl_transport.outgoing import Sender
from fsl_transport.road import Road, Transfer, find
from fsl_transport.stripe_count import StripeCount

EXTRA_PART: Final = 4
"""Of the budget, one part in so many is for streams that begin with more than ``window_bytes``."""


class _Incoming:
    __slots__ = (
        "assemblies",
        "complete",
        "extra_bytes",
        "gone",
        "kept",
        "line_bytes",
        "machine",
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
        self.extra_bytes = 0  # of credit that it began with
        self.short_round = -1  # in which something came that there was no room for
        self.gone = False


class Streams(Sender):
    """Both directions of one session's streams. ``peer`` is the endpoint's record of the peer."""

    __slots__ = ("_arrivals", "_early", "_incoming", "_newest", "_takes")

    def __init__(
        self, road: Road, peer: Any, name: str, identity: bytes, count: StripeCount
    ) -> None:
        super().__init__(road, peer, name, identity, count)
        self._newest = 0  # number of the newest stream that was offered to us
        self._arrivals = Arrivals()
        self._early = Early()
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
        self._road.open_streams += 1
        now = self._road.now()
        early, missed = self._take_early(machine.number)
        window = self._first_window(incoming)
        if early:  # all that may be on its way must fit
            window = max(window, self._settings.early_bytes)
        machine.accept(next_chunk, window, self._settings.chunk_limit_bytes, now)
        self._road.send_op(self._peer, frames.ACCEPT, machine.accept_fields())
        for chunk in early:
            if not incoming.gone:
                self._take_piece(incoming, chunk, now)
        if missed and not incoming.gone and not machine.is_complete:
            machine.ask_again(now)
            self._road.send_op(self._peer, frames.ACCEPT, machine.accept_fields())
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
        self._road.early_held_bytes -= self._early.bytes
        self._early = Early()
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
            settings, road = self._settings, self._road
            room = min(
                2 * settings.early_bytes - self._early.bytes,
                settings.early_total_bytes - road.early_held_bytes,
            )
            road.early_held_bytes += self._early.keep(chunk, room, settings.max_streams)

    def _take_early(self, number: int) -> tuple[list[Chunk], bool]:
        before = self._early.bytes
        found = self._early.take(number)
        self._road.early_held_bytes -= before - self._early.bytes
        return found

    def handle_probe(self, probe: Probe, now: float) -> None:
        """An empty piece: the stripe stands."""
        self._tell(self._arrivals.piece(probe.stripe, probe.number, asks=True))
        self._bulk.opened(probe.stripe, now)
        self._drain()

    def _tell(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        for told in ranges:
            head = frames.pack((frames.TAKEN, self._identity, *told), frames.TEXT_LIMIT)
            self._road.send_head(self._peer, head)

    def _take_piece(self, incoming: _Incoming, chunk: Chunk, now: float) -> None:
        index = chunk.index
        held = self._road.held_bytes
        is_new = index not in incoming.kept
        if is_new and index >= incoming.machine.expected:
            if chunk.round <= incoming.short_round:
                return  # its sender will go back to what came before it
            if held and held + chunk.size > self._settings.budget_bytes:
                incoming.short_round = incoming.machine.round
                self._road.short[incoming] = self
                return
        if not incoming.machine.begin(chunk.round, index, chunk.size, now):
            return
        if is_new:
            incoming.kept[index] = chunk.size
            self._road.held_bytes += chunk.size
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

    def _write_ready(self, incoming: _Incoming, index: int) -> None:
        for ready in incoming.machine.arrived(index):
            data = incoming.complete.pop(ready)
            incoming.writing[ready] = incoming.kept.pop(ready)
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
        for incoming in list(self._incoming.values()):
            if incoming.machine.handle_timer(now):
                self._road.send_op(self._peer, frames.ACCEPT, incoming.machine.accept_fields())
        if now >= self._bulk.next_deadline():
            for stripe, number in self._bulk.handle_timer(now):
                self._probe(stripe, number)
            self._drain()

    # Operations.

    def _on_offer(self, fields: list[Any], now: float) -> None:
        number, stream_id, chunks, line_bytes, meta = fields
        if number in self._incoming:
            raise PeerError(f"stream number {number} offered twice")
        self._newest = max(self._newest, number)
        if len(self._incoming) >= self._settings.max_streams:
            self._take_early(number)
            text = f"more than {self._settings.max_streams} streams at once"
            self._road.send_op(self._peer, frames.DECLINE, (number, text))
            return
        old = find(self._incoming, stream_id)
        if old is not None:
            self._forget(old)
            self._road.emit(StreamFailed(self._name, stream_id, "offered again"))
        machine = ReceiveStream(number, chunks, self._settings.stall_s)
        self._incoming[number] = _Incoming(machine, stream_id, line_bytes)
        self._road.emit(StreamOffered(self._name, stream_id, meta, chunks))

    def _make_use_of_room(self) -> None:
        """Something was written or given up. Ask for the oldest of what there was no room for: one stream at a time, each of which asks for the next by what it writes."""
        road = self._road
        while road.short and road.held_bytes <= self._settings.budget_bytes // 2:
            incoming = next(iter(road.short))
            if road.short.pop(incoming).ask_again(incoming):
                return

    def ask_again(self, incoming: _Incoming) -> bool:
        """There is room for what was dropped. False when it was asked for meanwhile, after a silence."""
        machine = incoming.machine
        if machine.round != incoming.short_round:
            return False
        now = self._road.now()
        machine.ask_again(now)
        self._road.send_op(self._peer, frames.ACCEPT, machine.accept_fields())
        self._road.rearm(self._peer, now)
        return True

    def _on_stop(self, fields: list[Any], now: float) -> None:
        incoming = self._incoming.get(fields[0])
        if incoming is not None:
            self._forget(incoming)
            self._road.emit(StreamFailed(self._name, incoming.stream_id, fields[1]))

    def _on_blocked(self, fields: list[Any], now: float) -> None:
        number, limit, line_bytes = fields
        incoming = self._incoming.get(number)
        if incoming is not None and incoming.machine.round >= 0:
            machine = incoming.machine
            if machine.blocked(limit, self._window(line_bytes), self._window_limit()):
                credit = (number, machine.credit.limit, machine.written)
                self._road.send_op(self._peer, frames.CREDIT, credit)

    # The receiving side.

    def _wrote(self, incoming: _Incoming, index: int, ok: bool) -> None:
        size = incoming.writing.pop(index, None)
        if size is None:
            return  # told twice
        self._road.held_bytes -= size
        self._make_use_of_room()
        if incoming.gone:
            return
        if not ok:
            self._abort(incoming, "the receiver could not write it")
            reason = "it could not be written"
            self._road.emit(StreamFailed(self._name, incoming.stream_id, reason))
            return
        machine = incoming.machine
        now = self._road.now()
        if machine.wrote(size, self._window_limit(), now):
            fields = (machine.number, machine.credit.limit, machine.written)
            self._road.send_op(self._peer, frames.CREDIT, fields)
        else:
            self._road.rearm(self._peer, now)
        self._finish_if_complete(incoming)

    def _finish_if_complete(self, incoming: _Incoming) -> None:
        if not incoming.gone and incoming.machine.is_complete:
            self._forget(incoming)
            self._road.send_op(self._peer, frames.DONE, (incoming.machine.number,))
            self._road.emit(StreamReceived(self._name, incoming.stream_id))

    def _abort(self, incoming: _Incoming, reason: str) -> None:
        op = frames.DECLINE if incoming.machine.round < 0 else frames.ABORT
        self._forget(incoming)
        self._road.send_op(self._peer, op, (incoming.machine.number, frames.short(reason)))

    def _forget(self, incoming: _Incoming) -> None:
        incoming.gone = True
        incoming.sink = None  # what it still writes stays counted until it says so
        self._road.held_bytes -= sum(incoming.kept.values())
        incoming.kept.clear()
        incoming.assemblies.clear()
        incoming.complete.clear()
        self._take_early(incoming.machine.number)
        if incoming.machine.round >= 0:
            self._road.open_streams -= 1
        self._road.extra_bytes -= incoming.extra_bytes
        self._road.short.pop(incoming, None)
        self._incoming.pop(incoming.machine.number, None)
        self._make_use_of_room()

    def _first_window(self, incoming: _Incoming) -> int:
        """What a stream begins with, when nothing is known of its writer. Limits that were told stay, so what streams that begin together get for their lines has a limit of its own."""
        road, settings = self._road, self._settings
        least = min(settings.window_bytes, self._window_limit())
        left = settings.budget_bytes // EXTRA_PART - road.extra_bytes
        extra = max(0, min(self._window(incoming.line_bytes) - least, left))
        incoming.extra_bytes = extra
        road.extra_bytes += extra
        return least + extra

    def _window(self, line_bytes: int) -> int:
        """The credit for a line that needs so much under way: that twice, since what waits for a piece that was lost is not under way any more."""
        return min(max(self._settings.window_bytes, 2 * line_bytes), self._window_limit())

    def _window_limit(self) -> int:
        """What a window may be now: all that come in share the budget."""
        settings = self._settings
        share = settings.budget_bytes // max(1, self._road.open_streams)
        return min(settings.window_limit_bytes, max(settings.chunk_limit_bytes, share))
