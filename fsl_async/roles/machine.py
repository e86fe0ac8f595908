"""The parts of every role machine: events, effects, facts and deadlines. Pure.

    machine.handle(event, now) -> list[effect]        machine.next_deadline() -> float | None

A message of a peer is an event as it came (`Received`, `Offered`); a shell turns a finished disk
write or a step of the training thread into an event, and carries effects out in order. An effect
that takes time ends in an event, named in its docstring, so a machine never waits. Times are
seconds of the caller's monotonic clock; names are names of peers; digests are hexadecimal text.

Each event, effect and fact has a tag, its type in the journal (`fsl_async.roles.names.Tagged`).
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

from attrs import field, frozen

from fsl_async.roles.messages import Greeting, Message, MessageError, Meta
from fsl_async.roles.names import Tagged

MessageT = TypeVar("MessageT", bound=Message)

EffectT = TypeVar("EffectT", bound="Effect")

SERVER = ""
"""The peer of a client, which has one."""


@frozen
class Event(Tagged, tag="event"):
    """Base of all events."""

    @property
    def topic(self) -> type:
        """The type by which a machine's table has its handler."""
        return type(self)


@frozen
class Received(Event, Generic[MessageT], tag="received"):
    """A message of a peer; at a client the peer is `SERVER`."""

    peer: str
    message: MessageT

    @property
    def topic(self) -> type:
        """The type of the message."""
        return type(self.message)


@frozen
class Offered(Received[MessageT], tag="offered"):
    """A peer offers a stream, with its metadata as the message."""

    stream: str


@frozen
class Greeted(Received[MessageT], tag="greeted"):
    """A client's hello arrived, or at a client the welcome, with the client's incarnation."""

    incarnation: int


@frozen
class Effect(Tagged, tag="effect"):
    """Base of all effects."""


@frozen
class Done(Event, Generic[EffectT], tag="done"):
    """An effect that takes time is carried out. problem: why it could not be; empty: it is."""

    of: EffectT
    problem: str = ""

    @classmethod
    def failed(cls, of: EffectT, error: Exception) -> Self:
        """An effect that an error ended; some errors have no text."""
        return cls(of, str(error) or type(error).__name__)

    @property
    def topic(self) -> type:
        """The type of the effect."""
        return type(self.of)


@frozen
class Fact(Tagged, tag="fact"):
    """Base of all facts: what a machine has decided, stated for readers of the journal."""


@frozen
class TimerFired(Event, tag="timer_fired"):
    """The machine's `next_deadline` has come."""


@frozen
class DrainAsked(Event, tag="drain_asked"):
    """The operator asked this node to end gracefully (Ctrl-C once, SIGTERM)."""

    reason: str


@frozen
class StreamLost(Event, tag="stream_lost"):
    """A stream broke off: the peer declined or canceled it, or a local read or write failed."""

    peer: str
    stream: str
    reason: str


@frozen
class ClientLeft(Event, tag="client_left"):
    """A session ended: expired, said goodbye, or was replaced by a newer incarnation.

    why: the reason in its goodbye, or the code of the violation that ended it; empty if there is
    neither. returns: whether it is launched again.
    """

    peer: str
    incarnation: int
    reason: str
    why: str = ""
    returns: bool = False


@frozen
class SessionLost(Event, tag="session_lost"):
    """The session with the parameter server ended; the transport keeps dialing.

    violation: what this node sent that the parameter server could not read; empty: nothing.
    """

    reason: str
    violation: str = ""


@frozen
class HelloRefused(Event, tag="hello_refused"):
    """The parameter server refused this client. text: why, and what to do."""

    code: str
    text: str


@frozen
class RunEnded(Event, tag="run_ended"):
    """The parameter server ended the run."""

    reason: str


@frozen
class TrainingEnded(Event, tag="training_ended"):
    """The user's function returned (`error` is None) or raised."""

    error: str | None


@frozen
class Send(Effect, tag="send"):
    """Send a control message to a peer; lost with the session if that ends first."""

    peer: str
    message: Message


@frozen
class Note(Effect, tag="note"):
    """Log a sentence for the operator and the journal: a decision and its reason."""

    text: str
    level: str = "info"  # info | warning
    facts: dict[str, int | float | str] = field(factory=dict)


@frozen
class DeclineStream(Effect, tag="decline_stream"):
    """Decline an offered stream."""

    peer: str
    stream: str
    reason: str


@frozen
class Refuse(Effect, tag="refuse"):
    """Answer a hello with a refusal. text: why, and what to do."""

    peer: str
    code: str
    text: str


@frozen
class EndSession(Effect, tag="end_session"):
    """End a peer's session."""

    peer: str
    reason: str


@frozen
class SendGoodbye(Effect, tag="send_goodbye"):
    """Send the goodbye to the parameter server now; the training thread may end a little later."""

    reason: str


@frozen
class Finish(Effect, tag="finish"):
    """Close the link, then end the process with `exit_code`.

    deadline: when others would end the process; None: unknown.
    """

    reason: str
    exit_code: int = field(default=0, converter=int)
    deadline: float | None = None


class Deadlines:
    """Named deadlines in seconds of the caller's clock; setting a name again moves it.

    A machine holds a handful, so the earliest is found by looking at all of them.
    """

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times: dict[str, float] = {}

    def set(self, name: str, when: float) -> None:
        """Arm `name` at `when`; replaces an earlier setting."""
        self._times[name] = when

    def cancel(self, name: str) -> None:
        """Disarm `name`; harmless when it is not armed."""
        self._times.pop(name, None)

    def clear(self) -> None:
        """Disarm everything."""
        self._times.clear()

    def when(self, name: str) -> float | None:
        """When `name` is due, or None."""
        return self._times.get(name)

    def next(self) -> float | None:
        """The earliest deadline, or None when nothing is armed."""
        return min(self._times.values(), default=None)

    def pop_due(self, now: float) -> list[str]:
        """Disarm and return the names due at `now`, earliest first, equal times by name."""
        due = sorted((when, name) for name, when in self._times.items() if when <= now)
        for _, name in due:
            del self._times[name]
        return [name for _, name in due]


Handlers = Mapping[type, Callable[[Any, float], list[Effect]]]
"""Maps the type of an event, of a message, or of an effect that is done, to its handler."""


class RoleMachine:
    """Base of the machines: a table of handlers, and deadlines.

    senders: the role whose messages it takes, for the text of a refusal.
    """

    senders: ClassVar[str]
    handlers: Handlers
    deadlines: Deadlines

    def next_deadline(self) -> float | None:
        """When `handle(TimerFired())` is due, in seconds of the caller's clock."""
        return self.deadlines.next()

    def check(self, event: Received[Any]) -> None:
        """Raise MessageError for a message that its peer may not send, or not in this way."""
        way: type[Event] = Offered if isinstance(event.message, Meta) else Received
        if isinstance(event.message, Greeting):
            way = Greeted
        if event.topic in self.handlers and type(event) is way:
            return
        name = event.topic.__name__
        text = f"{name} is no message of {self.senders}"
        if isinstance(event, Offered):
            text = f"{self.senders} streams no {name}"
        elif event.topic in self.handlers:
            text = f"{name} is not sent in this way"
        raise MessageError(text, "unexpected-message")

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event and return effects in the order in which they are to be carried out.

        Events without a handler are for the journal.
        """
        handler = self.handlers.get(event.topic)
        return [] if handler is None else handler(event, now)
