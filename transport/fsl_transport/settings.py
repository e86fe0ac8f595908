"""Settings of the transport, each with its unit in its name."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen

from fsl_transport.errors import LocalError
from fsl_transport.rate_limit import Rate

KIB = 1024
MIB = 1024 * 1024
STRIPES_LIMIT = 64
"""Maximum number of bulk connections of one dialer; routing ids encode no higher number."""


def _positive(_instance: object, attribute: Attribute[Any], value: float) -> None:
    if not value > 0:
        raise LocalError(f"{attribute.name} must be greater than zero, not {value!r}")


@frozen(kw_only=True)
class TransportSettings:
    """Times in seconds, sizes in bytes. Contradicting values raise ``LocalError``."""

    heartbeat_every_s: float = field(default=5.0, validator=_positive)
    """The dialer sends a heartbeat after this long without other control traffic of its own."""
    expire_after_s: float = field(default=20.0, validator=_positive)
    """A session ends when nothing was received for this long."""
    unreachable_every_s: float = field(default=10.0, validator=_positive)
    """Seconds between reports ``Unreachable`` of a dialer that gets no answer."""
    hello_every_s: float = field(default=0.5, validator=_positive)
    """First interval between two HELLOs; doubles up to ``heartbeat_every_s``."""
    retransmit_after_s: float = field(default=2.0, validator=_positive)
    """Retransmission timeout of control messages; doubles each time."""
    ack_after_s: float = field(default=0.5, validator=_positive)
    """Maximum delay of an acknowledgement; other traffic carries it earlier."""
    slow_link_bytes_per_s: float = field(default=64_000.0, validator=_positive)
    """Unacknowledged bytes divided by this are added to every retransmission timeout."""
    stall_s: float = field(default=10.0, validator=_positive)
    """A receiver requests the next chunk again after this long without one; doubles each time."""
    control_limit_bytes: int = field(default=4 * MIB, validator=_positive)
    """Largest control message, with its head."""
    hello_limit_bytes: int = field(default=64 * KIB, validator=_positive)
    """Largest HELLO, the only message of an unauthenticated peer that is parsed."""
    chunk_limit_bytes: int = field(default=2 * MIB, validator=_positive)
    """Largest chunk of a stream."""
    window_bytes: int = field(default=4 * MIB, validator=_positive)
    """Byte credit of a stream: bytes sent and not yet written. Twice the path's measured need in
    flight applies instead where that is more."""
    window_limit_bytes: int = field(default=64 * MIB, validator=_positive)
    """Maximum of that credit, and of the bytes in flight of a session over all its connections."""
    stripes_limit: int = field(default=64, validator=_positive)
    """Maximum number of bulk connections between two peers; measurement decides how many."""
    stripes_first: int = field(default=1, validator=_positive)
    """Number of bulk connections at the start."""
    eager_bytes: int = field(default=2 * MIB, validator=_positive)
    """Bytes that all streams of a session may send before they are accepted (0-RTT)."""
    receive_budget_bytes: int = field(default=1024 * MIB, validator=_positive)
    """Bytes received and not yet written, over all incoming streams. Many streams get smaller
    windows; what does not fit is requested again when memory is free (``receive_budget.py``)."""
    send_budget_total_bytes: int = field(default=1024 * MIB, validator=_positive)
    """Bytes that libzmq may hold for all peers together; more are dropped and sent again."""
    control_window: int = field(default=256, validator=_positive)
    """Control messages sent and not yet acknowledged; the rest waits in a backlog."""
    backlog_limit_bytes: int = field(default=64 * MIB, validator=_positive)
    """A peer whose backlog grows beyond this is considered dead."""
    max_sessions: int = field(default=4096, validator=_positive)
    """Sessions of one listener; the next HELLO is refused with code ``full``."""
    max_streams: int = field(default=64, validator=_positive)
    """Streams of one session in each direction, including those only offered."""
    eager_total_bytes: int = field(default=128 * MIB, validator=_positive)
    """Bytes received before their stream was accepted, over all sessions; more are dropped and
    requested again."""
    max_connections: int = field(default=16_384, validator=_positive)
    """Connections of one listener, at least two per peer. Also limited by the process's file
    descriptors, less a reserve (``zmq/admission.py``). The next connection is closed."""
    max_half_open: int = field(default=1024, validator=_positive)
    """New names that asked for a session, or got one and sent nothing since; the next HELLO of a
    new name is dropped."""
    connections_of_an_address: Rate = field(default=Rate(128.0, 2048.0))
    """New connections (each may start a handshake) of one network address, of a /64 in IPv6. The
    next connection is closed."""
    connections_of_new_addresses: Rate = field(default=Rate(512.0, 8192.0))
    """The same over all addresses from which no key was accepted yet; without keys, over all."""
    hellos_of_an_origin: Rate = field(default=Rate(64.0, 1024.0))
    """HELLOs of one key, or of one network address where there are no keys."""
    hellos_of_new_names: Rate = field(default=Rate(256.0, 4096.0))
    """HELLOs of all new names together."""
    control_messages: Rate = field(default=Rate(4000.0, 16_000.0))
    """Control messages of one session, including credit and acknowledgements. Messages beyond the
    rate are dropped and retransmitted later."""
    control_bytes: Rate = field(default=Rate(8.0 * MIB, 32.0 * MIB))
    """Bytes of these messages, of one session."""
    application_messages: Rate = field(default=Rate(1000.0, 4000.0))
    """Messages, heartbeats and offers of one session: the listener's application handles each one
    and may write it to disk."""

    @property
    def send_budget_bytes(self) -> int:
        """Bytes that libzmq may hold for one connection.

        The larger of what may be in flight on it, and twice the largest control message.
        """
        return max(self.window_limit_bytes + self.chunk_limit_bytes, 2 * self.control_limit_bytes)

    def __attrs_post_init__(self) -> None:
        """Check fields against each other."""
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
                f"stripes_first ({self.stripes_first}) must not be above stripes_limit"
                f" ({self.stripes_limit}), nor that above {STRIPES_LIMIT}"
            )
        if self.window_bytes < self.chunk_limit_bytes:
            raise LocalError(
                f"window_bytes ({self.window_bytes}) must hold one chunk of chunk_limit_bytes"
                f" ({self.chunk_limit_bytes})"
            )
        if self.eager_bytes > self.chunk_limit_bytes:
            raise LocalError(
                f"eager_bytes ({self.eager_bytes}) must not be above chunk_limit_bytes"
                f" ({self.chunk_limit_bytes}): eager bytes must leave credit for a chunk"
            )
        if self.window_limit_bytes < self.window_bytes:
            raise LocalError(
                f"window_limit_bytes ({self.window_limit_bytes}) must not be below window_bytes"
                f" ({self.window_bytes}): it is the maximum of that window"
            )
