"""Decides the global rounds: the first parameter server of the roster. Pure.

Rules
- It polls all members that are here and hold the newest global weights. It goes on when all have
  promised a cut, or after `grace_s` without the others; at least two, itself among them.
- The number of an attempt is in the ledger before the view is sent, so no number is used twice.
- A round is decided when every member of one attempt has reported the same digest: its line in the
  ledger is the decision. An attempt with an error, another digest or a lost member is dropped, and
  never decided afterwards; the next one has the members that are here then, with the same cuts.
- The line lists the contributors. A member that asks learns whether its cut was among them: a cut
  is of the round that the member is in, so the newest round that counted it answers that.
- While it is away no round is decided, and groups go on by themselves. A round that it had begun is
  due when it is back.

    state      event                          -> state       effects
    IDLE       due, two members here             POLLING     Send Poll
    POLLING    all promised, timer "grace"       FORMING     KeepAttempt
    POLLING    timer "grace", too few            IDLE        timer "again"
    FORMING    AttemptKept                       REDUCING    Send View
    REDUCING   Address                           REDUCING    Send Address to the others
    REDUCING   Reported by all, one digest       DECIDING    KeepDecision
    REDUCING   Failed, PeerGone, other digest,   IDLE        Send Dropped; timer "again"
               timer "report"
    DECIDING   DecisionKept                      IDLE        Send Decided to all
    any        AskGlobal                         same        Send Decided; Poll if POLLING
    any        FetchGlobal                       same        SendGlobal, or Decided if it is older
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from fsl_async.roles.machine import Deadlines, Effect, Event, Note, Send
from fsl_async.roles.messages import Message
from fsl_async.roles.ring import effects as do
from fsl_async.roles.ring import events as ev
from fsl_async.roles.ring import messages as msg
from fsl_async.roles.ring.rules import RingRules

LEAST = 2
"""Members of a global round."""
MOST_DOUBLINGS = 16
"""Of the wait for the next attempt."""


class CoordinatorPhase(enum.Enum):
    """The phases of the coordinator."""

    IDLE = "idle"
    POLLING = "polling"
    FORMING = "forming"
    REDUCING = "reducing"
    DECIDING = "deciding"


class RingCoordinator:
    """The state of the coordinator. `received` takes messages of members, also of its own."""

    def __init__(self, rules: RingRules) -> None:
        self.rules = rules
        self.phase = CoordinatorPhase.IDLE
        self.decided: ev.Decision | None = None
        self.attempt = 0
        self.counted: dict[str, int] = {}
        self.present: dict[str, int] = {}
        """Member with a session -> the round that it reported."""
        self.promises: dict[str, msg.Promise] = {}
        self.view: msg.View | None = None
        self.reports: dict[str, str] = {}
        self.lost = ""
        """A member of the view whose session ended before the view was sent, and why."""
        self.is_due = False
        self.versions = 0
        """Versions of the own group since the last decision."""
        self._dropped = 0
        """Attempts in a row that came to nothing, up to MOST_DOUBLINGS."""
        self._not_before = 0.0
        """When the next attempt may begin."""
        self.deadlines = Deadlines()
        self._handlers: dict[type[Event], Callable[[Any, float], list[Effect]]] = {
            ev.RingRecovered: self._recovered,
            ev.PeerGone: lambda event, now: self._gone(event.peer, event.reason, now),
            ev.GroupVersion: self._group_version,
            ev.AttemptKept: self._attempt_kept,
            ev.DecisionKept: self._decision_kept,
            ev.LedgerFailed: lambda event, now: self._drop(event.reason, now),
        }

    @property
    def round(self) -> int:
        """The round under way; -1 before there are global weights."""
        return -1 if self.decided is None else self.decided.round

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event of this process."""
        handler = self._handlers.get(type(event))
        return handler(event, now) if handler is not None else []

    def received(self, peer: str, message: Message, now: float) -> list[Effect]:
        """Take one message of a member."""
        match message:
            case msg.AskGlobal(number, digest):
                return self._asked(peer, number, digest, now)
            case msg.Promise():
                return self._promised(peer, message, now)
            case msg.Address():
                return self._address(peer, message)
            case msg.Reported():
                return self._reported(peer, message, now)
            case msg.Failed():
                if not self._is_of_attempt(peer, message.attempt):
                    return []
                return self._drop(f"{peer}: {message.reason}", now)
            case msg.FetchGlobal(number, model) if number == self.round:
                return [do.SendGlobal(peer, model)]
            case msg.FetchGlobal() if peer in self.present and self.decided is not None:
                return [self._answer(peer)]  # another round was decided since
            case _:
                return []

    def timer(self, name: str, now: float) -> list[Effect]:
        """Take one due deadline."""
        match name:
            case "every":
                self.deadlines.set("every", now + self.rules.every_s)
                self.is_due = self.is_due or self.versions > 0
                return self._begin(now)
            case "again":
                return self._begin(now)
            case "grace":
                return self._form(now)
            case _:  # report
                late = sorted(set(self._names()) - self.reports.keys())
                return self._drop(f"no report from {', '.join(late)}", now)

    def _recovered(self, event: ev.RingRecovered, now: float) -> list[Effect]:
        self.decided, self.attempt = event.decided, event.attempt
        self.counted = dict(event.counted)
        self.is_due = event.cut is not None  # a round that this process did not see decided
        if self.rules.every_s:
            self.deadlines.set("every", now + self.rules.every_s)
        return []

    def begun(self, digest: str, now: float) -> list[Effect]:
        """Take version 0 of the own group as G_0: its line is in the ledger."""
        if self.decided is not None:
            return []
        self.decided = ev.Decision(0, 0, digest)
        return [self._answer(name) for name in sorted(self.present)]

    # --- members ---

    def _asked(self, peer: str, number: int, digest: str, now: float) -> list[Effect]:
        if number > self.round or (
            self.decided is not None and number == self.round and digest != self.decided.digest
        ):
            self.present.pop(peer, None)
            text = (
                f"{peer} holds global weights {number} ({digest}), which this run directory does"
                f" not know (it is at {self.round}): restore the newest one of the coordinator"
            )
            return [Note(text, "warning")]
        self.present[peer] = number
        if self.decided is None:
            return []
        effects: list[Effect] = []
        if number != self.round:
            effects.append(self._answer(peer))
        elif self.phase is CoordinatorPhase.POLLING and peer not in self.promises:
            effects.append(Send(peer, msg.Poll(self.round)))
        return [*effects, *self._begin(now)]

    def _answer(self, peer: str) -> Send:
        assert self.decided is not None, "there are global weights"
        number = self.present[peer]
        counts = 0 <= number <= self.counted.get(peer, -1)
        decided = self.decided
        return Send(peer, msg.Decided(decided.round, decided.attempt, decided.digest, counts))

    def _gone(self, peer: str, reason: str, now: float) -> list[Effect]:
        self.present.pop(peer, None)
        self.promises.pop(peer, None)
        if self.phase is CoordinatorPhase.REDUCING and peer in self._names():
            return self._drop(f"{peer} is gone ({reason})", now)
        if self.phase is CoordinatorPhase.FORMING and peer in self._names():
            self.lost = f"{peer} is gone ({reason})"
        if self.phase is CoordinatorPhase.POLLING:
            return self._form_if_complete(now)
        return []

    # --- rounds ---

    def _group_version(self, event: ev.GroupVersion, now: float) -> list[Effect]:
        self.versions += 1
        if self.rules.every and self.versions >= self.rules.every:
            self.is_due = True
        return self._begin(now)

    def _ready(self) -> list[str]:
        """The members that can be polled, in the order of the roster."""
        return [name for name in self.rules.roster if self.present.get(name) == self.round]

    def _begin(self, now: float) -> list[Effect]:
        """Poll the members, if a round is due and no attempt is under way."""
        ready = self._ready()
        if self.phase is not CoordinatorPhase.IDLE or not self.is_due or self.decided is None:
            return []
        if len(ready) < LEAST or self.rules.name not in ready:
            return []
        if now < self._not_before:
            return []
        self.phase = CoordinatorPhase.POLLING
        self.promises.clear()
        self.deadlines.cancel("again")
        self.deadlines.set("grace", now + self.rules.grace_s)
        return [Send(name, msg.Poll(self.round)) for name in ready]

    def _promised(self, peer: str, promise: msg.Promise, now: float) -> list[Effect]:
        if peer not in self.present:
            return []
        if promise.round != self.round:  # it was decided while the cut was taken
            return [self._answer(peer)]
        if self.phase is not CoordinatorPhase.POLLING:
            return []
        self.promises[peer] = promise
        return self._form_if_complete(now)

    def _form_if_complete(self, now: float) -> list[Effect]:
        is_complete = self.promises.keys() >= set(self._ready())
        return self._form(now) if is_complete and len(self.promises) >= LEAST else []

    def _form(self, now: float) -> list[Effect]:
        """Fix the members of an attempt: those that have promised."""
        self.deadlines.cancel("grace")
        names = [name for name in self.rules.roster if name in self.promises]
        if len(names) < LEAST or self.rules.name not in names:
            self.phase = CoordinatorPhase.IDLE
            self.deadlines.set("again", now + self.rules.grace_s)
            return [Note(f"global round {self.round} waits: {len(names)} of {LEAST} members")]
        total = sum(self.promises[name].tokens for name in names)
        shares = [
            (name, self.promises[name].digest, self._weight(self.promises[name], total))
            for name in names
        ]
        self.attempt += 1
        self.reports.clear()
        self.lost = ""
        self.view = msg.View(
            self.round, self.attempt, shares, self.rules.piece_values, dict(self.rules.codec)
        )
        self.phase = CoordinatorPhase.FORMING
        return [do.KeepAttempt(self.round, self.attempt)]

    def _weight(self, promise: msg.Promise, total: int) -> float:
        """A group's part of the tokens, less for work that is rounds old; 0 if there are none."""
        if not promise.tokens:
            return 0.0
        discount = float((1 + promise.behind) ** -self.rules.staleness_exponent)
        return promise.tokens / total * discount

    def _names(self) -> list[str]:
        return [] if self.view is None else [share.name for share in self.view.members]

    def _attempt_kept(self, event: ev.AttemptKept, now: float) -> list[Effect]:
        if self.phase is not CoordinatorPhase.FORMING or event.attempt != self.attempt:
            return []
        if self.lost:
            return self._drop(self.lost, now)
        assert self.view is not None, "a view was fixed"
        self.phase = CoordinatorPhase.REDUCING
        names = self._names()
        text = f"global round {self.round}, attempt {self.attempt}: {', '.join(names)}"
        facts: dict[str, int | float | str] = {"round": self.round, "attempt": self.attempt}
        return [Note(text, facts=facts), *(Send(name, self.view) for name in names)]

    def _is_of_attempt(self, peer: str, attempt: int) -> bool:
        is_open = self.phase is CoordinatorPhase.REDUCING and attempt == self.attempt
        return is_open and peer in self._names()

    def _address(self, peer: str, message: msg.Address) -> list[Effect]:
        if not self._is_of_attempt(peer, message.attempt):
            return []
        return [Send(name, message) for name in self._names() if name != peer]

    def _reported(self, peer: str, message: msg.Reported, now: float) -> list[Effect]:
        if not self._is_of_attempt(peer, message.attempt):
            return []
        self.reports[peer] = message.digest
        if len(set(self.reports.values())) > 1:
            said = ", ".join(f"{name} {digest}" for name, digest in sorted(self.reports.items()))
            return self._drop(f"the results differ: {said}", now)
        if self.reports.keys() < set(self._names()):
            self.deadlines.set("report", now + self.rules.hold_s)
            return []
        self.deadlines.cancel("report")
        self.phase = CoordinatorPhase.DECIDING
        contributors = {
            name: (self.promises[name].begin, self.promises[name].end) for name in self._names()
        }
        return [do.KeepDecision(self.round + 1, self.attempt, message.digest, contributors)]

    def _drop(self, reason: str, now: float) -> list[Effect]:
        """Give an attempt up for good; another one follows."""
        names = self._names()
        self.phase, self.view = CoordinatorPhase.IDLE, None
        self.deadlines.cancel("report")
        # A member that cannot reduce, behind a firewall or with a full disk, answers at once each
        # time, and every attempt reads and writes the model at all members.
        wait_s = min(self.rules.retry_s * 2**self._dropped, self.rules.longest_retry_s)
        self._dropped = min(self._dropped + 1, MOST_DOUBLINGS)
        self._not_before = now + wait_s
        self.deadlines.set("again", self._not_before)
        text = f"attempt {self.attempt} of global round {self.round} is dropped: {reason}"
        dropped = msg.Dropped(self.round, self.attempt, reason)
        return [Note(text, "warning"), *(Send(name, dropped) for name in names)]

    def _decision_kept(self, event: ev.DecisionKept, now: float) -> list[Effect]:
        if self.phase is not CoordinatorPhase.DECIDING:
            return []
        names, tokens = self._names(), sum(one.tokens for one in self.promises.values())
        (digest,) = set(self.reports.values())
        self.counted |= dict.fromkeys(names, self.round)
        self.decided = ev.Decision(event.round, event.attempt, digest)
        self.phase, self.view = CoordinatorPhase.IDLE, None
        self.is_due, self.versions = False, 0
        self._dropped, self._not_before = 0, 0.0
        text = (
            f"global weights {self.round}, {digest}: {tokens:,} tokens of {', '.join(names)}"
            f" in attempt {event.attempt}"
        )
        facts: dict[str, int | float | str] = {"global": self.round, "members": len(names)}
        answers = [self._answer(name) for name in sorted(self.present)]
        return [Note(text, facts=facts), *answers]
