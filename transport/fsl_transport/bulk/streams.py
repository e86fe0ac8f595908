"""All streams of one session: its outgoing and incoming ones behind one interface."""

from __future__ import annotations

from fsl_transport.bulk.parallelism import Parallelism
from fsl_transport.bulk.receive_budget import ReceiveBudget
from fsl_transport.bulk.receiving import ReceivingStreams
from fsl_transport.bulk.sending import SendingStreams
from fsl_transport.events import Body, Transfer
from fsl_transport.link import ChunkSink, ChunkSource, StreamContext
from fsl_transport.session.frames import Chunk, Data, PieceAck, Probe
from fsl_transport.settings import TransportSettings


class Streams:
    """Dispatches calls, operations and messages to ``outgoing`` and ``incoming``.

    See ``SendingStreams`` and ``ReceivingStreams`` for the arguments.
    """

    __slots__ = ("_operations", "incoming", "outgoing")

    def __init__(
        self,
        context: StreamContext,
        budget: ReceiveBudget,
        name: str,
        identity: bytes,
        parallelism: Parallelism,
    ) -> None:
        self.outgoing = SendingStreams(context, name, identity, parallelism)
        self.incoming = ReceivingStreams(context, budget, name, identity)
        self._operations = self.outgoing.operations | self.incoming.operations

    def adopt(self, settings: TransportSettings) -> None:
        """Use other settings."""
        self.outgoing.adopt(settings)
        self.incoming.adopt(settings)

    def offer(self, stream_id: str, meta: Body, source: ChunkSource, eager_bytes: int) -> None:
        """Offer an outgoing stream."""
        self.outgoing.offer(stream_id, meta, source, eager_bytes)

    def accept(self, stream_id: str, sink: ChunkSink, next_chunk: int) -> None:
        """Accept an incoming stream."""
        self.incoming.accept(stream_id, sink, next_chunk)

    def decline(self, stream_id: str, reason: str) -> None:
        """Decline or abort an incoming stream."""
        self.incoming.decline(stream_id, reason)

    def cancel(self, stream_id: str, reason: str) -> None:
        """End the streams of this id, in both directions."""
        self.outgoing.cancel(stream_id, reason)
        self.incoming.decline(stream_id, reason)

    def close(self) -> None:
        """The session is gone: forget everything."""
        self.outgoing.close()
        self.incoming.close()

    def transfers(self) -> list[Transfer]:
        """Progress of all streams, outgoing ones first."""
        return self.outgoing.transfers() + self.incoming.transfers()

    def handle(self, data: Data, now: float) -> None:
        """Handle one stream operation from the control lane. ``PeerError`` if it is invalid."""
        self._operations[data.op](data.fields, now)

    def handle_bulk(self, message: Chunk | PieceAck | Probe, now: float) -> None:
        """Handle a message about pieces. ``PeerError`` if it is invalid."""
        if type(message) is Chunk:
            self.incoming.handle_chunk(message, now)
        elif type(message) is PieceAck:
            self.outgoing.handle_ack(message, now)
        elif type(message) is Probe:
            self.incoming.acknowledge(message.stripe, message.number, asks=True)
            self.outgoing.handle_probe(message.stripe, now)

    def next_deadline(self) -> float:
        """Return when to call ``handle_timer``, or infinity."""
        return min(self.outgoing.next_deadline(), self.incoming.next_deadline())

    def handle_timer(self, now: float) -> None:
        """Resume stalled streams, and probe silent stripes."""
        self.incoming.handle_timer(now)
        self.outgoing.handle_timer(now)
