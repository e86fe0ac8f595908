"""What happens at a relay. A line is one connection from a client's side and its twin towards the server; a door is a port of the relay.

DrainAsked and TimerFired come from `fsl_async.roles.sync.events`.
"""

from __future__ import annotations

from attrs import frozen

from fsl_async.roles.machine import Event


@frozen
class LineAccepted(Event, tag="line_accepted"):
    """Somebody connected to door `door` from `source`: an IPv4 address, or the network of an IPv6 one, `.../64`."""

    line: int
    door: int
    source: str


@frozen
class LineSigned(Event, tag="line_signed"):
    """Its first bytes are those of a ZeroMQ connection."""

    line: int


@frozen
class LineGreeted(Event, tag="line_greeted"):
    """Its greeting says how what follows is protected: NULL, PLAIN, CURVE, GSSAPI, or "" for something else than ZeroMQ."""

    line: int
    mechanism: str


@frozen
class LineDialled(Event, tag="line_dialled"):
    """Its twin stands."""

    line: int


@frozen
class LineAnswered(Event, tag="line_answered"):
    """The server behind its door has sent something: it runs, and not only its system."""

    line: int


@frozen
class DialFailed(Event, tag="dial_failed"):
    """The server behind its door could not be reached."""

    line: int
    reason: str


@frozen
class LineEnded(Event, tag="line_ended"):
    """Both connections are closed. Bytes: from the client to the server (`up`) and back, over its whole life."""

    line: int
    reason: str
    up: int
    down: int


@frozen
class LineState:
    """What a line has carried so far, in bytes; of that, what the server and the client are known to have taken; what waits in the relay's process for the server, and for the client."""

    line: int
    up: int
    down: int
    taken_up: int
    taken_down: int
    held_up: int
    held_down: int


@frozen
class LinesLooked(Event, tag="lines_looked"):
    """The answer to Look."""

    lines: tuple[LineState, ...]


@frozen
class LinesWeighed(Event, tag="lines_weighed"):
    """For each line that holds something, its number and the bytes of memory that it holds, here and in the kernel. Told while all together are more than strangers may hold."""

    held: tuple[tuple[int, int], ...]
