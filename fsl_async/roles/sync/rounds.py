"""Runs the rounds of a run, from the call to the version. Pure.

The trigger decides when a round opens, which clients it calls, and when it is complete; the
coordinator calls them, counts their answers, and orders the version. Phases, events and effects are
in the table of `roles.sync.ps`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import define, field

from fsl_async.roles.machine import Deadlines, Done, Effect, Note, Received, Send
from fsl_async.roles.messages import Message
from fsl_async.roles.phrasing import here_of
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import Delta
from fsl_async.roles.sync.deltas import Deltas
from fsl_async.roles.sync.evaluation import Evaluation
from fsl_async.roles.sync.progress import RunProgress
from fsl_async.roles.sync.ps_state import ArrivalHistory, Member, Merging, Phase, Round
from fsl_async.roles.sync.roster import LEAST
from fsl_async.roles.sync.shutdown import RunShutdown
from fsl_async.roles.sync.triggers import Trigger, Verdict
from fsl_async.roles.sync.version_serving import Serving

if TYPE_CHECKING:
    from fsl_async.config.settings import Config
    from fsl_async.roles.sync.secure import SecureSums


@define(eq=False)
class RoundCoordinator:
    """Calls clients, counts answers and orders versions.

    It shares the machine's members, deltas and deadlines; "sync", "round" and "retry" are its own.
    closed: returns the effects after a round that ends without a version.
    """

    _config: Config
    _merging: Merging
    members: dict[str, Member]
    deltas: Deltas
    _deadlines: Deadlines
    trigger: Trigger
    serving: Serving
    _shutdown: RunShutdown
    _progress: RunProgress
    _closed: Callable[[float], list[Effect]]
    evaluation: Evaluation
    phase: Phase = Phase.EMPTY
    round: Round | None = None
    secure: SecureSums | None = None
    """Set where deltas are masked."""
    is_held: bool = False
    """Whether a global round holds merges (`group_hold`)."""
    late: set[str] = field(factory=set)
    """Connected clients without an answer since a round that merged without them."""
    _history: ArrivalHistory = field(factory=ArrivalHistory)
    _failures: int = 0

    @property
    def awaits_nothing(self) -> bool:
        """Whether the open round has called no client, so that another may take its place."""
        if self.phase is not Phase.COLLECTING or self.round is None:
            return False
        return self.trigger.clients_lead and not self.round.last

    def _here(self) -> dict[str, Member]:
        """The clients that can be called: those that hold a version."""
        return {
            name: member
            for name, member in self.members.items()
            if member.attached and member.version >= 0 and member.trains
        }

    def call(self, now: float) -> list[Effect]:
        """Open a round if enough clients are here."""
        here = self._here()
        needed = max(1, self._config.sync.min_clients if self.deltas.version == 0 else 1)
        if self.secure is not None:
            needed = max(needed, LEAST)
        if len(here) < needed and not self._shutdown.asked:
            again = self.trigger.schedule.when_short(now)
            if again is not None:
                self._deadlines.set("sync", again)
            return [Note(f"no round: {here_of(len(here), needed)}")]
        self.phase = Phase.COLLECTING
        cap_s = self.trigger.schedule.cap_s
        if self._shutdown.asked:
            cap_s = self._shutdown.first_wait_s(self._history.usual_s(self._config.sync))
        last = self._shutdown.asked or self._progress.is_last(self.deltas.version)
        opening = self.trigger.opening(here, self.deltas, last=last)
        waiting = list(opening.waiting)
        self.round = Round(self.deltas.version, now, cap_s, opening.called, last, waiting)
        self.round.answered |= dict.fromkeys(opening.answered, True)
        self._deadlines.cancel("sync")
        names = [name for name in opening.called if name not in opening.answered]
        keys = [] if self.secure is None else self.secure.begin(self.round.number, names, now)
        return [*keys, *self._send_call(names, now), *self.evaluate(now)]

    def _round_call(self) -> Message:
        assert self.round is not None
        return self.trigger.call(self.round.number, last=self.round.last)

    def _send_call(self, names: list[str], now: float) -> list[Effect]:
        call = self._round_call()
        effects: list[Effect] = []
        for name in names:
            if not self.trigger.selection.announces_to_all:
                effects.extend(self.serving.announce_to(name, now))
            effects.append(Send(name, call))
        return effects

    def _round_over(self) -> None:
        if self.round is not None and self.round.last:
            # If the last round by count closed without a version, another one follows, unless the
            # end was asked for.
            self._shutdown.last_round_over = self._shutdown.asked or self._progress.is_last(
                self.deltas.version - 1
            )
        self.round = None

    def evaluate(self, now: float) -> list[Effect]:
        """Carry out the trigger's verdict on the open round."""
        is_held = self.is_held and not self._shutdown.asked
        if self.phase is not Phase.COLLECTING or self.round is None or is_held:
            return []
        cap_at = self.round.called_at + self.round.cap_s
        if self._shutdown.asked and self.round.missing():
            # The end waits longer than a grace window.
            if now < cap_at:
                self._deadlines.set("round", cap_at)
                return []
            return [do.CheckTransfers()]
        pending = self.deltas.mergeable
        completion = self.trigger.completion
        verdict = completion.verdict(self.round, self._history, now, pending=pending)
        if verdict.action in {"next", "pass"}:
            return self._next_turn(verdict, now)
        if verdict.action == "merge":
            return self._merge_now(verdict, now)
        if verdict.action == "close":
            return self.close(verdict.reason, now)
        if verdict.until is not None:
            self._deadlines.set("round", verdict.until)
            return []
        if now < cap_at:
            self._deadlines.set("round", cap_at)
            return []
        due = self._deadlines.when("round")
        if due is not None and due > now:
            return []  # a client that skips at once must not be called in a loop
        self._deadlines.set("round", now + self.trigger.schedule.again_s)
        here = {name: member.incarnation for name, member in self.members.items()}
        text = f"round {self.round.number} stays open: {verdict.reason}"
        return [Note(text, "warning"), *self._send_call(self.round.recall(here), now)]

    def _merge_now(self, verdict: Verdict, now: float) -> list[Effect]:
        assert self.round is not None
        if self.too_few() and self.secure is None:
            return self.close(self.too_few(), now)
        facts: dict[str, int | float | str] = {
            "round": self.round.number,
            "called": self.round.called,
            "answered": self.round.contributors(),
            "seconds": round(now - self.round.called_at, 3),
        }
        note = Note(f"round {self.round.number}: {verdict.reason}", facts=facts)
        return [note, *(self.merge(now) if self.secure is None else self.secure.close(now))]

    def _next_turn(self, verdict: Verdict, now: float) -> list[Effect]:
        """Call the next client, or stop waiting for the one before."""
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
                effects.extend(self._send_call([name], now))
        return [*effects, *self.evaluate(now)]

    def close(self, reason: str, now: float) -> list[Effect]:
        """End the open round without a version."""
        assert self.round is not None
        if self.secure is not None:
            self.secure.over()
        text = f"round {self.round.number} closes without a new version: {reason}"
        self._deadlines.cancel("round")
        again_at = self.trigger.schedule.after_close(self.round.called_at, now)
        self._deadlines.set("sync", again_at)
        self._round_over()
        self.phase = Phase.READY
        return [Note(text), *self._closed(now)]

    def too_few(self) -> str:
        """Why too few clients have pending deltas for the aggregation rule; empty: enough have."""
        clients, least = self.deltas.clients_pending, self._merging.least_clients
        if clients >= least:
            return ""
        rule = self._config.outer.aggregation
        return (
            f"{rule} needs deltas of {least} clients, there are {clients};"
            " they wait for the next round"
        )

    def merge(self, now: float) -> list[Effect]:
        """Order a version of all pending deltas, once an evaluator has scored them."""
        self.phase = Phase.MERGING
        self._deadlines.cancel("round")
        asked = self.evaluation.ask(now)
        return asked if self.evaluation.is_open else [*asked, *self._commit(now)]

    def scored(self, event: Received[msg.Score], now: float) -> list[Effect]:
        """Take an evaluator's score of a delta; the last one of a round orders the version."""
        return self.close_evaluation(now) if self.evaluation.scored(event) else []

    def close_evaluation(self, now: float) -> list[Effect]:
        """Order the version that waits for scores, with those that came."""
        return [*self.evaluation.close(), *self._commit(now)]

    def _commit(self, now: float) -> list[Effect]:
        scores = self.evaluation.scores()
        merged, scale = self.deltas.begin_merge(scores, self.evaluation.only)
        version = self.deltas.version + 1
        tokens = sum(one.delta.tokens for one in merged)
        position = self._progress.with_version(version, tokens, now)
        notes = [Note(line, "warning") for line in self.deltas.counted_less]
        return [*notes, do.Commit(version, merged, scale, position, self.deltas.reused)]

    def begin(self, now: float) -> None:
        """Set the first call: version 0 is durable."""
        self.phase = Phase.READY
        self._deadlines.set("sync", self.trigger.schedule.after_version(None, now))

    def committed(self, now: float) -> None:
        """Close the round whose version is durable, and set the next call."""
        called_at = self.round.called_at if self.round is not None else now
        self.late.update(self.round.missing() if self.round is not None else ())
        self._deadlines.cancel("round")
        self._failures = 0
        self.phase = Phase.READY
        self._round_over()
        self._deadlines.set("sync", self.trigger.schedule.after_version(called_at, now))

    def abandon(self, event: Done[do.Commit]) -> tuple[str, str]:
        """Make the deltas of a failed merge pending again. Returns the problem and the advice."""
        self.deltas.abandon_merge()
        # The beginning and the end of the store's text would be repeated.
        version = event.of.version
        reason, _, advice = event.problem.removeprefix(
            f"cannot write version {version}: "
        ).partition("; ")
        text = f"version {version} could not be written: {reason}; nothing is lost"
        return text, advice.removesuffix(" and try again")

    def try_again(self, text: str, now: float) -> list[Effect]:
        """Merge again after a pause, longer after each failure."""
        sync = self._config.sync
        cap_s = sync.retry_cap_s
        self._deadlines.set("retry", now + min(cap_s, sync.retry_s * 2**self._failures))
        self._failures += 1
        return [Note(f"{text}; it is tried again within {cap_s:g} s", "warning")]

    def left(self, peer: str, incarnation: int, reason: str, now: float) -> list[Effect]:
        """Stop waiting for the answer of a session that ended."""
        self.late.discard(peer)
        effects = [] if self.secure is None else self.secure.left(peer, now)
        if self.round is None or not self.round.leave(peer, incarnation):
            return effects
        text = f"{peer} left ({reason}); round {self.round.number} goes on without it"
        return [*effects, Note(text), *self.evaluate(now)]

    def rejoined(self, peer: str, incarnation: int, now: float) -> list[Effect]:
        """Call a client that attached again, if the open round waits for it."""
        if self.round is None:
            return []
        self.round.rejoin(peer, incarnation)
        again = [] if self.secure is None else self.secure.rejoined(peer, incarnation, now)
        if self.round is None or not self.round.awaits(peer, incarnation):
            return again
        # The first call may have been lost with the session.
        return [*again, Send(peer, self._round_call())]

    def answered(self, delta: Delta, now: float) -> list[Effect]:
        """Count a client's answer to the open round: a delta that was acknowledged, or was not."""
        contributed = self.deltas.is_acknowledged(delta.key)
        self.late.discard(delta.key.client)
        if self.round is None:
            return []
        if delta.round != self.round.number:
            return self.evaluate(now) if self.trigger.clients_lead else []
        if self.round.answer(delta.key.client, contributed=contributed) and contributed:
            self._history.offsets_s.append(now - self.round.called_at)
        return self.evaluate(now)

    def skipped(self, event: Received[msg.Skip], now: float) -> list[Effect]:
        """Count a client's answer that it has no delta for this round."""
        self.late.discard(event.peer)
        if self.round is None or event.message.round != self.round.number:
            return []
        self.round.answer(event.peer, contributed=False)
        return self.evaluate(now)
