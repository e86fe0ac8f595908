"""The streams of one session: joins the pure machines of ``chunks.py`` with sources and sinks.

Everything runs on the loop thread. Sources and sinks may answer at once or later; answers that
come after the stream or its session is gone are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from attrs import frozen

from fsl_transport import frames
from fsl_transport.chunks import ReceiveStream, SendStream, Verdict
from fsl_transport.errors import LocalError, PeerError
from fsl_transport.events import (
    Body,
    StreamDeclined,
    StreamFailed,
    StreamOffered,
    StreamReceived,
    StreamSent,
    TransportEvent,
)
from fsl_transport.frames import Chunk, Data
from fsl_transport.link import Buffer, ChunkSink, ChunkSource
from fsl_transport.settings import TransportSettings

_CHUNK_OVERHEAD_BYTES: Final = 256
"""What keeping a chunk takes besides its payload, rather more than less."""


@frozen
class Transfer:
    """How far one stream is, for a status page. ``done`` counts chunks written by the receiver."""

    peer: str
    stream_id: str
    sending: bool
    accepted: bool
    chunks: int
    done: int


class Road(Protocol):
    """What the streams of one session need from the endpoint."""

    settings: TransportSettings
    open_streams: int
    """Streams that come in, over all sessions of the endpoint: they share the budget."""
    held_bytes: int
    """Received and not written, over all sessions."""
    early_held_bytes: int
    """Received before they were accepted, over all sessions."""

    def now(self) -> float: ...  # noqa: D102
    def emit(self, event: TransportEvent) -> None: ...  # noqa: D102
    def send_op(self, peer: Any, op: int, fields: tuple[Any, ...]) -> None: ...  # noqa: D102
    def send_chunk(self, peer: Any, head: bytes, payload: Buffer) -> None: ...  # noqa: D102
    def rearm(self, peer: Any, now: float) -> None: ...  # noqa: D102


class _Outgoing:
    __slots__ = ("gone", "machine", "pumping", "source", "stream_id")

    def __init__(self, machine: SendStream, stream_id: str, source: ChunkSource) -> None:
        self.machine = machine
        self.stream_id = stream_id
        self.source = source
        self.pumping = False
        self.gone = False


class _Incoming:
    __slots__ = ("gone", "machine", "sink", "stream_id", "writing")

    def __init__(self, machine: ReceiveStream, stream_id: str) -> None:
        self.machine = machine
        self.stream_id = stream_id
        self.sink: ChunkSink | None = None
        self.writing: dict[int, int] = {}  # index -> bytes
        self.gone = False


class Streams:
    """Both directions of one session's streams. ``peer`` is the endpoint's record of the peer."""

    __slots__ = (
        "_early",
        "_early_bytes",
        "_identity",
        "_incoming",
        "_last_number",
        "_missed",
        "_name",
        "_newest",
        "_outgoing",
        "_peer",
        "_road",
        "_settings",
        "_takes",
    )

    def __init__(self, road: Road, peer: Any, name: str, identity: bytes) -> None:
        self._road = road
        self._peer = peer
        self._name = name
        self._identity = identity
        self._settings = road.settings
        self._last_number = 0
        self._newest = 0  # number of the newest stream that was offered to us
        self._early: dict[int, list[Chunk]] = {}  # of streams that are not accepted yet
        self._early_bytes = 0  # of these
        self._missed: set[int] = set()  # of which some did not fit
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._takes: dict[int, Callable[[list[Any], float], None]] = {
            frames.OFFER: self._on_offer,
            frames.ACCEPT: self._on_accept,
            frames.DECLINE: self._on_decline,
            frames.CREDIT: self._on_credit,
            frames.DONE: self._on_done,
            frames.STOP: self._on_stop,
            frames.ABORT: self._on_abort,
        }

    # What the owner calls.

    def adopt(self, settings: TransportSettings) -> None:
        """Use other settings for streams that begin from now on."""
        self._settings = settings

    def offer(self, stream_id: str, meta: Body, source: ChunkSource, early_bytes: int = 0) -> None:
        """Offer a stream; one of the same id that is under way is stopped first."""
        old = _find(self._outgoing, stream_id)
        if old is not None:
            self._stop(old, "offered again")
        self._last_number += 1
        number = self._last_number
        chunks = source.chunks
        # One chunk more than the window, because a receiver tells what it wrote in steps.
        limit = self._settings.window_bytes + self._settings.chunk_limit_bytes
        outgoing = _Outgoing(SendStream(number, chunks, limit), stream_id, source)
        others = sum(o.machine.credit.limit for o in self._outgoing.values() if o.machine.early)
        self._outgoing[number] = outgoing
        self._road.send_op(self._peer, frames.OFFER, (number, stream_id, chunks, meta))
        early_bytes = min(early_bytes, self._settings.early_bytes - others)
        if early_bytes > 0:
            outgoing.machine.begin_early(early_bytes)
            self._pump(outgoing)

    def accept(self, stream_id: str, sink: ChunkSink, next_chunk: int) -> None:
        """Take an offered stream from ``next_chunk`` on. An id that is gone is ignored."""
        incoming = _find(self._incoming, stream_id)
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
        missed = machine.number in self._missed
        early = self._take_early(machine.number)
        window = self._window()
        if early:  # all that may be on its way must fit
            window = max(window, self._settings.early_bytes)
        machine.accept(next_chunk, window, self._settings.chunk_limit_bytes, now)
        self._road.send_op(self._peer, frames.ACCEPT, machine.accept_fields())
        for chunk in early:
            if not incoming.gone:
                self._take_chunk(incoming, chunk, now)
        if missed and not incoming.gone and not machine.is_complete:
            machine.ask_again(now)
            self._road.send_op(self._peer, frames.ACCEPT, machine.accept_fields())
        self._finish_if_complete(incoming)

    def decline(self, stream_id: str, reason: str) -> None:
        """Send an offer back, or end a stream that comes in."""
        incoming = _find(self._incoming, stream_id)
        if incoming is not None:
            self._abort(incoming, reason)

    def cancel(self, stream_id: str, reason: str) -> None:
        """End the stream of this id, whichever way it goes."""
        outgoing = _find(self._outgoing, stream_id)
        if outgoing is not None:
            self._stop(outgoing, reason)
        self.decline(stream_id, reason)

    def close(self) -> None:
        """The session is gone: forget everything."""
        for outgoing in self._outgoing.values():
            outgoing.gone = True
        for incoming in list(self._incoming.values()):
            self._forget(incoming)
        for number in list(self._early):
            self._take_early(number)
        self._outgoing.clear()

    def transfers(self) -> list[Transfer]:
        """A snapshot of all streams, oldest first, sending ones first."""
        rows = []
        for out in self._outgoing.values():
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
        """One chunk from the bulk lane. ``PeerError`` when it makes no sense."""
        incoming = self._incoming.get(chunk.stream)
        if incoming is None and chunk.stream <= self._newest:
            return  # of a stream that is over
        if incoming is None or incoming.machine.round < 0:
            self._keep_early(chunk)
        else:
            self._take_chunk(incoming, chunk, now)

    def _keep_early(self, chunk: Chunk) -> None:
        """Keep a chunk until its stream is accepted; its OFFER may still be on the way."""
        if chunk.round:
            raise PeerError(f"a chunk of round {chunk.round} of a stream that is not accepted")
        settings = self._settings
        size = len(chunk.payload) + _CHUNK_OVERHEAD_BYTES
        streams = len(self._early) + (chunk.stream not in self._early)
        # Twice: a sender that stops a stream may send as much of others before we hear of it.
        fits = (
            self._early_bytes + size <= 2 * settings.early_bytes
            and self._road.early_held_bytes + size <= settings.early_total_bytes
        )
        if fits and streams <= settings.max_streams:
            self._early.setdefault(chunk.stream, []).append(chunk)
            self._early_bytes += size
            self._road.early_held_bytes += size
        elif len(self._missed) < self._settings.max_streams:
            self._missed.add(chunk.stream)

    def _take_early(self, number: int) -> list[Chunk]:
        self._missed.discard(number)
        early = self._early.pop(number, [])
        size = sum(len(chunk.payload) + _CHUNK_OVERHEAD_BYTES for chunk in early)
        self._early_bytes -= size
        self._road.early_held_bytes -= size
        return early

    def _take_chunk(self, incoming: _Incoming, chunk: Chunk, now: float) -> None:
        size = len(chunk.payload)
        held = self._road.held_bytes
        if held and held + size > self._settings.budget_bytes:
            return  # the stall timer asks for it when there may be room
        verdict = incoming.machine.chunk(chunk.round, chunk.index, size, now)
        if verdict is Verdict.WRITE:
            index = chunk.index
            incoming.writing[index] = size
            self._road.held_bytes += size
            assert incoming.sink is not None
            incoming.sink.write(index, chunk.payload, partial(self._wrote, incoming, index))
        elif verdict is Verdict.RESUME:
            self._road.send_op(self._peer, frames.ACCEPT, incoming.machine.accept_fields())

    def next_deadline(self) -> float:
        """The earliest stall among the streams that come in."""
        return min(
            (incoming.machine.next_deadline() for incoming in self._incoming.values()),
            default=float("inf"),
        )

    def handle_timer(self, now: float) -> None:
        """Ask again for what stalled."""
        for incoming in list(self._incoming.values()):
            if incoming.machine.handle_timer(now):
                self._road.send_op(self._peer, frames.ACCEPT, incoming.machine.accept_fields())

    # Operations.

    def _on_offer(self, fields: list[Any], now: float) -> None:
        number, stream_id, chunks, meta = fields
        if number in self._incoming:
            raise PeerError(f"stream number {number} offered twice")
        self._newest = max(self._newest, number)
        if len(self._incoming) >= self._settings.max_streams:
            self._take_early(number)
            text = f"more than {self._settings.max_streams} streams at once"
            self._road.send_op(self._peer, frames.DECLINE, (number, text))
            return
        old = _find(self._incoming, stream_id)
        if old is not None:
            self._forget(old)
            self._road.emit(StreamFailed(self._name, stream_id, "offered again"))
        machine = ReceiveStream(number, chunks, self._settings.stall_s)
        self._incoming[number] = _Incoming(machine, stream_id)
        self._road.emit(StreamOffered(self._name, stream_id, meta, chunks))

    def _on_accept(self, fields: list[Any], now: float) -> None:
        number, round_, chunk, received, limit = fields
        outgoing = self._outgoing.get(number)
        if outgoing is not None:
            outgoing.machine.accept(round_, chunk, received, limit)
            self._pump(outgoing)

    def _on_decline(self, fields: list[Any], now: float) -> None:
        outgoing = self._drop_outgoing(fields[0])
        if outgoing is not None:
            self._road.emit(StreamDeclined(self._name, outgoing.stream_id, fields[1]))

    def _on_credit(self, fields: list[Any], now: float) -> None:
        number, limit, written = fields
        outgoing = self._outgoing.get(number)
        if outgoing is not None:
            outgoing.machine.grant(limit, written)
            self._pump(outgoing)

    def _on_done(self, fields: list[Any], now: float) -> None:
        outgoing = self._outgoing.get(fields[0])
        if outgoing is None:
            return
        if not outgoing.machine.is_accepted:
            raise PeerError("DONE before ACCEPT")
        self._drop_outgoing(fields[0])
        self._road.emit(StreamSent(self._name, outgoing.stream_id))

    def _on_stop(self, fields: list[Any], now: float) -> None:
        incoming = self._incoming.get(fields[0])
        if incoming is not None:
            self._forget(incoming)
            self._road.emit(StreamFailed(self._name, incoming.stream_id, fields[1]))

    def _on_abort(self, fields: list[Any], now: float) -> None:
        outgoing = self._drop_outgoing(fields[0])
        if outgoing is not None:
            self._road.emit(StreamFailed(self._name, outgoing.stream_id, fields[1]))

    # The sending side.

    def _pump(self, outgoing: _Outgoing) -> None:
        """Send and read as far as credit and source allow, without recursion."""
        if outgoing.pumping:
            return
        machine = outgoing.machine
        outgoing.pumping = True
        try:
            while not outgoing.gone:
                ready = machine.take()
                if ready is not None:
                    index, data = ready
                    head = frames.pack(
                        (frames.CHUNK, self._identity, machine.number, machine.round, index),
                        frames.TEXT_LIMIT,
                    )
                    self._road.send_chunk(self._peer, head, data)
                    continue
                wanted = machine.next_read()
                if wanted is None:
                    break
                index, serial = wanted
                outgoing.source.read(index, partial(self._delivered, outgoing, serial))
        finally:
            outgoing.pumping = False

    def _delivered(self, outgoing: _Outgoing, serial: int, data: Buffer | None) -> None:
        if outgoing.gone or not outgoing.machine.answered(serial):
            return
        if not outgoing.machine.is_current(serial):
            self._pump(outgoing)  # a reading from before a resume made place for the next one
            return
        if data is None:
            self._fail_outgoing(outgoing, "the sender could not read it")
            return
        if type(data) is memoryview and data.format != "B":
            data = data.cast("B")
        if len(data) > self._settings.chunk_limit_bytes:
            limit = self._settings.chunk_limit_bytes
            self._fail_outgoing(
                outgoing, f"a chunk of {len(data)} bytes is over the limit of {limit}"
            )
            return
        outgoing.machine.delivered(serial, data)
        self._pump(outgoing)

    def _fail_outgoing(self, outgoing: _Outgoing, reason: str) -> None:
        self._stop(outgoing, reason)
        self._road.emit(StreamFailed(self._name, outgoing.stream_id, reason))

    def _stop(self, outgoing: _Outgoing, reason: str) -> None:
        number = outgoing.machine.number
        self._drop_outgoing(number)
        self._road.send_op(self._peer, frames.STOP, (number, frames.short(reason)))

    def _drop_outgoing(self, number: int) -> _Outgoing | None:
        outgoing = self._outgoing.pop(number, None)
        if outgoing is not None:
            outgoing.gone = True
        return outgoing

    # The receiving side.

    def _wrote(self, incoming: _Incoming, index: int, ok: bool) -> None:
        size = incoming.writing.pop(index, None)
        if size is None:
            return  # told twice
        self._road.held_bytes -= size
        if incoming.gone:
            return
        if not ok:
            self._abort(incoming, "the receiver could not write it")
            reason = "it could not be written"
            self._road.emit(StreamFailed(self._name, incoming.stream_id, reason))
            return
        machine = incoming.machine
        now = self._road.now()
        if machine.wrote(size, self._window(), now):
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
        self._take_early(incoming.machine.number)
        if incoming.machine.round >= 0:
            self._road.open_streams -= 1
        self._incoming.pop(incoming.machine.number, None)

    def _window(self) -> int:
        settings = self._settings
        share = settings.budget_bytes // max(1, self._road.open_streams)
        return min(settings.window_bytes, max(settings.chunk_limit_bytes, share))


def _find(streams: dict[int, Any], stream_id: str) -> Any:
    for stream in streams.values():
        if stream.stream_id == stream_id:
            return stream
    return None
