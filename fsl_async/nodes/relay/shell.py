"""Joins a RelayMachine with the sockets of a relay: effects out, events in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from fsl_async.nodes.runtime import Journal, Node
from fsl_async.roles.machine import Effect, Finish, Note
from fsl_async.roles.relay import effects as relay
from fsl_async.roles.relay import events as evr
from fsl_async.roles.relay.relay import STRANGERS_PART, RelayMachine
from fsl_transport import Scheduler
from fsl_transport.link import Cancellable
from fsl_transport.relay.relay import Switchboard

WEIGH_EVERY_S: Final = 0.1
WEIGHING_PART: Final = 20
"""Of the time, no more is spent on weighing: thousands of lines are weighed less often."""
TELL_EVERY_S: Final = 1.0
MORE_PART: Final = 16
"""Of the memory: when there is so much more than there was, it is told at once."""


class RelayShell:
    """Is the `Owner` of a `Switchboard` (see `fsl_transport.relay.relay`). Used on the loop thread only; set `switchboard` before anything comes."""

    def __init__(
        self,
        machine: RelayMachine,
        *,
        scheduler: Scheduler,
        journal: Journal,
        say: Callable[[Note], None],
        finished: Callable[[Finish], None],
    ) -> None:
        self.machine = machine
        self.node = Node(machine, scheduler, self._execute, journal)
        self.switchboard: Switchboard
        self._scheduler = scheduler
        self._weighing: Cancellable | None = None
        self._least_bytes = 0  # since it was last told what lines hold
        self._told_at = -math.inf
        self._executors: dict[type, Callable[[Any], None]] = {
            Note: say,
            Finish: finished,
            relay.ReadGreeting: lambda e: self.switchboard.greet(e.line),
            relay.DialTwin: lambda e: self.switchboard.dial(e.line),
            relay.Carry: lambda e: self.switchboard.carry(e.line),
            relay.DropLine: lambda e: self.switchboard.drop(e.line, e.reason),
            relay.StopListening: lambda _: self.switchboard.stop_listening(),
            relay.LookAtLines: lambda _: self.look(),
        }

    def look(self) -> None:
        """Tell the machine what every line has carried."""
        states = (
            evr.LineState(
                one.line, one.up, one.down, one.taken_up, one.taken_down, one.held_up, one.held_down
            )
            for one in self.switchboard.carried()
        )
        self.node.feed(evr.LinesLooked(tuple(states)))

    def weigh(self) -> None:
        """Tell the machine what lines hold if that is more than strangers alone may: when it became much more, else every second. From now on until the end."""
        begun = self._scheduler.time()
        held = self.switchboard.weigh()
        now = self._scheduler.time()
        memory_bytes = self.machine.rules.memory_bytes
        total = sum(size for _, size in held)
        self._least_bytes = min(self._least_bytes, total)
        is_more = total - self._least_bytes > memory_bytes // MORE_PART
        if total > memory_bytes // STRANGERS_PART and (
            is_more or now >= self._told_at + TELL_EVERY_S
        ):
            self._least_bytes, self._told_at = total, now
            self.node.feed(evr.LinesWeighed(tuple(held)))
        pause_s = max(WEIGH_EVERY_S, WEIGHING_PART * (now - begun))
        self._weighing = self._scheduler.call_at(now + pause_s, self.weigh)

    def close(self) -> None:
        """Nothing more."""
        if self._weighing is not None:
            self._weighing.cancel()
        self.node.close()

    def _execute(self, effect: Effect, number: int) -> None:
        self._executors[type(effect)](effect)

    # What the switchboard tells.

    def accepted(self, line: int, door: int, source: str) -> None:
        """See `fsl_transport.relay.relay`."""
        self.node.feed(evr.LineAccepted(line, door, source))

    def signed(self, line: int) -> None:
        """See `fsl_transport.relay.relay`."""
        self.node.feed(evr.LineSigned(line))

    def greeted(self, line: int, mechanism: str) -> None:
        """See `fsl_transport.relay.relay`."""
        self.node.feed(evr.LineGreeted(line, mechanism))

    def dialled(self, line: int) -> None:
        """See `fsl_transport.relay.relay`."""
        self.node.feed(evr.LineDialled(line))

    def answered(self, line: int) -> None:
        """See `fsl_transport.relay.relay`."""
        self.node.feed(evr.LineAnswered(line))

    def undialled(self, line: int, reason: str) -> None:
        """See `fsl_transport.relay.relay`."""
        self.node.feed(evr.DialFailed(line, reason))

    def ended(self, line: int, reason: str, up: int, down: int) -> None:
        """See `fsl_transport.relay.relay`."""
        self.node.feed(evr.LineEnded(line, reason, up, down))
