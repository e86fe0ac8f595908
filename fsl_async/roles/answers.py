"""What a client hears of a delta that it offers or has sent. Pure.

A key that was seen gets the answer it got. What would never be merged is refused before it is transferred. A transfer that broke off is
asked for again ("later"): the client may believe that all of it arrived.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import mutable

from fsl_async import effects as do
from fsl_async import events as ev
from fsl_async import messages as msg
from fsl_async.effects import Effect
from fsl_async.roles.deltas import DeltaBook
from fsl_async.roles.ps_state import Member

Objection = tuple[str, str] | None
"""Why a delta is refused, as a code and a sentence."""


@mutable
class Answers:
    """The server's answers. It shares the server's members and deltas; `too_late` knows about rounds."""

    members: dict[str, Member]
    deltas: DeltaBook
    too_late: Callable[[ev.DeltaOffered], Objection]

    def offered(self, event: ev.DeltaOffered) -> tuple[list[Effect], bool]:
        """Answer an offer. Returns whether that settles what the client has to say in its round."""
        peer, key = event.peer, event.key
        if key.client != peer or peer not in self.members:
            return [do.DeclineStream(peer, event.stream, "not yours")], False
        if self.deltas.is_acknowledged(key):
            again = do.Tell(peer, msg.Accepted(key.text))
            return [do.DeclineStream(peer, event.stream, "known"), again], True
        objection = self.deltas.objection(event) or self.too_late(event)
        if objection is None:
            work = (event.tokens, event.steps, event.round, event.metrics)
            return [do.ReceiveDelta(peer, event.stream, key, event.base_digest, *work)], False
        code, text = objection
        return [
            do.DeclineStream(peer, event.stream, code),
            do.Tell(peer, msg.Declined(key.text, code, text)),
            do.Note(f"refused delta {key.text}: {text}", "warning"),
        ], True

    def stored(self, event: ev.DeltaStored) -> list[Effect]:
        """Book what is durable, or say what became of it."""
        key = event.key
        outcome = self.deltas.settled_as(key)
        effects: list[Effect] = []
        answer: msg.Message = msg.Accepted(key.text)
        if self.deltas.is_acknowledged(key):
            pass  # a second stream of the same delta: the same answer again
        elif outcome is not None:
            answer = msg.Declined(key.text, outcome, f"this delta is {outcome}")
        elif event.problem is None:
            effects.append(self.deltas.acknowledge(key, event.tokens, event.steps))
        else:
            self.deltas.settle(key, "quarantined")
            answer = msg.Declined(key.text, "quarantined", event.problem)
            text = f"quarantined delta {key.text}: {event.problem}; the round goes on without it"
            effects.append(do.Note(text, "warning"))
        if key.client in self.members:
            effects.append(do.Tell(key.client, answer))
        return effects

    def lost(self, event: ev.StreamLost) -> list[Effect]:
        """A transfer broke off."""
        text = f"stream {event.stream} of {event.peer} broke off: {event.reason}"
        effects: list[Effect] = [do.Note(text)]
        if event.stream.startswith("delta:") and event.peer in self.members:
            key = event.stream.removeprefix("delta:")
            effects.append(do.Tell(event.peer, msg.Declined(key, "later", event.reason[:200])))
        return effects
