"""Outgoing streams of one session: joins ``chunks.SendStream``, ``stripes.py`` and sources.

Runs on the loop thread. A source may answer at once or later; an answer that arrives after its
stream or session is gone is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict

from fsl_transport.bulk.chunks import SendStream
from fsl_transport.bulk.credit import STEP_LIMIT_BYTES
from fsl_transport.bulk.parallelism import Parallelism
from fsl_transport.bulk.stripes import BulkSender
from fsl_transport.errors import PeerError
from fsl_transport.events import Body, StreamDeclined, StreamFailed, StreamSent, Transfer
from fsl_transport.link import Buffer, ChunkSource, StreamContext
from fsl_transport.session import frames
from fsl_transport.session.frames import PieceAck
from fsl_transport.settings import TransportSettings


class Outgoing:
    """One outgoing stream."""

    __slots__ = ("blocked_at", "gone", "machine", "pumping", "source", "stream_id")

    def __init__(self, machine: SendStream, stream_id: str, source: ChunkSource) -> None:
        self.machine = machine
        self.stream_id = stream_id
        self.source = source
        self.blocked_at = -1  # the limit of the last BLOCKED
        self.pumping = False
        self.gone = False


class _BulkLimits(TypedDict):
    min_probe_timeout_s: float
    piece_limit: int
    window_limit: int


def _bulk_limits(settings: TransportSettings) -> _BulkLimits:
    return {
        "min_probe_timeout_s": settings.stall_s / 20,
        "piece_limit": settings.chunk_limit_bytes,
        "window_limit": settings.window_limit_bytes,
    }


class SendingStreams:
    """The outgoing streams of one session, and the stripes that they share.

    ``name`` and ``identity`` are the peer's name and the session's id. ``parallelism`` is what was
    found out about the path by earlier sessions.
    """

    __slots__ = (
        "_announced",
        "_bulk",
        "_context",
        "_draining",
        "_identity",
        "_last_number",
        "_name",
        "_parallelism",
        "_settings",
        "_streams",
        "operations",
    )

    def __init__(
        self, context: StreamContext, name: str, identity: bytes, parallelism: Parallelism
    ) -> None:
        self._context = context
        self._name = name
        self._identity = identity
        self._settings = context.settings
        self._last_number = 0
        self._streams: dict[int, Outgoing] = {}
        self._bulk = BulkSender(**_bulk_limits(self._settings))
        self._parallelism = parallelism
        self._announced = 1  # stripes that the peer knows of
        self._draining = False
        parallelism.begin_session()
        self.operations: dict[int, Callable[[list[Any], float], None]] = {
            frames.ACCEPT: self._on_accept,
            frames.DECLINE: self._on_decline,
            frames.CREDIT: self._on_credit,
            frames.DONE: self._on_done,
            frames.ABORT: self._on_abort,
            frames.STRIPES: self._on_stripes,
        }
        """Handlers of the operations that concern outgoing streams: ``handler(fields, now)``."""

    def adopt(self, settings: TransportSettings) -> None:
        """Use other settings: for the stripes now, for streams offered from now on."""
        self._settings = settings
        self._bulk.set_limits(**_bulk_limits(settings))

    # Calls of the application.

    def offer(self, stream_id: str, meta: Body, source: ChunkSource, eager_bytes: int = 0) -> None:
        """Offer a stream. A stream of the same id that is not finished is stopped first."""
        old = self._find(stream_id)
        if old is not None:
            self._stop(old, "offered again")
        self._last_number += 1
        number = self._last_number
        chunks = source.chunks
        # The receiver reports written chunks in steps that follow its own settings. The sender must
        # allow for the largest step, or both sides would wait.
        window = max(self._settings.window_limit_bytes, STEP_LIMIT_BYTES)
        limit = window + self._settings.chunk_limit_bytes
        outgoing = Outgoing(SendStream(number, chunks, limit), stream_id, source)
        streams = self._streams.values()
        others = sum(one.machine.credit.limit for one in streams if one.machine.is_eager)
        self._streams[number] = outgoing
        self._use_stripes()
        target = self._bulk.congestion_window.target
        self._context.send_op(frames.OFFER, (number, stream_id, chunks, target, meta))
        eager_bytes = min(eager_bytes, self._settings.eager_bytes - others)
        if eager_bytes > 0:
            outgoing.machine.begin_eager(eager_bytes)
            self._pump(outgoing)

    def cancel(self, stream_id: str, reason: str) -> None:
        """Stop the stream of this id, if there is one."""
        outgoing = self._find(stream_id)
        if outgoing is not None:
            self._stop(outgoing, reason)

    def close(self) -> None:
        """The session is gone: forget everything."""
        for outgoing in self._streams.values():
            outgoing.gone = True
        self._streams.clear()

    def transfers(self) -> list[Transfer]:
        """Progress of all streams, oldest first."""
        return [
            Transfer(
                self._name,
                outgoing.stream_id,
                sending=True,
                accepted=outgoing.machine.is_accepted,
                chunks=outgoing.machine.chunks,
                done=outgoing.machine.confirmed,
            )
            for _, outgoing in sorted(self._streams.items())
        ]

    def _find(self, stream_id: str) -> Outgoing | None:
        for outgoing in self._streams.values():
            if outgoing.stream_id == stream_id:
                return outgoing
        return None

    # Acknowledgements and timers of the stripes.

    def handle_ack(self, ack: PieceAck, now: float) -> None:
        """Pieces arrived. ``PeerError`` if they were not sent."""
        self._bulk.on_ack(ack.stripe, ack.first, ack.last, now)
        self._drain()
        if self._bulk.is_busy:
            self._measure(now)
        elif self._parallelism.start(self._bulk.delivered, self._bulk.rtt_s):
            self._use_stripes()

    def handle_probe(self, stripe: int, now: float) -> None:
        """The peer probed a stripe: it is open."""
        self._bulk.opened(stripe, now)
        self._drain()

    def next_deadline(self) -> float:
        """The earliest probe timeout of the stripes."""
        return self._bulk.next_deadline()

    def handle_timer(self, now: float) -> None:
        """Probe the stripes whose timeout expired."""
        if now >= self._bulk.next_deadline():
            for stripe, number in self._bulk.handle_timer(now):
                self._probe(stripe, number)
            self._drain()

    # Operations of the peer.

    def _on_accept(self, fields: list[Any], now: float) -> None:
        number, round_, chunk, received, limit = fields
        outgoing = self._streams.get(number)
        if outgoing is not None:
            if round_:  # a resume: chunks are read again
                self._bulk.forget(number)
            outgoing.machine.accept(round_, chunk, received, limit)
            self._pump(outgoing)

    def _on_decline(self, fields: list[Any], now: float) -> None:
        outgoing = self._remove(fields[0])
        if outgoing is not None:
            self._context.emit(StreamDeclined(self._name, outgoing.stream_id, fields[1]))

    def _on_credit(self, fields: list[Any], now: float) -> None:
        number, limit, written = fields
        outgoing = self._streams.get(number)
        if outgoing is not None:
            outgoing.machine.grant(limit, written)
            self._pump(outgoing)

    def _on_done(self, fields: list[Any], now: float) -> None:
        outgoing = self._streams.get(fields[0])
        if outgoing is None:
            return
        if not outgoing.machine.is_accepted:
            raise PeerError("DONE before ACCEPT")
        self._remove(fields[0])
        self._context.emit(StreamSent(self._name, outgoing.stream_id))

    def _on_abort(self, fields: list[Any], now: float) -> None:
        outgoing = self._remove(fields[0])
        if outgoing is not None:
            self._context.emit(StreamFailed(self._name, outgoing.stream_id, fields[1]))

    def _on_stripes(self, fields: list[Any], now: float) -> None:
        self._announce(fields[0])

    # The number of stripes.

    def _use_stripes(self) -> None:
        """Use as many stripes as ``Parallelism`` found useful; open those that are missing."""
        self._bulk.count = self._parallelism.count
        if self._bulk.count > self._announced and not self._announce(self._bulk.count):
            self._announced = self._bulk.count
            self._context.send_op(frames.STRIPES, (self._bulk.count,))

    def _announce(self, count: int) -> bool:
        """Open connections and probe each one. False where the peer opens connections."""
        count = min(count, self._settings.stripes_limit)
        if not self._context.open_stripes(count):
            return False
        now = self._context.now()
        while self._announced < count:
            self._probe(self._announced, self._bulk.probe(self._announced, now))
            self._announced += 1
        self._context.rearm(now)
        return True

    def _probe(self, stripe: int, number: int) -> None:
        head = frames.pack((frames.PROBE, self._identity, stripe, number), frames.TEXT_LIMIT)
        self._context.send_bulk(stripe, (head,))

    def _measure(self, now: float) -> None:
        bulk = self._bulk
        if self._parallelism.update(
            now,
            bulk.delivered,
            open_count=bulk.open_count,
            rtt_s=bulk.rtt_s,
            useful=bulk.congestion_window.connections,
        ):
            self._use_stripes()
            self._drain()

    # Reading and sending.

    def _pump(self, outgoing: Outgoing) -> None:
        """Read and queue as far as credit, source and stripes allow, without recursion; send."""
        if outgoing.pumping:
            return
        machine = outgoing.machine
        outgoing.pumping = True
        try:
            while not outgoing.gone:
                if machine.held is not None:
                    if not self._bulk.takes_chunks:
                        self._send(more=True)
                        if not self._bulk.takes_chunks:
                            break
                    ready = machine.take()
                    if ready is None:
                        if machine.is_blocked:
                            self._report_blocked(outgoing)
                        break
                    self._bulk.add(machine.number, machine.round, *ready, machine.chunks)
                    # Round robin: other streams come before the next chunk of this one.
                    self._streams[machine.number] = self._streams.pop(machine.number)
                wanted = machine.next_read()
                if wanted is None:
                    if machine.is_blocked:
                        self._report_blocked(outgoing)
                    break
                index, serial = wanted
                outgoing.source.read(index, partial(self._delivered, outgoing, serial))
        finally:
            outgoing.pumping = False
        self._send()

    def _report_blocked(self, outgoing: Outgoing) -> None:
        machine = outgoing.machine
        limit = machine.credit.limit
        if machine.is_accepted and limit > outgoing.blocked_at:
            outgoing.blocked_at = limit
            fields = (machine.number, limit, self._bulk.congestion_window.target)
            self._context.send_op(frames.BLOCKED, fields)

    def _drain(self) -> None:
        """Windows may be free: send what waits, and let the streams queue more."""
        if self._draining:
            return
        self._draining = True
        try:
            self._send()
            for outgoing in list(self._streams.values()):
                if not self._bulk.takes_chunks:
                    break
                self._pump(outgoing)
        finally:
            self._draining = False

    def _send(self, *, more: bool = False) -> None:
        """Send pieces as far as windows allow.

        ``more``: other chunks follow, so the last one, whose last piece asks, stays queued.
        """
        bulk, now = self._bulk, self._context.now()
        sent = False
        while (found := bulk.next(now, more=more)) is not None:
            stripe, number, asks, piece = found
            head = frames.pack(
                (
                    frames.CHUNK,
                    self._identity,
                    piece.stream,
                    piece.round,
                    piece.index,
                    piece.offset,
                    piece.size,
                    stripe,
                    number,
                    asks,
                ),
                frames.TEXT_LIMIT,
            )
            self._context.send_bulk(stripe, (head, piece.data))
            sent = True
        if not bulk.is_busy and not more:
            self._parallelism.on_idle(now)
        if sent:
            self._context.rearm(now)

    def _delivered(self, outgoing: Outgoing, serial: int, data: Buffer | None) -> None:
        if outgoing.gone or not outgoing.machine.answered(serial):
            return
        if not outgoing.machine.is_current(serial):
            self._pump(outgoing)  # a read from before a resume ended, so another one may start
            return
        if data is None:
            self._fail(outgoing, "the sender could not read it")
            return
        if type(data) is memoryview and data.format != "B":
            data = data.cast("B")
        limit = self._settings.chunk_limit_bytes
        if len(data) > limit:
            self._fail(outgoing, f"a chunk of {len(data)} bytes is over the limit of {limit}")
            return
        outgoing.machine.delivered(serial, data)
        self._pump(outgoing)

    def _fail(self, outgoing: Outgoing, reason: str) -> None:
        self._stop(outgoing, reason)
        self._context.emit(StreamFailed(self._name, outgoing.stream_id, reason))

    def _stop(self, outgoing: Outgoing, reason: str) -> None:
        number = outgoing.machine.number
        self._remove(number)
        self._context.send_op(frames.STOP, (number, frames.short(reason)))

    def _remove(self, number: int) -> Outgoing | None:
        outgoing = self._streams.pop(number, None)
        if outgoing is not None:
            outgoing.gone = True
            self._bulk.forget(number)
        return outgoing
