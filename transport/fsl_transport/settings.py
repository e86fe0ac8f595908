"""Every number of the transport room in one place, with its unit in its name."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen

from fsl_transport.errors import LocalError
from fsl_transport.rate_limit import Rate

KIB = 1024
MIB = 1024 * 1024
STRIPES_LIMIT = 64
"""Bulk connections of one dialer at most; also what a routing id may say."""


def _positive(_instance: object, attribute: Attribute[Any], value: float) -> None:
    if not value > 0:
        raise LocalError(f"{attribute.name} must be greater than zero, not {value!r}")


@frozen(kw_only=True)
class TransportSettings:
    """Times in seconds, sizes in bytes. Raises ``LocalError`` when they contradict each other."""

    heartbeat_every_s: float = field(default=5.0, validator=_positive)
    """The dialer beats after this long without control traffic of its own."""
    expire_after_s: float = field(default=20.0, validator=_positive)
    """A session ends when nothing was heard for this long."""
    unreachable_every_s: float = field(default=10.0, validator=_positive)
    """How often a dialer without a welcome says so."""
    hello_every_s: float = field(default=0.5, validator=_positive)
    """First wait between two HELLOs; doubles up to ``heartbeat_every_s``."""
    retransmit_after_s: float = field(default=2.0, validator=_positive)
    """Wait for an acknowledgement before all that is open is sent again; doubles each time."""
    ack_after_s: float = field(default=0.5, validator=_positive)
    """An acknowledgement rides on other traffic, or goes alone after this long."""
    slow_link_bytes_per_s: float = field(default=64_000.0, validator=_positive)
    """Open bytes divided by this are added to every wait for an acknowledgement."""
    stall_s: float = field(default=10.0, validator=_positive)
    """A receiver asks again for the next chunk after this long without one; doubles each time."""
    control_limit_bytes: int = field(default=4 * MIB, validator=_positive)
    """Largest control message, head included."""
    hello_limit_bytes: int = field(default=64 * KIB, validator=_positive)
    """Largest HELLO: the only message that a stranger gets parsed."""
    chunk_limit_bytes: int = field(default=2 * MIB, validator=_positive)
    """Largest chunk of a stream."""
    window_bytes: int = field(default=4 * MIB, validator=_positive)
    """Byte credit of a stream: what may be sent and not yet written. Or twice what its line needs under way, by measurement, where that is more."""
    window_limit_bytes: int = field(default=64 * MIB, validator=_positive)
    """What that is at most; also what all connections of a session may have under way."""
    stripes_limit: int = field(default=64, validator=_positive)
    """Connections for bulk between two peers at most; how many there are is found by measuring."""
    stripes_first: int = field(default=1, validator=_positive)
    """How many a link begins with."""
    eager_bytes: int = field(default=2 * MIB, validator=_positive)
    """What may be under way of a session's streams that nobody has accepted yet, where their owner wants that."""
    budget_bytes: int = field(default=1024 * MIB, validator=_positive)
    """Received and not written yet, over all streams that come in: many get smaller windows, and what finds no room is asked for again when there is some (``room.py``)."""
    unsent_total_bytes: int = field(default=1024 * MIB, validator=_positive)
    """What may wait inside libzmq for all peers together; what is more is dropped and sent again."""
    control_window: int = field(default=256, validator=_positive)
    """Control messages sent and not yet acknowledged; the rest waits in a backlog."""
    backlog_limit_bytes: int = field(default=64 * MIB, validator=_positive)
    """A peer that lets more than this wait is taken for dead."""
    max_sessions: int = field(default=4096, validator=_positive)
    """Sessions of one listener; the next HELLO is refused with code ``full``."""
    max_streams: int = field(default=64, validator=_positive)
    """Streams of one session in each direction, offered ones among them."""
    eager_total_bytes: int = field(default=128 * MIB, validator=_positive)
    """Of chunks that came before their stream was accepted, over all sessions; what is more is asked for again."""
    max_connections: int = field(default=16_384, validator=_positive)
    """Of one listener, two and more for each peer; never more than the system's descriptors allow, less what is reserved (``doorkeeper.py``). The next one is hung up."""
    max_half_open: int = field(default=1024, validator=_positive)
    """Names not seen before that have asked, or were welcomed and not heard since; the next HELLO of such a name is dropped."""
    connections_of_an_address: Rate = field(default=Rate(128.0, 2048.0))
    """New connections, each of which may begin a handshake, of one network address (of a /64 in IPv6); the next one is hung up."""
    connections_of_new_addresses: Rate = field(default=Rate(512.0, 8192.0))
    """The same of all addresses together from which no key was let in yet, or where there are no keys, of all."""
    hellos_of_an_origin: Rate = field(default=Rate(64.0, 1024.0))
    """HELLOs of one key, or of one network address where there are no keys."""
    hellos_of_new_names: Rate = field(default=Rate(256.0, 4096.0))
    """HELLOs of all names together that were not seen before."""
    control_messages: Rate = field(default=Rate(4000.0, 16_000.0))
    """Of one session, credit and acknowledgements among them. What is beyond comes again later."""
    control_bytes: Rate = field(default=Rate(8.0 * MIB, 32.0 * MIB))
    """Of one session."""
    owner_messages: Rate = field(default=Rate(1000.0, 4000.0))
    """Of one session: messages, heartbeats and offers, each of which the listener's owner deals with and may write down."""

    @property
    def unsent_bytes(self) -> int:
        """What may wait inside libzmq for one connection: what may be under way on it, or twice the largest message."""
        return max(self.window_limit_bytes + self.chunk_limit_bytes, 2 * self.control_limit_bytes)

    def __attrs_post_init__(self) -> None:
        """Check what one field alone cannot know."""
        if self.expire_after_s <= self.heartbeat_every_s:
            raise LocalError(
                f"expire_after_s ({self.expire_after_s:g}) must be longer than heartbeat_every_s"
                f" ({self.heartbeat_every_s:g}): make it three times as long or more"
            )
        if self.ack_after_s >= self.retransmit_after_s:
            raise LocalError(
                f"ack_after_s ({self.ack_after_s:g}) must be shorter than retransmit_after_s"
                f" ({self.retransmit_after_s:g}): otherwise everything is sent twice"
            )
        if not self.stripes_first <= self.stripes_limit <= STRIPES_LIMIT:
            raise LocalError(
                f"stripes_first ({self.stripes_first}) must not be above stripes_limit ({self.stripes_limit}),"
                f" nor that above {STRIPES_LIMIT}"
            )
        if self.window_bytes < self.chunk_limit_bytes:
            raise LocalError(
                f"window_bytes ({self.window_bytes}) must hold one chunk of chunk_limit_bytes"
                f" ({self.chunk_limit_bytes})"
            )
        if self.eager_bytes > self.chunk_limit_bytes:
            raise LocalError(
                f"eager_bytes ({self.eager_bytes}) must not be above chunk_limit_bytes ({self.chunk_limit_bytes}):"
                " what came early must leave credit for a chunk"
            )
        if self.window_limit_bytes < self.window_bytes:
            raise LocalError(
                f"window_limit_bytes ({self.window_limit_bytes}) must not be below window_bytes"
                f" ({self.window_bytes}): it is the most that becomes of it"
            )
