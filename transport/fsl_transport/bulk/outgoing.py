"""The streams of one session that go out, and the stripes that they share: the machines of ``chunks.py`` and ``stripes.py`` with sources."""

from __future__ import annotations

from functools import partial
from typing import Any, TypedDict

from fsl_transport.bulk.chunks import SendStream
from fsl_transport.bulk.credit import STEP_LIMIT_BYTES
from fsl_transport.bulk.parallelism import Parallelism
from fsl_transport.bulk.stream_context import StreamContext, find
from fsl_transport.bulk.stripes import BulkSender
from fsl_transport.errors import PeerError
from fsl_transport.events import Body, StreamDeclined, StreamFailed, StreamSent
from fsl_transport.link import Buffer, ChunkSource
from fsl_transport.session import frames
from fsl_transport.session.frames import Taken
from fsl_transport.settings import TransportSettings


class Outgoing:
    """One stream."""

    __slots__ = ("blocked_at", "gone", "machine", "pumping", "source", "stream_id")

    def __init__(self, machine: SendStream, stream_id: str, source: ChunkSource) -> None:
        self.machine = machine
        self.stream_id = stream_id
        self.source = source
        self.blocked_at = -1  # the limit at which the receiver was told so
        self.pumping = False
        self.gone = False


class _BulkLimits(TypedDict):
    patience_s: float
    piece_limit: int
    window_limit: int


def _bulk_limits(settings: TransportSettings) -> _BulkLimits:
    return {
        "patience_s": settings.stall_s / 20,
        "piece_limit": settings.chunk_limit_bytes,
        "window_limit": settings.window_limit_bytes,
    }


class Sender:
    """The sending direction of one session. ``peer`` is the endpoint's record of the peer."""

    __slots__ = (
        "_announced",
        "_bulk",
        "_context",
        "_count",
        "_draining",
        "_identity",
        "_last_number",
        "_name",
        "_outgoing",
        "_peer",
        "_settings",
    )

    def __init__(
        self, context: StreamContext, peer: Any, name: str, identity: bytes, count: Parallelism
    ) -> None:
        self._context = context
        self._peer = peer
        self._name = name
        self._identity = identity
        self._settings: TransportSettings = context.settings
        self._last_number = 0
        self._outgoing: dict[int, Outgoing] = {}
        self._bulk = BulkSender(**_bulk_limits(self._settings))
        self._count = count
        self._announced = 1  # stripes that the other side knows of
        self._draining = False
        count.forget_epoch()

    def adopt(self, settings: TransportSettings) -> None:
        """Use other settings: for the connections now, for streams that begin from now on."""
        self._settings = settings
        self._bulk.bound(**_bulk_limits(settings))

    def offer(self, stream_id: str, meta: Body, source: ChunkSource, eager_bytes: int = 0) -> None:
        """Offer a stream; one of the same id that is under way is stopped first."""
        old = find(self._outgoing, stream_id)
        if old is not None:
            self._stop(old, "offered again")
        self._last_number += 1
        number = self._last_number
        chunks = source.chunks
        # More than a receiver may write before it says so: it does in steps, by its own settings, and otherwise both would wait.
        window = max(self._settings.window_limit_bytes, STEP_LIMIT_BYTES)
        limit = window + self._settings.chunk_limit_bytes
        outgoing = Outgoing(SendStream(number, chunks, limit), stream_id, source)
        others = sum(o.machine.credit.limit for o in self._outgoing.values() if o.machine.eager)
        self._outgoing[number] = outgoing
        self._use_stripes()
        line = self._bulk.line.needs
        self._context.send_op(self._peer, frames.OFFER, (number, stream_id, chunks, line, meta))
        eager_bytes = min(eager_bytes, self._settings.eager_bytes - others)
        if eager_bytes > 0:
            outgoing.machine.begin_eager(eager_bytes)
            self._pump(outgoing)

    def handle_taken(self, taken: Taken, now: float) -> None:
        """Pieces arrived. ``PeerError`` when they were not sent."""
        self._bulk.taken(taken.stripe, taken.first, taken.last, now)
        self._drain()
        if self._bulk.is_busy:
            self._measure(now)
        elif self._count.begin(self._bulk.delivered, self._bulk.round_trip_s):
            self._use_stripes()

    # Operations.

    def _on_accept(self, fields: list[Any], now: float) -> None:
        number, round_, chunk, received, limit = fields
        outgoing = self._outgoing.get(number)
        if outgoing is not None:
            if round_:  # it reads again
                self._bulk.forget(number)
            outgoing.machine.accept(round_, chunk, received, limit)
            self._pump(outgoing)

    def _on_decline(self, fields: list[Any], now: float) -> None:
        outgoing = self._drop_outgoing(fields[0])
        if outgoing is not None:
            self._context.emit(StreamDeclined(self._name, outgoing.stream_id, fields[1]))

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
        self._context.emit(StreamSent(self._name, outgoing.stream_id))

    def _on_abort(self, fields: list[Any], now: float) -> None:
        outgoing = self._drop_outgoing(fields[0])
        if outgoing is not None:
            self._context.emit(StreamFailed(self._name, outgoing.stream_id, fields[1]))

    def _on_stripes(self, fields: list[Any], now: float) -> None:
        self._announce(fields[0])

    # The stripes.

    def _use_stripes(self) -> None:
        """See to it that there are as many as were found to be of use."""
        self._bulk.count = self._count.count
        if self._bulk.count > self._announced and not self._announce(self._bulk.count):
            self._announced = self._bulk.count
            self._context.send_op(self._peer, frames.STRIPES, (self._bulk.count,))

    def _announce(self, count: int) -> bool:
        """Open connections, and show each of them to the other side. False where that is the other side's part."""
        count = min(count, self._settings.stripes_limit)
        if not self._context.open_stripes(self._peer, count):
            return False
        now = self._context.now()
        while self._announced < count:
            self._probe(self._announced, self._bulk.probe(self._announced, now))
            self._announced += 1
        self._context.rearm(self._peer, now)
        return True

    def _probe(self, stripe: int, number: int) -> None:
        head = frames.pack((frames.PROBE, self._identity, stripe, number), frames.TEXT_LIMIT)
        self._context.send_bulk(self._peer, stripe, (head,))

    def _measure(self, now: float) -> None:
        bulk = self._bulk
        if self._count.feed(
            now,
            bulk.delivered,
            open_count=bulk.open_count,
            round_trip_s=bulk.round_trip_s,
            worth=bulk.line.connections,
        ):
            self._use_stripes()
            self._drain()

    # The sending side.

    def _pump(self, outgoing: Outgoing) -> None:
        """Read and hand over as far as credit, source and stripes allow, without recursion; then send."""
        if outgoing.pumping:
            return
        machine = outgoing.machine
        outgoing.pumping = True
        try:
            while not outgoing.gone:
                if machine.held is not None:
                    if not self._bulk.has_room:
                        self._send(more=True)
                        if not self._bulk.has_room:
                            break
                    ready = machine.take()
                    if ready is None:
                        if machine.is_starved:
                            self._tell_blocked(outgoing)
                        break
                    self._bulk.add(machine.number, machine.round, *ready, machine.chunks)
                    # The others have their turn before this one has its next.
                    self._outgoing[machine.number] = self._outgoing.pop(machine.number)
                wanted = machine.next_read()
                if wanted is None:
                    if machine.is_starved:
                        self._tell_blocked(outgoing)
                    break
                index, serial = wanted
                outgoing.source.read(index, partial(self._delivered, outgoing, serial))
        finally:
            outgoing.pumping = False
        self._send()

    def _tell_blocked(self, outgoing: Outgoing) -> None:
        machine = outgoing.machine
        limit = machine.credit.limit
        if machine.is_accepted and limit > outgoing.blocked_at:
            outgoing.blocked_at = limit
            fields = (machine.number, limit, self._bulk.line.needs)
            self._context.send_op(self._peer, frames.BLOCKED, fields)

    def _drain(self) -> None:
        """Windows are free again: send what waits, and let the streams hand over more."""
        if self._draining:
            return
        self._draining = True
        try:
            self._send()
            for outgoing in list(self._outgoing.values()):
                if not self._bulk.has_room:
                    break
                self._pump(outgoing)
        finally:
            self._draining = False

    def _send(self, *, more: bool = False) -> None:
        """Send pieces as far as windows allow; with ``more`` to come not the last chunk, which asks for an answer."""
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
            self._context.send_bulk(self._peer, stripe, (head, piece.data))
            sent = True
        if not bulk.is_busy and not more:
            self._count.rest(now)
        if sent:
            self._context.rearm(self._peer, now)

    def _delivered(self, outgoing: Outgoing, serial: int, data: Buffer | None) -> None:
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

    def _fail_outgoing(self, outgoing: Outgoing, reason: str) -> None:
        self._stop(outgoing, reason)
        self._context.emit(StreamFailed(self._name, outgoing.stream_id, reason))

    def _stop(self, outgoing: Outgoing, reason: str) -> None:
        number = outgoing.machine.number
        self._drop_outgoing(number)
        self._context.send_op(self._peer, frames.STOP, (number, frames.short(reason)))

    def _drop_outgoing(self, number: int) -> Outgoing | None:
        outgoing = self._outgoing.pop(number, None)
        if outgoing is not None:
            outgoing.gone = True
            self._bulk.forget(number)
        return outgoing
