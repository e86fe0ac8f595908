"""Interfaces between the transport's parts: link, clock, randomness, sources, sinks, streams.

A link moves lists of frames between named peers and guarantees nothing: like UDP, it may lose,
repeat and reorder them. Sessions and streams repair that. ``testing/mem_link.py`` and
``zmq/link.py`` implement it and pass one conformance suite.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from fsl_transport.errors import LocalError
from fsl_transport.events import TransportEvent
from fsl_transport.settings import TransportSettings

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes. A ``bytes`` object is immutable and may be sent without a copy."""

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Peer names: safe in a routing id, a file name and a log line."""


class Lane(enum.IntEnum):
    """Control and bulk traffic: neither waits for the other."""

    CONTROL = 0
    BULK = 1


Receiver: TypeAlias = Callable[[str, Lane, Sequence[Buffer], bytes], None]
"""Takes (peer, lane, frames, origin). The origin identifies one dialer under the peer's name."""

TAG_BYTES = 8
"""Length of the dialer's tag at the start of an origin. On an encrypted link the key follows."""


def public_key(origin: bytes) -> str:
    """Return the public key (Z85) that an origin was authenticated with; empty if plain."""
    return origin[TAG_BYTES:].decode("ascii")


class Link(Protocol):
    """Sends and receives frames by peer name. All calls and callbacks are on the loop thread."""

    @property
    def address(self) -> str:
        """Return the address at which the link listens, or that it dials, as messages show it."""
        ...

    @property
    def stripes_limit(self) -> int:
        """Maximum number of bulk connections between two peers."""
        ...

    def send(
        self,
        peer: str,
        lane: Lane,
        frames: Sequence[Buffer],
        origin: bytes = b"",
        stripe: int = 0,
    ) -> None:
        """Queue one message. Never blocks; silently drops a message to an absent peer.

        Any process may connect under any name, so a listener passes the ``origin`` that it received
        to select the connection. A dialer has one listener and leaves it empty.
        ``stripe`` is the number of the connection on the bulk lane.
        """
        ...

    def open_stripes(self, count: int) -> None:
        """Dialer: keep at least ``count`` bulk connections. Does not wait for them to come up."""
        ...

    def adopt(self, settings: TransportSettings) -> None:
        """Use other settings: for queue limits now, for socket options from the next connection."""
        ...

    def set_receiver(self, receive: Receiver) -> None:
        """Call ``receive(peer, lane, frames, origin)`` for each message.

        A dialer's peer is ``""``. The origin is empty where a name has one connection only.
        """
        ...

    def remote_address(self) -> str:
        """Network address of the message being received, for rate limits; empty if unknown."""
        ...

    def redial(self) -> None:
        """Dialer: the peer was silent for too long; replace the connections."""
        ...

    def close(self) -> None:
        """Send as much of the queue as goes without waiting, then stop."""
        ...

    async def aclose(self) -> None:
        """Call ``close`` and wait until tasks and sockets are gone."""
        ...


class Cancellable(Protocol):
    """Returned by ``call_at``."""

    def cancel(self) -> object:
        """Cancel the call; no effect if it already happened."""
        ...


class Scheduler(Protocol):
    """The part of an asyncio loop that an endpoint uses; ``VirtualScheduler`` implements it too."""

    def time(self) -> float:
        """Seconds, monotonic."""
        ...

    def call_at(self, when: float, callback: Callable[..., object], *args: object) -> Cancellable:
        """Call ``callback(*args)`` once at ``when``."""
        ...


class Rng(Protocol):
    """Source of randomness: ``random.Random(seed)`` or ``random.SystemRandom()``."""

    def random(self) -> float:
        """A float in [0, 1)."""
        ...

    def getrandbits(self, k: int, /) -> int:
        """An integer of ``k`` random bits."""
        ...


class ChunkSource(Protocol):
    """Provides a stream's chunks. A chunk may be requested again after a loss."""

    @property
    def chunks(self) -> int:
        """Number of chunks, numbered from 0."""
        ...

    def read(self, index: int, deliver: Callable[[Buffer | None], None]) -> None:
        """Call ``deliver(data)`` once, now or later, on the loop thread; ``None`` means failure.

        The data must not change afterwards. Every read of an index must give the same bytes.
        """
        ...


class ChunkSink(Protocol):
    """Takes a stream's chunks in order of index."""

    def write(self, index: int, data: Buffer, done: Callable[[bool], None]) -> None:
        """Take the chunk and call ``done(True)`` once it counts as written.

        ``done`` returns the chunk's byte credit; call it on the loop thread, now or later. Several
        writes may be pending. ``done(False)`` ends the stream. The buffer is free after ``done``.
        """
        ...


class StreamContext(Protocol):
    """Services that the streams of one session need from their endpoint."""

    @property
    def settings(self) -> TransportSettings:
        """Settings in use."""
        ...

    def now(self) -> float:
        """Scheduler time."""
        ...

    def emit(self, event: TransportEvent) -> None:
        """Report an event to the application, after those reported before."""
        ...

    def send_op(self, op: int, fields: tuple[Any, ...]) -> None:
        """Send one operation on the session's reliable control channel."""
        ...

    def send_bulk(self, stripe: int, frames: Sequence[Buffer]) -> None:
        """Send one message on a connection of the bulk lane."""
        ...

    def send_unreliable(self, head: bytes) -> None:
        """Send one message on the control lane that may be lost."""
        ...

    def open_stripes(self, count: int) -> bool:
        """Have ``count`` bulk connections. False where the peer opens them."""
        ...

    def rearm(self, now: float) -> None:
        """Ensure that the timer fires no later than the session's next deadline."""
        ...


def check_name(name: str) -> str:
    """Return ``name`` or raise ``LocalError``."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise LocalError(
            f"{name!r} is no name for a peer: use 1 to 64 of the characters A-Z a-z 0-9 . _ -"
        )
    return name
