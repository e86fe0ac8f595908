"""Events that an endpoint reports to its application, one at a time, on the loop thread.

``peer`` is the dialer's name on the listening side and ``""`` on the dialing side, which has only
one peer. Bodies and payloads are dicts with ``str`` keys, as msgpack decoded them.

``PeerDown`` ends all streams of the session; they get no events of their own. ``StreamFailed``
reports a stream that fails while its session lives.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from attrs import frozen

Body: TypeAlias = dict[str, Any]


@frozen
class HelloReceived:
    """Listener: a dialer requests a session; answer with ``welcome`` or ``refuse``.

    ``key`` is the dialer's public key on an encrypted link.
    """

    peer: str
    incarnation: int
    hello: Body
    role: str = ""
    key: str = ""


@frozen
class PeerUp:
    """The session is established. ``body`` is the welcome at a dialer, the hello at a listener."""

    peer: str
    incarnation: int
    body: Body


@frozen
class PeerDown:
    """The session and its streams are gone.

    ``reason`` is one of
      * ``expired``: nothing was received for ``expire_after_s``;
      * ``bye``: the peer ended the session;
      * ``superseded``: a higher incarnation of the name connected;
      * ``reset``: the peer started a new session or does not hold this one;
      * ``protocol``: the peer broke the protocol;
      * ``revoked``: the peer's key is no longer allowed.
    """

    peer: str
    incarnation: int
    reason: str
    text: str = ""


@frozen
class Refused:
    """Dialer: the listener refused the session. The dialer stops until ``connect`` is called."""

    code: str
    text: str


@frozen
class Superseded:
    """Dialer: a process of this name with a higher incarnation took over. The dialer stops."""


@frozen
class Unreachable:
    """Dialer: no answer for ``seconds`` so far. The dialer keeps trying."""

    address: str
    seconds: float


@frozen
class MessageReceived:
    """A control message, in order, exactly once per session."""

    peer: str
    body: Body


@frozen
class HeartbeatReceived:
    """A heartbeat and the small dict that it carried."""

    peer: str
    payload: Body


@frozen
class StreamOffered:
    """The peer offers a stream; answer with ``accept`` or ``decline``."""

    peer: str
    stream_id: str
    meta: Body
    chunks: int


@frozen
class StreamReceived:
    """Every chunk of an incoming stream is written to its sink."""

    peer: str
    stream_id: str


@frozen
class StreamSent:
    """The receiver confirmed that every chunk is written."""

    peer: str
    stream_id: str


@frozen
class StreamDeclined:
    """The receiver declined the offer."""

    peer: str
    stream_id: str
    reason: str


@frozen
class StreamFailed:
    """A stream ended early while its session lives: cancelled, or its source or sink failed."""

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


@frozen
class Transfer:
    """Progress of one stream, for a status page. ``done`` counts chunks the receiver has written.

    Not an event: ``transfers()`` of an endpoint returns these.
    """

    peer: str
    stream_id: str
    sending: bool
    accepted: bool
    chunks: int
    done: int
