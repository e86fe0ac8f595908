"""The gate: who may begin a handshake, which HELLOs a listener looks at, and how fast a peer with a session may speak. Pure.

A connection may cost its listener a CURVE handshake, some computations on a curve, before anybody knows whose it is. So each network address has
a bucket of connections, and all addresses share one more, which those are spared from where a key was let in before: a flood from
one address keeps nobody else out, and one from everywhere not those who belong here. Who is too fast is hung up, and dials again by itself.

A HELLO makes its listener remember a name, ask its owner, and often write to a disk, before anybody knows whether it is honest. So

  * each origin (its key on an encrypted link, else its network address) has a bucket of HELLOs;
  * names that the listener has not seen before share one more bucket, and there are only so many of them half open, that is
    asking, or welcomed and not heard since;
  * names that are known are spared both of the latter: a flood of fresh names must not keep those away who belong here.

What is beyond is dropped without an answer and counted; a dialer says HELLO again by itself, and later each time.

A peer with a session has three buckets: for all its control messages, for their bytes, and for what its listener's owner has to deal
with (messages, heartbeats, offers of streams). What is beyond is dropped as if the network had lost it, so that it
comes again later: the sender's window of open messages slows it down. Nothing is lost and no session ends for speaking fast.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from fsl_transport.rate_limit import RateLimit, TokenBucket
from fsl_transport.session import frames
from fsl_transport.session.frames import Ack, Beat, Data
from fsl_transport.settings import TransportSettings

_ORIGINS: Final = 4096
"""Whose buckets are remembered."""


def place_of(address: str) -> str:
    """What one sender of connections cannot change at will: an IPv4 address, the first half of an IPv6 one. Empty for none."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if found.version == 4:
        return str(found)
    return str(found.ipv4_mapped or found.exploded[:19])


class ArrivalLimits:
    """For one listener."""

    __slots__ = ("_all", "_known", "_places", "dropped")

    def __init__(self, settings: TransportSettings, now: float) -> None:
        self._places = RateLimit(settings.connections_of_an_address, _ORIGINS)
        self._all = TokenBucket(settings.connections_of_new_addresses, now)
        self._known: dict[str, None] = {}
        self.dropped = 0

    def opens(self, address: str, now: float) -> bool:
        """Whether a connection from there may go on."""
        place = place_of(address)
        self._places.forget_full(now)
        allowed = not place or self._places.take(place, now)
        if allowed and place not in self._known:
            allowed = self._all.take(now)
        if not allowed:
            self.dropped += 1
        return allowed

    def settled(self, address: str) -> None:
        """A key was let in from there."""
        place = place_of(address)
        if not place:
            return
        self._known.pop(place, None)
        while len(self._known) >= _ORIGINS:
            del self._known[next(iter(self._known))]
        self._known[place] = None


class HelloLimits:
    """For one listener."""

    __slots__ = ("_all", "_half_open", "_limit", "_origins", "dropped")

    def __init__(self, settings: TransportSettings, now: float) -> None:
        self._origins = RateLimit(settings.hellos_of_an_origin, _ORIGINS)
        self._all = TokenBucket(settings.hellos_of_new_names, now)
        self._limit = settings.max_half_open
        self._half_open: dict[str, None] = {}
        self.dropped = 0

    @property
    def half_open(self) -> int:
        """How many new names have asked or were welcomed and have not been heard since."""
        return len(self._half_open)

    def opens(self, name: str, origin: str, now: float, *, is_known: bool) -> bool:
        """Whether to look at a HELLO; ``origin`` is empty where the link has none."""
        self._origins.forget_full(now)
        allowed = not origin or self._origins.take(origin, now)
        if allowed and not is_known:
            is_new = name not in self._half_open
            allowed = (not is_new or len(self._half_open) < self._limit) and self._all.take(now)
        if not allowed:
            self.dropped += 1
        return allowed

    def asks(self, name: str) -> None:
        """A new name is half open from now on."""
        self._half_open[name] = None

    def settled(self, name: str) -> None:
        """It was heard in its session, or is gone."""
        self._half_open.pop(name, None)


class MessageLimits:
    """For one session at a listener."""

    __slots__ = ("_bytes", "_messages", "_words")

    def __init__(self, settings: TransportSettings, now: float) -> None:
        self._messages = TokenBucket(settings.control_messages, now)
        self._bytes = TokenBucket(settings.control_bytes, now)
        self._words = TokenBucket(settings.owner_messages, now)

    def opens(self, message: Data | Beat | Ack, size: int, now: float) -> bool:
        """Whether to handle a control message of ``size`` bytes."""
        if not (self._messages.take(now) and self._bytes.take(now, size)):
            return False
        if type(message) is Ack:
            return True
        is_word = type(message) is not Data or message.op in {frames.MESSAGE, frames.OFFER}
        return not is_word or self._words.take(now)
