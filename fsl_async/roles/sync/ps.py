"""Decides what the parameter server does. Pure: no socket, clock, random number or tensor.

Rules
- A client that opens a session gets a shard of the data, and takes part once its model is the run's
  (`membership`).
- The first client that attaches a model publishes version 0 (`publishing`). If it leaves before
  that is durable, the next one does; one that fails goes to the end of the queue. A new client's
  weights never replace a version that exists.
- The members are called every `every_s`, or as soon as there is a version (`triggers`, `rounds`). A
  round does not wait for clients that are away. With the trigger "buffer" they send by themselves,
  at the pace that they are told.
- A delta is acknowledged when it is durable, never before (`delta_admission`). It is merged once,
  into the next version, with its staleness on record. One of another lineage, or more than
  `max_staleness` versions old, is refused before its transfer.
- A known key gets the same answer again. A client may offer a delta any number of times.
- Versions are made one at a time. Deltas acknowledged meanwhile go into the next one.
- Clients pull: a version is announced, and streamed to each client that asks: the coded update if
  it holds the version before (checked by digest), else the full version (`version_serving`).
- The end (`run_end`): one last round, then every client gets the last version, then the run ends.
  At a limit of rounds the last round is the one that reaches it. Any other limit, or the operator,
  gets one more; where clients train in rounds, the open round is the last, for clients that
  answer in time. Later offers are refused. If the last version cannot be written, the run ends
  without it: acknowledged deltas are in the spool, for the next start.
- After an incomplete transfer the client is asked to offer the delta again ("later"), because it
  may assume that the delta arrived.

    state        event or message           -> state        effects
    EMPTY        Recovered with a version      READY        Quarantine what is an outlier again
    EMPTY        ModelAttached (first)         EMPTY        UseModel, Send Publish
    EMPTY        InitialMeta                   EMPTY        ReceiveInitial
    EMPTY        ReceiveInitial is done        EMPTY        - (the model is fixed from here on)
    EMPTY        VersionCommitted 0            READY        Send Announce to all
    READY        timer "sync"                  COLLECTING   Send Call or Turn to the clients chosen
    READY        Holding                       READY        timer "sync" now, if not set
    any          Admit is done,                same         Send Pace, where clients send by
                 HeartbeatReceived                          themselves (`pacing`)
    COLLECTING   DeltaStored, Skip,            COLLECTING   Send Accepted; Commit at the trigger's
                 ClientLeft, timer "round"     or MERGING   verdict
    MERGING      VersionCommitted              READY        Send Announce to all; at a limit, end
    MERGING      Commit has failed             MERGING      timer "retry", then Commit
    any          StoreFailed                   same         Finish with exit code 2
    any          DamageRepaired                same         Note
    any          DeltaMeta                     same         ReceiveDelta, or DeclineStream and
                                                            Send Accepted | Declined
    any          StreamLost                    same         Send Declined "later"; timer "publish"
    MERGING      the evaluator is here         MERGING      Send Evaluate, SendDelta (`evaluation`)
    MERGING      Score, timer "evaluator"      MERGING      Commit
    any          Fetch                         same         SendVersion | Send Announce
    any          VersionSent (lost)            same         - (the client asks again)
    any          Holding (another digest)      same         SendVersion in full, VerifyVersion
    any          VerifyVersion is done         same         Note
    any          ClientHello, Admit is done    same         Admit | Refuse; Welcome
    any          ModelAttached, KeepShard done same         KeepShard | Send Reject; Send Announce
    any          DecayAsked, KeepDecay is done same         KeepDecay; Send Announce to all
    any          DrainAsked                    same         last round; Send Stop, Finish, DONE
    ending       timer "round", "drain"        same         CheckTransfers
    ending       TransfersChecked              same         wait while bytes advance
    any          TakeCut, Adopt, AdoptFailed,  same         TakeCut, Adopt: `group_hold`
                 ResumeMerges
    ending       EndGroup                      same         as without a last global round
    DONE         anything but ClientHello      DONE         nothing
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsl_async.errors import ExitCode
from fsl_async.roles.groups import effects as groups
from fsl_async.roles.groups.events import AdoptFailed
from fsl_async.roles.machine import (
    ClientLeft,
    Deadlines,
    DeclineStream,
    Done,
    DrainAsked,
    Effect,
    EndSession,
    Event,
    Finish,
    Note,
    Offered,
    Received,
    Refuse,
    RoleMachine,
    StreamLost,
    TimerFired,
)
from fsl_async.roles.phrasing import counted
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import EVALUATE, ROLL_OUT, Delta
from fsl_async.roles.sync.delta_admission import DeltaAdmission, Objection
from fsl_async.roles.sync.deltas import Counting, Deltas
from fsl_async.roles.sync.evaluation import Evaluation
from fsl_async.roles.sync.group_hold import GroupHold
from fsl_async.roles.sync.membership import Membership, Publishing, ShardLeases
from fsl_async.roles.sync.norm_guard import NormGuard
from fsl_async.roles.sync.pacing import Pacing
from fsl_async.roles.sync.progress import RunLimits, RunProgress
from fsl_async.roles.sync.ps_state import (
    Member,
    Merging,
    Phase,
    Round,
)
from fsl_async.roles.sync.rollouts import Rollouts
from fsl_async.roles.sync.rounds import RoundCoordinator
from fsl_async.roles.sync.run_end import RunEnd
from fsl_async.roles.sync.secure import SecureSums
from fsl_async.roles.sync.shutdown import RunShutdown
from fsl_async.roles.sync.triggers import trigger_of
from fsl_async.roles.sync.version_serving import Serving
from fsl_async.roles.sync.weighting import Weighting

if TYPE_CHECKING:
    from fsl_async.config.settings import Config

__all__ = ["Member", "Merging", "ParameterServerMachine", "Phase"]


class ParameterServerMachine(RoleMachine):
    """The state of a run at the parameter server.

    `handle` and `next_deadline` are the whole interface.
    """

    senders = "a client"

    def __init__(self, config: Config, merging: Merging, weighting: Weighting, run: str) -> None:
        self.config = config
        self.run = run
        sync, train, tune = config.sync, config.train, config.tune
        self.progress = RunProgress(
            RunLimits(config.run.rounds, config.run.tokens, config.run.seconds),
            train.decays_from,
            sync.every_s if sync.trigger == "clock" else 0.0,
        )
        self.members: dict[str, Member] = {}
        trigger = trigger_of(config)
        self.guard = NormGuard(
            config.guard, growth=weighting.growth, by_order=tune.method == "lora"
        )
        self.deltas = Deltas(
            weighting,
            max_staleness=sync.staleness_limit,
            keep_versions=config.store.keep_versions,
            epsilon=tune.dp_epsilon,
            reuses=merging.reuses,
            weighs_unmoved=merging.compares,
            counting=Counting(
                weighting,
                self.guard,
                trigger.clients_lead or merging.reuses,
                merging.clips_values,
            ),
            one_base=merging.clips_values or tune.history > 0,
        )
        self.deadlines = Deadlines()
        self.serving = Serving(self.members, self.deltas, self.progress, trigger, tune.history)
        self.pacing = Pacing(sync, self.members)
        evaluation = Evaluation(
            config.guard, self.members, self.deltas, self.deadlines, merging.least_clients
        )
        self.publishing = Publishing(
            self.members, self.deadlines, sync.retry_s, over=not config.leads
        )
        self.membership = Membership(self.members, ShardLeases(config.shards))
        shutdown = RunShutdown(config.session.drain_s)
        self.rounds = RoundCoordinator(
            config,
            merging,
            self.members,
            self.deltas,
            deadlines=self.deadlines,
            trigger=trigger,
            serving=self.serving,
            shutdown=shutdown,
            progress=self.progress,
            # Late binding: self.end is set below.
            closed=lambda now: self.end.settle(now),  # noqa: PLW0108
            evaluation=evaluation,
        )
        last_s = config.groups.hold_s if config.groups.is_on else 0.0
        self.end = RunEnd(shutdown, self.rounds, self.deadlines, last_global_s=last_s)
        self.hold = GroupHold(self.rounds)
        self.admission = DeltaAdmission(self.members, self.deltas, self._too_late, self.guard)
        self.rollouts: Rollouts | None = None
        if tune.is_on and tune.objective == "grpo":
            self.rollouts = Rollouts(config, self.members, self.deltas)
        self.secure: SecureSums | None = None
        if tune.secure:
            self.secure = SecureSums(self.rounds, self.deadlines, config, run)
            self.rounds.secure = self.admission.secure = self.secure
        self.handlers = {
            ev.Recovered: self._recovered,
            ev.DecayAsked: self._decay_asked,
            do.KeepDecay: self._decay_kept,
            TimerFired: self._timers,
            ev.ClientHello: self._hello,
            do.Admit: lambda event, _: self.pacing.greet(self.membership.admitted(event)),
            ev.HeartbeatReceived: self.pacing.heartbeat,
            ClientLeft: self._left,
            ev.ModelAttached: self._attached,
            do.KeepShard: self._shard_kept,
            msg.InitialMeta: self._initial_offered,
            do.ReceiveInitial: self._initial_received,
            msg.DeltaMeta: self._delta_offered,
            ev.DeltaStored: self._delta_stored,
            msg.Skip: self.rounds.skipped,
            msg.Score: self.rounds.scored,
            msg.Fetch: self.serving.fetch,
            ev.VersionSent: self._sent,
            msg.Holding: self._held,
            groups.TakeCut: self.hold.asked,
            groups.ResumeMerges: self.hold.resumed,
            groups.Adopt: self.hold.asked,
            AdoptFailed: self.hold.failed,
            groups.EndGroup: lambda _, now: self.end.global_done(now),
            ev.VersionCommitted: self._committed,
            do.Commit: self._commit_failed,
            ev.StoreFailed: self._store_failed,
            ev.DamageRepaired: lambda event, _: [Note(event.text, "warning", {"alarm": "damage"})],
            do.VerifyVersion: self.serving.verified,
            StreamLost: self._stream_lost,
            ev.TransfersChecked: self.end.transfers_checked,
            DrainAsked: lambda event, now: self.end.drain(event.reason, now),
        }
        if self.rollouts is not None:
            self.handlers |= {
                msg.Rollout: self.rollouts.pass_on,
                msg.Disputed: self.rollouts.disputed,
            }
        if self.secure is not None:
            self.handlers |= {
                msg.SecureKey: self.secure.key_sent,
                msg.SecureShares: self.secure.shares_sent,
                msg.SharesRefused: self.secure.refused,
                do.KeepSum: self.secure.kept,
                msg.Unmasked: self.secure.unmasked,
                ev.SumOpened: self.secure.opened,
            }

    @property
    def tokens_total(self) -> int:
        """Tokens of all deltas merged so far."""
        return self.progress.tokens

    @property
    def phase(self) -> Phase:
        """Where the run is."""
        return self.rounds.phase

    @property
    def round(self) -> Round | None:
        """The open round."""
        return self.rounds.round

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

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event and return effects in the order in which they are to be carried out."""
        if self.ended and not isinstance(event, ev.ClientHello):
            return []  # a late event of the disk or a client must not restart the run
        return super().handle(event, now)

    # --- start and membership ---

    def _recovered(self, event: ev.Recovered, now: float) -> list[Effect]:
        self.progress.recovered(
            event.version,
            event.tokens_total,
            event.served_s,
            now,
            event.decay,
            began_s=event.began_s,
            global_versions=event.global_versions,
        )
        lost: list[Effect] = [Note(text, "warning", {"alarm": "lost"}) for text in event.lost]
        limits = self.progress.limits
        # If the limit was reached before this start, clients still get time to reconnect and offer
        # their deltas.
        least_s = self.config.session.drain_s if event.served_s else 0.0
        self._set_limit(max(limits.seconds - event.served_s, least_s), now)
        self.membership.recovered(event, now)
        if event.version < 0:
            return lost
        self.publishing.done()
        self.serving.void = event.void
        self.serving.global_version = event.global_version
        self.serving.global_base = event.global_base
        self.deltas.digests = dict(event.digests)
        self.deltas.global_versions = list(event.newest_global)
        usual = list({(one.key.client, one.key.base): one for one in event.usual}.values())
        self.deltas.recovered(usual, event.latest, event.arrivals)
        self.deltas.advance(event.version, event.digest)
        self.deltas.settled.settle_all(event.settled)
        self.rounds.phase = Phase.READY
        trigger = self.rounds.trigger
        trigger.selection.recovered(event.settled)
        self.end.state.last_round_over = self.progress.is_last(self.version - 1)
        limit = self.progress.limit_reached(self.version, self.tokens_total)
        if limit is None:
            self.deadlines.set("sync", trigger.schedule.after_start(event.since_version_s, now))
        else:  # killed between its last version and its end: let clients reconnect and fetch it
            self.end.begin(limit, now)
            self.deadlines.set("linger", now + self.config.session.drain_s)
        waiting = counted(len(event.pending), "delta")
        text = f"continuing at version {event.version} with {waiting} still to be merged"
        self.guard.recovered(usual, event.held)
        self.guard.known_since(
            [*self.deltas.settled, *(one.key.client for one in event.pending)],
            now - event.since_version_s,
        )
        if self.secure is not None:
            return [*lost, Note(text), *self.secure.recovered(event, now)]
        # In the order of the ledger, so that the guard excludes the same deltas as before.
        again = [effect for one in event.pending for effect in self.admission.queue(one, now)]
        return [*lost, Note(text), *again]

    def _hello(self, event: ev.ClientHello, now: float) -> list[Effect]:
        peer = event.peer
        if self.ended:
            return [Refuse(peer, "finished", "this run has ended")]
        if event.run and event.run != self.run:
            text = (
                f"this is run {self.run}, but {peer} is in run {event.run}:"
                " restart the client to join this one"
            )
            return [Refuse(peer, "run", text)]
        objection = self._objection_to_role(event)
        if objection:
            return [Refuse(peer, "evaluator", objection)]
        self.guard.joined(peer, now)
        former = self.members.get(peer)
        is_member = self.membership.enter(event, now)
        self.serving.forget(peer)
        effects = self.serving.check_lineage(event) if is_member and event.run else []
        if former is not None:  # no event has reported the end of its session or process
            effects += self._gone(peer, former.incarnation, "it opened a new session", now)
        if self.ended:  # the end waited for this client only
            return [*effects, Refuse(peer, "finished", "this run has ended")]
        if is_member:
            return [*effects, *self.pacing.greet(self.membership.admit(peer))]
        refusal = self.membership.refuse(peer, now)
        return [*effects, *refusal, *self.end.end_if_all_hold(now)]

    def _objection_to_role(self, event: ev.ClientHello) -> str:
        """Why a client may not do what it comes for; empty: it may."""
        peer, name = event.peer, self.config.guard.evaluator
        if event.duty == ROLL_OUT and self.rollouts is None:
            return "answers are of use in a run with tune.objective = grpo: leave out --rollout"
        if (event.duty == EVALUATE) == (peer == name):
            return ""
        if event.duty == EVALUATE:
            has = f"the evaluator of this run is {name}" if name else "this run has no evaluator"
            return f"{has}, not {peer}: set guard.evaluator at the parameter server, or give --name"
        return (
            f"{peer} is the evaluator of this run and trains nothing: start it with --evaluate, or"
            " give this client another --name"
        )

    def _left(self, event: ClientLeft, now: float) -> list[Effect]:
        member = self.members.get(event.peer)
        if member is not None and member.incarnation != event.incarnation:
            return []  # a new process is connected already
        self.membership.shards.left(event.peer, event.reason, now)
        if member is None:
            return []
        del self.members[event.peer]
        effects = self._gone(event.peer, event.incarnation, event.reason, now)
        return effects + self.end.end_if_all_hold(now) + self._all_done(event)

    def _all_done(self, event: ClientLeft) -> list[Effect]:
        """Tell the operator of a run without clients, whose scripts have ended before it."""
        is_done = event.reason == "bye" and not event.returns and self.version >= 0
        if not is_done or self.members or self.end.asked or self.ended:
            return []
        until = "until its limit of time" if self.progress.limits.seconds else "without end"
        text = (
            f"all clients have left, {event.peer} last ({event.why or 'it ended its session'}), and"
            f" this run waits for clients {until}: start one again, or end the run with Ctrl-C"
        )
        return [Note(text)]

    def _gone(self, peer: str, incarnation: int, reason: str, now: float) -> list[Effect]:
        """Stop waiting for answers of a session that is over."""
        return [
            *self.publishing.left(peer),
            *self.rounds.left(peer, incarnation, reason, now),
        ]

    def _attached(self, event: ev.ModelAttached, now: float) -> list[Effect]:
        peer, member = event.peer, self.members.get(event.peer)
        if member is None:
            return [EndSession(peer, "not a member: reconnect")]
        if not member.trains and self.version < 0:
            return []  # a run's model is not its evaluator's; the shell asks again at version 0
        is_fixed = self.version >= 0 or self.publishing.received
        agrees, effects = self.membership.attached(event, is_fixed=is_fixed)
        if not agrees:
            return effects + self._gone(peer, member.incarnation, "another model", now)
        if any(isinstance(effect, do.KeepShard) for effect in effects):
            return effects
        return effects + self._join(peer, member, now)

    def _shard_kept(self, event: Done[do.KeepShard], now: float) -> list[Effect]:
        effects, peer = self.membership.kept(event), event.of.peer
        member = self.members.get(peer)
        if effects or member is None or member.incarnation != event.of.incarnation:
            return effects
        return self._join(peer, member, now)

    def _join(self, peer: str, member: Member, now: float) -> list[Effect]:
        """Let a client take part that has a shard and the run's model."""
        member.attached = True
        if self.version < 0:
            return self.publishing.choose()
        return [
            *self.serving.lineage(peer),
            self.serving.announcement(peer, now),
            *self.rounds.rejoined(peer, member.incarnation, now),
            *self.rounds.evaluation.joined(peer),
        ]

    # --- initial weights and versions ---

    def _initial_offered(self, event: Offered[msg.InitialMeta], now: float) -> list[Effect]:
        if self.version < 0 and event.peer == self.publishing.name:
            return [do.ReceiveInitial(event.peer, event.stream)]
        effects: list[Effect] = [DeclineStream(event.peer, event.stream, "not the publisher")]
        if self.version >= 0 and event.peer in self.members:
            effects.append(self.serving.announcement(event.peer, now))
        return effects

    def _initial_received(self, event: Done[do.ReceiveInitial], now: float) -> list[Effect]:
        if event.problem:
            text = f"the initial weights could not be written: {event.problem}"
            return self.publishing.failed(text, now)
        self.publishing.received = self.version < 0
        return []

    def _held(self, event: Received[msg.Holding], now: float) -> list[Effect]:
        effects = self.serving.held(event, now) or self.end.end_if_all_hold(now)
        is_ready = self.phase is Phase.READY and not self.end.asked
        if is_ready and self.deadlines.when("sync") is None:
            self.deadlines.set("sync", now)  # the last call found too few clients
        return effects

    def _sent(self, event: ev.VersionSent, now: float) -> list[Effect]:
        if event.is_lost:
            self.serving.forget(event.peer)
        return []

    def _committed(self, event: ev.VersionCommitted, now: float) -> list[Effect]:
        is_global = event.made_of != "deltas"
        accepted = [] if self.secure is None else self.secure.committed()
        tokens = self.deltas.advance(event.version, event.digest, is_global=is_global)
        self.progress.committed(event.version, tokens, now, is_global=is_global)
        if is_global or (self.config.groups.is_on and event.version == 0):
            self.serving.take_global(event)
        if event.version == 0:
            self.publishing.done()
            self.rounds.begin(now)
            note = Note("version 0 is durable, training starts")
            if not self.config.leads:
                return [note, *self.membership.begin_again()]
            return [note, *self.serving.announce(now), *self.hold.serve()]
        if is_global and self.end.asked and self.rounds.round is not None:
            self.rounds.phase = Phase.COLLECTING  # the last round goes on
            return [*self._announce_to_all(now), *self.rounds.evaluate(now), *self.hold.serve()]
        self.rounds.committed(now)
        limit = self.progress.limit_reached(self.version, self.tokens_total)
        if limit is not None and not self.end.asked:
            self.end.begin(limit, now)
        again = self.admission.look_again(now)
        announced = [*accepted, *self._announce_to_all(now)]
        return [*announced, *again, *self.end.settle(now), *self.hold.serve()]

    def _announce_to_all(self, now: float) -> list[Effect]:
        to_all = self.rounds.trigger.selection.announces_to_all
        return self.serving.announce(now) if to_all else []

    def _commit_failed(self, event: Done[do.Commit], now: float) -> list[Effect]:
        text, advice = self.rounds.abandon(event)
        if self.end.asked:
            return self.end.without(text)
        return self.rounds.try_again(f"{text}; {advice}" if advice else text, now)

    def _store_failed(self, event: ev.StoreFailed, now: float) -> list[Effect]:
        """Finish, but do not stop clients: the run continues after the operator's repair.

        A restart may fail again, so the exit code asks for no relaunch.
        """
        self.deadlines.clear()
        return [Finish(event.reason, ExitCode.BAD_INPUT)]

    # --- timers ---

    def _timers(self, event: TimerFired, now: float) -> list[Effect]:
        effects: list[Effect] = []
        rounds = self.rounds
        steps = {
            "sync": rounds.call,
            "round": rounds.evaluate,
            "retry": rounds.merge,
            "evaluator": rounds.close_evaluation,
            "linger": self.end.settle,
            **({} if self.secure is None else {"secure": self.secure.timer}),
        }
        for name in self.deadlines.pop_due(now):
            match name:
                case _ if name in steps:
                    effects.extend(steps[name](now))
                case "publish":
                    effects.extend(self.publishing.choose())
                case "limit":
                    text = f"the run's limit of {self.progress.limits.seconds:g} s is reached"
                    effects.extend(self.end.drain(text, now))
                case "global" if self.rounds.is_held:  # it is under way; the member ends the hold
                    self.deadlines.set("global", now + 1.0)
                case "global":
                    text = "ending without a last global round: none was decided in time"
                    effects.extend(self.end.global_done(now, text))
                case _:  # drain
                    effects.append(do.CheckTransfers())
        return effects

    def _set_limit(self, left_s: float, now: float) -> None:
        """Set the deadline of the limit in seconds, or none where there is no such limit."""
        if self.progress.limits.seconds:
            self.deadlines.set("limit", now + left_s)
        else:
            self.deadlines.cancel("limit")

    def _decay_asked(self, event: ev.DecayAsked, now: float) -> list[Effect]:
        objection = self._objection_to_decay(event.more, now)
        if objection:
            return [Note(f"no decay: {objection}", "warning")]
        return [do.KeepDecay(self.progress.decay(event.more, now))]

    def _objection_to_decay(self, more: RunLimits, now: float) -> str:
        progress = self.progress
        if self.end.asked or self.version < 0:
            return f"the run {'is ending' if self.end.asked else 'has not begun'}"
        if self.config.train.schedule != "wsd":
            return "learning rates follow another schedule; set train.schedule = wsd"
        position = progress.position(now)
        if not (position.is_planned or more.exist):
            return "this run has no planned end; give --rounds, --tokens or --seconds"
        if not more.exist and (position.fade < 1.0 or progress.was_asked):
            since = f"{progress.decays_from:.0%} of the run"
            return (
                f"learning rates fall already, since {since}, until {progress.limits.words};"
                " --rounds, --tokens or --seconds sets another end"
            )
        return ""

    def _decay_kept(self, event: Done[do.KeepDecay], now: float) -> list[Effect]:
        decay, progress = event.of.decay, self.progress
        falls = progress.position(now).fade < 1.0
        progress.adopt(decay, now)
        self._set_limit(decay.limits.seconds - progress.served_s(now), now)
        begun = f" from version {self.version} on, {decay.decays_from:.0%} of the run,"
        text = (
            f"learning rates fall{'' if falls else begun} until the run ends at"
            f" {decay.limits.words}"
        )
        facts: dict[str, int | float | str] = {
            "version": self.version,
            "decays_from": decay.decays_from,
        }
        return [Note(text, facts=facts), *self.serving.announce_position(now)]

    # --- deltas ---

    def _delta_offered(self, event: Offered[msg.DeltaMeta], now: float) -> list[Effect]:
        effects, settled = self.admission.offered(event, now)
        return [*effects, *self.rounds.answered(event.message.delta, now)] if settled else effects

    def _too_late(self, delta: Delta) -> Objection:
        """Why the rounds take this delta no more, as a code and a sentence, or None."""
        if self.end.asked and self.end.state.last_round_over:
            return "ended", "the run has had its last round"
        if self.phase is Phase.MERGING and self.round is not None and self.round.last:
            return "later", "the last round is being merged"
        if self.secure is not None and (objection := self.secure.objection(delta)):
            return objection
        return self.rounds.trigger.selection.objection(delta, self.round)

    def _delta_stored(self, event: ev.DeltaStored, now: float) -> list[Effect]:
        effects = self.admission.stored(event, now)
        effects += self.rounds.answered(event.stored.delta, now)
        return effects + self.end.end_if_all_hold(now)

    def _stream_lost(self, event: StreamLost, now: float) -> list[Effect]:
        if event.peer == self.publishing.name and self.version < 0:
            text = f"stream {event.stream} of {event.peer} broke off: {event.reason}"
            return self.publishing.failed(text, now)
        return self.admission.lost(event, now)
