"""The parameter server's decisions. Pure: no socket, no clock, no chance, no tensor.

Rules
- The first client that attaches a model publishes version 0; if it leaves before that is durable, the next one does, and one
  that fails goes to the end of the line. A fresh client's weights never replace a version that exists.
- Every `every_s` by the clock the members are called (`roles.round` says when a round merges). Whoever is not there is
  not waited for.
- A delta is acknowledged when it is durable, never before. It is merged once, into the next version, with its staleness
  on record; one of another lineage or older than `max_staleness` versions is refused before it is transferred.
- A key that was seen gets the answer it got. A client may offer a delta as often as it likes.
- Versions are made one at a time. What is acknowledged meanwhile goes into the next one.
- Clients pull: a version is announced, and streamed to whoever asks, as the coded update when the client holds the version
  before (checked by digest), else in full.
- The end (`roles.ending`): one last round, then every client gets the last version, then the run ends. A limit of rounds makes
  its last round the last one; any other limit, and the operator, get one more. What is offered after it is refused. If
  the last version cannot be written, the run ends without it: what was acknowledged is in the spool, for the next start.
- A delta whose transfer broke off is asked for again ("later"): the client may believe that all of it arrived.

    state        event                      -> state        effects
    EMPTY        ModelAttached (first)         EMPTY        Tell Publish
    EMPTY        InitialOffered                EMPTY        ReceiveInitial
    EMPTY        VersionCommitted 0            READY        Tell Announce to all
    READY        timer "sync"                  COLLECTING   Tell Call to the members
    COLLECTING   DeltaStored, CallSkipped,     COLLECTING   Tell Accepted, Accumulate
                 ClientLeft, timer "round"     or MERGING   Commit when the round says so
    MERGING      VersionCommitted              READY        Tell Announce to all; when a limit is reached, towards the end
    MERGING      CommitFailed                  MERGING      timer "retry", then Commit again
    any          DeltaOffered                  same         ReceiveDelta, or DeclineStream and Tell Accepted | Declined
    any          ClientHello                   same         Admit | Refuse
    any          DrainAsked                    same, last round, then DONE with Tell Stop and Finish
    ending       timer "round", "drain"        same         LookAtTransfers
    ending       TransfersSeen                 same         wait for what advances, go on without the rest
    DONE         anything but ClientHello      DONE         nothing
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsl_async import effects as do
from fsl_async import events as ev
from fsl_async import messages as msg
from fsl_async.deadlines import Deadlines
from fsl_async.effects import Effect
from fsl_async.learn.weighting import Weighting
from fsl_async.roles.answers import Answers, Objection
from fsl_async.roles.deltas import DeltaBook
from fsl_async.roles.ending import Ending
from fsl_async.roles.ps_state import EXIT_FAILED, LONGEST_RETRY_S, Member, Phase, ServerRules
from fsl_async.roles.publishing import Publishing
from fsl_async.roles.round import ArrivalHistory, Round, Verdict
from fsl_async.roles.serving import Serving
from fsl_async.roles.triggers import trigger_named
from fsl_async.roles.words import here_of

__all__ = ["EXIT_FAILED", "Member", "Phase", "ServerMachine", "ServerRules"]


class ServerMachine:
    """The state of a run at the parameter server. `handle` and `next_deadline` are the whole interface."""

    def __init__(self, rules: ServerRules, weighting: Weighting, run: str) -> None:
        self.rules = rules
        self.run = run
        self.phase = Phase.EMPTY
        self.members: dict[str, Member] = {}
        self.deltas = DeltaBook(
            weighting, max_staleness=rules.max_staleness, keep_versions=rules.keep_versions
        )
        self.round: Round | None = None
        self.history = ArrivalHistory()
        self.tokens_total = 0
        self.failures = 0
        self.ending = Ending(rules.drain_s, rules.stalled_s, rules.drain_cap_s)
        self.deadlines = Deadlines()
        self.trigger = trigger_named(rules.trigger)
        self.serving = Serving(self.members, self.deltas, self.trigger.tells_all)
        self.answers = Answers(self.members, self.deltas, self._too_late)
        self.publishing = Publishing(self.members, self.deadlines, rules.retry_s)
        self._handlers: dict[type[ev.Event], Callable[[Any, float], list[Effect]]] = {
            ev.Recovered: self._recovered,
            ev.TimerFired: self._timers,
            ev.ClientHello: self._hello,
            ev.ClientLeft: self._left,
            ev.ShardBooked: self._shard_booked,
            ev.ModelAttached: self._attached,
            ev.InitialOffered: self._initial_offered,
            ev.DeltaOffered: self._delta_offered,
            ev.DeltaStored: self._delta_stored,
            ev.CallSkipped: self._skipped,
            ev.FetchAsked: self.serving.fetch,
            ev.VersionHeld: self._held,
            ev.VersionCommitted: self._committed,
            ev.CommitFailed: self._commit_failed,
            ev.StreamLost: self._stream_lost,
            ev.TransfersSeen: self._transfers_seen,
            ev.DrainAsked: lambda event, now: self._drain(event.reason, now),
        }

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

    def next_deadline(self) -> float | None:
        """When `handle(TimerFired())` is due, in seconds of the caller's clock."""
        return self.deadlines.next()

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take one event and return what is to be done, in order."""
        if self.ended and not isinstance(event, ev.ClientHello):
            return []  # a late answer of the disk or a client must not wake the run up
        handler = self._handlers.get(type(event))
        return handler(event, now) if handler is not None else []

    # --- start and membership ---

    def _recovered(self, event: ev.Recovered, now: float) -> list[Effect]:
        if self.rules.limit_s:
            # Where the time was up before, clients still get a moment to come back and hand in what they have.
            left_s = self.rules.limit_s - event.served_s
            self.deadlines.set(
                "limit", now + max(left_s, self.rules.drain_s if event.served_s else 0.0)
            )
        if event.version < 0:
            return []
        self.publishing.done()
        self.deltas.digests = dict(event.digests)
        self.deltas.advance(event.version, event.digest)
        for key in sorted(event.settled):
            self.deltas.settle(key, event.settled[key])
        self.tokens_total = event.tokens_total
        self.phase = Phase.READY
        self.trigger.recovered(event.settled)
        self.ending.last_round_over = self.rules.is_last(self.version - 1)
        limit = self.rules.limit_reached(self.version, self.tokens_total)
        if limit is None:
            self.deadlines.set("sync", self.trigger.after_start(self.rules, now))
        else:  # killed between its last version and its end: wait for clients to come and fetch
            self._begin_end(limit, now)
            self.deadlines.set("linger", now + self.rules.drain_s)
        waiting = len(event.pending)
        text = f"continuing at version {event.version} with {waiting} deltas still to be merged"
        again = [self.deltas.acknowledge(d.key, d.tokens, d.steps) for d in event.pending]
        return [do.Note(text), *again]

    def _hello(self, event: ev.ClientHello, now: float) -> list[Effect]:
        peer = event.peer
        if self.ended:
            return [do.Refuse(peer, "finished", "this run has ended")]
        if event.run and event.run != self.run:
            text = f"this is run {self.run}, but {peer} is in run {event.run}: restart the client to join this one"
            return [do.Refuse(peer, "run", text)]
        former = self.members.get(peer)
        self.members[peer] = Member(event.incarnation)
        effects: list[Effect] = []
        if former is not None:  # nobody said that its session, or its life, is over
            effects = self._gone(peer, former.incarnation, "it says hello again", now)
        if self.ended:  # it was the last thing to wait for
            return [*effects, do.Refuse(peer, "finished", "this run has ended")]
        return [*effects, do.Admit(peer, event.incarnation)]

    def _left(self, event: ev.ClientLeft, now: float) -> list[Effect]:
        member = self.members.get(event.peer)
        if member is None or member.incarnation != event.incarnation:
            return []  # its successor is here already
        del self.members[event.peer]
        effects = self._gone(event.peer, event.incarnation, event.reason, now)
        return effects + self._end_if_all_hold(now)

    def _gone(self, peer: str, incarnation: int, reason: str, now: float) -> list[Effect]:
        """A session is over: wait for nothing that was asked in it."""
        effects = self.publishing.left(peer)
        if self.round is not None and self.round.leave(peer, incarnation):
            text = f"{peer} left ({reason}); round {self.round.number} goes on without it"
            effects.append(do.Note(text))
            effects.extend(self._evaluate(now))
        return effects

    def _shard_booked(self, event: ev.ShardBooked, now: float) -> list[Effect]:
        if event.peer in self.members:
            self.members[event.peer].shard = event.shard
        return []

    def _attached(self, event: ev.ModelAttached, now: float) -> list[Effect]:
        member = self.members.get(event.peer)
        if member is None:
            return [do.Dismiss(event.peer, "not a member: say hello again")]
        if event.difference is not None:
            text = (
                f"the model of {event.peer} is not the run's: {event.difference};"
                " use the same model configuration at every client"
            )
            del self.members[event.peer]
            reject = [do.Tell(event.peer, msg.Reject("model", text)), do.Note(text, "warning")]
            return reject + self._gone(event.peer, member.incarnation, "another model", now)
        member.attached = True
        if self.version < 0:
            return self.publishing.choose()
        effects: list[Effect] = [self.serving.announcement(event.peer)]
        if self.round is not None:
            self.round.rejoin(event.peer, member.incarnation)
            if self.round.awaits(event.peer, member.incarnation):
                # The first call may have been lost with the session it was said in.
                effects.append(do.Tell(event.peer, self._round_call()))
        return effects

    # --- initial weights and versions ---

    def _initial_offered(self, event: ev.InitialOffered, now: float) -> list[Effect]:
        if self.version < 0 and event.peer == self.publishing.name:
            return [do.ReceiveInitial(event.peer, event.stream)]
        effects: list[Effect] = [do.DeclineStream(event.peer, event.stream, "not the publisher")]
        if self.version >= 0 and event.peer in self.members:
            effects.append(self.serving.announcement(event.peer))
        return effects

    def _held(self, event: ev.VersionHeld, now: float) -> list[Effect]:
        effects = self.serving.held(event) or self._end_if_all_hold(now)
        if self.trigger.trains and self.phase is Phase.READY and not self.ending.asked:
            due = self.deadlines.when("sync")
            self.deadlines.set("sync", now if due is None else due)  # perhaps it was too few before
        return effects

    def _committed(self, event: ev.VersionCommitted, now: float) -> list[Effect]:
        self.tokens_total += self.deltas.advance(event.version, event.digest)
        self.failures = 0
        self.phase = Phase.READY
        if event.version == 0:
            self.publishing.done()
            self.deadlines.set("sync", self.trigger.after_version(self.rules, None, now))
            return [do.Note("version 0 is durable, training starts"), *self.serving.announce()]
        called_at = self.round.called_at if self.round is not None else now
        self._round_over()
        self.deadlines.set("sync", self.trigger.after_version(self.rules, called_at, now))
        limit = self.rules.limit_reached(self.version, self.tokens_total)
        if limit is not None and not self.ending.asked:
            self._begin_end(limit, now)
        told = self.serving.announce() if self.trigger.tells_all else []
        return [*told, *self._settle_down(now)]

    # --- rounds ---

    def _timers(self, event: ev.TimerFired, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for name in self.deadlines.pop_due(now):
            match name:
                case "sync":
                    effects.extend(self._call(now))
                case "round":
                    effects.extend(self._evaluate(now))
                case "retry":
                    effects.extend(self._commit())
                case "publish":
                    effects.extend(self.publishing.choose())
                case "linger":
                    effects.extend(self._settle_down(now))
                case "limit":
                    text = f"the run's limit of {self.rules.limit_s:g} s is reached"
                    effects.extend(self._drain(text, now))
                case _:  # drain
                    effects.append(do.LookAtTransfers())
        return effects

    def _call(self, now: float) -> list[Effect]:
        # Who holds no version yet is still downloading and has nothing to send: it is not called, and not waited for.
        here = {
            name: member
            for name, member in self.members.items()
            if member.attached and member.version >= 0
        }
        needed = max(1, self.rules.min_clients if self.version == 0 else 1)
        if len(here) < needed and not self.ending.asked:
            again = self.trigger.when_short(self.rules, now)
            if again is not None:
                self.deadlines.set("sync", again)
            return [do.Note(f"no round: {here_of(len(here), needed)}")]
        self.phase = Phase.COLLECTING
        cap_s = self.trigger.cap_s(self.rules)
        if self.ending.asked:
            cap_s = self.ending.first_wait_s(self.history.usual_s(self.rules.round))
        last = self.ending.asked or self.rules.is_last(self.version)
        opening = self.trigger.choose(here, self.deltas)
        waiting = list(opening.waiting)
        self.round = Round(self.version, now, cap_s, opening.called, last, waiting)
        self.round.answered |= dict.fromkeys(opening.answered, True)
        self.deadlines.cancel("sync")
        told = [name for name in opening.called if name not in opening.answered]
        return [*self._tell_call(told), *self._evaluate(now)]

    def _round_call(self) -> msg.Message:
        assert self.round is not None
        return self.trigger.call(self.round.number, last=self.round.last)

    def _tell_call(self, names: list[str]) -> list[Effect]:
        call = self._round_call()
        effects: list[Effect] = []
        for name in names:
            if not self.trigger.tells_all:
                effects.append(self.serving.announcement(name))
            effects.append(do.Tell(name, call))
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
            return [do.LookAtTransfers()]
        pending = len(self.deltas.pending)
        verdict = self.trigger.verdict(self.round, self.rules, self.history, now, pending)
        if verdict.action in {"next", "pass"}:
            return self._next_turn(verdict, now)
        if verdict.action == "merge":
            facts: dict[str, int | float | str] = {
                "round": self.round.number,
                "called": self.round.called,
                "answered": self.round.contributors(),
                "seconds": round(now - self.round.called_at, 3),
            }
            note = do.Note(f"round {self.round.number}: {verdict.reason}", facts=facts)
            return [note, *self._commit()]
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
        self.deadlines.set("round", now + self.trigger.again_s(self.rules))
        here = {name: member.incarnation for name, member in self.members.items()}
        text = f"round {self.round.number} stays open: {verdict.reason}"
        return [do.Note(text, "warning"), *self._tell_call(self.round.recall(here))]

    def _next_turn(self, verdict: Verdict, now: float) -> list[Effect]:
        """Let the next one have its turn, or let the turn of the one before pass."""
        assert self.round is not None
        effects: list[Effect] = []
        if verdict.action == "pass":
            self.round.dismiss(self.round.missing())
            text = f"round {self.round.number} goes on: {verdict.reason}"
            effects.append(do.Note(text, "warning"))
        else:
            here = {
                name: member.incarnation
                for name, member in self.members.items()
                if member.attached and member.version >= 0
            }
            name = self.round.next_of(here)
            if name is not None:
                self.round.cap_s = now - self.round.called_at + self.trigger.cap_s(self.rules)
                effects.extend(self._tell_call([name]))
        return [*effects, *self._evaluate(now)]

    def _close(self, reason: str, now: float) -> list[Effect]:
        assert self.round is not None
        text = f"round {self.round.number} closes without a new version: {reason}"
        self.deadlines.cancel("round")
        self.deadlines.set("sync", self.trigger.after_close(self.rules, self.round.called_at, now))
        self._round_over()
        self.phase = Phase.READY
        return [do.Note(text), *self._settle_down(now)]

    def _commit(self) -> list[Effect]:
        self.phase = Phase.MERGING
        self.deadlines.cancel("round")
        merged, scale = self.deltas.begin_merge()
        return [do.Commit(self.version + 1, merged, scale)]

    def _commit_failed(self, event: ev.CommitFailed, now: float) -> list[Effect]:
        if event.version == 0:
            text = f"the initial weights could not be written: {event.reason}"
            return self.publishing.failed(text, now)
        self.deltas.abandon_merge()
        text = f"version {event.version} could not be written: {event.reason}; nothing is lost"
        if self.ending.asked:
            self.ending.reason = f"{self.ending.reason}; {text}, the next start merges it"
            return [do.Note(self.ending.reason, "warning"), *self._finish(EXIT_FAILED)]
        wait_s = min(LONGEST_RETRY_S, self.rules.retry_s * 2**self.failures)
        self.failures += 1
        self.deadlines.set("retry", now + wait_s)
        return [do.Note(f"{text}, next try in {wait_s:g} s", "warning")]

    # --- deltas ---

    def _delta_offered(self, event: ev.DeltaOffered, now: float) -> list[Effect]:
        effects, settled = self.answers.offered(event)
        return [*effects, *self._answered(event, now)] if settled else effects

    def _too_late(self, event: ev.DeltaOffered) -> Objection:
        """Why no delta can be merged any more, as a code and a sentence, or None."""
        if self.ending.asked and self.ending.last_round_over:
            return "ended", "the run has had its last round"
        if self.phase is Phase.MERGING and self.round is not None and self.round.last:
            return "later", "the last round is being merged"
        return self.trigger.objection(event, self.round)

    def _delta_stored(self, event: ev.DeltaStored, now: float) -> list[Effect]:
        return self.answers.stored(event) + self._answered(event, now)

    def _answered(self, event: ev.DeltaOffered | ev.DeltaStored, now: float) -> list[Effect]:
        """A client has answered the open round, with a delta that counts or with one that does not."""
        contributed = self.deltas.is_acknowledged(event.key)
        if self.round is None or event.round != self.round.number:
            return []
        if self.round.answer(event.key.client, contributed=contributed) and contributed:
            self.history.offsets_s.append(now - self.round.called_at)
        return self._evaluate(now)

    def _skipped(self, event: ev.CallSkipped, now: float) -> list[Effect]:
        if self.round is None or event.round != self.round.number:
            return []
        self.round.answer(event.peer, contributed=False)
        return self._evaluate(now)

    def _stream_lost(self, event: ev.StreamLost, now: float) -> list[Effect]:
        if event.peer == self.publishing.name and self.version < 0:
            text = f"stream {event.stream} of {event.peer} broke off: {event.reason}"
            return self.publishing.failed(text, now)
        return self.answers.lost(event)

    # --- the end ---

    def _drain(self, reason: str, now: float) -> list[Effect]:
        if self.ending.asked:
            return []
        self._begin_end(reason, now)
        self.deadlines.cancel("limit")
        if self.phase is Phase.EMPTY:
            return self._finish()
        what = "one last round" if self.trigger.last_round else "no further round"
        effects: list[Effect] = [do.Note(f"ending: {reason}; {what}")]
        if self.phase is Phase.READY:
            effects.extend(self._call(now) if self.trigger.last_round else self._settle_down(now))
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
        if self.trigger.last_round:
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
        told = [] if self.trigger.tells_all else self.serving.announce()
        return [*told, *self._end_if_all_hold(now)]

    def _end_if_all_hold(self, now: float) -> list[Effect]:
        lingering = self.deadlines.when("linger") is not None
        if not self.ending.asked or self.phase is not Phase.READY or lingering:
            return []
        return [] if self.serving.behind() else self._next_step(now)

    def _next_step(self, now: float) -> list[Effect]:
        self.deadlines.cancel("drain")
        return self._finish() if self.ending.last_round_over else self._call(now)

    def _transfers_seen(self, event: ev.TransfersSeen, now: float) -> list[Effect]:
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
        return [*(do.Tell(name, stop) for name in self.members), do.Finish(reason, exit_code)]
