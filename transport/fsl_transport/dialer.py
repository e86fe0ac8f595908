"""Dialing side of the transport: one listener."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsl_transport.endpoint import BeatPayload, Endpoint, check_lane, no_payload
from fsl_transport.errors import PeerError
from fsl_transport.events import (
    Body,
    PeerUp,
    Refused,
    Superseded,
    TransportEvent,
    Unreachable,
)
from fsl_transport.link import Buffer, Lane, Link, Rng, Scheduler
from fsl_transport.peer import Peer
from fsl_transport.session import frames, session
from fsl_transport.session.frames import Chunk, PieceAck, Probe
from fsl_transport.session.session import DialerMachine, DialerState
from fsl_transport.settings import TransportSettings


class DialerEndpoint(Endpoint):
    """Dialing side: one listener. ``peer`` arguments are ignored, events carry ``""``.

    ``incarnation`` is wall-clock nanoseconds at the start of the process. A handshake may raise it
    once (see ``session.py``), so read it back from ``.incarnation``.
    ``rng`` jitters waits. ``beat_payload(peer)`` gives the dict that rides on each heartbeat.
    """

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        settings: TransportSettings,
        on_event: Callable[[TransportEvent], None],
        name: str,
        *,
        incarnation: int,
        role: str = "client",
        rng: Rng | None = None,
        beat_payload: BeatPayload = no_payload,
    ) -> None:
        super().__init__(
            link, scheduler, settings, on_event, name, rng=rng, beat_payload=beat_payload
        )
        self._machine = DialerMachine(name, role, incarnation, settings, self._rng.random)
        self._peer = Peer(
            self._context,
            "",
            self._machine,
            self._execute,
            lambda _peer: None,
            opens_stripes=True,
        )
        self._hello: Callable[[], Body] = dict

    @property
    def incarnation(self) -> int:
        """The incarnation in use."""
        return self._machine.incarnation

    @property
    def is_up(self) -> bool:
        """Whether a session is established."""
        return self._machine.session is not None

    def adopt(self, settings: TransportSettings) -> None:
        """Use other settings from now on, also in the established session.

        For settings that the listener sends in its welcome: both sides must agree on heartbeat and
        expiry.
        """
        peer = self._peer
        self._context.adopt(settings)
        self._machine.settings = settings
        if self._machine.session is not None:
            self._machine.session.adopt(settings)
        if peer.parallelism is not None:
            limit = min(settings.stripes_limit, self._link.stripes_limit)
            peer.parallelism.set_limits(settings.stripes_first, limit)
        if peer.streams is not None:
            peer.streams.adopt(settings)
        peer.rearm(peer.now())

    def connect(self, hello: Callable[[], Body]) -> None:
        """Send HELLO now and again after every loss; ``hello()`` gives the body of each one."""
        self._hello = hello
        now = self._peer.now()
        self._peer.run(self._machine.connect(now), now)
        self._peer.rearm(now)

    def disconnect(self, peer: str = "", reason: str = "") -> None:
        """Send BYE and stop until ``connect``. Emits no ``PeerDown`` here."""
        self._machine.disconnect(reason)
        self._peer.close_streams()
        self._peer.flush()

    def _find(self, peer: str) -> Peer | None:
        return None if self._machine.session is None else self._peer

    def _all_peers(self) -> Sequence[Peer]:
        return [self._peer]

    def _receive(self, name: str, lane: Lane, parts: Sequence[Buffer], origin: bytes) -> None:
        context = self._context
        if context.is_closed:
            return
        now = context.scheduler.time()
        settings = context.settings
        peer = self._peer
        try:
            message = frames.parse(parts, settings.control_limit_bytes, settings.chunk_limit_bytes)
            check_lane(message, lane, parts)
        except PeerError as error:
            peer.violated(str(error), now)
            peer.rearm(now)
            return
        if isinstance(message, Chunk | Probe | PieceAck):
            peer.handle_bulk(message, now)
        else:
            peer.handle(message, now)

    def _execute(self, peer: Peer, effect: Any) -> None:
        if isinstance(effect, session.SendHello):
            if self._context.is_closed or self._machine.state is not DialerState.CALLING:
                return  # the application disconnected while it handled the loss
            body = frames.check_body(self._hello())
            self._machine.outbox.append(self._machine.hello_head(body))
            peer.flush()
        elif isinstance(effect, session.Up):
            peer.emit(PeerUp("", effect.incarnation, effect.body))
        elif isinstance(effect, session.StillConnecting):
            peer.emit(Unreachable(self.address, effect.seconds))
        elif isinstance(effect, session.RefusedBy):
            peer.emit(Refused(effect.code, effect.text))
        else:
            peer.emit(Superseded())
