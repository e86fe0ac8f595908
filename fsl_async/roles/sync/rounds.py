"""The rounds of a run, from the call to the version, and the run's end: what the parameter server does with those it has. Pure.

The base of `roles.ps.ParameterServerMachine`, which knows how members and deltas come and go. Phases, events and effects are in its table.
"""

from __future__ import annotations

from fsl_async.roles.machine import Deadlines, Effect, Finish, Note, Send
from fsl_async.roles.messages import Message
from fsl_async.roles.phrasing import here_of
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import Delta
from fsl_async.roles.sync.deltas import DeltaBook
from fsl_async.roles.sync.norm_guard import NormGuard
from fsl_async.roles.sync.ps_state import (
    EXIT_DAMAGED,
    EXIT_FAILED,
    Member,
    ParameterServerRules,
    Phase,
)
from fsl_async.roles.sync.publishing import Publishing
from fsl_async.roles.sync.round import ArrivalHistory, Round
from fsl_async.roles.sync.shutdown import RunShutdown
from fsl_async.roles.sync.triggers import Verdict, trigger_of
from fsl_async.roles.sync.version_serving import Serving
from fsl_async.roles.sync.weighting import Weighting


class RoundCoordinator:
    """Opens rounds as `sync.trigger` wants them, decides when they merge, and brings the run to its end."""

    def __init__(self, rules: ParameterServerRules, weighting: Weighting) -> None:
        self.rules = rules
        self.phase = Phase.EMPTY
        self.members: dict[str, Member] = {}
        self.deltas = DeltaBook(
            weighting, max_staleness=rules.max_staleness, keep_versions=rules.keep_versions
        )
        self.round: Round | None = None
        self.history = ArrivalHistory()
        self.screen = NormGuard(rules.guard)
        self.failures = 0
        self.ending = RunShutdown(rules.drain_s, rules.stalled_s, rules.drain_cap_s)
        self.deadlines = Deadlines()
        self.trigger = trigger_of(rules)
        self.serving = Serving(
            self.members, self.deltas, self.trigger.selection.tells_all, self.trigger.trains
        )
        self.publishing = Publishing(self.members, self.deadlines, rules.retry_s)

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.phase is Phase.DONE

    @property
    def version(self) -> int:
        """The newest durable version, -1 before there is one."""
        return self.deltas.version

    @property
    def digest(self) -> str:
        """The digest of the newest durable version."""
        return self.serving.digest

    def _here(self) -> dict[str, Member]:
        """Who can be called: who holds no version yet is still downloading and has nothing to send."""
        return {
            name: member
            for name, member in self.members.items()
            if member.attached and member.version >= 0
        }

    # --- rounds ---

    def _call(self, now: float) -> list[Effect]:
        here = self._here()
        needed = max(1, self.rules.min_clients if self.version == 0 else 1)
        if len(here) < needed and not self.ending.asked:
            again = self.trigger.schedule.when_short(now)
            if again is not None:
                self.deadlines.set("sync", again)
            return [Note(f"no round: {here_of(len(here), needed)}")]
        self.phase = Phase.COLLECTING
        cap_s = self.trigger.schedule.cap_s
        if self.ending.asked:
            cap_s = self.ending.first_wait_s(self.history.usual_s(self.rules.round))
        last = self.ending.asked or self.rules.is_last(self.version)
        opening = self.trigger.selection.choose(here, self.deltas)
        waiting = list(opening.waiting)
        self.round = Round(self.version, now, cap_s, opening.called, last, waiting)
        self.round.answered |= dict.fromkeys(opening.answered, True)
        self.deadlines.cancel("sync")
        told = [name for name in opening.called if name not in opening.answered]
        return [*self._tell_call(told), *self._evaluate(now)]

    def _round_call(self) -> Message:
        assert self.round is not None
        return self.trigger.call(self.round.number, last=self.round.last)

    def _tell_call(self, names: list[str]) -> list[Effect]:
        call = self._round_call()
        effects: list[Effect] = []
        for name in names:
            if not self.trigger.selection.tells_all:
                effects.extend(self.serving.tell(name))
            effects.append(Send(name, call))
        return effects

    def _round_over(self) -> None:
        if self.round is not None and self.round.last:
            # Of a round that closed without a version, only the end that was asked for is the last one.
            self.ending.last_round_over = self.ending.asked or self.rules.is_last(self.version - 1)
        self.round = None

    def _evaluate(self, now: float) -> list[Effect]:
        """Ask the open round whether it is time, and act on the answer."""
        if self.phase is not Phase.COLLECTING or self.round is None:
            return []
        cap_at = self.round.called_at + self.round.cap_s
        if self.ending.asked and self.round.missing():  # the end waits longer than a grace window
            if now < cap_at:
                self.deadlines.set("round", cap_at)
                return []
            return [do.CheckTransfers()]
        pending = len(self.deltas.pending)
        completion = self.trigger.completion
        verdict = completion.verdict(self.round, self.history, now, pending=pending)
        if verdict.action in {"next", "pass"}:
            return self._next_turn(verdict, now)
        if verdict.action == "merge":
            return self._merge(verdict, now)
        if verdict.action == "close":
            return self._close(verdict.reason, now)
        if verdict.until is not None:
            self.deadlines.set("round", verdict.until)
            return []
        if now < cap_at:
            self.deadlines.set("round", cap_at)
            return []
        due = self.deadlines.when("round")
        if due is not None and due > now:
            return []  # who answers "nothing" at once must not be called in a loop
        self.deadlines.set("round", now + self.trigger.schedule.again_s)
        here = {name: member.incarnation for name, member in self.members.items()}
        text = f"round {self.round.number} stays open: {verdict.reason}"
        return [Note(text, "warning"), *self._tell_call(self.round.recall(here))]

    def _merge(self, verdict: Verdict, now: float) -> list[Effect]:
        assert self.round is not None
        if self._too_few():
            return self._close(self._too_few(), now)
        facts: dict[str, int | float | str] = {
            "round": self.round.number,
            "called": self.round.called,
            "answered": self.round.contributors(),
            "seconds": round(now - self.round.called_at, 3),
        }
        note = Note(f"round {self.round.number}: {verdict.reason}", facts=facts)
        return [note, *self._commit()]

    def _next_turn(self, verdict: Verdict, now: float) -> list[Effect]:
        """Let the next one have its turn, or let the turn of the one before pass."""
        assert self.round is not None
        effects: list[Effect] = []
        if verdict.action == "pass":
            self.round.dismiss(self.round.missing())
            text = f"round {self.round.number} goes on: {verdict.reason}"
            effects.append(Note(text, "warning"))
        else:
            here = {name: member.incarnation for name, member in self._here().items()}
            name = self.round.next_of(here)
            if name is not None:
                self.round.cap_s = now - self.round.called_at + self.trigger.schedule.cap_s
                effects.extend(self._tell_call([name]))
        return [*effects, *self._evaluate(now)]

    def _close(self, reason: str, now: float) -> list[Effect]:
        assert self.round is not None
        text = f"round {self.round.number} closes without a new version: {reason}"
        self.deadlines.cancel("round")
        again_at = self.trigger.schedule.after_close(self.round.called_at, now)
        self.deadlines.set("sync", again_at)
        self._round_over()
        self.phase = Phase.READY
        return [Note(text), *self._settle_down(now)]

    def _too_few(self) -> str:
        """What is missing for the rule of aggregation, or nothing."""
        clients, least = self.deltas.clients_pending, self.rules.least_clients
        if clients >= least:
            return ""
        return (
            f"{self.rules.aggregation} needs deltas of {least} clients, there are {clients};"
            " what is there waits for the next round"
        )

    def _commit(self) -> list[Effect]:
        self.phase = Phase.MERGING
        self.deadlines.cancel("round")
        merged, scale = self.deltas.begin_merge()
        version = self.version + 1
        then = do.Reduce(version) if self.rules.reduces else do.Commit(version)
        return [do.Average(version, merged, scale), then]

    def _reduced(self, event: ev.Reduced, now: float) -> list[Effect]:
        return [do.Commit(event.version)]

    def _commit_failed(self, event: ev.CommitFailed, now: float) -> list[Effect]:
        if event.version == 0:
            text = f"the initial weights could not be written: {event.reason}"
            return self.publishing.failed(text, now)
        self.deltas.abandon_merge()
        # The store's own advice and beginning would say the same twice.
        reason, _, advice = event.reason.removeprefix(
            f"cannot write version {event.version}: "
        ).partition("; ")
        text = f"version {event.version} could not be written: {reason}; nothing is lost"
        if self.ending.asked:
            self.ending.reason = f"{self.ending.reason}; {text}, the next start merges it"
            return [Note(self.ending.reason, "warning"), *self._finish(EXIT_FAILED)]
        cap_s = self.rules.retry_cap_s
        self.deadlines.set("retry", now + min(cap_s, self.rules.retry_s * 2**self.failures))
        self.failures += 1
        if advice:
            text = f"{text}; {advice.removesuffix(' and try again')}"
        return [Note(f"{text}; it is tried again within {cap_s:g} s", "warning")]

    def _store_failed(self, event: ev.StoreFailed, now: float) -> list[Effect]:
        """The run is not over: its clients are told nothing, and come back when the operator has done what the reason says."""
        self.deadlines.clear()
        return [Finish(event.reason, EXIT_DAMAGED)]

    def _answered(self, delta: Delta, now: float) -> list[Effect]:
        """A client has answered the open round, with a delta that counts or with one that does not."""
        contributed = self.deltas.is_acknowledged(delta.key)
        if self.round is None:
            return []
        if delta.round != self.round.number:
            return self._evaluate(now) if self.trigger.completion.any_delta else []
        if self.round.answer(delta.key.client, contributed=contributed) and contributed:
            self.history.offsets_s.append(now - self.round.called_at)
        return self._evaluate(now)

    def _skipped(self, event: ev.RoundSkipped, now: float) -> list[Effect]:
        if self.round is None or event.round != self.round.number:
            return []
        self.round.answer(event.peer, contributed=False)
        return self._evaluate(now)

    # --- the end ---

    def _drain(self, reason: str, now: float) -> list[Effect]:
        if self.ending.asked:
            return []
        self._begin_end(reason, now)
        self.deadlines.cancel("limit")
        if self.phase is Phase.EMPTY:
            return self._finish()
        calls_last = not self.trigger.trains
        what = "one last round" if calls_last else "no further round"
        effects: list[Effect] = [Note(f"ending: {reason}; {what}")]
        if self.phase is Phase.READY:
            effects.extend(self._call(now) if calls_last else self._settle_down(now))
        elif self.phase is Phase.COLLECTING and self.round is not None:
            self.round.cap_s = now - self.round.called_at + self.rules.drain_s
            effects.extend(self._evaluate(now))
        elif self.deadlines.when("retry") is not None:
            # One more try, at once; MERGING goes on to the end by itself.
            self.deadlines.cancel("retry")
            effects.extend(self._commit())
        return effects

    def _begin_end(self, reason: str, now: float) -> None:
        self.ending.begin(reason, now)
        if not self.trigger.trains:  # clients train between rounds: the last one is still to come
            return
        if self.round is None:
            self.ending.last_round_over = True
        else:  # what is open is the last one, for those who were called already
            self.round.last = True
            self.round.waiting.clear()

    def _settle_down(self, now: float) -> list[Effect]:
        """Towards the end: wait for every client to hold the version, then call the last round, or end after it."""
        if not self.ending.asked:
            return []
        self.deadlines.cancel("sync")
        self.deadlines.set("drain", now + self.rules.drain_s)
        told = [] if self.trigger.selection.tells_all else self.serving.announce()
        return [*told, *self._end_if_all_hold(now)]

    def _end_if_all_hold(self, now: float) -> list[Effect]:
        lingering = self.deadlines.when("linger") is not None
        if not self.ending.asked or self.phase is not Phase.READY or lingering:
            return []
        return [] if self.serving.behind() else self._next_step(now)

    def _next_step(self, now: float) -> list[Effect]:
        self.deadlines.cancel("drain")
        if self.ending.last_round_over and self.deltas.pending and not self._too_few():
            return self._commit()  # stored while the last one was merged: acknowledged is merged
        return self._finish() if self.ending.last_round_over else self._call(now)

    def _transfers_seen(self, event: ev.TransfersChecked, now: float) -> list[Effect]:
        """A step of the end has waited long enough: go on waiting for those whose transfers advance."""
        if not self.ending.asked:
            return []
        until = self.ending.longer(now)
        moving = set(event.advanced) if until is not None else set()
        if self.phase is Phase.COLLECTING and self.round is not None:
            slow = [name for name in self.round.missing() if name not in moving]
            self.round.dismiss(slow)
            if until is not None and self.round.missing():
                self.round.cap_s = until - self.round.called_at
            return self._evaluate(now)
        if self.phase is not Phase.READY:
            return []
        if until is not None and self.serving.behind() & moving:
            self.deadlines.set("drain", until)
            return []
        return self._next_step(now)

    def _finish(self, exit_code: int = 0) -> list[Effect]:
        self.phase = Phase.DONE
        self.deadlines.clear()
        reason = self.ending.reason or "done"
        stop = msg.Stop(reason)
        return [*(Send(name, stop) for name in self.members), Finish(reason, exit_code)]
