"""The parameter server's decisions. Pure: no socket, no clock, no chance, no tensor.

Rules
- The first client that attaches a model publishes version 0; if it leaves before that is durable, the next one does, and one
  that fails goes to the end of the line. A fresh client's weights never replace a version that exists.
- Every `every_s` by the clock the members are called (`roles.round` says when a round merges), or as soon as there is a
  version (the other `sync.trigger`s, `roles.triggers`). Whoever is not there is not waited for.
- A delta is acknowledged when it is durable, never before. It is merged once, into the next version, with its staleness
  on record; one of another lineage or older than `max_staleness` versions is refused before it is transferred.
- A key that was seen gets the answer it got. A client may offer a delta as often as it likes.
- Versions are made one at a time. What is acknowledged meanwhile goes into the next one.
- Clients pull: a version is announced, and streamed to whoever asks, as the coded update when the client holds the version
  before (checked by digest), else in full.
- The end (`roles.ending`): one last round, then every client gets the last version, then the run ends. A limit of rounds makes
  its last round the last one; any other limit, and the operator, get one more, but for rounds that are trained as such (Turn): the
  open one is the last, for those who answer in time. What is offered after it is refused. If
  the last version cannot be written, the run ends without it: what was acknowledged is in the spool, for the next start.
- A delta whose transfer broke off is asked for again ("later"): the client may believe that all of it arrived.

    state        event                      -> state        effects
    EMPTY        ModelAttached (first)         EMPTY        Tell Publish
    EMPTY        InitialOffered                EMPTY        ReceiveInitial
    EMPTY        VersionCommitted 0            READY        Tell Announce to all
    READY        timer "sync"                  COLLECTING   Tell Call or Turn to those whom the trigger chooses
    READY        VersionHeld                   READY        timer "sync" now, where too few were there before (not by the clock)
    COLLECTING   DeltaStored, RoundSkipped,     COLLECTING   Tell Accepted, Accumulate
                 ClientLeft, timer "round"     or MERGING   Average, Commit at the round's verdict; Tell Turn to the next (turns)
    MERGING      Reduced                       MERGING      Commit (where servers reduce: Average, Reduce before)
    MERGING      VersionCommitted              READY        Tell Announce to all; when a limit is reached, towards the end
    MERGING      CommitFailed                  MERGING      timer "retry", then Average, Commit again
    any          StoreFailed                   same         Finish with exit code 2: clients wait for the next start
    any          DeltaOffered                  same         ReceiveDelta, or DeclineStream and Tell Accepted | Declined
    any          ClientHello                   same         Admit | Refuse
    any          DrainAsked                    same, last round, then DONE with Tell Stop and Finish
    ending       timer "round", "drain"        same         CheckTransfers
    ending       TransfersChecked                 same         wait for what advances, go on without the rest
    DONE         anything but ClientHello      DONE         nothing
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsl_async.roles.machine import (
    ClientLeft,
    DeclineStream,
    DrainAsked,
    Effect,
    EndSession,
    Event,
    Note,
    Refuse,
    Send,
    StreamLost,
    TimerFired,
)
from fsl_async.roles.phrasing import counted
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import Delta
from fsl_async.roles.sync.delta_admission import DeltaAdmission, Objection
from fsl_async.roles.sync.ps_state import EXIT_FAILED, Member, ParameterServerRules, Phase
from fsl_async.roles.sync.rounds import RoundCoordinator
from fsl_async.roles.sync.weighting import Weighting

__all__ = ["EXIT_FAILED", "Member", "ParameterServerMachine", "ParameterServerRules", "Phase"]


class ParameterServerMachine(RoundCoordinator):
    """The state of a run at the parameter server. `handle` and `next_deadline` are the whole interface."""

    def __init__(self, rules: ParameterServerRules, weighting: Weighting, run: str) -> None:
        super().__init__(rules, weighting)
        self.run = run
        self.tokens_total = 0
        self.answers = DeltaAdmission(self.members, self.deltas, self._too_late, self.screen)
        self._handlers: dict[type[Event], Callable[[Any, float], list[Effect]]] = {
            ev.Recovered: self._recovered,
            TimerFired: self._timers,
            ev.ClientHello: self._hello,
            ClientLeft: self._left,
            ev.ShardAssigned: self._shard_booked,
            ev.ModelAttached: self._attached,
            ev.InitialOffered: self._initial_offered,
            ev.DeltaOffered: self._delta_offered,
            ev.DeltaStored: self._delta_stored,
            ev.RoundSkipped: self._skipped,
            ev.FetchAsked: self.serving.fetch,
            ev.SendVersionFailed: self._serve_failed,
            ev.VersionHeld: self._held,
            ev.Reduced: self._reduced,
            ev.VersionCommitted: self._committed,
            ev.CommitFailed: self._commit_failed,
            ev.StoreFailed: self._store_failed,
            ev.DamageRepaired: lambda event, _: [Note(event.text, "warning", {"alarm": "damage"})],
            ev.VersionVerified: self.serving.verified,
            StreamLost: self._stream_lost,
            ev.TransfersChecked: self._transfers_seen,
            DrainAsked: lambda event, now: self._drain(event.reason, now),
        }

    def next_deadline(self) -> float | None:
        """When `handle(TimerFired())` is due, in seconds of the caller's clock."""
        return self.deadlines.next()

    def handle(self, event: Event, now: float) -> list[Effect]:
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
        self.trigger.selection.recovered(event.settled)
        self.ending.last_round_over = self.rules.is_last(self.version - 1)
        limit = self.rules.limit_reached(self.version, self.tokens_total)
        if limit is None:
            at = self.trigger.schedule.after_start(event.since_version_s, now)
            self.deadlines.set("sync", at)
        else:  # killed between its last version and its end: wait for clients to come and fetch
            self._begin_end(limit, now)
            self.deadlines.set("linger", now + self.rules.drain_s)
        waiting = counted(len(event.pending), "delta")
        text = f"continuing at version {event.version} with {waiting} still to be merged"
        self.screen.recovered(event.usual, event.held)
        self.screen.known_since(
            [*self.deltas.settled, *(one.key.client for one in event.pending)],
            now - event.since_version_s,
        )
        # The order of booking is that of the ledger, so the same is kept out as before the end of the last process.
        again = [effect for one in event.pending for effect in self.answers.book(one, now)]
        return [Note(text), *again]

    def _hello(self, event: ev.ClientHello, now: float) -> list[Effect]:
        peer = event.peer
        if self.ended:
            return [Refuse(peer, "finished", "this run has ended")]
        if event.run and event.run != self.run:
            text = f"this is run {self.run}, but {peer} is in run {event.run}: restart the client to join this one"
            return [Refuse(peer, "run", text)]
        self.screen.came(peer, now)
        former = self.members.get(peer)
        self.members[peer] = Member(event.incarnation)
        self.serving.forget(peer)
        effects: list[Effect] = []
        if former is not None:  # nobody said that its session, or its life, is over
            effects = self._gone(peer, former.incarnation, "it says hello again", now)
        if self.ended:  # it was the last thing to wait for
            return [*effects, Refuse(peer, "finished", "this run has ended")]
        return [*effects, do.Admit(peer, event.incarnation)]

    def _left(self, event: ClientLeft, now: float) -> list[Effect]:
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
            effects.append(Note(text))
            effects.extend(self._evaluate(now))
        return effects

    def _shard_booked(self, event: ev.ShardAssigned, now: float) -> list[Effect]:
        if event.peer in self.members:
            self.members[event.peer].shard = event.shard
        return []

    def _attached(self, event: ev.ModelAttached, now: float) -> list[Effect]:
        member = self.members.get(event.peer)
        if member is None:
            return [EndSession(event.peer, "not a member: say hello again")]
        if event.difference is not None:
            text = (
                f"the model of {event.peer} is not the run's: {event.difference};"
                " use the same model configuration at every client"
            )
            del self.members[event.peer]
            reject = [Send(event.peer, msg.Reject("model", text)), Note(text, "warning")]
            return reject + self._gone(event.peer, member.incarnation, "another model", now)
        member.attached = True
        if self.version < 0:
            return self.publishing.choose()
        effects: list[Effect] = [self.serving.announcement(event.peer)]
        if self.round is not None:
            self.round.rejoin(event.peer, member.incarnation)
            if self.round.awaits(event.peer, member.incarnation):
                # The first call may have been lost with the session it was said in.
                effects.append(Send(event.peer, self._round_call()))
        return effects

    # --- initial weights and versions ---

    def _initial_offered(self, event: ev.InitialOffered, now: float) -> list[Effect]:
        if self.version < 0 and event.peer == self.publishing.name:
            return [do.ReceiveInitial(event.peer, event.stream)]
        effects: list[Effect] = [DeclineStream(event.peer, event.stream, "not the publisher")]
        if self.version >= 0 and event.peer in self.members:
            effects.append(self.serving.announcement(event.peer))
        return effects

    def _held(self, event: ev.VersionHeld, now: float) -> list[Effect]:
        effects = self.serving.held(event) or self._end_if_all_hold(now)
        waits = self.trigger.schedule.when_short(now) is None
        if waits and self.phase is Phase.READY and not self.ending.asked:
            due = self.deadlines.when("sync")
            self.deadlines.set("sync", now if due is None else due)  # perhaps it was too few before
        return effects

    def _serve_failed(self, event: ev.SendVersionFailed, now: float) -> list[Effect]:
        self.serving.forget(event.peer)
        return []

    def _committed(self, event: ev.VersionCommitted, now: float) -> list[Effect]:
        self.tokens_total += self.deltas.advance(event.version, event.digest)
        self.failures = 0
        self.phase = Phase.READY
        if event.version == 0:
            self.publishing.done()
            self.deadlines.set("sync", self.trigger.schedule.after_version(None, now))
            return [Note("version 0 is durable, training starts"), *self.serving.announce()]
        called_at = self.round.called_at if self.round is not None else now
        self._round_over()
        self.deadlines.set("sync", self.trigger.schedule.after_version(called_at, now))
        limit = self.rules.limit_reached(self.version, self.tokens_total)
        if limit is not None and not self.ending.asked:
            self._begin_end(limit, now)
        told = self.serving.announce() if self.trigger.selection.tells_all else []
        return [*told, *self.answers.look_again(now), *self._settle_down(now)]

    # --- rounds ---

    def _timers(self, event: TimerFired, now: float) -> list[Effect]:
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
                    effects.append(do.CheckTransfers())
        return effects

    # --- deltas ---

    def _delta_offered(self, event: ev.DeltaOffered, now: float) -> list[Effect]:
        effects, settled = self.answers.offered(event, now)
        return [*effects, *self._answered(event.delta, now)] if settled else effects

    def _too_late(self, delta: Delta) -> Objection:
        """Why no delta can be merged any more, as a code and a sentence, or None."""
        if self.ending.asked and self.ending.last_round_over:
            return "ended", "the run has had its last round"
        if self.phase is Phase.MERGING and self.round is not None and self.round.last:
            return "later", "the last round is being merged"
        return self.trigger.selection.objection(delta, self.round)

    def _delta_stored(self, event: ev.DeltaStored, now: float) -> list[Effect]:
        return self.answers.stored(event, now) + self._answered(event.stored.delta, now)

    def _stream_lost(self, event: StreamLost, now: float) -> list[Effect]:
        if event.peer == self.publishing.name and self.version < 0:
            text = f"stream {event.stream} of {event.peer} broke off: {event.reason}"
            return self.publishing.failed(text, now)
        return self.answers.lost(event)
