"""Links, sessions and streams: moves opaque frames between named peers over bad networks.

Start with ``ListenerEndpoint`` and ``DialerEndpoint``; what they tell is in ``events.py``, what
goes over the wire in ``docs/WIRE.md``. The ZeroMQ link is imported from ``fsl_transport.zmq.link``
and the loop runner from ``fsl_transport.loop``, so that simulations load neither zmq nor asyncio.
"""

from fsl_transport.bulk.stream_context import Transfer
from fsl_transport.endpoint import DialerEndpoint, ListenerEndpoint
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
    TransportEvent,
    Unreachable,
)
from fsl_transport.link import (
    Buffer,
    Cancellable,
    Chance,
    ChunkSink,
    ChunkSource,
    Lane,
    Link,
    Scheduler,
)
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
    "Chance",
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
