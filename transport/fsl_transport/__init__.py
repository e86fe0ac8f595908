"""Links, sessions and streams: moves opaque frames between named peers over bad networks.

Start with ``ListenerEndpoint`` and ``DialerEndpoint``. ``events.py`` has the events that they
report, ``docs/WIRE.md`` the protocol. The ZeroMQ link is imported from ``fsl_transport.zmq.link``
and the loop runner from ``fsl_transport.loop``, so that simulations load neither zmq nor asyncio.
"""

from fsl_transport.dialer import DialerEndpoint
from fsl_transport.errors import LocalError, PeerError, TransportError
from fsl_transport.events import (
    Body,
    HeartbeatReceived,
    HelloReceived,
    MessageReceived,
    PeerDown,
    PeerUp,
    Refused,
    StreamDeclined,
    StreamFailed,
    StreamOffered,
    StreamReceived,
    StreamSent,
    Superseded,
    Transfer,
    TransportEvent,
    Unreachable,
)
from fsl_transport.link import (
    Buffer,
    Cancellable,
    ChunkSink,
    ChunkSource,
    Lane,
    Link,
    Rng,
    Scheduler,
)
from fsl_transport.listener import ListenerEndpoint
from fsl_transport.session.frames import PROTOCOL_VERSION
from fsl_transport.settings import STRIPES_LIMIT, TransportSettings
from fsl_transport.testing.mem_link import Conditions, MemLink, MemNetwork
from fsl_transport.testing.virtual_time import VirtualScheduler

__all__ = [
    "PROTOCOL_VERSION",
    "STRIPES_LIMIT",
    "Body",
    "Buffer",
    "Cancellable",
    "ChunkSink",
    "ChunkSource",
    "Conditions",
    "DialerEndpoint",
    "HeartbeatReceived",
    "HelloReceived",
    "Lane",
    "Link",
    "ListenerEndpoint",
    "LocalError",
    "MemLink",
    "MemNetwork",
    "MessageReceived",
    "PeerDown",
    "PeerError",
    "PeerUp",
    "Refused",
    "Rng",
    "Scheduler",
    "StreamDeclined",
    "StreamFailed",
    "StreamOffered",
    "StreamReceived",
    "StreamSent",
    "Superseded",
    "Transfer",
    "TransportError",
    "TransportEvent",
    "TransportSettings",
    "Unreachable",
    "VirtualScheduler",
]
