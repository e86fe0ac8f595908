"""What a relay's machine wants done. Note and Finish come from `fsl_async.roles.sync.effects`."""

from __future__ import annotations

from attrs import frozen

from fsl_async.roles.machine import Effect


@frozen
class ReadGreeting(Effect, tag="read_greeting"):
    """Read who it is. Ends in LineSigned, LineGreeted or LineEnded."""

    line: int


@frozen
class DialTwin(Effect, tag="dial_twin"):
    """Connect to the server behind the line's door. Ends in LineDialled or DialFailed."""

    line: int


@frozen
class Carry(Effect, tag="carry"):
    """Let bytes pass in both directions, unread."""

    line: int


@frozen
class DropLine(Effect, tag="drop_line"):
    """Close both connections now. Ends in LineEnded with this reason."""

    line: int
    reason: str


@frozen
class LookAtLines(Effect, tag="look_at_lines"):
    """Say what every line has carried. Ends in LinesLooked."""


@frozen
class StopListening(Effect, tag="stop_listening"):
    """Close the doors; lines go on."""
