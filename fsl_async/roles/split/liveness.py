"""Whether a split server has anybody, and for how long it waits where it has nobody. Pure.

The parameter server of another process keeps a session too, in which it says one thing: that the run is over. While that session lasts the run
goes on, whoever of the clients is away. Where neither is here, either everything is down, or the run has ended and nobody could say so. These
cannot be told apart, so the server waits `alone_s` and then leaves: a process that is started in its folder later goes on.
"""

from __future__ import annotations

from attrs import mutable

from fsl_async.roles.machine import Deadlines, Effect, Refuse
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split.messages import PS_ROLE, SplitWelcome

ALONE = "alone"
"""The deadline's name."""


@mutable
class Liveness:
    """The parameter server's session, and the deadline of a server that is alone. It shares the server's deadlines."""

    deadlines: Deadlines
    alone_s: float
    conductor: int | None = None  # the life of the parameter server that has a session

    def look(self, run: str, now: float, *, clients: bool) -> None:
        """Somebody has come or gone. A server that is in no run yet waits for its first one as long as it takes."""
        if not run or self.alone_s <= 0 or clients or self.conductor is not None:
            self.deadlines.cancel(ALONE)
        elif self.deadlines.when(ALONE) is None:
            self.deadlines.set(ALONE, now + self.alone_s)

    def admit(
        self, event: ev.PsConnected, run: str, refusal: tuple[str, str] | None
    ) -> list[Effect]:
        """Welcome the parameter server of `run`, or of whatever run where that is empty."""
        if refusal is None and event.peer != PS_ROLE:
            refusal = "name", f"a parameter server comes as {PS_ROLE}, and not as {event.peer}"
        if refusal is None and run and event.run != run:
            text = (
                f"this split server is in run {run}, and the parameter server in run {event.run}:"
                " give every run a split server, and a folder, of its own"
            )
            refusal = "run", text
        if refusal is not None:
            return [Refuse(event.peer, *refusal)]
        self.conductor = event.incarnation
        welcome = SplitWelcome(event.run, 0, "", -1)
        return [split.AdmitSplit(event.peer, event.incarnation, welcome)]

    def is_ps(self, peer: str) -> bool:
        """Whether a message comes from a parameter server that was admitted."""
        return peer == PS_ROLE and self.conductor is not None

    def left(self, incarnation: int) -> None:
        """The parameter server's session has ended."""
        if self.conductor == incarnation:
            self.conductor = None

    def reason(self) -> str:
        """Why a server that is alone ends."""
        return (
            f"no client and no parameter server for {self.alone_s:g} s (split.alone_s): the run has ended, or all are away;"
            " what was trained is in the last checkpoint, and a start with the same --run-dir goes on"
        )
