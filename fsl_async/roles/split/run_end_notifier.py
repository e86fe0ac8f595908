"""What a parameter server says to a split server of another process: that the run is over. Pure.

Clients say so too, and mostly that is enough. This is for the run that ends while none of them has a session there.

Rules
- A session is kept for as long as the parameter server serves. Nothing is said in it but the end; that it lasts tells the split server that
  the run goes on, whoever of the clients is away.
- A split server that leaves before the run ends is dialled again after `reoffer_s`: another process goes on in its folder.
- So is one that has no room for a session, or whose list of keys does not let this one in under its name: that passes, or a person changes it.
  People read of it once.
- One that refuses for good (another run's) is told to people, once, and not dialled again: clients are left to tell it.
- When the run ends, nobody waits for more than `tell_s`: a split server that does not hear of it ends by itself (`split.alone_s`).

    state      event                        -> effects
    any        SplitWelcomed                   Tell RunOver where the run is over
    any        SessionLost                      over: Leave, Finish
    any        HelloRefused of `AGAIN`        timer "dial", then DialAgain; Note the first time, but of "leaving" none
    any        HelloRefused                   Note; over: Leave, Finish
    any        RunEnded                        Tell RunOver where there is a session; timer "end"
    any        SplitServerEnded                over: Leave, Finish
    over       timer "end"                     Leave, Finish
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsl_async.roles.machine import (
    Deadlines,
    Effect,
    Event,
    Finish,
    HelloRefused,
    Note,
    RunEnded,
    Send,
    SendGoodbye,
    SessionLost,
    TimerFired,
)
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.sync.client_state import SERVER

AGAIN = frozenset({"leaving", "full", "name", "key"})
"""Codes of refusals that do not last: somebody ends, somebody goes, somebody changes the list of keys."""


class RunEndNotifierMachine:
    """The parameter server's dealings with a split server elsewhere. `handle` and `next_deadline` are the whole interface."""

    def __init__(self, run: str, reoffer_s: float, tell_s: float) -> None:
        self.run = run
        self.reoffer_s, self.tell_s = reoffer_s, tell_s
        self.connected = False
        self.refused = False
        self.noted = {"leaving"}  # of `AGAIN`, which people need not read, or have read
        self.over = ""  # why the run has ended; empty while it has not
        self.done = False
        self.deadlines = Deadlines()
        self._handlers: dict[type[Event], Callable[[Any, float], list[Effect]]] = {
            ev.SplitWelcomed: self._welcomed,
            SessionLost: self._lost,
            HelloRefused: self._refused,
            RunEnded: self._run_ended,
            ev.SplitServerEnded: lambda event, _: self._nobody_there(event.reason),
            TimerFired: self._timers,
        }

    def next_deadline(self) -> float | None:
        """When `handle(TimerFired())` is due, in seconds of the caller's clock."""
        return self.deadlines.next()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event and return what is to be done, in order."""
        handler = self._handlers.get(type(event))
        return [] if self.done or handler is None else handler(event, now)

    def hello(self) -> msg.PsHello:
        """What to say first in a session."""
        return msg.PsHello(self.run, msg.PS_ROLE)

    def _welcomed(self, event: ev.SplitWelcomed, now: float) -> list[Effect]:
        self.connected = True
        self.deadlines.cancel("dial")
        return [Send(SERVER, msg.RunOver(self.over))] if self.over else []

    def _lost(self, event: SessionLost, now: float) -> list[Effect]:
        was, self.connected = self.connected, False
        return self._nobody_there(event.reason) if was else []

    def _refused(self, event: HelloRefused, now: float) -> list[Effect]:
        self.connected = False
        again = event.code in AGAIN
        silent = event.code == "finished" or event.code in self.noted
        text = f"the split server has no session for this parameter server: {event.text}"
        notes: list[Effect] = []
        if not silent:
            notes.append(Note(f"{text}; trying again" if again else text, "warning"))
        if again:
            self.noted.add(event.code)
            if not self.over:
                self.deadlines.set("dial", now + self.reoffer_s)
        else:
            self.refused = True
        return [*notes, *self._nobody_there(event.text)]

    def _run_ended(self, event: RunEnded, now: float) -> list[Effect]:
        if self.over:
            return []
        self.over = event.reason or "the run has ended"
        self.deadlines.cancel("dial")
        if self.refused:
            return self._nobody_there("")
        self.deadlines.set("end", now + self.tell_s)
        return [Send(SERVER, msg.RunOver(self.over))] if self.connected else []

    def _nobody_there(self, reason: str) -> list[Effect]:
        """The split server has ended, or takes nobody: that is the end of this once the run is over."""
        if not self.over:
            return []
        self.done = True
        self.deadlines.clear()
        return [SendGoodbye(reason), Finish(reason, 0)]

    def _timers(self, event: TimerFired, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for name in self.deadlines.pop_due(now):
            if name == "dial":
                effects.append(split.DialAgain())
            else:
                effects.extend(self._nobody_there(self.over))
        return effects
