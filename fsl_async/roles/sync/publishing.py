"""Who publishes version 0: the first client that attached a model, and the next one when that fails. Pure."""

from __future__ import annotations

from attrs import mutable

from fsl_async.roles.machine import Deadlines, Effect, Note, Send
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.ps_state import Member


@mutable
class Publishing:
    """The line of those who may publish. It shares the server's members and deadlines; "publish" is its own deadline."""

    members: dict[str, Member]
    deadlines: Deadlines
    retry_s: float
    name: str | None = None
    over: bool = False  # version 0 is durable

    def choose(self) -> list[Effect]:
        """Ask the first in the line, unless somebody is asked already or a failure is too fresh."""
        if self.over or self.name is not None or self.deadlines.when("publish") is not None:
            return []
        for name, member in self.members.items():
            if member.attached:
                self.name = name
                text = f"{name} is first and publishes the initial weights"
                return [Note(text), Send(name, msg.Publish())]
        return []

    def left(self, peer: str) -> list[Effect]:
        """A session is over: if it was the publisher's, the next one is asked."""
        if self.name != peer:
            return []
        self.name = None
        text = f"{peer} left before its initial weights were here"
        return [Note(text, "warning"), *self.choose()]

    def failed(self, reason: str, now: float) -> list[Effect]:
        """Not at once again, because a full disk is full for a while; and if there is another client, not the same one."""
        if self.over:
            return []
        peer, self.name = self.name, None
        if peer is not None and peer in self.members:
            self.members[peer] = self.members.pop(peer)
        self.deadlines.set("publish", now + self.retry_s)
        return [Note(f"{reason}; next try in {self.retry_s:g} s", "warning")]

    def done(self) -> None:
        """Version 0 is durable: nobody publishes any more."""
        self.over, self.name = True, None
        self.deadlines.cancel("publish")
