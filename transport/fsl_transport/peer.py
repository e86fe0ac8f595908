"""One peer of an endpoint: joins its session machine, its streams and the link.

* ``Peer`` feeds messages and timeouts to the pure machines of one peer and executes their
effects. It is the ``StreamContext`` of the peer's streams.
* ``PeerContext`` holds what the peers of one endpoint share: link, settings, memory, events,
deadlines.
* ``EventQueue`` delivers events to the application one at a time. ``on_event`` is never entered
twice: events that arise while one is being handled wait for it to return.
* ``Deadlines`` arms one scheduler timer for all peers, over a heap. A peer has one live entry in
it. A deadline that moves later stays in the heap and is found to be early when it fires, so
that an arriving message costs no heap operation.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from fsl_transport.bulk.parallelism import Parallelism
from fsl_transport.bulk.receive_budget import ReceiveBudget
from fsl_transport.bulk.streams import Streams
from fsl_transport.errors import PeerError
from fsl_transport.events import (
    Body,
    HeartbeatReceived,
    MessageReceived,
    PeerDown,
    TransportEvent,
)
from fsl_transport.link import Buffer, Cancellable, Lane, Link, Scheduler
from fsl_transport.session import frames, session
from fsl_transport.session.access_control import MessageLimits
from fsl_transport.session.frames import Beat, Chunk, Data, PieceAck, Probe
from fsl_transport.session.reliable import BeatDue, Session
from fsl_transport.settings import TransportSettings


class EventQueue:
    """Delivers events to ``on_event``, in order, without recursion."""

    def __init__(self, on_event: Callable[[TransportEvent], None]) -> None:
        self._on_event = on_event
        self._events: deque[TransportEvent] = deque()
        self._is_emitting = False
        self._is_closed = False

    def emit(self, event: TransportEvent) -> None:
        """Deliver an event, after those emitted before."""
        if self._is_closed:
            return
        self._events.append(event)
        if self._is_emitting:
            return
        self._is_emitting = True
        try:
            while self._events:
                self._on_event(self._events.popleft())
        finally:
            self._is_emitting = False

    def close(self) -> None:
        """Drop all events from now on."""
        self._is_closed = True
        self._events.clear()


class Deadlines:
    """One scheduler timer for the deadlines of all peers."""

    def __init__(self, scheduler: Scheduler, settings: TransportSettings) -> None:
        self.settings = settings
        self._scheduler = scheduler
        self._heap: list[tuple[float, int, Peer]] = []
        self._order = 0
        self._timer: Cancellable | None = None
        self._timer_at = math.inf

    def arm(self, peer: Peer, deadline: float, now: float) -> None:
        """Call ``peer.handle_timer`` no later than at ``deadline``."""
        if deadline >= peer.armed_at:
            return
        peer.armed_at = deadline
        self._order += 1
        heapq.heappush(self._heap, (deadline, self._order, peer))
        if deadline < self._timer_at:
            self._arm_timer(max(deadline, now))

    def close(self) -> None:
        """Cancel everything."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._heap.clear()

    def _arm_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._scheduler.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        # A loop's clock has a resolution: it may call slightly early.
        now = max(self._scheduler.time(), self._timer_at)
        self._timer = None
        if now - self._timer_at > self.settings.heartbeat_every_s / 2:
            # This process slept (suspended, starved, blocked). Messages that arrived meanwhile wait
            # in the sockets: read them before any peer expires.
            self._arm_timer(now + self.settings.ack_after_s)
            return
        self._timer_at = -math.inf  # so that ``arm`` sets no timer during the loop
        heap = self._heap
        try:
            while heap and heap[0][0] <= now:
                when, _, peer = heapq.heappop(heap)
                if when != peer.armed_at:
                    continue  # replaced by an earlier entry
                peer.armed_at = math.inf
                peer.handle_timer(now)
        finally:
            self._timer_at = math.inf
            if heap:
                self._arm_timer(max(heap[0][0], now))


class PeerContext:
    """Shared by the peers of one endpoint. ``beat_payload(peer)`` gives a heartbeat's dict."""

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        settings: TransportSettings,
        on_event: Callable[[TransportEvent], None],
        beat_payload: Callable[[str], Body],
    ) -> None:
        self.link = link
        self.scheduler = scheduler
        self.settings = settings
        self.beat_payload = beat_payload
        self.events = EventQueue(on_event)
        self.deadlines = Deadlines(scheduler, settings)
        self.receive_budget = ReceiveBudget(settings)
        self.bad_messages = 0
        self.is_closed = False

    def adopt(self, settings: TransportSettings) -> None:
        """Use other settings from now on."""
        self.settings = settings
        self.deadlines.settings = settings
        self.receive_budget.adopt(settings)
        self.link.adopt(settings)

    def close(self) -> None:
        """Report no more events, fire no more timers, send nothing."""
        self.is_closed = True
        self.events.close()
        self.deadlines.close()


class Peer:
    """One peer: its session machine, and its streams while a session is established.

    ``origin`` identifies the connection whose HELLO was admitted; a dialer's is empty.
    ``on_effect`` executes the effects that only one side has. ``on_change`` is called after the
    machine's state may have changed. ``opens_stripes``: this side opens the bulk connections.
    """

    __slots__ = (
        "_context",
        "_on_change",
        "_on_effect",
        "_opens_stripes",
        "armed_at",
        "machine",
        "message_limits",
        "name",
        "origin",
        "parallelism",
        "streams",
    )

    def __init__(
        self,
        context: PeerContext,
        name: str,
        machine: Any,
        on_effect: Callable[[Peer, Any], None],
        on_change: Callable[[Peer], None],
        *,
        opens_stripes: bool,
    ) -> None:
        self.name = name
        self.machine = machine
        self.origin = b""
        self.streams: Streams | None = None
        self.message_limits: MessageLimits | None = None
        self.parallelism: Parallelism | None = None  # outlives the session
        self.armed_at = math.inf  # of the live entry in the heap
        self._context = context
        self._on_effect = on_effect
        self._on_change = on_change
        self._opens_stripes = opens_stripes

    def open_streams(self) -> Streams:
        """Return the streams of the session, which must be established."""
        if self.streams is None:
            context = self._context
            if self.parallelism is None:
                settings = context.settings
                limit = min(settings.stripes_limit, context.link.stripes_limit)
                self.parallelism = Parallelism(settings.stripes_first, limit)
            identity = self.machine.session.identity
            self.streams = Streams(
                self, context.receive_budget, self.name, identity, self.parallelism
            )
        return self.streams

    def close_streams(self) -> None:
        """The session is over: drop its streams."""
        if self.streams is not None:
            self.streams.close()
            self.streams = None

    # Inputs.

    def handle(self, message: frames.Message, now: float) -> None:
        """Handle a message of the session."""
        try:
            effects = self.machine.handle(message, now)
            if effects:
                self.run(effects, now)
        except PeerError as error:
            self.violated(str(error), now)
        if self.machine.outbox:
            self.flush()
        self.rearm(now)

    def handle_bulk(self, message: Chunk | Probe | PieceAck, now: float) -> None:
        """Handle a message about pieces. Ignored if it is of another session."""
        current: Session | None = self.machine.session
        if current is None or message.session != current.identity:
            return
        current.on_received(now)
        try:
            self.open_streams().handle_bulk(message, now)
        except PeerError as error:
            self.violated(str(error), now)
        self.rearm(now)

    def handle_timer(self, now: float) -> None:
        """A deadline expired."""
        self.run(self.machine.handle_timer(now), now)
        if self.streams is not None:
            self.streams.handle_timer(now)
        self._on_change(self)
        self.rearm(now)

    def violated(self, text: str, now: float) -> None:
        """The peer broke the protocol: end its session."""
        self._context.bad_messages += 1
        self.run(self.machine.violated(text, now), now)
        self._on_change(self)

    # Effects.

    def run(self, effects: Sequence[Any], now: float) -> None:
        """Execute effects of the machine, then send its outbox."""
        for effect in effects:
            kind = type(effect)
            if kind is Data:
                if effect.op == frames.MESSAGE:
                    self.emit(MessageReceived(self.name, effect.fields[0]))
                elif self.machine.session is not None:
                    self.open_streams().handle(effect, now)
            elif kind is Beat:
                if effect.asks:
                    self.machine.session.beat(self._payload(), now, asks=False)
                    self.flush()
                self.emit(HeartbeatReceived(self.name, effect.payload))
            elif kind is BeatDue:
                self.machine.session.beat(self._payload(), now, asks=True)
            elif kind is session.Down:
                self.close_streams()
                self._on_change(self)
                if effect.reason == "expired":
                    self._context.link.redial()
                self.emit(PeerDown(self.name, effect.incarnation, effect.reason, effect.text))
            else:
                self._on_effect(self, effect)
        self.flush()

    def flush(self, origin: bytes | None = None) -> None:
        """Send the machine's outbox, on the peer's own connection unless ``origin`` is given."""
        outbox = self.machine.outbox
        context = self._context
        if outbox and not context.is_closed:
            send = context.link.send
            if origin is None:
                origin = self.origin
            for head in outbox:
                send(self.name, Lane.CONTROL, (head,), origin)
        outbox.clear()

    def _payload(self) -> Body:
        return self._context.beat_payload(self.name)

    # StreamContext.

    @property
    def settings(self) -> TransportSettings:
        """See ``StreamContext``."""
        return self._context.settings

    def now(self) -> float:
        """See ``StreamContext``."""
        return self._context.scheduler.time()

    def emit(self, event: TransportEvent) -> None:
        """See ``StreamContext``."""
        self._context.events.emit(event)

    def send_op(self, op: int, fields: tuple[Any, ...]) -> None:
        """See ``StreamContext``. Dropped without a session."""
        current = self.machine.session
        if current is None or self._context.is_closed:
            return
        now = self._context.scheduler.time()
        current.send(op, fields, now)
        self.flush()
        self.rearm(now)

    def send_bulk(self, stripe: int, frames: Sequence[Buffer]) -> None:
        """See ``StreamContext``."""
        context = self._context
        if not context.is_closed:
            context.link.send(self.name, Lane.BULK, frames, self.origin, stripe)

    def send_unreliable(self, head: bytes) -> None:
        """See ``StreamContext``."""
        context = self._context
        if not context.is_closed:
            context.link.send(self.name, Lane.CONTROL, (head,), self.origin)

    def open_stripes(self, count: int) -> bool:
        """See ``StreamContext``."""
        if self._opens_stripes:
            self._context.link.open_stripes(count)
        return self._opens_stripes

    def rearm(self, now: float) -> None:
        """See ``StreamContext``."""
        deadline: float = self.machine.next_deadline()
        if self.streams is not None:
            deadline = min(deadline, self.streams.next_deadline())
        if deadline < self.armed_at and not self._context.is_closed:
            self._context.deadlines.arm(self, deadline, now)
