"""Sessions as pure machines: who is there, is it still there, and did it hear every message.

Bytes are not touched here: ``handle`` takes parsed messages and gives effects; heads to send pile
up in ``outbox``, which the endpoint empties after each call (as aioquic's ``datagrams_to_send``).
Time is the argument ``now``, chance the argument ``chance``.

Rules
  * A dialer says HELLO with its incarnation and the number of the attempt, again and again with
    growing, jittered waits, until WELCOME or REFUSE with the same two numbers comes.
  * A higher incarnation replaces the ghost of the name at once. A lower one is refused with code
    ``superseded`` and the known incarnation. A dialer that was never up takes that as clock skew,
    raises itself to known + 1 and tries again; one that had been up is superseded and quiet.
  * The same incarnation with a new attempt is the same process reconnecting: a new session.
  * Session ids are random. Traffic under an id the listener does not hold is answered UNKNOWN,
    whereupon the dialer says HELLO at once: a restarted listener is found within one message.
  * Control messages are numbered from 1, accepted in order only, acknowledged cumulatively, and
    sent again from the first open one (go-back-N) after a wait or when the peer reports a gap.
  * The dialer beats when it sent no control traffic for a while, and every second heartbeat in any
    case, because of what rides on it; the listener answers the beat.
    Whoever hears nothing (chunks count) for ``expire_after_s`` ends the session.

Dialer     state     event                                -> state     effects
           IDLE      connect                              -> CALLING   SayHello
           CALLING   timer                                -> CALLING   SayHello / StillConnecting
           CALLING   WELCOME                              -> UP        Up
           CALLING   REFUSE superseded, never up          -> CALLING   SayHello (known + 1)
           CALLING   REFUSE superseded, was up            -> IDLE      Overtaken
           CALLING   REFUSE                               -> IDLE      RefusedBy
           UP        DATA, BEAT in order                  -> UP        the message itself
           UP        UNKNOWN                              -> CALLING   Down reset, SayHello
           UP        BYE, bad bytes, expiry               -> CALLING   Down, (later) SayHello
           UP        BYE revoked                          -> IDLE      Down, RefusedBy
           any       disconnect                           -> IDLE

Listener   ABSENT    HELLO                                -> ASKED     Ask
(one per   ASKED     HELLO, higher or newer attempt       -> ASKED     Ask
peer)      ASKED     welcome()                            -> UP        (WELCOME)
           ASKED     refuse()                             -> ABSENT    (REFUSE)
           ASKED     timer                                -> ABSENT
           UP        HELLO, higher incarnation            -> ASKED     Down superseded, Ask
           UP        HELLO, same, newer attempt           -> ASKED     Down reset, Ask
           UP        HELLO, same attempt, nothing heard   -> UP        (WELCOME again)
           UP        DATA, BEAT in order                  -> UP        the message itself
           UP        BYE, bad bytes, expiry               -> ABSENT    Down
           ASKED, UP expel()                              -> ABSENT    Down revoked
           any       HELLO, lower incarnation             -> same      (REFUSE superseded)
           any       other session's DATA, BEAT, ACK      -> same      (UNKNOWN)
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Final, TypeAlias

from attrs import frozen

from fsl_transport.events import Body
from fsl_transport.session import frames
from fsl_transport.session.answers import (
    REVOKED,
    SUPERSEDED,
    protocol_refusal,
    refusal_head,
    unknown_head,
)
from fsl_transport.session.frames import (
    INCARNATION_LIMIT,
    Ack,
    Beat,
    Bye,
    Data,
    Foreign,
    Hello,
    Message,
    Refuse,
    Unknown,
)
from fsl_transport.session.frames import Welcome as WelcomeMessage
from fsl_transport.session.reliable import BeatDue, Session
from fsl_transport.settings import TransportSettings

_IN_SESSION: Final = (Data, Beat, Ack)


@frozen
class SayHello:
    """Ask the owner for a fresh hello body and send it by ``hello_head``."""


@frozen
class StillConnecting:
    """No welcome for ``seconds``."""

    seconds: float


@frozen
class Up:
    """The session stands."""

    incarnation: int
    body: Body


@frozen
class Down:
    """The session is over."""

    incarnation: int
    reason: str
    text: str = ""


@frozen
class RefusedBy:
    """The listener said no."""

    code: str
    text: str


@frozen
class Replaced:
    """A higher incarnation of our name is in."""


@frozen
class Ask:
    """The owner decides about this hello."""

    hello: Hello


Effect: TypeAlias = (
    SayHello | StillConnecting | Up | Down | RefusedBy | Replaced | Ask | Data | Beat | BeatDue
)


class DialerState(enum.Enum):
    """See the table."""

    IDLE = "idle"
    CALLING = "calling"
    UP = "up"


class DialerMachine:
    """The dialing side: one listener, one session at a time."""

    def __init__(
        self,
        name: str,
        role: str,
        incarnation: int,
        settings: TransportSettings,
        chance: Callable[[], float],
    ) -> None:
        self.name = name
        self.role = role
        self.incarnation = incarnation
        self.settings = settings
        self.chance = chance
        self.state = DialerState.IDLE
        self.attempt = 0
        self.session: Session | None = None
        self.peer_incarnation = 0
        self.outbox: list[bytes] = []
        self._was_up = False
        self._wait_s = settings.hello_every_s
        self._hello_at = math.inf
        self._calling_since = 0.0
        self._unreachable_at = math.inf

    def connect(self, now: float) -> list[Effect]:
        """Begin to call. Does nothing when calling or up already."""
        if self.state is not DialerState.IDLE:
            return []
        return self._call(now, at_once=True)

    def hello_head(self, body: Body) -> bytes:
        """The bytes of the HELLO that ``SayHello`` asks for."""
        return frames.pack(
            (
                frames.HELLO,
                frames.PROTOCOL_VERSION,
                self.incarnation,
                self.attempt,
                self.name,
                self.role,
                body,
            ),
            self.settings.hello_limit_bytes,
        )

    def handle(self, message: Message, now: float) -> list[Effect]:
        """One parsed message from the control lane."""
        session = self.session
        if session is not None and isinstance(message, _IN_SESSION):
            if message.session != session.identity:
                return []  # from a session of ours that is over
            return session.handle(message, now)
        if isinstance(message, WelcomeMessage):
            return self._welcomed(message, now)
        if isinstance(message, Refuse):
            return self._refused(message, now)
        if session is None or not isinstance(message, Unknown | Bye):
            return []
        if message.session != session.identity:
            return []
        if isinstance(message, Unknown):
            return [self._down("reset"), *self._call(now, at_once=True)]
        if message.reason == REVOKED:
            self._rest()
            text = "the server does not let this key in any more; ask whoever runs it"
            return [self._down(REVOKED, text), RefusedBy(REVOKED, text)]
        return [self._down("bye", message.reason), *self._call(now, at_once=False)]

    def violated(self, text: str, now: float) -> list[Effect]:
        """The listener sent bytes it must not send."""
        if self.session is None:
            return []
        self.outbox.append(self.session.bye_head("protocol"))
        return [self._down("protocol", text), *self._call(now, at_once=False)]

    def disconnect(self, reason: str) -> None:
        """End on purpose; quiet until ``connect``."""
        if self.session is not None:
            self.outbox.append(self.session.bye_head(reason))
            self._down("bye")
        self._rest()

    def next_deadline(self) -> float:
        """When to call ``handle_timer``, or infinity."""
        if self.session is not None:
            return self.session.next_deadline()
        return min(self._hello_at, self._unreachable_at)

    def handle_timer(self, now: float) -> list[Effect]:
        """Do what is due."""
        session = self.session
        if session is not None:
            effects = session.handle_timer(now)
            if session.is_expired:
                return [self._down("expired"), *self._call(now, at_once=True)]
            return effects
        effects = []
        if now >= self._hello_at:
            self._hello_at = now + self._next_wait_s()
            effects.append(SayHello())
        if now >= self._unreachable_at:
            self._unreachable_at = now + self.settings.unreachable_every_s
            effects.append(StillConnecting(now - self._calling_since))
        return effects

    def _next_wait_s(self) -> float:
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, max(wait_s, self.settings.heartbeat_every_s))
        return wait_s * (0.75 + 0.5 * self.chance())

    def _call(self, now: float, *, at_once: bool) -> list[Effect]:
        self.state = DialerState.CALLING
        self.attempt += 1
        self._calling_since = now
        self._wait_s = self.settings.hello_every_s
        self._hello_at = now + self._next_wait_s()
        self._unreachable_at = now + self.settings.unreachable_every_s
        return [SayHello()] if at_once else []

    def _down(self, reason: str, text: str = "") -> Down:
        self.session = None
        return Down(self.peer_incarnation, reason, text)

    def _rest(self) -> None:
        self.state = DialerState.IDLE
        self._hello_at = math.inf
        self._unreachable_at = math.inf

    def _welcomed(self, message: WelcomeMessage, now: float) -> list[Effect]:
        if (
            self.state is not DialerState.CALLING
            or message.incarnation != self.incarnation
            or message.attempt != self.attempt
        ):
            return []
        self.state = DialerState.UP
        self._was_up = True
        self.peer_incarnation = message.epoch
        self.session = Session(message.session, self.settings, self.outbox, now, beats=True)
        return [Up(message.epoch, message.body)]

    def _refused(self, message: Refuse, now: float) -> list[Effect]:
        if (
            self.state is not DialerState.CALLING
            or message.incarnation != self.incarnation
            or message.attempt != self.attempt
        ):
            return []
        if message.code == SUPERSEDED and message.known >= self.incarnation:
            if self._was_up:
                self._rest()
                return [Replaced()]
            if message.known + 1 >= INCARNATION_LIMIT:
                self._rest()
                return [RefusedBy(message.code, f"{message.text}, the highest that there is")]
            self.incarnation = message.known + 1
            self.attempt += 1
            return [SayHello()]
        self._rest()
        return [RefusedBy(message.code, message.text)]


class ListenerState(enum.Enum):
    """See the table."""

    ABSENT = "absent"
    ASKED = "asked"
    UP = "up"


class ListenerMachine:
    """The listening side's view of one dialer."""

    __slots__ = (
        "_asked_at",
        "_attempt",
        "_ended_at",
        "_heard_under_session",
        "_welcome",
        "epoch",
        "hello",
        "incarnation",
        "outbox",
        "session",
        "settings",
        "state",
    )

    def __init__(self, epoch: int, settings: TransportSettings) -> None:
        self.epoch = epoch
        self.settings = settings
        self.state = ListenerState.ABSENT
        self.incarnation = -1
        self.session: Session | None = None
        self.hello: Body = {}
        self.outbox: list[bytes] = []
        self._attempt = -1
        self._asked_at = 0.0
        self._ended_at = -math.inf
        self._welcome = b""
        self._heard_under_session = False

    def handle(self, message: Message, now: float) -> list[Effect]:
        """One parsed message from the control lane."""
        session = self.session
        if isinstance(message, _IN_SESSION):
            if session is None or message.session != session.identity:
                self.outbox.append(unknown_head(message.session))
                return []
            self._heard_under_session = True
            return session.handle(message, now)
        if isinstance(message, Hello):
            return self._hello(message, now)
        if isinstance(message, Foreign):
            self.outbox.append(protocol_refusal(message))
            return []
        if isinstance(message, Bye) and session is not None and message.session == session.identity:
            return [self._down("bye", now, message.reason)]
        return []

    def is_copy(self, hello: Hello) -> bool:
        """Whether this is the very HELLO whose session stands."""
        return (
            self.session is not None
            and hello.incarnation == self.incarnation
            and hello.attempt == self._attempt
        )

    def remember(self, incarnation: int) -> None:
        """Count ``incarnation`` as seen, unless the dialer itself has said more by now."""
        if self.state is ListenerState.ABSENT:
            self.incarnation = max(self.incarnation, incarnation)

    def welcome(self, identity: bytes, body: Body, now: float) -> None:
        """Let the asking dialer in under the random session id ``identity``."""
        head = frames.pack(
            (
                frames.WELCOME,
                frames.PROTOCOL_VERSION,
                self.incarnation,
                self._attempt,
                identity,
                self.epoch,
                body,
            ),
            self.settings.control_limit_bytes,
        )
        self.state = ListenerState.UP
        self.session = Session(identity, self.settings, self.outbox, now, beats=False)
        self._heard_under_session = False
        self._welcome = head
        self.outbox.append(head)

    def refuse(self, code: str, text: str) -> None:
        """Send the asking dialer away; it may ask again."""
        self.outbox.append(
            refusal_head(self.incarnation, self._attempt, code, text, known=0),
        )
        self.state = ListenerState.ABSENT
        self._attempt -= 1  # when the REFUSE is lost, its repeated HELLO is asked about again

    def violated(self, text: str, now: float) -> list[Effect]:
        """The dialer sent bytes it must not send."""
        if self.session is None:
            return []
        self.outbox.append(self.session.bye_head("protocol"))
        return [self._down("protocol", now, text)]

    def disconnect(self, reason: str, now: float) -> None:
        """End on purpose."""
        if self.session is not None:
            self.outbox.append(self.session.bye_head(reason))
            self._down("bye", now)
        self.state = ListenerState.ABSENT

    def evict(self, now: float) -> list[Effect]:
        """Its key is no longer allowed: say so and end whatever there is."""
        if self.session is not None:
            self.outbox.append(self.session.bye_head(REVOKED))
        return [self._down(REVOKED, now)]

    def next_deadline(self) -> float:
        """When to call ``handle_timer``, or infinity."""
        if self.session is not None:
            return self.session.next_deadline()
        if self.state is ListenerState.ASKED:
            return self._asked_at + self.settings.expire_after_s
        return math.inf

    def handle_timer(self, now: float) -> list[Effect]:
        """Do what is due."""
        session = self.session
        if session is not None:
            effects = session.handle_timer(now)
            if session.is_expired:
                if not self._heard_under_session:
                    self._attempt -= 1  # the WELCOME may be lost; the dialer still repeats this one
                return [self._down("expired", now)]
            return effects
        if (
            self.state is ListenerState.ASKED
            and now >= self._asked_at + self.settings.expire_after_s
        ):
            self.state = ListenerState.ABSENT
            self._attempt -= 1
        return []

    def _down(self, reason: str, now: float, text: str = "") -> Down:
        self.session = None
        self.state = ListenerState.ABSENT
        self._welcome = b""
        self._ended_at = now
        return Down(self.incarnation, reason, text)

    def _hello(self, message: Hello, now: float) -> list[Effect]:
        if message.incarnation < self.incarnation:
            text = f"a process with incarnation {self.incarnation} holds this name"
            self.outbox.append(
                refusal_head(
                    message.incarnation, message.attempt, SUPERSEDED, text, known=self.incarnation
                )
            )
            return []
        effects: list[Effect] = []
        if message.incarnation > self.incarnation:
            if self.session is not None:
                effects.append(self._down(SUPERSEDED, now))
        elif self.state is ListenerState.ABSENT:
            # A repeated HELLO of a session that is over must not make a member of nobody; after
            # a while it can only be a process that counts its attempts anew.
            if message.attempt <= self._attempt and (
                now < self._ended_at + self.settings.expire_after_s
            ):
                return []
        elif message.attempt <= self._attempt:
            # Once its session was used, the dialer has the WELCOME: this one is an old copy.
            if (
                message.attempt == self._attempt
                and self.session is not None
                and not self._heard_under_session
            ):
                self.session.on_received(now)
                self.outbox.append(self._welcome)
            return []
        elif self.session is not None:
            effects.append(self._down("reset", now))
        self.incarnation = message.incarnation
        self._attempt = message.attempt
        self._asked_at = now
        self.hello = message.body
        self.state = ListenerState.ASKED
        effects.append(Ask(message))
        return effects
