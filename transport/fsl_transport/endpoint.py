"""The two endpoints: ``ListenerEndpoint`` for a server, ``DialerEndpoint`` for a client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from fsl_transport.endpoint_base import BULK_MESSAGES, Endpoint, Peer, check_lane
from fsl_transport.errors import LocalError, PeerError
from fsl_transport.events import (
    Body,
    HelloReceived,
    PeerUp,
    Refused,
    Superseded,
    TransportEvent,
    Unreachable,
)
from fsl_transport.link import Buffer, Chance, Lane, Link, Scheduler, check_name, key_of
from fsl_transport.session import frames, session
from fsl_transport.session.access_control import HelloLimits, MessageLimits
from fsl_transport.session.answers import SUPERSEDED, protocol_refusal, refusal_head, unknown_head
from fsl_transport.session.frames import Ack, Beat, Data, Foreign, Hello
from fsl_transport.session.session import DialerMachine, DialerState, ListenerMachine, ListenerState
from fsl_transport.settings import TransportSettings

_KNOWN_NAMES_PER_SESSION: Final = 4

Admit: TypeAlias = Callable[[str, str], tuple[str, str] | None]
"""Whether a name may be used with a public key: ``None``, or the code and the text of a refusal."""


def _accept_all(_name: str, _key: str) -> None:
    return None


class ListenerEndpoint(Endpoint):
    """The listening side: many dialers, told apart by name.

    ``incarnation`` is the listener's own (wall-clock nanoseconds); dialers see it in ``PeerUp``.
    ``chance`` makes session ids; give a seeded ``random.Random`` in simulations only.
    ``admit(name, key)`` is asked for each HELLO before it can touch what is there under that name.
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
        chance: Chance | None = None,
        admit: Admit = _accept_all,
    ) -> None:
        super().__init__(link, scheduler, settings, on_event, name, chance=chance)
        self.incarnation = incarnation
        self._admit = admit
        self._peers: dict[str, Peer] = {}
        self._present: dict[str, None] = {}  # names that are asking or up, in order of arrival
        self._gate = HelloLimits(settings, scheduler.time())
        self._known: dict[str, None] = {}  # names that were heard in a session, or remembered
        self.slowed = 0
        """Control messages that came too fast, and were left for later."""

    @property
    def dropped_hellos(self) -> int:
        """HELLOs that came too fast."""
        return self._gate.dropped

    @property
    def peers(self) -> list[str]:
        """Names with a session, in order of arrival."""
        return [name for name in self._present if self._find(name) is not None]

    def remember(self, name: str, incarnation: int) -> None:
        """Count ``incarnation`` as seen for ``name``, as after a restart from a ledger.

        A HELLO below it is then refused with code ``superseded``; one equal to it reconnects.
        Ignored for a name that asks or is up. ``LocalError`` when either is out of range.
        """
        check_name(name)
        if type(incarnation) is not int or not 0 <= incarnation < frames.INCARNATION_LIMIT:
            raise LocalError(f"{incarnation!r} is no incarnation: use nanoseconds since 1970")
        self._record(name).machine.remember(incarnation)
        self._know(name)

    def welcome(self, peer: str, body: Body) -> None:
        """Let the peer of ``HelloReceived`` in. Ignored when it no longer asks."""
        frames.check_body(body)
        found = self._asking(peer)
        if found is None:
            return
        now = self._scheduler.time()
        identity = self._chance.getrandbits(8 * frames.SESSION_BYTES)
        hello, found.machine.hello = found.machine.hello, {}
        found.machine.welcome(identity.to_bytes(frames.SESSION_BYTES, "little"), body, now)
        self._flush(found)
        self.rearm(found, now)
        self.emit(PeerUp(peer, found.machine.incarnation, hello))

    def refuse(self, peer: str, code: str, text: str) -> None:
        """Send the peer of ``HelloReceived`` away. Ignored when it no longer asks."""
        if code == SUPERSEDED:
            raise LocalError(f"the code {code!r} is the transport's own: take another word")
        found = self._asking(peer)
        if found is not None:
            found.machine.refuse(code, text)
            self._settle(found)
            self._flush(found)

    def disconnect(self, peer: str, reason: str) -> None:
        """Say BYE and forget the session; no ``PeerDown`` comes for it here."""
        found = self._peers.get(peer)
        if found is not None:
            found.machine.disconnect(reason, self._scheduler.time())
            self._drop_streams(found)
            self._settle(found)
            self._flush(found)

    def key(self, peer: str) -> str:
        """The public key that the peer came with; empty where there is no session or the link is plain."""
        found = self._find(peer)
        return "" if found is None else key_of(found.origin)

    def evict(self, allows: Callable[[str], bool]) -> list[str]:
        """End the sessions of all whose key is not allowed any more; returns their names. ``PeerDown`` comes for each."""
        now = self._scheduler.time()
        gone = [self._peers[name] for name in self._present]
        gone = [peer for peer in gone if not allows(key_of(peer.origin))]
        for peer in gone:
            effects = peer.machine.evict(now)
            self._settle(peer)
            self._run(peer, effects, now)
        return [peer.name for peer in gone]

    def _asking(self, peer: str) -> Peer | None:
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
        self._gate.settled(name)
        self._known.pop(name, None)
        self._known[name] = None
        if len(self._known) > _KNOWN_NAMES_PER_SESSION * self.settings.max_sessions:
            del self._known[next(iter(self._known))]

    def _settle(self, peer: Peer) -> None:
        if peer.machine.state is ListenerState.ABSENT:
            self._present.pop(peer.name, None)
            self._gate.settled(peer.name)
            peer.machine.hello = {}  # up to 64 KiB of a stranger's, who may have many names
        else:
            self._present[peer.name] = None

    def _receive(self, name: str, lane: Lane, parts: Sequence[Buffer], origin: bytes) -> None:
        if self._closed:
            return
        now = self._scheduler.time()
        settings = self.settings
        peer = self._peers.get(name)
        if peer is not None and (
            peer.origin != origin or peer.machine.state is ListenerState.ABSENT
        ):
            peer = None  # a stranger under that name, who must not harm whoever holds it
        if peer is None or peer.machine.session is None:
            limit = settings.hello_limit_bytes
        else:
            limit = settings.control_limit_bytes
        try:
            message = frames.parse(parts, limit, settings.chunk_limit_bytes)
            check_lane(message, lane, parts)
            _check_holder(message, name)
        except PeerError as error:
            if peer is None:
                self.bad_messages += 1
            else:
                self._violated(peer, str(error), now)
                self.rearm(peer, now)
            return
        if type(message) is Hello:
            self._take_hello(name, message, origin, now)
        elif peer is None:
            self._answer_unauthenticated(name, message, origin)
        elif isinstance(message, BULK_MESSAGES):
            self._handle_bulk(peer, message, now)
        elif not isinstance(message, Data | Beat | Ack) or self._may_send(
            peer, message, len(parts[0]), now
        ):
            self._handle(peer, message, now)

    def _may_send(self, peer: Peer, message: Data | Beat | Ack, size: int, now: float) -> bool:
        """Whether to handle a message of a peer, which has a session or had one."""
        current = peer.machine.session
        if current is None or message.session != current.identity:
            return True
        if peer.speech is None:
            peer.speech = MessageLimits(self.settings, now)
            self._know(peer.name)
        if peer.speech.opens(message, size, now):
            return True
        self.slowed += 1
        current.on_received(now)
        self.rearm(peer, now)
        return False

    def _take_hello(self, name: str, hello: Hello, origin: bytes, now: float) -> None:
        """Whoever is admitted gets the name's session bound to its connection; nobody else."""
        key = key_of(origin)
        address_of = key or self._link.address_of()
        if not self._gate.opens(name, address_of, now, is_known=name in self._known):
            return
        if name not in self._present and len(self._present) >= self.settings.max_sessions:
            text = f"the listener already has {len(self._present)} sessions"
            head = refusal_head(hello.incarnation, hello.attempt, "full", text, known=0)
            self._link.send(name, Lane.CONTROL, (head,), origin)
            return
        refused = self._admit(name, key)
        if refused is not None:
            head = refusal_head(hello.incarnation, hello.attempt, *refused, known=0)
            self._link.send(name, Lane.CONTROL, (head,), origin)
            return
        peer = self._record(name)
        if peer.origin != origin and peer.machine.is_copy(hello):
            return  # its WELCOME, with the session id, is for the connection that asked first
        effects = peer.machine.handle(hello, now)
        if effects:
            peer.origin = origin
            peer.speech = None
            if name not in self._known:
                self._gate.asks(name)
            self._run(peer, effects, now)
        else:
            self._flush(peer, origin)
        self.rearm(peer, now)

    def _record(self, name: str) -> Peer:
        """The record of a name; a new one takes the place of the oldest absent one."""
        peer = self._peers.get(name)
        if peer is None:
            limit = _KNOWN_NAMES_PER_SESSION * self.settings.max_sessions
            if len(self._peers) >= limit:
                oldest = next(known for known in self._peers if known not in self._present)
                del self._peers[oldest]
            peer = self._peers[name] = Peer(name, ListenerMachine(self.incarnation, self.settings))
        return peer

    def _answer_unauthenticated(self, name: str, message: frames.Message, origin: bytes) -> None:
        if isinstance(message, Foreign):
            head = protocol_refusal(message)
        elif isinstance(message, Data | Beat | Ack):
            head = unknown_head(message.session)
        else:
            return
        self._link.send(name, Lane.CONTROL, (head,), origin)

    def _special(self, peer: Peer, effect: Any) -> None:
        hello = effect.hello
        self._settle(peer)
        key = key_of(peer.origin)
        self.emit(HelloReceived(peer.name, hello.incarnation, hello.body, hello.role, key))


def _check_holder(message: frames.Message, name: str) -> None:
    if type(message) is Hello and message.name != name:
        raise PeerError(f"HELLO of {message.name!r} on the connection of {name!r}")


class DialerEndpoint(Endpoint):
    """The dialing side: one listener. ``peer`` arguments are ignored, events carry ``""``.

    ``incarnation`` is wall-clock nanoseconds at the start of the process; it may be raised by one
    handshake (see ``session.py``), so read it back from ``.incarnation``.
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
        chance: Chance | None = None,
    ) -> None:
        super().__init__(link, scheduler, settings, on_event, name, chance=chance)
        self._machine = DialerMachine(name, role, incarnation, settings, self._chance.random)
        self._peer = Peer("", self._machine)
        self._hello: Callable[[], Body] = dict

    @property
    def incarnation(self) -> int:
        """The incarnation in use."""
        return self._machine.incarnation

    @property
    def is_up(self) -> bool:
        """Whether a session stands."""
        return self._machine.session is not None

    def adopt(self, settings: TransportSettings) -> None:
        """Use other settings from now on, also in the session that stands.

        For what the listener says in its welcome: both sides must agree about heartbeat and expiry.
        """
        self.settings = settings
        self._machine.settings = settings
        self._link.adopt(settings)
        if self._machine.session is not None:
            self._machine.session.adopt(settings)
        if self._peer.count is not None:
            self._peer.count.bound(
                settings.stripes_first, min(settings.stripes_limit, self._link.stripes_limit)
            )
        if self._peer.streams is not None:
            self._peer.streams.adopt(settings)
        self.rearm(self._peer, self._scheduler.time())

    def connect(self, hello: Callable[[], Body]) -> None:
        """Say HELLO now and again after every loss; ``hello()`` is asked for each one's body."""
        self._hello = hello
        now = self._scheduler.time()
        self._run(self._peer, self._machine.connect(now), now)
        self.rearm(self._peer, now)

    def disconnect(self, peer: str = "", reason: str = "") -> None:
        """Say BYE and be quiet until ``connect``; no ``PeerDown`` comes for it here."""
        self._machine.disconnect(reason)
        self._drop_streams(self._peer)
        self._flush(self._peer)

    def open_stripes(self, peer: Peer, count: int) -> bool:
        """See ``Endpoint``: this side does."""
        self._link.open_stripes(count)
        return True

    def _find(self, peer: str) -> Peer | None:
        return None if self._machine.session is None else self._peer

    def _all_peers(self) -> Sequence[Peer]:
        return [self._peer]

    def _receive(self, name: str, lane: Lane, parts: Sequence[Buffer], origin: bytes) -> None:
        if self._closed:
            return
        now = self._scheduler.time()
        settings = self.settings
        peer = self._peer
        try:
            message = frames.parse(parts, settings.control_limit_bytes, settings.chunk_limit_bytes)
            check_lane(message, lane, parts)
        except PeerError as error:
            self._violated(peer, str(error), now)
            self.rearm(peer, now)
            return
        if isinstance(message, BULK_MESSAGES):
            self._handle_bulk(peer, message, now)
        else:
            self._handle(peer, message, now)

    def _special(self, peer: Peer, effect: Any) -> None:
        if isinstance(effect, session.SayHello):
            if self._closed or self._machine.state is not DialerState.CALLING:
                return  # the owner hung up while it was told about the loss
            body = frames.check_body(self._hello())
            self._machine.outbox.append(self._machine.hello_head(body))
            self._flush(peer)
        elif isinstance(effect, session.Up):
            self.emit(PeerUp("", effect.incarnation, effect.body))
        elif isinstance(effect, session.StillConnecting):
            self.emit(Unreachable(self.address, effect.seconds))
        elif isinstance(effect, session.RefusedBy):
            self.emit(Refused(effect.code, effect.text))
        else:
            self.emit(Superseded())
