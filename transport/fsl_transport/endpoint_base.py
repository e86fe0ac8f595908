"""What both endpoints share: the thin shell that joins a link, a scheduler and the pure machines.

One scheduler timer per endpoint, over a heap of session deadlines. A session has one live entry in
the heap; deadlines that move later are left alone and found to be early when they fire, so that a
message that arrives costs no heap work. ``on_event`` is never entered twice: events that come up
while one is being handled wait for it to return.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from fsl_transport.bulk.parallelism import Parallelism
from fsl_transport.bulk.receive_budget import ReceiveBudget
from fsl_transport.bulk.stream_context import Transfer
from fsl_transport.bulk.streams import Streams
from fsl_transport.errors import LocalError, PeerError
from fsl_transport.events import (
    Body,
    HeartbeatReceived,
    MessageReceived,
    PeerDown,
    TransportEvent,
)
from fsl_transport.link import (
    Buffer,
    Cancellable,
    Chance,
    ChunkSink,
    ChunkSource,
    Lane,
    Link,
    Scheduler,
    check_name,
)
from fsl_transport.session import frames, session
from fsl_transport.session.access_control import MessageLimits
from fsl_transport.session.frames import Beat, Chunk, Data, Probe, Taken
from fsl_transport.session.reliable import BeatDue, Session
from fsl_transport.settings import TransportSettings

BULK_MESSAGES: Final = (Chunk, Probe, Taken)
"""What is about the bulk lane; TAKEN travels on the other one."""
_CHUNK_HEAD_LIMIT: Final = 256


class Peer:
    """One peer: its machine, its streams while a session stands, its live heap entry.

    ``origin`` is the connection that brought the HELLO it was admitted for; a dialer's is empty. ``count`` is what was
    learned about the line to it; it outlives the session.
    """

    __slots__ = ("armed_at", "count", "machine", "name", "origin", "speech", "streams")

    def __init__(self, name: str, machine: Any) -> None:
        self.name = name
        self.origin = b""
        self.machine = machine
        self.streams: Streams | None = None
        self.speech: MessageLimits | None = None
        self.count: Parallelism | None = None
        self.armed_at = math.inf


class Endpoint:
    """What both sides share."""

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        settings: TransportSettings,
        on_event: Callable[[TransportEvent], None],
        name: str,
        *,
        chance: Chance | None = None,
    ) -> None:
        self.name = check_name(name)
        self.settings = settings
        self.receive_budget = ReceiveBudget()
        self.early_held_bytes = 0
        self.bad_messages = 0
        self._link = link
        self._scheduler = scheduler
        self._on_event = on_event
        self._chance: Chance = random.SystemRandom() if chance is None else chance
        self._beat_payload: Callable[[str], Body] = _no_payload
        self._events: deque[TransportEvent] = deque()
        self._emitting = False
        self._closed = False
        self._heap: list[tuple[float, int, Peer]] = []
        self._order = 0
        self._timer: Cancellable | None = None
        self._timer_at = math.inf
        link.set_receiver(self._receive)

    @property
    def address(self) -> str:
        """Where the link listens or dials."""
        return self._link.address

    @property
    def garbage(self) -> int:
        """Messages and connections that were no protocol of ours, all told."""
        return self.bad_messages + int(getattr(self._link, "garbage", 0))

    def set_beat_payload(self, payload: Callable[[str], Body]) -> None:
        """``payload(peer)`` gives the small dict that rides on each heartbeat."""
        self._beat_payload = payload

    def send(self, peer: str, body: Body) -> None:
        """Send a control message: in order, exactly once while the session lives.

        Dropped when there is no session. ``LocalError`` when the body cannot travel.
        """
        frames.check_body(body)
        found = self._find(peer)
        if found is not None:
            self.send_op(found, frames.MESSAGE, (body,))

    def offer(
        self, peer: str, stream_id: str, meta: Body, source: ChunkSource, eager_bytes: int = 0
    ) -> None:
        """Offer a stream, or start the one of this id again. Dropped without a session.

        ``eager_bytes``: so much of it may be sent before it is accepted, which saves a round trip and is lost where it is
        declined; all streams of a session share ``settings.eager_bytes``.
        """
        frames.check_body(meta)
        if not (
            isinstance(stream_id, str)
            and 0 < len(stream_id) <= frames.TEXT_LIMIT
            and stream_id.isprintable()
        ):
            text = f"1 to {frames.TEXT_LIMIT} printable characters"
            raise LocalError(f"{stream_id!r} is no stream id: {text}")
        streams = self._streams(peer)
        if streams is not None:
            streams.offer(stream_id, meta, source, eager_bytes)

    def accept(self, peer: str, stream_id: str, sink: ChunkSink, next_chunk: int = 0) -> None:
        """Take an offered stream from ``next_chunk`` on; ignored when the offer is gone."""
        found = self._find(peer)
        if found is None:
            return
        try:
            self._peer_streams(found).accept(stream_id, sink, next_chunk)
        except PeerError as error:  # in what came early
            self._violated(found, str(error), self.now())

    def decline(self, peer: str, stream_id: str, reason: str) -> None:
        """Send an offer back; ignored when it is gone."""
        streams = self._streams(peer)
        if streams is not None:
            streams.decline(stream_id, reason)

    def cancel(self, peer: str, stream_id: str, reason: str) -> None:
        """End a stream, whichever way it goes; the other side gets ``StreamFailed``."""
        streams = self._streams(peer)
        if streams is not None:
            streams.cancel(stream_id, reason)

    def transfers(self) -> list[Transfer]:
        """A snapshot of all streams, for a status page."""
        rows: list[Transfer] = []
        for peer in self._all_peers():
            if peer.streams is not None:
                rows.extend(peer.streams.transfers())
        return rows

    def last_received_ago_s(self, peer: str) -> float | None:
        """Seconds since the peer was heard; None without a session."""
        found = self._find(peer)
        if found is None:
            return None
        seconds: float = found.machine.session.last_received_ago_s(self.now())
        return seconds

    def close(self) -> None:
        """Cancel all timers, forget all sessions without a word, close the link."""
        if self._closed:
            return
        self._closed = True
        self._events.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._heap.clear()
        for peer in self._all_peers():
            self._drop_streams(peer)
        self._link.close()

    async def aclose(self) -> None:
        """``close``, and wait until the link's tasks and sockets are gone."""
        self.close()
        await self._link.aclose()

    # What the streams call (``streams.StreamContext``).

    def now(self) -> float:
        """Scheduler time."""
        return self._scheduler.time()

    def emit(self, event: TransportEvent) -> None:
        """Hand an event to the owner, after the ones before it."""
        if self._closed:
            return
        self._events.append(event)
        if self._emitting:
            return
        self._emitting = True
        try:
            while self._events:
                self._on_event(self._events.popleft())
        finally:
            self._emitting = False

    def send_op(self, peer: Peer, op: int, fields: tuple[Any, ...]) -> None:
        """Send one reliable operation."""
        current = peer.machine.session
        if current is None or self._closed:
            return
        now = self._scheduler.time()
        current.send(op, fields, now)
        self._flush(peer)
        self.rearm(peer, now)

    def send_bulk(self, peer: Peer, stripe: int, frames: Sequence[Buffer]) -> None:
        """Send one message on a connection of the bulk lane."""
        if not self._closed:
            self._link.send(peer.name, Lane.BULK, frames, peer.origin, stripe)

    def send_head(self, peer: Peer, head: bytes) -> None:
        """Send one message on the control lane, of which nothing depends on its arrival."""
        if not self._closed:
            self._link.send(peer.name, Lane.CONTROL, (head,), peer.origin)

    def open_stripes(self, peer: Peer, count: int) -> bool:
        """Have so many connections for bulk. False where the other side opens them."""
        return False

    def rearm(self, peer: Peer, now: float) -> None:
        """See to it that the timer fires no later than the peer's next deadline."""
        deadline = peer.machine.next_deadline()
        if peer.streams is not None:
            deadline = min(deadline, peer.streams.next_deadline())
        if deadline >= peer.armed_at or self._closed:
            return
        peer.armed_at = deadline
        self._order += 1
        heapq.heappush(self._heap, (deadline, self._order, peer))
        if deadline < self._timer_at:
            self._arm_timer(max(deadline, now))

    # Inside.

    def _find(self, peer: str) -> Peer | None:
        """The record of a peer that has a session."""
        raise NotImplementedError

    def _all_peers(self) -> Sequence[Peer]:
        raise NotImplementedError

    def _receive(self, name: str, lane: Lane, parts: Sequence[Buffer], origin: bytes) -> None:
        raise NotImplementedError

    def _special(self, peer: Peer, effect: Any) -> None:
        """An effect that only one side knows."""
        raise NotImplementedError

    def _settle(self, peer: Peer) -> None:
        """The state of a peer may have changed."""

    def _streams(self, peer: str) -> Streams | None:
        found = self._find(peer)
        return None if found is None else self._peer_streams(found)

    def _peer_streams(self, peer: Peer) -> Streams:
        if peer.streams is None:
            if peer.count is None:
                limit = min(self.settings.stripes_limit, self._link.stripes_limit)
                peer.count = Parallelism(self.settings.stripes_first, limit)
            identity = peer.machine.session.identity
            peer.streams = Streams(self, peer, peer.name, identity, peer.count)
        return peer.streams

    def _arm_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._scheduler.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        # A loop may call a hair early: its clock has a resolution.
        now = max(self._scheduler.time(), self._timer_at)
        self._timer = None
        if now - self._timer_at > self.settings.heartbeat_every_s / 2:
            # This process slept (suspended, starved, stuck). What the peers said meanwhile waits
            # in the sockets: read it before anybody is declared dead.
            self._arm_timer(now + self.settings.ack_after_s)
            return
        self._timer_at = -math.inf  # nobody arms it while we are here
        heap = self._heap
        try:
            while heap and heap[0][0] <= now:
                when, _, peer = heapq.heappop(heap)
                if when != peer.armed_at:
                    continue  # replaced by an earlier entry since
                peer.armed_at = math.inf
                self._run(peer, peer.machine.handle_timer(now), now)
                if peer.streams is not None:
                    peer.streams.handle_timer(now)
                self._settle(peer)
                self.rearm(peer, now)
        finally:
            self._timer_at = math.inf
            if heap:
                self._arm_timer(max(heap[0][0], now))

    def _handle(self, peer: Peer, message: frames.Message, now: float) -> None:
        try:
            effects = peer.machine.handle(message, now)
            if effects:
                self._run(peer, effects, now)
        except PeerError as error:
            self._violated(peer, str(error), now)
        if peer.machine.outbox:
            self._flush(peer)
        self.rearm(peer, now)

    def _handle_bulk(self, peer: Peer, message: Chunk | Probe | Taken, now: float) -> None:
        current: Session | None = peer.machine.session
        if current is None or message.session != current.identity:
            return
        current.on_received(now)
        try:
            streams = self._peer_streams(peer)
            if type(message) is Chunk:
                streams.handle_chunk(message, now)
            elif type(message) is Taken:
                streams.handle_taken(message, now)
            elif type(message) is Probe:
                streams.handle_probe(message, now)
        except PeerError as error:
            self._violated(peer, str(error), now)
        self.rearm(peer, now)

    def _violated(self, peer: Peer, text: str, now: float) -> None:
        self.bad_messages += 1
        self._run(peer, peer.machine.violated(text, now), now)
        self._settle(peer)

    def _flush(self, peer: Peer, origin: bytes | None = None) -> None:
        """Send what the machine left in its outbox, to the peer's own connection or another."""
        outbox = peer.machine.outbox
        if outbox and not self._closed:
            send = self._link.send
            if origin is None:
                origin = peer.origin
            for head in outbox:
                send(peer.name, Lane.CONTROL, (head,), origin)
        outbox.clear()

    def _run(self, peer: Peer, effects: Sequence[Any], now: float) -> None:
        """Execute effects, then send what they and the machine left in the outbox."""
        for effect in effects:
            kind = type(effect)
            if kind is Data:
                if effect.op == frames.MESSAGE:
                    self.emit(MessageReceived(peer.name, effect.fields[0]))
                elif peer.machine.session is not None:
                    self._peer_streams(peer).handle(effect, now)
            elif kind is Beat:
                if effect.asks:
                    peer.machine.session.beat(self._beat_payload(peer.name), now, asks=False)
                    self._flush(peer)
                self.emit(HeartbeatReceived(peer.name, effect.payload))
            elif kind is BeatDue:
                peer.machine.session.beat(self._beat_payload(peer.name), now, asks=True)
            elif kind is session.Down:
                self._drop_streams(peer)
                self._settle(peer)
                if effect.reason == "expired":
                    self._link.redial()
                self.emit(PeerDown(peer.name, effect.incarnation, effect.reason, effect.text))
            else:
                self._special(peer, effect)
        self._flush(peer)

    def _drop_streams(self, peer: Peer) -> None:
        if peer.streams is not None:
            peer.streams.close()
            peer.streams = None


def check_lane(message: frames.Message, lane: Lane, parts: Sequence[Buffer]) -> None:
    """``PeerError`` when a message came on the lane of the others."""
    if type(message) is Chunk or type(message) is Probe:
        if lane is not Lane.BULK or len(parts[0]) > _CHUNK_HEAD_LIMIT:
            raise PeerError("a chunk on the control lane, or with a large head")
    elif lane is not Lane.CONTROL:
        raise PeerError("a control message on the bulk lane")


def _no_payload(_peer: str) -> Body:
    return {}
