"""The shell of what a parameter server says to a split server elsewhere: transport events in, effects out. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsl_transport as tp
from fsl_async.nodes.ports import Dialer
from fsl_async.nodes.runtime import Journal, Node
from fsl_async.roles.machine import (
    Effect,
    Event,
    Finish,
    HelloRefused,
    Note,
    Send,
    SendGoodbye,
    SessionLost,
)
from fsl_async.roles.messages import MessageError
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.run_end_notifier import RunEndNotifierMachine
from fsl_async.roles.sync.client_state import SERVER


class RunEndNotifierShell:
    """Joins a RunEndNotifierMachine with an endpoint."""

    def __init__(
        self,
        machine: RunEndNotifierMachine,
        *,
        scheduler: tp.Scheduler,
        journal: Journal,
        say: Callable[[Note], None],
        finished: Callable[[], None],
    ) -> None:
        self.machine = machine
        self.node = Node(machine, scheduler, self._execute, journal)
        self.endpoint: Dialer
        self._say, self._finished = say, finished
        self._unreached = False

    def dial(self) -> None:
        """Dial the split server, now and again after every loss."""
        self.endpoint.connect(lambda: msg.to_wire(self.machine.hello()))

    def on_transport(self, event: tp.TransportEvent) -> None:
        """Take one event of the endpoint."""
        feed: Callable[[Event], Any] = self.node.feed
        match event:
            case tp.PeerUp(_, _, body):
                self._welcomed(body)
            case tp.PeerDown(_, _, reason):
                feed(SessionLost(reason))
            case tp.Refused(code, text):
                feed(HelloRefused(code, text))
            case tp.Superseded():
                text = "another parameter server took over there"
                feed(HelloRefused("superseded", text))
            case tp.Unreachable(address, seconds) if not self._unreached:
                self._unreached = True
                text = f"no answer from the split server at {address} for {seconds:.0f} s; trying again"
                self._say(Note(text, "warning"))
            case tp.MessageReceived(_, body):
                self._message(body)
            case tp.StreamOffered(_, stream):
                self.endpoint.decline(SERVER, stream, "not wanted")
            case _:
                pass

    def _welcomed(self, body: dict[str, Any]) -> None:
        try:
            welcome = msg.from_wire(body)
        except MessageError:
            return
        if isinstance(welcome, msg.SplitWelcome):
            self._unreached = False
            self.node.feed(ev.SplitWelcomed(welcome.run, 1))

    def _message(self, body: dict[str, Any]) -> None:
        try:
            message = msg.from_wire(body)
        except MessageError:
            return
        if isinstance(message, msg.Ended):
            self.node.feed(ev.SplitServerEnded(message.reason))

    def _execute(self, effect: Effect, number: int) -> None:
        match effect:
            case Send(_, message):
                self.endpoint.send(SERVER, msg.to_wire(message))
            case Note():
                self._say(effect)
            case SendGoodbye(reason):
                self.endpoint.disconnect(SERVER, reason)
            case split.DialAgain():
                self.dial()
            case Finish():
                self._finished()
            case other:
                raise AssertionError(f"{type(other).__name__} is not a herald's")
