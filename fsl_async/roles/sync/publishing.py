"""Chooses the client that publishes version 0. Pure.

It is the first one that attached a model, and the next one when that fails.
"""

from __future__ import annotations

from attrs import mutable

from fsl_async.roles.machine import Deadlines, Effect, Note, Send
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.ps_state import Member


@mutable
class Publishing:
    """The choice of the publisher. It shares the machine's members and deadlines.

    "publish" is its own deadline.
    """

    members: dict[str, Member]
    deadlines: Deadlines
    retry_s: float
    name: str | None = None
    received: bool = False  # all initial weights arrived; version 0 is being written
    over: bool = False  # version 0 is durable

    def choose(self) -> list[Effect]:
        """Ask the first attached client, unless one is asked already or a failure is too recent."""
        if self.over or self.received or self.name is not None:
            return []
        if self.deadlines.when("publish") is not None:
            return []
        for name, member in self.members.items():
            if member.attached:
                self.name = name
                text = f"{name} is first and publishes the initial weights"
                return [Note(text), Send(name, msg.Publish())]
        return []

    def left(self, peer: str) -> list[Effect]:
        """Ask the next client if the publisher's session ended before its weights arrived."""
        if self.name != peer or self.received:
            return []
        self.name = None
        text = f"{peer} left before its initial weights arrived"
        return [Note(text, "warning"), *self.choose()]

    def failed(self, reason: str, now: float) -> list[Effect]:
        """Ask again after a pause, because a disk stays full for a while; prefer another client."""
        if self.over:
            return []
        self.received = False
        peer, self.name = self.name, None
        if peer is not None and peer in self.members:
            self.members[peer] = self.members.pop(peer)
        self.deadlines.set("publish", now + self.retry_s)
        return [Note(f"{reason}; next try in {self.retry_s:g} s", "warning")]

    def done(self) -> None:
        """Stop: version 0 is durable."""
        self.over, self.name = True, None
        self.deadlines.cancel("publish")
