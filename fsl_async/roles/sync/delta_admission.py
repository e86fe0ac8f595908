"""Decides the answers to deltas that clients offer or have sent. Pure.

A known key gets the same answer again. A delta that would never be merged is refused before its
transfer. After an incomplete transfer the client is asked to offer again ("later"), because it may
assume that the delta arrived.

After a delta was quarantined for its values, its client is refused for a second, and for twice as
long after each more, up to `DIVERGED_S`, unless it sends from a newer version. Not for good: it has
gone back to the run's weights, and the only client of a run gets no newer ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import evolve, field, mutable

from fsl_async.roles.machine import DeclineStream, Effect, Note, Offered, Send, StreamLost
from fsl_async.roles.messages import Message
from fsl_async.roles.phrasing import MessageThrottle
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import Delta, DeltaKey, StoredDelta
from fsl_async.roles.sync.deltas import Deltas
from fsl_async.roles.sync.norm_guard import NormGuard
from fsl_async.roles.sync.ps_state import Member

if TYPE_CHECKING:
    from fsl_async.roles.sync.secure import SecureSums

DIVERGED_S = 60.0

Objection = tuple[str, str] | None
"""Why a delta is refused, as a code and a sentence."""


@mutable
class DeltaAdmission:
    """Answers of the parameter server. It shares the machine's members and deltas.

    too_late: objects to a delta for reasons of rounds.
    """

    members: dict[str, Member]
    deltas: Deltas
    too_late: Callable[[Delta], Objection]
    guard: NormGuard
    secure: SecureSums | None = None
    _throttle: MessageThrottle = field(factory=lambda: MessageThrottle(by_thing=True))
    _diverged: dict[str, tuple[int, float, float, str]] = field(factory=dict)
    """Client -> base of its last delta quarantined for its values, until when it is refused, for
    how long, and why; until one that is not."""

    def offered(self, event: Offered[msg.DeltaMeta], now: float) -> tuple[list[Effect], bool]:
        """Answer an offer. Returns also whether this is the client's answer to its round."""
        peer, delta = event.peer, event.message.delta
        key = delta.key
        member = self.members.get(peer)
        if key.client != peer or member is None or not member.trains:
            return [DeclineStream(peer, event.stream, "not yours")], False
        if self.deltas.is_acknowledged(key) or key in self.guard.held:
            again = [] if self._waits(key) else [Send(peer, msg.Accepted(key))]
            return [DeclineStream(peer, event.stream, "known"), *again], True
        objection = self._out_of_place(key, now) or self.deltas.objection(delta)
        if objection is not None and self.secure is not None:
            objection = "void", objection[1]  # its client can send the work again
        objection = objection or self.too_late(delta)
        if objection is None:
            self.deltas.receive(key)
            tokens, why = self.guard.tokens(delta, now)
            delta = evolve(delta, tokens=tokens)
            receive = do.ReceiveDelta(peer, event.stream, delta)
            return [
                *(self._note(f"{peer} tokens", why, "warning", now) if why else []),
                receive,
            ], False
        code, text = objection
        return [
            DeclineStream(peer, event.stream, code),
            Send(peer, msg.Declined(key, code, text)),
            *self._note(f"{peer} {code}", f"refused delta {key.text}: {text}", "warning", now),
        ], True

    def _waits(self, key: DeltaKey) -> bool:
        """Whether a masked delta has no answer yet: it is not decided whether a version has it."""
        return self.secure is not None and key in self.deltas.pending

    def _note(self, thing: str, text: str, level: str, now: float) -> list[Effect]:
        more = self._throttle.lets(thing, now)
        return [] if more is None else [Note(text + more, level)]

    def _out_of_place(self, key: DeltaKey, now: float) -> Objection:
        session = self.members[key.client].incarnation
        if key.incarnation != session:
            return "incarnation", f"its session is of incarnation {session}"
        base, until, _, problem = self._diverged.get(key.client, (-1, now, 0.0, ""))
        if key.base > base or now >= until:
            return None
        again = f"the next is taken in {until - now:.0f} s"
        return "quarantined", f"the one before was quarantined: {problem}; {again}"

    def queue(self, stored: StoredDelta, now: float) -> list[Effect]:
        """Queue a durable delta for the next merge, or exclude it."""
        key = stored.key
        if self.secure is not None and (late := self.secure.objection(stored.delta)):
            self.deltas.settled.settle(key, "quarantined")
            return [do.Quarantine(key, late[1])]
        reason = self.guard.outlier(stored.norm)
        if reason is not None:
            self.deltas.settled.settle(key, "quarantined")
            self.guard.stored(key.client, now)
            self.guard.hold(stored)
            release = self.guard.limits.release
            done = "held back" if release else "quarantined"
            text = f"{done} delta {key.text}: {reason}; the round goes on without it"
            return [do.Quarantine(key, reason, release), Note(text, "warning")]
        self._count(stored, now)
        return []

    def _count(self, stored: StoredDelta, now: float) -> None:
        """Queue a delta for the next merge."""
        self.guard.accepted(stored, now)
        self.deltas.acknowledge(stored)

    def look_again(self, now: float) -> list[Effect]:
        """Release held deltas that are no outliers any more and not too stale."""
        effects: list[Effect] = []
        for one in self.guard.releasable():
            if self.deltas.staleness(one.key) > self.deltas.max_staleness:
                continue
            self.deltas.settled.unsettle(one.key)
            text = f"delta {one.key.text}, held back before, is no outlier any more"
            effects += [Note(text), do.Release(one.key)]
            self._count(one, now)
        return effects

    def stored(self, event: ev.DeltaStored, now: float) -> list[Effect]:
        """Queue a durable delta, or answer with its outcome."""
        key = event.stored.key
        outcome = self.deltas.settled.of(key)
        effects: list[Effect] = []
        answer: Message = msg.Accepted(key)
        if self.deltas.is_acknowledged(key) or key in self.guard.held:
            pass  # a second stream of the same delta: the same answer again
        elif outcome is not None:
            answer = msg.Declined(key, outcome, f"this delta is {outcome}")
        elif event.problem is None:
            self._diverged.pop(key.client, None)
            effects += self.queue(event.stored, now)
            for one in effects:
                if isinstance(one, do.Quarantine) and not one.held:
                    code = "quarantined" if self.secure is None else "void"
                    answer = msg.Declined(key, code, one.reason)
        else:
            self.deltas.settled.settle(key, "quarantined")
            answer = msg.Declined(key, "quarantined", event.problem)
            _, _, before_s, _ = self._diverged.get(key.client, (-1, 0.0, 0.5, ""))
            pause_s = min(DIVERGED_S, 2.0 * before_s)
            self._diverged[key.client] = key.base, now + pause_s, pause_s, event.problem
            text = f"quarantined delta {key.text}: {event.problem}; the round goes on without it"
            effects.append(Note(text, "warning", {"alarm": "delta", "client": key.client}))
        if key.client in self.members and not self._waits(key):
            effects.append(Send(key.client, answer))
        return effects

    def lost(self, event: StreamLost, now: float) -> list[Effect]:
        """Answer a transfer that broke off."""
        text = f"stream {event.stream} of {event.peer} broke off: {event.reason}"
        effects: list[Effect] = self._note(f"{event.peer} broke off", text, "info", now)
        if event.stream.startswith("delta:") and event.peer in self.members:
            key = DeltaKey.parse(event.stream.removeprefix("delta:"))
            effects.append(Send(event.peer, msg.Declined(key, "later", event.reason[:200])))
        return effects
