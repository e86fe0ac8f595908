"""Follows what a run makes of a fault: when it is detected, and when the client is back. Pure.

detect   from the start of a fault until the parameter server ends the session, or begins one with
         a new process; of faults that it detects while they last (a kill lasts until then)
resume   from the end of a fault (a kill ends at once) until the parameter server receives the
         client's first message
back     from the end of a fault until a session's client holds the newest version
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import mutable

if TYPE_CHECKING:
    from fsl_async.observe.clients import Line
    from fsl_async.observe.run_state import RunState

KILL = "kill"
_SESSION = ("client_hello", "client_left")
_HOLDS = ("client_hello", "version_held")
_RECEIVED = (*_HOLDS, "heartbeat_received", "delta_offered", "model_attached")


@mutable
class Recovery:
    """A fault of one client and its consequences. Times in seconds since 1970; None: not yet."""

    kind: str
    name: str
    begun: float
    ended: float = math.inf
    detected: float | None = None
    resumed: float | None = None
    back: float | None = None
    back_version: int = -1
    """The version that it held then."""

    def see(self, line: Line, state: RunState) -> None:
        """Take a line of the parameter server's journal. state: after that line."""
        if line.get("peer") != self.name or line.get("kind") != "event":
            return
        at, event = float(line["t"]), line.get("type")
        was_killed = self.kind == KILL
        is_in_time = was_killed or at <= self.ended
        if self.detected is None and event in _SESSION and self.begun < at and is_in_time:
            self.detected = at
        ended = self.begun if was_killed else self.ended
        received = ("client_hello",) if was_killed else _RECEIVED
        if self.resumed is None and event in received and at > ended:
            self.resumed = at
        if self.resumed is None or self.back is not None:
            return
        client = state.clients.get(self.name)
        if client is None or not client.connected or client.version < state.ps.version:
            return
        if event in _HOLDS or at == self.resumed:
            self.back, self.back_version = at, client.version
