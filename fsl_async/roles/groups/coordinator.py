"""Decides the global rounds: the first parameter server of the roster. Pure.

A global round leads from the global weights G_k to G_(k+1): each group offers a cut of its newest
version, and a reduction adds up what the groups gained since G_k. An attempt is one reduction.

Rules
- It polls all members that are here and hold the newest global weights. It goes on when all have
  promised a cut, or after `grace_s` without the others; at least two, itself among them.
- The number of an attempt is in the ledger before the view is sent, so no number is used twice.
- A round is decided when every member of one attempt has reported the same digest: its line in the
  ledger is the decision. An attempt with an error, another digest or a lost member is dropped, and
  never decided afterwards; the next one has the members that are here then, with the same cuts.
- Rounds are due by the fastest group: a first group without clients holds up no other.
- After `TRIES` attempts in a row that came to nothing, the next ones are each tried without one
  member after the other, then without two, and so on. Members without which a round is decided stay
  out for `ROUNDS_OUT` rounds: they adopt the results, and what they merged counts later.
- The line lists the contributors. A member that asks learns whether its cut was among them: a cut
  is of the round that the member is in, so the newest round that counted it answers that.
- A group that ends has a round due for what it merged. When all that are here end, and hold the
  newest global weights, they are let go: so all end with the same weights.
- While it is away no round is decided, and groups go on by themselves. A round that it had begun is
  due when it is back.

    state      event or message               -> state       effects
    any        GroupsRecovered                     IDLE
    IDLE       due, two members here             POLLING     Send Poll
    POLLING    Promise of all, timer "grace"     FORMING     KeepAttempt
    POLLING    timer "grace", too few            IDLE        timer "again"
    FORMING    KeepAttempt is done               REDUCING    Send View
    REDUCING   Address                           REDUCING    Send Address to the others
    REDUCING   Reported by all, one digest       DECIDING    KeepDecision
    REDUCING   Failed, PeerGone, other digest,   IDLE        Send Dropped; timer "again"
               timer "report"
    DECIDING   KeepDecision is done              IDLE        Send Decided to all
    any        KeepAttempt or KeepDecision fails IDLE        Send Dropped; timer "again"
    any        Adopted                           same        Send Decided to all, if it is G_0
    any        AskGlobal                         same        Send Decided; Poll if POLLING
    any        FetchGlobal                       same        SendGlobal, or Decided if it is older
    any        VersionMade, Ending               same        Send Poll if a round is due by that
    IDLE       Ending of all, timer "end"        IDLE        Send AllEnded
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import asdict

from fsl_async.roles.groups import effects as do
from fsl_async.roles.groups import events as ev
from fsl_async.roles.groups import messages as msg
from fsl_async.roles.machine import Deadlines, Done, Effect, Note, Received, RoleMachine, Send

if TYPE_CHECKING:
    from fsl_async.config.settings import Config

LEAST = 2
"""Members of a global round."""
MOST_DOUBLINGS = 16
"""Of the wait for the next attempt."""
RETRY_S, LONGEST_RETRY_S = 0.5, 60.0
"""Wait after an attempt that came to nothing, twice as long after each further one."""
STALENESS_EXPONENT = 0.5
TRIES = 3
"""Attempts with all members before one is left out."""
ROUNDS_OUT = 8
"""Global rounds without a member that they were not decided with."""


class CoordinatorPhase(enum.Enum):
    """The phases of the coordinator."""

    IDLE = "idle"
    POLLING = "polling"
    FORMING = "forming"
    REDUCING = "reducing"
    DECIDING = "deciding"


class GroupsCoordinator(RoleMachine):
    """The state of the coordinator. It takes messages of members, also of its own."""

    senders = "a member"

    def __init__(self, config: Config) -> None:
        self.name = config.run.name
        self.groups = config.groups
        self.roster = tuple(config.groups.servers)
        self.codec = config.codec
        self.phase = CoordinatorPhase.IDLE
        self.decided: ev.Decision | None = None
        self.attempt = 0
        self.counted: dict[str, int] = {}
        self.present: dict[str, int] = {}
        """Member with a session -> the round that it reported."""
        self.ending: dict[str, bool] = {}
        """Member whose group ends -> whether it merged what is in no decided round."""
        self.promises: dict[str, msg.Promise] = {}
        self.view: msg.View | None = None
        self.reports: dict[str, str] = {}
        self.lost = ""
        """A member of the view whose session ended before the view was sent, and why."""
        self.is_due = False
        self.versions: dict[str, int] = {}
        """Member -> versions of its group since the last decision."""
        self._vain_attempts = 0
        """Attempts in a row that came to nothing."""
        self._failures: dict[str, int] = {}
        """Member -> how many of them it ended."""
        self._without: set[str] = set()
        """The members that the attempt under way is tried without."""
        self._ended_attempts = 0
        """Attempts in a row that a member ended."""
        self._versions_of: dict[str, int] = {}
        """Member -> the newest version of its group."""
        self._out_until: dict[str, int] = {}
        """Member -> the round in which it takes part again."""
        self._not_before = 0.0
        """When the next attempt may begin."""
        self.deadlines = Deadlines()
        self.handlers = {
            ev.GroupsRecovered: lambda event, _: self._recovered(event),
            ev.Adopted: lambda event, _: self._begun(event.decision),
            ev.PeerGone: lambda event, now: self._gone(event.peer, event.reason, now),
            do.KeepAttempt: self._attempt_kept,
            do.KeepDecision: self._decision_kept,
            msg.AskGlobal: lambda event, now: self._asked(event.peer, event.message, now),
            msg.VersionMade: lambda event, now: self._version_made(
                event.peer, event.message.version, now
            ),
            msg.Ending: lambda event, now: self._ending(event.peer, event.message.gained, now),
            msg.Promise: lambda event, now: self._promised(event.peer, event.message, now),
            msg.Address: lambda event, _: self._address(event.peer, event.message),
            msg.Reported: lambda event, now: self._reported(event.peer, event.message, now),
            msg.Failed: self._failed,
            msg.FetchGlobal: lambda event, _: self._fetched(event.peer, event.message),
        }

    @property
    def round(self) -> int:
        """The round under way; -1 before there are global weights."""
        return -1 if self.decided is None else self.decided.round

    def timer(self, name: str, now: float) -> list[Effect]:
        """Take one due deadline."""
        match name:
            case "again":
                return [*self._begin(now), *self._let_go(now)]
            case "end":
                return self._end()
            case "grace":
                return self._form(now)
            case _:  # report
                late = sorted(set(self._names()) - self.reports.keys())
                return self._drop(f"no report from {', '.join(late)}", now, late)

    def _recovered(self, event: ev.GroupsRecovered) -> list[Effect]:
        self.decided, self.attempt = event.decided, event.attempt
        self.counted = dict(event.counted)
        self.is_due = event.cut is not None  # a round that this process did not see decided
        return []

    def _begun(self, first: ev.Decision) -> list[Effect]:
        """Take version 0 of the own group as G_0: its line is in the ledger."""
        if self.decided is not None:
            return []
        self.decided = first
        return [self._answer(name) for name in sorted(self.present)]

    # --- members ---

    def _asked(self, peer: str, asked: msg.AskGlobal, now: float) -> list[Effect]:
        decided, number = self.decided, asked.round
        problem = ""
        if decided is not None and asked.run not in {"", decided.run}:
            problem = (
                f"{peer} is of run {asked.run}, and this is run {decided.run}: give it a new"
                " --run-dir, or restore the one of this parameter server"
            )
        elif number > self.round or (
            decided is not None and number == self.round and asked.digest != decided.digest
        ):
            problem = (
                f"{peer} holds global weights {number} ({asked.digest}), which this run directory"
                f" does not know (it is at {self.round}): restore the newest one of the coordinator"
            )
        if problem:
            self.present.pop(peer, None)
            answer = [] if decided is None else [self._answer(peer)]  # it says so there, too
            return [Note(problem, "warning"), *answer, *self._let_go(now)]
        self.present[peer] = number
        if decided is None:
            return []
        effects: list[Effect] = []
        if number != self.round:
            effects.append(self._answer(peer))
        elif self.phase is CoordinatorPhase.POLLING and peer in self._ready():
            effects += [] if peer in self.promises else [Send(peer, msg.Poll(self.round))]
        return [*effects, *self._begin(now)]

    def _ending(self, peer: str, gained: bool, now: float) -> list[Effect]:
        if peer not in self.present:
            return []
        if peer not in self.ending:
            self._out_until.pop(peer, None)  # its last chance
        self.ending[peer] = gained
        if gained and self._out_until.get(peer, 0) <= self.round:
            self.is_due = True
        return [*self._begin(now), *self._let_go(now)]

    def _let_go(self, now: float) -> list[Effect]:
        """Let groups end now if all are here, else once those away had time to come back."""
        if not self.ending:
            return []
        if all(name in self.present for name in self.roster):
            return self._end()
        if self.deadlines.when("end") is None:
            self.deadlines.set("end", now + self.groups.grace_s)
        return []

    def _end(self) -> list[Effect]:
        """Let all groups end, if all that are here have nothing that needs a round."""
        here = {self.name, *self.present}
        hold_newest = all(self.present.get(name) == self.round for name in here)
        if self.phase is not CoordinatorPhase.IDLE or not hold_newest:
            return []
        if any(self.ending.get(name) is not False for name in here):
            return []
        return [Send(name, msg.AllEnded()) for name in sorted(here)]

    def _fetched(self, peer: str, wanted: msg.FetchGlobal) -> list[Effect]:
        if self.decided is not None and wanted.round == self.round:
            return [do.SendGlobal(peer, self.decided, wanted.model)]
        is_known = peer in self.present and self.decided is not None
        return [self._answer(peer)] if is_known else []  # another round was decided since

    def _answer(self, peer: str) -> Send:
        assert self.decided is not None, "there are global weights"
        counts = 0 <= self.present.get(peer, -1) <= self.counted.get(peer, -1)
        made = self.decided
        return Send(peer, msg.Decided(made.round, made.attempt, made.digest, counts, made.run))

    def _gone(self, peer: str, reason: str, now: float) -> list[Effect]:
        self.present.pop(peer, None)
        self.promises.pop(peer, None)
        self.ending.pop(peer, None)
        effects = self._let_go(now)
        if self.phase is CoordinatorPhase.REDUCING and peer in self._names():
            effects += self._drop(f"{peer} is gone ({reason})", now, [peer])
        if self.phase is CoordinatorPhase.FORMING and peer in self._names():
            self.lost = f"{peer} is gone ({reason})"
        if self.phase is CoordinatorPhase.POLLING:
            effects += self._form_if_complete(now)
        return effects

    # --- rounds ---

    def _version_made(self, peer: str, version: int, now: float) -> list[Effect]:
        if peer not in self.present or version <= self._versions_of.get(peer, -1):
            return []
        self._versions_of[peer] = version
        made = self.versions[peer] = self.versions.get(peer, 0) + 1
        if made >= self.groups.every:
            self.is_due = True
        return self._begin(now)

    def _ready(self) -> list[str]:
        """The members that can be polled, in the order of the roster."""
        here = [name for name in self.roster if self.present.get(name) == self.round]
        fit = [
            name
            for name in here
            if name not in self._without and self._out_until.get(name, 0) <= self.round
        ]
        return fit if len(fit) >= LEAST else here

    def _suspect(self) -> set[str]:
        """Return the members that the next attempt is tried without.

        One, until each was left out once, then two: it is not known which ones cannot reduce.
        """
        excess = self._ended_attempts - TRIES
        self._without = set()
        if excess >= 0:
            self._out_until.clear()
        others = [name for name in self._ready() if name != self.name]
        if excess < 0 or len(others) < LEAST:
            return set()
        others.sort(key=lambda name: -self._failures.get(name, 0))
        size = min(1 + excess // len(others), len(others) - 1)
        return {others[(excess + offset) % len(others)] for offset in range(size)}

    def _begin(self, now: float) -> list[Effect]:
        """Poll the members, if a round is due and no attempt is under way."""
        if self.phase is not CoordinatorPhase.IDLE or not self.is_due or self.decided is None:
            return []
        if now < self._not_before:
            return []
        self._without = self._suspect()
        ready = self._ready()
        if len(ready) < LEAST or self.name not in ready:
            return []
        self.phase = CoordinatorPhase.POLLING
        self.promises.clear()
        self.deadlines.cancel("again")
        self.deadlines.set("grace", now + self.groups.grace_s)
        return [Send(name, msg.Poll(self.round)) for name in ready]

    def _promised(self, peer: str, promise: msg.Promise, now: float) -> list[Effect]:
        if peer not in self.present:
            return []
        if promise.round != self.round:  # it was decided while the cut was taken
            return [self._answer(peer)]
        if self.phase is not CoordinatorPhase.POLLING or peer not in self._ready():
            return []
        self.promises[peer] = promise
        return self._form_if_complete(now)

    def _form_if_complete(self, now: float) -> list[Effect]:
        is_complete = self.promises.keys() >= set(self._ready())
        return self._form(now) if is_complete and len(self.promises) >= LEAST else []

    def _form(self, now: float) -> list[Effect]:
        """Fix the members of an attempt: those that have promised."""
        self.deadlines.cancel("grace")
        names = [name for name in self.roster if name in self.promises]
        if len(names) < LEAST or self.name not in names:
            self.phase = CoordinatorPhase.IDLE
            self._ended_attempts += bool(self._without)
            self.deadlines.set("again", now + self.groups.grace_s)
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
            self.round,
            self.attempt,
            shares,
            min(self.promises[name].piece_values for name in names),
            asdict(self.codec.spec_global),
        )
        self.phase = CoordinatorPhase.FORMING
        return [do.KeepAttempt(self.round, self.attempt)]

    def _weight(self, promise: msg.Promise, total: int) -> float:
        """A group's part of the tokens, less for work that is rounds old; 0 if there are none."""
        if not promise.tokens:
            return 0.0
        discount = float((1 + promise.behind) ** -STALENESS_EXPONENT)
        return promise.tokens / total * discount

    def _names(self) -> list[str]:
        return [] if self.view is None else [share.name for share in self.view.members]

    def _attempt_kept(self, event: Done[do.KeepAttempt], now: float) -> list[Effect]:
        if event.problem:
            return self._drop(event.problem, now)
        if self.phase is not CoordinatorPhase.FORMING or event.of.attempt != self.attempt:
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
            return self._drop(f"the results differ: {said}", now, [peer])
        if self.reports.keys() < set(self._names()):
            self.deadlines.set("report", now + self.groups.hold_s)
            return []
        self.deadlines.cancel("report")
        self.phase = CoordinatorPhase.DECIDING
        contributors = {
            name: (self.promises[name].begin, self.promises[name].end) for name in self._names()
        }
        return [do.KeepDecision(self.round + 1, self.attempt, message.digest, contributors)]

    def _failed(self, event: Received[msg.Failed], now: float) -> list[Effect]:
        peer, failed = event.peer, event.message
        if not self._is_of_attempt(peer, failed.attempt):
            return []
        return self._drop(f"{peer}: {failed.reason}", now, [peer])

    def _drop(self, reason: str, now: float, by: Sequence[str] = ()) -> list[Effect]:
        """Give an attempt up for good; another one follows. by: the members that ended it."""
        names = self._names()
        self._ended_attempts += bool(by)
        for name in by:
            self._failures[name] = self._failures.get(name, 0) + 1
        self.phase, self.view = CoordinatorPhase.IDLE, None
        self.deadlines.cancel("report")
        # A member that cannot reduce, behind a firewall or with a full disk, answers at once each
        # time, and every attempt reads and writes the model at all members.
        doublings = min(self._vain_attempts, MOST_DOUBLINGS)
        wait_s = min(RETRY_S * 2**doublings, LONGEST_RETRY_S)
        self._vain_attempts += 1
        self._not_before = now + wait_s
        self.deadlines.set("again", self._not_before)
        text = f"attempt {self.attempt} of global round {self.round} is dropped: {reason}"
        dropped = msg.Dropped(self.round, self.attempt, reason)
        return [Note(text, "warning"), *(Send(name, dropped) for name in names)]

    def _decision_kept(self, event: Done[do.KeepDecision], now: float) -> list[Effect]:
        if event.problem:
            return self._drop(event.problem, now)
        if self.phase is not CoordinatorPhase.DECIDING:
            return []
        made, names = event.of, self._names()
        tokens = sum(one.tokens for one in self.promises.values())
        self.counted |= dict.fromkeys(names, self.round)
        assert self.decided is not None, "there are global weights"
        self.decided = ev.Decision(made.round, made.attempt, made.digest, self.decided.run)
        self.phase, self.view = CoordinatorPhase.IDLE, None
        self.is_due = False
        self.versions.clear()
        notes = [
            note for name in sorted(self._without - set(names)) for note in self._leave_out(name)
        ]
        self._vain_attempts, self._ended_attempts, self._not_before, self._without = (
            0,
            0,
            0.0,
            set(),
        )
        self._failures.clear()
        text = (
            f"global weights {self.round}, {made.digest}: {tokens:,} tokens of {', '.join(names)}"
            f" in attempt {made.attempt}"
        )
        facts: dict[str, int | float | str] = {"global": self.round, "members": len(names)}
        answers = [self._answer(name) for name in sorted(self.present)]
        return [Note(text, facts=facts), *notes, *answers]

    def _leave_out(self, name: str) -> list[Effect]:
        self._out_until[name] = self.round + ROUNDS_OUT
        text = (
            f"{name} is left out of global rounds until {self.round + ROUNDS_OUT}:"
            f" {self._ended_attempts} attempts came to nothing, and one without it was decided"
        )
        return [Note(text, "warning")]
