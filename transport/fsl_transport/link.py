"""The seams of the room: what an endpoint needs from a network, a clock, a source and a sink.

A link moves lists of frames between named peers and promises nothing: it may lose, repeat and
reorder like UDP. Sessions and streams above it mend that. Two implementations, ``mem_link`` and
``zmq_link``, pass one conformance suite.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from fsl_transport.errors import LocalError
from fsl_transport.settings import TransportSettings

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes. A ``bytes`` object may be sent without a copy, because nobody can change it."""

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Peer names: safe in a routing id, a file name and a log line."""


class Lane(enum.IntEnum):
    """Two roads that do not wait for each other."""

    CONTROL = 0
    BULK = 1


Receiver: TypeAlias = Callable[[str, Lane, Sequence[Buffer], bytes], None]
"""Peer, lane, frames, and the origin: which of the connections under that name brought them."""

TAG_BYTES = 8
"""Of an origin; what follows is the sender's public key, where the link is encrypted."""


def key_of(origin: bytes) -> str:
    """The public key (Z85) that an origin was authenticated with; empty on a plain link."""
    return origin[TAG_BYTES:].decode("ascii")


class Link(Protocol):
    """Frames in, frames out, by peer name. Everything happens on the loop thread."""

    @property
    def address(self) -> str:
        """Where it listens or dials, for messages to people."""
        ...

    @property
    def stripes_limit(self) -> int:
        """Connections of the bulk lane between two peers at most."""
        ...

    def send(
        self,
        peer: str,
        lane: Lane,
        frames: Sequence[Buffer],
        origin: bytes = b"",
        stripe: int = 0,
    ) -> None:
        """Queue one message. Never blocks; silently drops what is for an absent peer.

        A listener says by ``origin``, as it was received, which connection of the name is meant:
        anybody may connect under any name. A dialer has one listener and leaves it empty.
        ``stripe`` is the number of the connection on the bulk lane.
        """
        ...

    def open_stripes(self, count: int) -> None:
        """A dialer: have ``count`` connections on the bulk lane, at least; they come up by themselves."""
        ...

    def adopt(self, settings: TransportSettings) -> None:
        """Go by other settings: for what is kept and queued at once, for the rest with the next connection."""
        ...

    def set_receiver(self, receive: Receiver) -> None:
        """Call ``receive(peer, lane, frames, origin)`` for each message.

        A dialer's peer is ``""``. The origin is empty where one name has one connection.
        """
        ...

    def address_of(self) -> str:
        """Network address of the message that is being received, for limits; empty where there is none."""
        ...

    def redial(self) -> None:
        """A dialer heard nothing for too long: make new connections, where there are any."""
        ...

    def close(self) -> None:
        """Send what is queued as far as it goes at once, then stop."""
        ...

    async def aclose(self) -> None:
        """``close``, and wait until tasks and sockets are gone."""
        ...


class Cancellable(Protocol):
    """What ``call_at`` returns."""

    def cancel(self) -> object:
        """Forget the call; harmless when it already happened."""
        ...


class Scheduler(Protocol):
    """The part of an asyncio loop that an endpoint uses; ``VirtualScheduler`` is the other one."""

    def time(self) -> float:
        """Seconds, monotonic."""
        ...

    def call_at(self, when: float, callback: Callable[..., object], *args: object) -> Cancellable:
        """Call ``callback(*args)`` once at ``when``."""
        ...


class Chance(Protocol):
    """Randomness as an argument: ``random.Random(seed)`` or ``random.SystemRandom()``."""

    def random(self) -> float:
        """A float in [0, 1)."""
        ...

    def getrandbits(self, k: int, /) -> int:
        """A number of ``k`` random bits."""
        ...


class ChunkSource(Protocol):
    """Where a stream's chunks come from. Chunks may be asked for again after a loss."""

    @property
    def chunks(self) -> int:
        """How many chunks there are, numbered from 0."""
        ...

    def read(self, index: int, deliver: Callable[[Buffer | None], None]) -> None:
        """Call ``deliver(data)`` once, now or later, on the loop thread; ``None`` = failed.

        The data must not change afterwards. Asked again for an index, give the same bytes.
        """
        ...


class ChunkSink(Protocol):
    """Where a stream's chunks go, in order of index."""

    def write(self, index: int, data: Buffer, done: Callable[[bool], None]) -> None:
        """Take the chunk and call ``done(True)`` once it may be counted as kept.

        ``done`` returns the byte credit, now or later, on the loop thread; several writes may be
        open at once. ``done(False)`` ends the stream. A chunk's buffer is free after ``done``.
        """
        ...


def check_name(name: str) -> str:
    """Return ``name`` or raise ``LocalError``."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise LocalError(
            f"{name!r} is no name for a peer: use 1 to 64 of the characters A-Z a-z 0-9 . _ -"
        )
    return name
