"""Decides what a client of pretraining does. Pure: no socket, clock, random number or tensor.

Rules
- Training never waits for the network. While the parameter server is away, the client trains on; it
  offers its delta after the reconnect.
- One delta is outstanding at a time. The client keeps it, coded, until the parameter server has
  acknowledged or refused its key, and offers it again after every reconnect. A call that arrives
  meanwhile is answered afterwards.
- A delta is measured from the base that its key names and never recomputed against another: the
  outstanding delta is completely coded before the base is replaced.
- The training thread does one thing for the machine at a time: it copies a snapshot, or it moves to
  a new base. `busy` is that thing.
- A new version is fetched as soon as it is announced, starting from the version held. Progress
  since the last snapshot is carried over (theta <- Theta_new + (theta_now - u)). After a
  quarantined delta it is discarded instead: those weights are not finite.
- If a digest differs from the announced one, or frames cannot be applied, the client fetches the
  version in full after a pause: a persistent fault must not move full models in a tight loop.
- A call is valid in its session only; the parameter server repeats it to a client that it still
  waits for.
- After the last call nothing more is merged, so the training thread is held at its snapshot until
  the run's last version arrives: no work is wasted, and the user's loop ends with exactly the run's
  weights, without what coding has kept back of the last delta. The thread resumes if there was
  nothing to send, if the delta is refused, and if the session is lost, because the parameter server
  may stay away for long.
- A turn asks for a full round: the client trains it once, from the version that the turn names, and
  is held at its end until the resulting version arrives, even while the parameter server is away. A
  turn that is repeated in a new session is the same turn.
- Where the run calls no rounds, the client is given a pace and leads: it takes a snapshot when that
  is reached, or as soon as no delta is outstanding any more. A call is then that of the last round.
- After a delta that was refused as too old the next one is measured from the version that was the
  newest then. Progress since is carried over; without the wait it would be refused too, from each
  of the versions in between.
- A session that the parameter server ends because of what this client sends is opened again, and
  the third time the client ends: it would send the same again.
- If training ends before the run does, the progress since the last snapshot is sent as a last
  delta, after the outstanding one. The client waits for it while its bytes advance, at most
  `DRAIN_CAP_S`, and `DRAIN_S` without a session.

    state      event or message                 -> effects
    any        Attached                         SendManifest in a session
    offline    Welcomed                         SendManifest, OfferDelta when one is outstanding
    joined     Publish                          OfferInitial
    joined     Announce (not held)              Send Fetch; ReplaceBase by its own version 0
    joined     VersionMeta                      ReceiveVersion, or DeclineStream
    joined     Scalars                          as Announce, then as VersionMeta
    any        ReceiveVersion is done           FinishEncoding of the outstanding delta, ReplaceBase
    any        FinishEncoding is done           ReplaceBase
    any        BaseReplaced                     Rebase
    any        ReplaceBase has failed           Note; timer "fetch", then Send Fetch
    any        Rebased                          Send Holding
    training   Call                             TakeSnapshot when no delta is outstanding
    any        Pace                             CountSteps, timer "pace"
    training   PaceReached, timer "pace"        TakeSnapshot when no delta is outstanding
    any        Rollout                          TakeRollout
    joined     TaskSays                         Send its message
    training   Turn                             TakeSnapshot of the round, once the weights are on
                                                its version
    training   Snapshotted                      OfferDelta, or Send Skip when no token was trained
    any        Accepted, Declined               DropDelta, then what was waiting
    any        Declined "later", StreamLost     timer "offer", then OfferDelta; timer "fetch"
    any        SessionLost (third violation)    EndTraining
    held       SessionLost, Declined            ResumeTraining (in a round: Rebased, Declined)
    any        Stop, DrainAsked, Preempting,    EndTraining
               HelloRefused, Reject
    any        TrainingEnded                    TakeSnapshot, then Finish after the last answer;
                                                Finish at once after Stop
    ending     timer "end"                      CheckTransfers
    ending     TransfersChecked                 Finish unless bytes advance
    preempted  timer "late"                     begin no further delta
    preempted  timer "goodbye"                  Finish
    finished   anything                         nothing

Notes report joining, the first weights, every version that the model moves to (with the fact
`version`, to which the node adds training metrics), and the loss and return of the parameter
server.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from fsl_async.errors import ExitCode
from fsl_async.roles.machine import (
    SERVER,
    Deadlines,
    DeclineStream,
    Done,
    DrainAsked,
    Effect,
    Event,
    HelloRefused,
    Note,
    Received,
    RoleMachine,
    Send,
    SendGoodbye,
    SessionLost,
    StreamLost,
    TimerFired,
    TrainingEnded,
)
from fsl_async.roles.phrasing import lost_words
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import TRAIN, Delta, DeltaKey
from fsl_async.roles.sync.pacing import Leading
from fsl_async.roles.sync.shutdown import DRAIN_S, ClientShutdown
from fsl_async.roles.sync.training_trouble import Movement
from fsl_async.roles.sync.version_sync import Held, VersionSync

ANSWER_S = 2.0
"""How long the parameter server may take to answer a hello before its loss is reported."""
REOFFER_S = 5.0
"""After that, a delta or a fetch that failed is offered again."""
VIOLATIONS = 3
"""How often the parameter server may end the session because of what this client sends. The same
message is sent in each new session, so more of them end the same way."""


class ClientMachine(RoleMachine):
    """The state of a run at a client. `handle` and `next_deadline` are the whole interface."""

    senders = "a parameter server"
    duty: ClassVar[str] = TRAIN

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.run = ""
        self.connected = False
        self.away = False  # the session was lost and there is no new one
        # Reports that loss, unless the answer to the next hello gives its cause.
        self.pending_note: Note | None = None
        self.attached = False
        self.model_version = -1
        # Of the version that the weights were last moved to, from which the next delta is measured.
        self.model_digest = ""
        self.delta: Delta | None = None  # the outstanding one
        self.coded = False  # whether all of its chunks are coded
        self.sequence = 0
        self.call: msg.Call | None = None
        self.answering: msg.Call | None = None
        # The call at which the training thread is held.
        self.held: msg.Call | None = None
        self.busy: str | None = None  # "snapshot" | "coding" | "replacing" | "rebasing"
        self.discard = False
        self.tokens_acknowledged = 0
        self.noted_empty = False  # that steps without tokens send nothing
        self.sends_from = -1  # no delta is measured from an older version
        self.violations = 0  # since a delta or a version has gone through
        self.deadlines = Deadlines()
        self.leading = Leading(self.deadlines)
        self.version_sync = VersionSync(self.deadlines)
        self.movement = Movement()
        self.shutdown = ClientShutdown(self.deadlines)
        self.handlers = {
            TimerFired: self._timers,
            ev.Attached: self._attached,
            ev.Welcomed: self._welcomed,
            SessionLost: self._lost,
            HelloRefused: self._refused,
            msg.Reject: lambda event, now: self._refused(event.message, now),
            msg.Publish: self._publish,
            msg.Call: self._called,
            msg.Turn: self._called,
            msg.Pace: self._pace_given,
            ev.PaceReached: self._pace_reached,
            ev.TaskSays: self._say,
            msg.Rollout: lambda event, _: [do.TakeRollout(event.message)],
            msg.Accepted: self._acknowledged,
            msg.Declined: self._delta_refused,
            msg.Announce: lambda event, now: self._announced(event.message, now),
            msg.Scalars: self._scalars,
            msg.VersionMeta: lambda event, now: self._offered(event.stream, event.message, now),
            do.ReceiveVersion: self._fetch_received,
            do.ReplaceBase: self._fetch_failed,
            ev.BaseReplaced: self._base_replaced,
            ev.Rebased: self._rebased,
            ev.Snapshotted: self._snapshotted,
            do.FinishEncoding: self._encoding_finished,
            StreamLost: self._stream_lost,
            msg.Stop: self._run_ended,
            DrainAsked: lambda event, now: self.shutdown.ask(
                event.reason, ExitCode.INTERRUPTED, now
            ),
            ev.Preempting: self.shutdown.preempt,
            TrainingEnded: self._training_ended,
            ev.TransfersChecked: self.shutdown.transfers_checked,
        }

    @property
    def base(self) -> Held:
        """The version that the base buffer holds."""
        return self.version_sync.base

    @property
    def finished(self) -> bool:
        """Whether this client's part is over."""
        return self.shutdown.finished

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event and return effects in the order in which they are to be carried out."""
        return [] if self.finished else super().handle(event, now)

    def _say(self, event: ev.TaskSays, now: float) -> list[Effect]:
        return [Send(SERVER, event.message)] if self.connected else []

    # --- the session ---

    def _attached(self, event: ev.Attached, now: float) -> list[Effect]:
        self.attached = True
        return [do.SendManifest()] if self.connected else []

    def _welcomed(self, event: ev.Welcomed, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if not self.run:
            part = f", part {event.shard + 1} of {event.shards}" if event.shards else ""
            effects.append(Note(f"joined run {event.run} as {self.name}{part}"))
        elif self.away:
            effects.extend(self._report_lost())
            effects.append(Note("the parameter server is back"))
        self.connected, self.away = True, False
        self.run = event.run
        if event.incarnation is not None:
            self.incarnation = event.incarnation  # the handshake may have raised it
        self._forget_session()
        effects.extend(self.leading.stop())
        if self.attached:
            effects.append(do.SendManifest())
        return effects + self._offer()

    def _lost(self, event: SessionLost, now: float) -> list[Effect]:
        self.connected = False
        self.shutdown.uploads.interrupt()
        self._forget_session()
        self.away = True
        if event.violation:
            self.violations += 1
            if self.violations >= VIOLATIONS:
                return self._give_up(event.violation, now)
        what = lost_words(event.reason)
        if not self.shutdown.training:
            self.shutdown.session_lost(now)
            meanwhile = f"waiting {DRAIN_S:g} s for it, to send what was trained"
        else:
            meanwhile = "training goes on" if self.model_version >= 0 else "trying again"
        self.pending_note = Note(f"{what}; {meanwhile}", "warning")
        in_turn = self.held is not None and self.held.trains
        effects = [] if self.busy == "snapshot" or in_turn else self._resume()
        if event.reason in {"reset", "revoked"}:
            # The answer to the next hello may give the cause: another process has the name, or the
            # key was revoked.
            self.deadlines.set("lost", now + ANSWER_S)
            return effects
        return [*self._report_lost(), *effects]

    def _give_up(self, violation: str, now: float) -> list[Effect]:
        """End: what this client sends ends each session."""
        self.shutdown.refusing = True
        text = f"the parameter server has ended {self.violations} sessions over what this client"
        text += f" sends: {violation} (a bug in fsl-async, or another version of it there)"
        return self.shutdown.ask(text, ExitCode.BUG, now)

    def _report_lost(self) -> list[Effect]:
        note, self.pending_note = self.pending_note, None
        self.deadlines.cancel("lost")
        return [] if note is None else [note]

    def _forget_session(self) -> None:
        """Forget open requests and the call: they are valid in one session only."""
        self.version_sync.forget_session()
        self.call = None
        if self.answering is not None:
            self.answering = attrs.evolve(self.answering, last=False)
        self.deadlines.cancel("offer")

    def _refused(self, event: HelloRefused | msg.Reject, now: float) -> list[Effect]:
        self.shutdown.refusing = True
        self.pending_note = None
        exit_code = 0 if event.code == "finished" else ExitCode.BAD_INPUT
        return self.shutdown.ask(event.text, exit_code, now)

    def _offer(self) -> list[Effect]:
        return [do.OfferDelta(self.delta)] if self.delta is not None and self.connected else []

    def _timers(self, event: TimerFired, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for name in self.deadlines.pop_due(now):
            if self.finished:
                break
            if name == "offer":
                effects.extend(self._offer())
            elif name == "pace":
                self.leading.reached = True
                effects.extend(self._advance())
            elif name == "goodbye":
                effects.extend(self.shutdown.time_is_up())
            elif name == "late":
                self.shutdown.emptied = True
                effects.extend(self._advance())
            elif name == "lost":
                effects.extend(self._report_lost())
            elif name == "fetch":
                self.version_sync.asked = None
                effects.extend(self._advance())
            elif self.shutdown.training or not self.connected:  # end
                effects.extend(self.shutdown.finish())
            else:
                effects.append(do.CheckTransfers())
        return effects

    def _stream_lost(self, event: StreamLost, now: float) -> list[Effect]:
        if event.stream.startswith("delta:"):
            if self.delta is not None and self.connected:
                self.deadlines.set("offer", now + REOFFER_S)
            return []
        if event.stream.startswith("initial:"):
            self.version_sync.publishing = False
            return []
        if event.stream == self.version_sync.replaying:
            self.version_sync.replaying = ""
        self.version_sync.later(now, REOFFER_S)  # the stream failed, not the session
        return []

    # --- versions, down ---

    def _publish(self, event: Received[msg.Publish], now: float) -> list[Effect]:
        if not self.attached or self.shutdown.asked:
            return []
        if self.base.version >= 0:
            self.shutdown.refusing = True
            text = (
                "the run has gone back to before version 0, and this client holds version"
                f" {self.base.version}: start it again, and the run begins anew"
            )
            return self.shutdown.ask(text, ExitCode.BAD_INPUT, now)
        self.version_sync.publishing = True
        return [do.OfferInitial()]

    def _scalars(self, event: Received[msg.Scalars], now: float) -> list[Effect]:
        """Take an announcement, and the scalars as if they were offered as a stream."""
        effects = self._announced(event.message, now)
        meta = msg.VersionMeta("seeds", event.message.version)
        stream = msg.version_stream(meta.kind, meta.version)
        return [*effects, *self._offered(stream, meta, now, here=True)]

    def _announced(self, newest: msg.Announce | msg.Scalars, now: float) -> list[Effect]:
        version_sync, comes = self.version_sync, isinstance(newest, msg.Scalars)
        undone = version_sync.announced(newest)
        if undone and version_sync.refuses_rollback:
            self.shutdown.refusing = True
            text = f"{undone}; this site's site.toml refuses that without --accept-rollback"
            return self.shutdown.ask(text, ExitCode.BAD_INPUT, now)
        if version_sync.publishing:
            version_sync.publishing = False
            if newest.version == 0 and self.busy is None and self.base.version < 0:
                self.busy, version_sync.adopted = "replacing", True
                return [do.ReplaceBase(0, is_own=True)]
        version_sync.by_scalars = comes or version_sync.by_scalars
        if comes and version_sync.asked is None and version_sync.base != version_sync.latest:
            version_sync.asked = newest.version
        if self.base == self.version_sync.latest and self.model_version == newest.version:
            return [version_sync.holding()]
        notes = [Note(f"{undone}; this client goes back too", "warning")] if undone else []
        return [*notes, *self._advance()]

    def _offered(
        self, stream: str, meta: msg.VersionMeta, now: float, *, here: bool = False
    ) -> list[Effect]:
        busy = self.busy == "replacing" or not self.attached or self.shutdown.asked
        if not busy and self.version_sync.fits(meta):
            return self.version_sync.receive(stream, meta, here=here)
        if self.version_sync.asked is not None:  # this may have been the answer: ask again later
            self.version_sync.later(now, REOFFER_S)
        return [DeclineStream(SERVER, stream, "not wanted")]

    def _fetch_received(self, event: Done[do.ReceiveVersion], now: float) -> list[Effect]:
        self.violations = 0
        self.version_sync.received(event.of.version)
        return self._advance()

    def _fetch_failed(self, event: Done[do.ReplaceBase], now: float) -> list[Effect]:
        version = event.of.version
        text = f"version {version} could not be applied: {event.problem}; fetching it in full"
        return self._base_lost(text, now)

    def _base_lost(self, text: str, now: float) -> list[Effect]:
        self.busy = None
        self.version_sync.lost()
        self.version_sync.later(now, REOFFER_S)
        return [Note(text, "warning"), *self._advance()]

    def _base_replaced(self, event: ev.BaseReplaced, now: float) -> list[Effect]:
        problem = self.version_sync.replaced(event)
        if problem is None:
            return self._rebase()
        if self.version_sync.adopted and event.version == 0:  # its own could not be written
            self.busy, self.version_sync.adopted = None, False
            self.version_sync.lost()
            return [Note("another client published the initial weights"), *self._advance()]
        return self._base_lost(problem, now)

    def _rebase(self) -> list[Effect]:
        self.busy = "rebasing"
        discard, self.discard = self.discard, False
        # Nothing more is sent: by the call, or by where the run is since the turn was called.
        held = self.held
        ends = held is not None and (held.last or (held.trains and self.version_sync.over))
        return [do.Rebase(self.base.version, discard or ends)]

    def _rebased(self, event: ev.Rebased, now: float) -> list[Effect]:
        self.busy = None
        effects = self._report_version(event.version)
        if self.model_version < 0:
            self.leading.begin(now)
        self.model_version, self.model_digest = event.version, self.base.digest
        if self.held is not None and self.held.trains:
            # The version is that of the round, or of one that this delta missed.
            effects.extend(self._resume())
        if event.dropped_tokens:
            text = (
                f"weights were not finite: back on version {event.version},"
                f" without the last {event.dropped_tokens} tokens"
            )
            effects.append(Note(text, "warning"))
        next_ones = self._advance()
        trains = any(isinstance(one, do.TakeSnapshot) and one.round >= 0 for one in next_ones)
        # Scalars that are measured from a version report that it is held.
        if self.connected and not (self.version_sync.by_scalars and trains):
            effects.append(self.version_sync.holding())
        return effects + next_ones

    def _report_version(self, version: int) -> list[Effect]:
        if version == self.model_version:  # the weights were not finite and are reset to it
            return []
        if self.model_version >= 0:
            return [Note(f"version {version}", facts={"version": version})]
        if self.version_sync.adopted and version == 0:
            return [Note("published the initial weights")]
        return [Note(f"received version {version}")]

    # --- deltas, up ---

    def _called(self, event: Received[msg.Call], now: float) -> list[Effect]:
        call = event.message
        if call == self.answering or (self.delta is not None and self.delta.round == call.round):
            return []
        if call.trains and self.answering is not None and self.answering.round == call.round:
            self.answering = call  # repeated in a new session: it is being trained
            return []
        self.call = call
        return self._advance()

    def _pace_given(self, event: Received[msg.Pace], now: float) -> list[Effect]:
        effects = self.leading.give(event.message, now, begins=self.model_version >= 0)
        return [*effects, *self._advance()]

    def _pace_reached(self, event: ev.PaceReached, now: float) -> list[Effect]:
        self.leading.reached = True
        return self._advance()

    def _snapshotted(self, event: ev.Snapshotted, now: float) -> list[Effect]:
        self.busy = None
        answered, self.answering = self.answering, None
        assert answered is not None
        self.leading.begin(now)
        if event.tokens < 1 or event.steps < 1:
            effects: list[Effect] = [do.DropDelta(event.sequence)]
            if self.connected and answered.round != msg.OWN_PACE:
                reason = "no token trained since the last snapshot"
                effects.append(Send(SERVER, msg.Skip(answered.round, reason)))
                if self.version_sync.by_scalars:
                    effects.append(self.version_sync.holding())
            if event.steps and not (self.noted_empty or self.version_sync.by_scalars):
                self.noted_empty = True
                text = (
                    f"nothing is sent: {event.steps:,} steps were reported with tokens=0, and"
                    " tokens are the weight of what was trained"
                )
                effects.append(Note(text, "warning"))
            return [*effects, *self._resume(), *self._advance()]
        key = DeltaKey(self.name, self.incarnation, event.base, event.sequence)
        work = event.tokens, event.steps, answered.round, event.metrics, event.facts
        self.delta = Delta(key, self.model_digest, *work)
        self.coded = False
        if self.connected:
            self.shutdown.uploads.begin(now)
        waits = answered.trains or (answered.last and self.connected)
        waits = waits and not self.shutdown.asked
        notes = self.movement.count(event.steps, moved=event.moved)
        return [*notes, *([] if waits else self._resume()), *self._offer(), *self._advance()]

    def _resume(self) -> list[Effect]:
        """Resume the training thread if a call holds it."""
        held, self.held = self.held, None
        return [] if held is None else [do.ResumeTraining()]

    def _encoding_finished(self, event: Done[do.FinishEncoding], now: float) -> list[Effect]:
        self.busy, sequence = None, event.of.sequence
        if self.delta is None or self.delta.key.sequence != sequence:
            return [do.DropDelta(sequence), *self._advance()]  # settled while it was coded
        self.coded = True
        return self._advance()

    def _acknowledged(self, event: Received[msg.Accepted], now: float) -> list[Effect]:
        if self.delta is None or self.delta.key != event.message.key:
            return []
        self.tokens_acknowledged += self.delta.tokens
        self.violations = 0
        self.shutdown.uploads.arrived(now)
        return self._settled(now)

    def _delta_refused(self, event: Received[msg.Declined], now: float) -> list[Effect]:
        declined = event.message
        if self.delta is None or self.delta.key != declined.key:
            return []
        self.shutdown.uploads.interrupt()
        if declined.code == "later":
            self.deadlines.set("offer", now + REOFFER_S)
            return []
        tokens = self.delta.tokens
        text = f"the parameter server refused a delta of {tokens} tokens: {declined.text}"
        if declined.code == "stale":
            self.sends_from = self.version_sync.latest.version
            text += (
                "; a step that compiles or loads may take that long: the next delta is measured"
                f" from version {self.sends_from}"
            )
        if declined.code == "quarantined":
            self.discard = True
            text += "; going back to the run's weights"
        return [Note(text, "warning"), *self._resume(), *self._settled(now)]

    def _settled(self, now: float) -> list[Effect]:
        assert self.delta is not None
        drop = do.DropDelta(self.delta.key.sequence)
        self.delta = None
        self.deadlines.cancel("offer")
        # A delta that the worker is coding at this moment is dropped when the worker is done.
        effects: list[Effect] = [] if self.busy == "coding" else [drop]
        return effects + self._advance()

    # --- the next thing to do ---

    def _advance(self) -> list[Effect]:
        """Start everything that is possible now; called after every change."""
        if not self.shutdown.training:
            return self._wind_down()
        if self.shutdown.asked or not self.attached:
            return []
        effects: list[Effect] = []
        if self.connected and self.busy != "replacing":
            effects.extend(self.version_sync.fetch())
        if self.busy is not None:
            return effects
        if self.version_sync.here is not None:
            if self.delta is not None and not self.coded:
                self.busy = "coding"
                return [*effects, do.FinishEncoding(self.delta.key.sequence)]
            version, self.version_sync.here = self.version_sync.here, None
            self.busy = "replacing"
            return [*effects, do.ReplaceBase(version)]
        if self.discard and self.base.version >= 0:
            return effects + self._rebase()
        return effects + self._answer_call()

    def _answer_call(self) -> list[Effect]:
        call = self.call
        if call is None and self.leading.is_due:
            call = msg.Call(msg.OWN_PACE)
        if call is None or self.delta is not None or self.model_version < 0:
            return []
        if self.model_version < min(self.sends_from, self.version_sync.latest.version):
            return []  # its delta would be refused too
        if call.trains and call.round != self.model_version:
            if call.round < self.model_version:
                self.call = None  # that round is over
            return []  # a round is trained from the version that it starts from
        self.answering, self.call = call, None
        return [self._take_snapshot(call)]

    def _take_snapshot(self, call: msg.Call) -> Effect:
        self.sequence += 1
        self.leading.reached = False
        holds = call.last or call.trains
        self.busy, self.held = "snapshot", call if holds else None
        return do.TakeSnapshot(self.sequence, holds, call.round if call.trains else -1)

    # --- the end ---

    def _run_ended(self, event: Received[msg.Stop], now: float) -> list[Effect]:
        self.shutdown.refusing = True
        reason = event.message.reason
        return [SendGoodbye(reason), *self.shutdown.ask(reason, 0, now)]

    def _training_ended(self, event: TrainingEnded, now: float) -> list[Effect]:
        effects = self.shutdown.training_ended(event.error, now, joined=self.model_version >= 0)
        return effects or self._wind_down()

    def _wind_down(self) -> list[Effect]:
        """Send what was trained last, then finish; called after every change once training ends."""
        if self.busy is not None or self.delta is not None:
            return []
        if not self.shutdown.emptied:
            self.shutdown.emptied = True
            # While the parameter server collects for this version's round, it counts as the answer.
            self.answering = msg.Call(self.version_sync.latest.version)
            return [self._take_snapshot(self.answering)]
        return self.shutdown.finish()
