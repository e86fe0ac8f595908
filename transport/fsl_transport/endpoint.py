"""Calls that the application makes on an endpoint, the same for both sides.

``ListenerEndpoint`` (``listener.py``) accepts many dialers, ``DialerEndpoint`` (``dialer.py``)
dials one listener. They decide which peer a message belongs to and whether to handle it;
``peer.py`` handles it. The application gets events (``events.py``) and answers with these calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from fsl_transport.bulk.receive_budget import ReceiveBudget
from fsl_transport.errors import LocalError, PeerError
from fsl_transport.events import Body, Transfer, TransportEvent
from fsl_transport.link import (
    Buffer,
    ChunkSink,
    ChunkSource,
    Lane,
    Link,
    Rng,
    Scheduler,
    check_name,
)
from fsl_transport.peer import Peer, PeerContext
from fsl_transport.session import frames
from fsl_transport.session.frames import Chunk, Probe
from fsl_transport.settings import TransportSettings

_CHUNK_HEAD_LIMIT: Final = 256

BeatPayload: TypeAlias = Callable[[str], Body]
"""Takes a peer's name. Returns the small dict that a heartbeat carries."""


def no_payload(_peer: str) -> Body:
    """Return an empty payload for heartbeats."""
    return {}


class Endpoint:
    """Calls of the application, the same for both sides. They ignore a peer without a session."""

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        settings: TransportSettings,
        on_event: Callable[[TransportEvent], None],
        name: str,
        *,
        rng: Rng | None,
        beat_payload: BeatPayload,
    ) -> None:
        self.name = check_name(name)
        self._context = PeerContext(link, scheduler, settings, on_event, beat_payload)
        self._link = link
        self._rng: Rng = random.SystemRandom() if rng is None else rng
        link.set_receiver(self._receive)

    @property
    def settings(self) -> TransportSettings:
        """Settings in use."""
        return self._context.settings

    @property
    def address(self) -> str:
        """Return the address at which the link listens, or that it dials."""
        return self._link.address

    @property
    def receive_budget(self) -> ReceiveBudget:
        """Memory for incoming streams."""
        return self._context.receive_budget

    @property
    def bad_messages(self) -> int:
        """Messages that broke the protocol."""
        return self._context.bad_messages

    @property
    def garbage(self) -> int:
        """Messages and connections that broke the protocol, including those the link counted."""
        return self.bad_messages + int(getattr(self._link, "garbage", 0))

    def send(self, peer: str, body: Body) -> None:
        """Send a control message: in order, exactly once while the session lives.

        ``LocalError`` if the body cannot be encoded.
        """
        frames.check_body(body)
        found = self._find(peer)
        if found is not None:
            found.send_op(frames.MESSAGE, (body,))

    def offer(
        self, peer: str, stream_id: str, meta: Body, source: ChunkSource, eager_bytes: int = 0
    ) -> None:
        """Offer a stream. An unfinished one of the same id is replaced.

        Up to ``eager_bytes`` are sent before the stream is accepted (0-RTT). That saves a round
        trip, and is wasted if the stream is declined. All streams of a session share
        ``settings.eager_bytes``.
        """
        frames.check_body(meta)
        if not (
            isinstance(stream_id, str)
            and 0 < len(stream_id) <= frames.TEXT_LIMIT
            and stream_id.isprintable()
        ):
            text = f"1 to {frames.TEXT_LIMIT} printable characters"
            raise LocalError(f"{stream_id!r} is no stream id: {text}")
        found = self._find(peer)
        if found is not None:
            found.open_streams().offer(stream_id, meta, source, eager_bytes)

    def accept(self, peer: str, stream_id: str, sink: ChunkSink, next_chunk: int = 0) -> None:
        """Accept an offered stream from ``next_chunk`` on. Ignored if the offer is gone."""
        found = self._find(peer)
        if found is None:
            return
        try:
            found.open_streams().accept(stream_id, sink, next_chunk)
        except PeerError as error:  # in the eager bytes
            found.violated(str(error), found.now())

    def decline(self, peer: str, stream_id: str, reason: str) -> None:
        """Decline an offer. Ignored if it is gone."""
        found = self._find(peer)
        if found is not None:
            found.open_streams().decline(stream_id, reason)

    def cancel(self, peer: str, stream_id: str, reason: str) -> None:
        """End a stream in either direction; the peer gets ``StreamFailed``."""
        found = self._find(peer)
        if found is not None:
            found.open_streams().cancel(stream_id, reason)

    def transfers(self) -> list[Transfer]:
        """Progress of all streams, for a status page."""
        rows: list[Transfer] = []
        for peer in self._all_peers():
            if peer.streams is not None:
                rows.extend(peer.streams.transfers())
        return rows

    def last_received_ago_s(self, peer: str) -> float | None:
        """Seconds since anything was received from the peer; None without a session."""
        found = self._find(peer)
        if found is None:
            return None
        seconds: float = found.machine.session.last_received_ago_s(found.now())
        return seconds

    def close(self) -> None:
        """Cancel all timers, drop all sessions without a message, close the link."""
        if self._context.is_closed:
            return
        self._context.close()
        for peer in self._all_peers():
            peer.close_streams()
        self._link.close()

    async def aclose(self) -> None:
        """Call ``close`` and wait until the link's tasks and sockets are gone."""
        self.close()
        await self._link.aclose()

    def _find(self, peer: str) -> Peer | None:
        """The record of a peer that has a session."""
        raise NotImplementedError

    def _all_peers(self) -> Sequence[Peer]:
        raise NotImplementedError

    def _receive(self, name: str, lane: Lane, parts: Sequence[Buffer], origin: bytes) -> None:
        raise NotImplementedError


def check_lane(message: frames.Message, lane: Lane, parts: Sequence[Buffer]) -> None:
    """``PeerError`` for a message on the wrong lane. PIECE_ACK travels on the control lane."""
    if type(message) is Chunk or type(message) is Probe:
        if lane is not Lane.BULK or len(parts[0]) > _CHUNK_HEAD_LIMIT:
            raise PeerError("a chunk on the control lane, or with a large head")
    elif lane is not Lane.CONTROL:
        raise PeerError("a control message on the bulk lane")
