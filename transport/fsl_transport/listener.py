"""Listening side of the transport: many dialers, identified by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from fsl_transport.endpoint import BeatPayload, Endpoint, check_lane, no_payload
from fsl_transport.errors import LocalError, PeerError
from fsl_transport.events import Body, HelloReceived, PeerUp, TransportEvent
from fsl_transport.link import Buffer, Lane, Link, Rng, Scheduler, check_name, public_key
from fsl_transport.peer import Peer
from fsl_transport.session import frames
from fsl_transport.session.access_control import HelloLimits, MessageLimits
from fsl_transport.session.frames import (
    SUPERSEDED,
    Ack,
    Beat,
    Chunk,
    Data,
    Foreign,
    Hello,
    PieceAck,
    Probe,
    protocol_refusal,
    refusal_head,
    unknown_head,
)
from fsl_transport.session.session import Ask, ListenerMachine, ListenerState
from fsl_transport.settings import TransportSettings

_NAMES_PER_SESSION: Final = 4
"""A listener remembers this many names for each session that it may have."""

Admit: TypeAlias = Callable[[str, str], tuple[str, str] | None]
"""Takes a name and a public key. Returns None to admit, or code and text of the refusal."""


def _admit_all(_name: str, _key: str) -> None:
    return None


class ListenerEndpoint(Endpoint):
    """Listening side: many dialers, identified by name.

    ``incarnation`` is the listener's own (wall-clock nanoseconds); dialers get it in ``PeerUp``.
    ``rng`` makes session ids; pass a seeded ``random.Random`` in simulations only.
    ``admit(name, key)`` decides on each HELLO before it can affect what exists under that name.
    ``beat_payload(peer)`` gives the dict that rides on each heartbeat.
    """

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        settings: TransportSettings,
        on_event: Callable[[TransportEvent], None],
        name: str,
        *,
        incarnation: int = 0,
        rng: Rng | None = None,
        admit: Admit = _admit_all,
        beat_payload: BeatPayload = no_payload,
    ) -> None:
        super().__init__(
            link, scheduler, settings, on_event, name, rng=rng, beat_payload=beat_payload
        )
        self.incarnation = incarnation
        self._admit = admit
        self._peers: dict[str, Peer] = {}
        self._present: dict[str, None] = {}  # names asked or up, in order of arrival
        self._hello_limits = HelloLimits(settings, scheduler.time())
        self._known: dict[str, None] = {}  # names heard from in a session, or remembered
        self.throttled = 0
        """Control messages dropped because they came too fast; their sender repeats them."""

    @property
    def dropped_hellos(self) -> int:
        """HELLOs dropped because they came too fast."""
        return self._hello_limits.dropped

    @property
    def peers(self) -> list[str]:
        """Names with a session, in order of arrival."""
        return [name for name in self._present if self._find(name) is not None]

    def remember(self, name: str, incarnation: int) -> None:
        """Count ``incarnation`` as seen for ``name``, as after a restart from a ledger.

        A HELLO below it is then refused with code ``superseded``; an equal one reconnects. Ignored
        for a name that is asked or up. ``LocalError`` if either argument is out of range.
        """
        check_name(name)
        if type(incarnation) is not int or not 0 <= incarnation < frames.INCARNATION_LIMIT:
            raise LocalError(f"{incarnation!r} is no incarnation: use nanoseconds since 1970")
        self._record(name).machine.remember(incarnation)
        self._know(name)

    def welcome(self, peer: str, body: Body) -> None:
        """Grant the session of ``HelloReceived``. Ignored if the peer no longer asks."""
        frames.check_body(body)
        found = self._asked(peer)
        if found is None:
            return
        now = found.now()
        identity = self._rng.getrandbits(8 * frames.SESSION_BYTES)
        hello, found.machine.hello = found.machine.hello, {}
        found.machine.welcome(identity.to_bytes(frames.SESSION_BYTES, "little"), body, now)
        found.flush()
        found.rearm(now)
        found.emit(PeerUp(peer, found.machine.incarnation, hello))

    def refuse(self, peer: str, code: str, text: str) -> None:
        """Refuse the session of ``HelloReceived``. Ignored if the peer no longer asks."""
        if code == SUPERSEDED:
            raise LocalError(f"the code {code!r} is the transport's own: take another word")
        found = self._asked(peer)
        if found is not None:
            found.machine.refuse(code, text)
            self._track(found)
            found.flush()

    def disconnect(self, peer: str, reason: str) -> None:
        """Send BYE and end the session. Emits no ``PeerDown`` here."""
        found = self._peers.get(peer)
        if found is not None:
            found.machine.disconnect(reason, found.now())
            found.close_streams()
            self._track(found)
            found.flush()

    def key(self, peer: str) -> str:
        """Public key of the peer's session; empty without a session or on a plain link."""
        found = self._find(peer)
        return "" if found is None else public_key(found.origin)

    def evict(self, allows: Callable[[str], bool]) -> list[str]:
        """End the sessions whose key is no longer allowed; return their names.

        Emits ``PeerDown`` for each.
        """
        gone = [self._peers[name] for name in self._present]
        gone = [peer for peer in gone if not allows(public_key(peer.origin))]
        for peer in gone:
            now = peer.now()
            effects = peer.machine.evict(now)
            self._track(peer)
            peer.run(effects, now)
        return [peer.name for peer in gone]

    def _asked(self, peer: str) -> Peer | None:
        found = self._peers.get(peer)
        if found is None or found.machine.state is not ListenerState.ASKED:
            return None
        return found

    def _find(self, peer: str) -> Peer | None:
        found = self._peers.get(peer)
        return None if found is None or found.machine.session is None else found

    def _all_peers(self) -> Sequence[Peer]:
        return list(self._peers.values())

    def _know(self, name: str) -> None:
        self._hello_limits.close(name)
        self._known.pop(name, None)
        self._known[name] = None
        if len(self._known) > _NAMES_PER_SESSION * self.settings.max_sessions:
            del self._known[next(iter(self._known))]

    def _track(self, peer: Peer) -> None:
        """The peer's state may have changed: update which names are present."""
        if peer.machine.state is ListenerState.ABSENT:
            self._present.pop(peer.name, None)
            self._hello_limits.close(peer.name)
            peer.machine.hello = {}  # up to 64 KiB from a peer that may use many names
        else:
            self._present[peer.name] = None

    def _receive(self, name: str, lane: Lane, parts: Sequence[Buffer], origin: bytes) -> None:
        context = self._context
        if context.is_closed:
            return
        now = context.scheduler.time()
        settings = context.settings
        peer = self._peers.get(name)
        if peer is not None and (
            peer.origin != origin or peer.machine.state is ListenerState.ABSENT
        ):
            peer = None  # unauthenticated under this name: must not affect its holder
        if peer is None or peer.machine.session is None:
            limit = settings.hello_limit_bytes
        else:
            limit = settings.control_limit_bytes
        try:
            message = frames.parse(parts, limit, settings.chunk_limit_bytes)
            check_lane(message, lane, parts)
            _check_name_of(message, name)
        except PeerError as error:
            if peer is None:
                context.bad_messages += 1
            else:
                peer.violated(str(error), now)
                peer.rearm(now)
            return
        if type(message) is Hello:
            self._take_hello(name, message, origin, now)
        elif peer is None:
            self._answer_unauthenticated(name, message, origin)
        elif isinstance(message, Chunk | Probe | PieceAck):
            peer.handle_bulk(message, now)
        elif not isinstance(message, Data | Beat | Ack) or self._may_handle(
            peer, message, len(parts[0]), now
        ):
            peer.handle(message, now)

    def _may_handle(self, peer: Peer, message: Data | Beat | Ack, size: int, now: float) -> bool:
        """Whether a message is within the rates of its session."""
        current = peer.machine.session
        if current is None or message.session != current.identity:
            return True
        if peer.message_limits is None:
            peer.message_limits = MessageLimits(self.settings, now)
            self._know(peer.name)
        if peer.message_limits.allows(message, size, now):
            return True
        self.throttled += 1
        current.on_received(now)
        peer.rearm(now)
        return False

    def _take_hello(self, name: str, hello: Hello, origin: bytes, now: float) -> None:
        """Judge a HELLO. Only an admitted one binds the name's session to its connection."""
        key = public_key(origin)
        limited_by = key or self._link.remote_address()
        if not self._hello_limits.allows(name, limited_by, now, is_known=name in self._known):
            return
        refusal = self._refusal(name, key)
        if refusal is not None:
            head = refusal_head(hello.incarnation, hello.attempt, *refusal, known=0)
            self._link.send(name, Lane.CONTROL, (head,), origin)
            return
        peer = self._record(name)
        if peer.origin != origin and peer.machine.is_copy(hello):
            return  # its WELCOME, with the session id, is for the connection that asked first
        effects = peer.machine.handle(hello, now)
        if effects:
            peer.origin = origin
            peer.message_limits = None
            if name not in self._known:
                self._hello_limits.open(name)
            peer.run(effects, now)
        else:
            peer.flush(origin)
        peer.rearm(now)

    def _refusal(self, name: str, key: str) -> tuple[str, str] | None:
        """Code and text if a HELLO is refused before the application is asked."""
        if name not in self._present and len(self._present) >= self.settings.max_sessions:
            return "full", f"the listener already has {len(self._present)} sessions"
        return self._admit(name, key)

    def _record(self, name: str) -> Peer:
        """Return the record of a name. A new one replaces the oldest absent one at the limit."""
        peer = self._peers.get(name)
        if peer is None:
            if len(self._peers) >= _NAMES_PER_SESSION * self.settings.max_sessions:
                oldest = next(known for known in self._peers if known not in self._present)
                del self._peers[oldest]
            machine = ListenerMachine(self.incarnation, self.settings)
            peer = self._peers[name] = Peer(
                self._context, name, machine, self._execute, self._track, opens_stripes=False
            )
        return peer

    def _answer_unauthenticated(self, name: str, message: frames.Message, origin: bytes) -> None:
        if isinstance(message, Foreign):
            head = protocol_refusal(message)
        elif isinstance(message, Data | Beat | Ack):
            head = unknown_head(message.session)
        else:
            return
        self._link.send(name, Lane.CONTROL, (head,), origin)

    def _execute(self, peer: Peer, effect: Ask) -> None:
        hello = effect.hello
        self._track(peer)
        key = public_key(peer.origin)
        peer.emit(HelloReceived(peer.name, hello.incarnation, hello.body, hello.role, key))


def _check_name_of(message: frames.Message, name: str) -> None:
    if type(message) is Hello and message.name != name:
        raise PeerError(f"HELLO of {message.name!r} on the connection of {name!r}")
