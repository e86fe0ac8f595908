"""What an endpoint tells its owner: frozen values, delivered one at a time on the loop thread.

``peer`` is the dialer's name on the listening side and ``""`` on the dialing side, which has only
one peer. Bodies and payloads are dicts with ``str`` keys, as they came out of msgpack.

When a session ends both sides forget its streams without a word per stream: ``PeerDown`` covers
them. ``StreamFailed`` is for one stream that failed while the session lives.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from attrs import frozen

Body: TypeAlias = dict[str, Any]


@frozen
class HelloReceived:
    """Listener: a dialer asks to come in; answer with ``welcome`` or ``refuse``. ``key`` is its public key where the link is encrypted."""

    peer: str
    incarnation: int
    hello: Body
    role: str = ""
    key: str = ""


@frozen
class PeerUp:
    """The session stands. Dialer: ``body`` is the welcome; listener: ``body`` is the hello."""

    peer: str
    incarnation: int
    body: Body


@frozen
class PeerDown:
    """The session and its streams are gone.

    ``reason`` is one of ``expired`` (nothing heard), ``bye`` (it said so), ``superseded`` (a
    higher incarnation of the name came), ``reset`` (the other side started a new session or no
    longer knows this one), ``protocol`` (it sent bytes it must not send) and ``revoked`` (its key is no longer allowed).
    """

    peer: str
    incarnation: int
    reason: str
    text: str = ""


@frozen
class Refused:
    """Dialer: the listener said no. The dialer is quiet until ``connect`` is called again."""

    code: str
    text: str


@frozen
class Superseded:
    """Dialer: a process of this name with a higher incarnation took over; this one is quiet."""


@frozen
class Unreachable:
    """Dialer: no welcome for ``seconds`` now; it goes on trying."""

    address: str
    seconds: float


@frozen
class MessageReceived:
    """One control message, in order, exactly once per session."""

    peer: str
    body: Body


@frozen
class HeartbeatReceived:
    """A heartbeat and the small dict it carried."""

    peer: str
    payload: Body


@frozen
class StreamOffered:
    """The peer wants to send a stream; answer with ``accept`` or ``decline``."""

    peer: str
    stream_id: str
    meta: Body
    chunks: int


@frozen
class StreamReceived:
    """Every chunk is written to the sink."""

    peer: str
    stream_id: str


@frozen
class StreamSent:
    """The receiver confirmed that every chunk is written."""

    peer: str
    stream_id: str


@frozen
class StreamDeclined:
    """The receiver does not want our offer."""

    peer: str
    stream_id: str
    reason: str


@frozen
class StreamFailed:
    """One stream ended early while its session lives: cancelled, source or sink failed."""

    peer: str
    stream_id: str
    reason: str


TransportEvent: TypeAlias = (
    HelloReceived
    | PeerUp
    | PeerDown
    | Refused
    | Superseded
    | Unreachable
    | MessageReceived
    | HeartbeatReceived
    | StreamOffered
    | StreamReceived
    | StreamSent
    | StreamDeclined
    | StreamFailed
)
