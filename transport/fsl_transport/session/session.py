"""Sessions as pure state machines: handshake, replacement by incarnation, loss and expiry.

``handle`` takes parsed messages and returns effects. Packed heads to send collect in ``outbox``,
which the endpoint empties after each call (like aioquic's ``datagrams_to_send``). Time is the
argument ``now``; randomness is the argument ``random``.

Rules
  * A dialer sends HELLO with its incarnation and the number of its attempt, repeatedly, with
    growing, jittered waits, until a WELCOME or REFUSE with the same two numbers arrives.
  * A higher incarnation replaces the name's old session at once. A lower one is refused with code
    ``superseded`` and the known incarnation. A dialer that was never up takes that for clock skew,
    raises its incarnation to known + 1 and tries again; one that was up is superseded and stops.
  * The same incarnation with a new attempt is the same process reconnecting: a new session.
  * Session ids are random. Traffic under an id that the listener does not hold is answered with
    UNKNOWN, and the dialer sends HELLO at once: a restarted listener is found within one message.
  * Control messages are numbered from 1, accepted only in order, acknowledged cumulatively, and
    retransmitted from the first unacknowledged one (go-back-N) after a timeout or a reported gap.
  * The dialer sends a heartbeat when it sent no control traffic for a while, and at least every
    second interval, because of the payload; the listener answers it. A side that receives nothing
    (chunks count) for ``expire_after_s`` ends the session.

Dialer     state     event                                -> state     effects
           IDLE      connect                              -> CALLING   SendHello
           CALLING   timer                                -> CALLING   SendHello / StillConnecting
           CALLING   WELCOME                              -> UP        Up
           CALLING   REFUSE superseded, never up          -> CALLING   SendHello (known + 1)
           CALLING   REFUSE superseded, was up            -> IDLE      Replaced
           CALLING   REFUSE                               -> IDLE      RefusedBy
           UP        DATA, BEAT in order                  -> UP        the message itself
           UP        UNKNOWN                              -> CALLING   Down reset, SendHello
           UP        BYE, bad bytes, expiry               -> CALLING   Down, (later) SendHello
           UP        BYE revoked                          -> IDLE      Down, RefusedBy
           any       disconnect                           -> IDLE

Listener   ABSENT    HELLO                                -> ASKED     Ask
(one per   ASKED     HELLO, higher or newer attempt       -> ASKED     Ask
peer)      ASKED     welcome()                            -> UP        (WELCOME)
           ASKED     refuse()                             -> ABSENT    (REFUSE)
           ASKED     timer                                -> ABSENT
           UP        HELLO, higher incarnation            -> ASKED     Down superseded, Ask
           UP        HELLO, same, newer attempt           -> ASKED     Down reset, Ask
           UP        HELLO, same attempt, session unused  -> UP        (WELCOME again)
           UP        DATA, BEAT in order                  -> UP        the message itself
           UP        BYE, bad bytes, expiry               -> ABSENT    Down
           ASKED, UP evict()                              -> ABSENT    Down revoked
           any       HELLO, lower incarnation             -> same      (REFUSE superseded)
           any       another session's DATA, BEAT, ACK    -> same      (UNKNOWN)
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Final, TypeAlias

from attrs import frozen

from fsl_transport.events import Body
from fsl_transport.session import frames
from fsl_transport.session.frames import (
    INCARNATION_LIMIT,
    REVOKED,
    SUPERSEDED,
    Ack,
    Beat,
    Bye,
    Data,
    Foreign,
    Hello,
    Message,
    Refuse,
    Unknown,
    Welcome,
    protocol_refusal,
    refusal_head,
    unknown_head,
)
from fsl_transport.session.reliable import BeatDue, Session
from fsl_transport.settings import TransportSettings

_IN_SESSION: Final = (Data, Beat, Ack)


@frozen
class SendHello:
    """Get a fresh hello body from the application and send it with ``hello_head``."""


@frozen
class StillConnecting:
    """No answer for ``seconds`` so far."""

    seconds: float


@frozen
class Up:
    """The session is established."""

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
    """The listener refused the session."""

    code: str
    text: str


@frozen
class Replaced:
    """A higher incarnation of this name connected."""


@frozen
class Ask:
    """The application decides about this hello."""

    hello: Hello


Effect: TypeAlias = (
    SendHello | StillConnecting | Up | Down | RefusedBy | Replaced | Ask | Data | Beat | BeatDue
)


class DialerState(enum.Enum):
    """States of the dialer's table."""

    IDLE = "idle"
    CALLING = "calling"
    UP = "up"


class DialerMachine:
    """Dialing side: one listener, one session at a time."""

    def __init__(
        self,
        name: str,
        role: str,
        incarnation: int,
        settings: TransportSettings,
        random: Callable[[], float],
    ) -> None:
        self.name = name
        self.role = role
        self.incarnation = incarnation
        self.settings = settings
        self._random = random
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
        """Start calling. No effect if already calling or up."""
        if self.state is not DialerState.IDLE:
            return []
        return self._call(now, at_once=True)

    def hello_head(self, body: Body) -> bytes:
        """Pack the HELLO that ``SendHello`` requests."""
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
        """Handle one parsed message from the control lane."""
        session = self.session
        if session is not None and isinstance(message, _IN_SESSION):
            if message.session != session.identity:
                return []  # from an earlier session
            return session.handle(message, now)
        if isinstance(message, Welcome):
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
            self._stop_calling()
            text = "the listener no longer accepts this key; ask its operator"
            return [self._down(REVOKED, text), RefusedBy(REVOKED, text)]
        return [self._down("bye", message.reason), *self._call(now, at_once=False)]

    def violated(self, text: str, now: float) -> list[Effect]:
        """The listener broke the protocol."""
        if self.session is None:
            return []
        self.outbox.append(self.session.bye_head("protocol"))
        return [self._down("protocol", text), *self._call(now, at_once=False)]

    def disconnect(self, reason: str) -> None:
        """End the session on purpose; idle until ``connect``."""
        if self.session is not None:
            self.outbox.append(self.session.bye_head(reason))
            self._down("bye")
        self._stop_calling()

    def next_deadline(self) -> float:
        """Return when to call ``handle_timer``, or infinity."""
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
            effects.append(SendHello())
        if now >= self._unreachable_at:
            self._unreachable_at = now + self.settings.unreachable_every_s
            effects.append(StillConnecting(now - self._calling_since))
        return effects

    def _next_wait_s(self) -> float:
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, max(wait_s, self.settings.heartbeat_every_s))
        return wait_s * (0.75 + 0.5 * self._random())

    def _call(self, now: float, *, at_once: bool) -> list[Effect]:
        self.state = DialerState.CALLING
        self.attempt += 1
        self._calling_since = now
        self._wait_s = self.settings.hello_every_s
        self._hello_at = now + self._next_wait_s()
        self._unreachable_at = now + self.settings.unreachable_every_s
        return [SendHello()] if at_once else []

    def _down(self, reason: str, text: str = "") -> Down:
        self.session = None
        return Down(self.peer_incarnation, reason, text)

    def _stop_calling(self) -> None:
        self.state = DialerState.IDLE
        self._hello_at = math.inf
        self._unreachable_at = math.inf

    def _welcomed(self, message: Welcome, now: float) -> list[Effect]:
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
                self._stop_calling()
                return [Replaced()]
            if message.known + 1 >= INCARNATION_LIMIT:
                self._stop_calling()
                return [RefusedBy(message.code, f"{message.text}, the highest possible")]
            self.incarnation = message.known + 1
            self.attempt += 1
            return [SendHello()]
        self._stop_calling()
        return [RefusedBy(message.code, message.text)]


class ListenerState(enum.Enum):
    """States of the listener's table."""

    ABSENT = "absent"
    ASKED = "asked"
    UP = "up"


class ListenerMachine:
    """Listening side: one dialer."""

    __slots__ = (
        "_asked_at",
        "_attempt",
        "_ended_at",
        "_received_in_session",
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
        self._received_in_session = False

    def handle(self, message: Message, now: float) -> list[Effect]:
        """Handle one parsed message from the control lane."""
        session = self.session
        if isinstance(message, _IN_SESSION):
            if session is None or message.session != session.identity:
                self.outbox.append(unknown_head(message.session))
                return []
            self._received_in_session = True
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
        """Whether this HELLO is the one whose session is established."""
        return (
            self.session is not None
            and hello.incarnation == self.incarnation
            and hello.attempt == self._attempt
        )

    def remember(self, incarnation: int) -> None:
        """Count ``incarnation`` as seen, unless a session shows a higher one."""
        if self.state is ListenerState.ABSENT:
            self.incarnation = max(self.incarnation, incarnation)

    def welcome(self, identity: bytes, body: Body, now: float) -> None:
        """Grant the session under the random id ``identity``."""
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
        self._received_in_session = False
        self._welcome = head
        self.outbox.append(head)

    def refuse(self, code: str, text: str) -> None:
        """Refuse the session; the dialer may ask again."""
        self.outbox.append(
            refusal_head(self.incarnation, self._attempt, code, text, known=0),
        )
        self.state = ListenerState.ABSENT
        self._attempt -= 1  # if the REFUSE is lost, the repeated HELLO is decided again

    def violated(self, text: str, now: float) -> list[Effect]:
        """The dialer broke the protocol."""
        if self.session is None:
            return []
        self.outbox.append(self.session.bye_head("protocol"))
        return [self._down("protocol", now, text)]

    def disconnect(self, reason: str, now: float) -> None:
        """End the session on purpose."""
        if self.session is not None:
            self.outbox.append(self.session.bye_head(reason))
            self._down("bye", now)
        self.state = ListenerState.ABSENT

    def evict(self, now: float) -> list[Effect]:
        """The peer's key is no longer allowed: send BYE and end any session."""
        if self.session is not None:
            self.outbox.append(self.session.bye_head(REVOKED))
        return [self._down(REVOKED, now)]

    def next_deadline(self) -> float:
        """Return when to call ``handle_timer``, or infinity."""
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
                if not self._received_in_session:
                    self._attempt -= 1  # the WELCOME may be lost: the dialer repeats this HELLO
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
            # A late copy of a HELLO whose session is over must not open a new session. After the
            # expiry time it can only be a process that counts its attempts from 1 again.
            if message.attempt <= self._attempt and (
                now < self._ended_at + self.settings.expire_after_s
            ):
                return []
        elif message.attempt <= self._attempt:
            # Once the session was used, the dialer has the WELCOME, and this HELLO is a copy.
            if (
                message.attempt == self._attempt
                and self.session is not None
                and not self._received_in_session
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
