"""Rate limits of a listener: new connections, HELLOs, and messages of established peers. Pure.

Connections. Each may cost the listener a CURVE handshake, some elliptic-curve computations, before
it is authenticated.
  * Each network address has a token bucket.
  * All addresses share another one; addresses from which a key was accepted before do not use it.
  * So a flood from one address affects only that address, and a flood from many addresses does not
    keep out known peers. A connection beyond the rate is closed; a dialer dials again by itself.

HELLOs. Each makes the listener remember a name, ask its application, and often write to disk,
before the peer is known to be honest.
  * Each origin (its key on an encrypted link, else its network address) has a token bucket.
  * Names that are new to the listener share another one. At most ``max_half_open`` of them may be
    half open, that is, waiting for an answer, or welcomed and not heard from since.
  * Known names use neither of the latter, so that a flood of new names does not keep them out.
  * A HELLO beyond a limit is dropped without an answer and counted; a dialer repeats it with
    growing waits.

Messages. A session has three token buckets: for all its control messages, for their bytes, and for
those that the listener's application handles (messages, heartbeats, stream offers). A message
beyond a rate is dropped as if the network had lost it and is retransmitted later; the sender's
window of unacknowledged messages slows it down. Nothing is lost, and no session ends for this.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from fsl_transport.rate_limit import RateLimit, TokenBucket
from fsl_transport.session import frames
from fsl_transport.session.frames import Ack, Beat, Data
from fsl_transport.settings import TransportSettings

_ORIGINS: Final = 4096
"""Maximum number of addresses or keys whose buckets are kept."""


def address_prefix(address: str) -> str:
    """Return the part of an address that its user cannot vary: an IPv4 address, a /64 in IPv6.

    Empty if ``address`` is not an IP address.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if found.version == 4:
        return str(found)
    return str(found.ipv4_mapped or found.exploded[:19])


class ConnectionLimits:
    """Limits the rate of new connections of one listener."""

    __slots__ = ("_known", "_new", "_per_address", "rejected")

    def __init__(self, settings: TransportSettings, now: float) -> None:
        self._per_address = RateLimit(settings.connections_of_an_address, _ORIGINS)
        self._new = TokenBucket(settings.connections_of_new_addresses, now)
        self._known: dict[str, None] = {}
        self.rejected = 0

    def allows(self, address: str, now: float) -> bool:
        """Whether a new connection from ``address`` may stay."""
        prefix = address_prefix(address)
        self._per_address.forget_full(now)
        allowed = not prefix or self._per_address.take(prefix, now)
        if allowed and prefix not in self._known:
            allowed = self._new.take(now)
        if not allowed:
            self.rejected += 1
        return allowed

    def authenticated(self, address: str) -> None:
        """A key was accepted from ``address``."""
        prefix = address_prefix(address)
        if not prefix:
            return
        self._known.pop(prefix, None)
        while len(self._known) >= _ORIGINS:
            del self._known[next(iter(self._known))]
        self._known[prefix] = None


class HelloLimits:
    """Limits the rate of HELLOs and the number of half-open names of one listener."""

    __slots__ = ("_half_open", "_limit", "_new", "_per_origin", "dropped")

    def __init__(self, settings: TransportSettings, now: float) -> None:
        self._per_origin = RateLimit(settings.hellos_of_an_origin, _ORIGINS)
        self._new = TokenBucket(settings.hellos_of_new_names, now)
        self._limit = settings.max_half_open
        self._half_open: dict[str, None] = {}
        self.dropped = 0

    @property
    def half_open(self) -> int:
        """Number of half-open names."""
        return len(self._half_open)

    def allows(self, name: str, origin: str, now: float, *, is_known: bool) -> bool:
        """Whether to handle a HELLO; ``origin`` is empty where the link has none."""
        self._per_origin.forget_full(now)
        allowed = not origin or self._per_origin.take(origin, now)
        if allowed and not is_known:
            is_new = name not in self._half_open
            allowed = (not is_new or len(self._half_open) < self._limit) and self._new.take(now)
        if not allowed:
            self.dropped += 1
        return allowed

    def open(self, name: str) -> None:
        """A new name becomes half open."""
        self._half_open[name] = None

    def close(self, name: str) -> None:
        """The name was heard from in its session, or is gone."""
        self._half_open.pop(name, None)


class MessageLimits:
    """Limits the rate of control messages of one session at a listener."""

    __slots__ = ("_application", "_bytes", "_messages")

    def __init__(self, settings: TransportSettings, now: float) -> None:
        self._messages = TokenBucket(settings.control_messages, now)
        self._bytes = TokenBucket(settings.control_bytes, now)
        self._application = TokenBucket(settings.application_messages, now)

    def allows(self, message: Data | Beat | Ack, size: int, now: float) -> bool:
        """Whether to handle a control message of ``size`` bytes."""
        if not (self._messages.take(now) and self._bytes.take(now, size)):
            return False
        if type(message) is Ack:
            return True
        goes_up = type(message) is not Data or message.op in {frames.MESSAGE, frames.OFFER}
        return not goes_up or self._application.take(now)
