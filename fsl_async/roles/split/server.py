"""Decides what the split server does. Pure: no socket, clock, random number or tensor.

It holds the upper part of the model (x_s, or a replica of it per client), and per client perhaps an
auxiliary model with its buffer. It opens no rounds: it trains uploads as they arrive. What a method
decides is in `fsl_async.roles.split.methods`.

Rules
- Uploads are trained one at a time, in the order in which they are complete; those of one client in
  the order of their keys.
- An upload is trained once. A key that was trained is answered as known, with its answer if that is
  still kept: the answers to the last `in_flight` uploads of each client, until the client has them.
- A client has at most `in_flight` uploads here that are not trained. Further ones are refused with
  "later".
- An upload of a round too far behind the newest is declined, before it is transferred and again
  before it is trained.
- Uploads that were complete when their client left are trained; the others are dropped, and the
  client offers them again.
- Auxiliary models are aligned after the first upload of a client in a round that aligns, with x_s
  as it is then. Versions of a client's model grow; a number is not given twice, also when a split
  server that died had given it. A client that holds another version than is kept here gets the one
  that is kept.
- Replicas of the clients that reported a round as done are averaged, weighted by samples, before
  the first upload of a later round, and when the run is over.
- A checkpoint is made every `CHECKPOINT_EVERY` uploads and before the first upload of a later
  round, between two trainings, with the progress of all clients. One at a time; several that fall
  due meanwhile are one more. A failed one is tried again.
- A split server that is killed goes on from its last checkpoint. Uploads after it are lost with the
  weights that were trained on them: the ledger records them as dropped, and clients offer again
  those they have kept.
- The first client's run is the split server's run, for good. Every client's part must be that of
  the configuration.
- The end: complete uploads are trained, then a last checkpoint is made. It comes when the run is
  over, as clients or the parameter server report, or when the operator asks for it. Asked while the
  run is not known to be over, the split server only leaves: it sends the answers that clients wait
  for, ends their sessions, and admits no client. They go on with the process that comes after it.
  It also leaves after `alone_s` without a client and without the parameter server
  (`fsl_async.roles.split.server_state`).

    state      event or message         -> effects
    any        SplitRecovered              RecordUpload "dropped" for all that is lost
    any        SplitHello                  AdmitSplit, SendAuxiliary when versions differ | Refuse
    serving    SmashedMeta                 ReceiveUpload | DeclineStream and Send AlreadyTrained
                                           (SendAnswer) | DeclineStream and Send UploadRefused
    any        UploadReceived              TrainUpload when no other is trained or before it
    training   UploadTrained               RecordUpload; Send Trained | SendAnswer | Send
                                           UploadRefused; RecordAuxiliary, Align; next TrainUpload
    aligning   Aligned                     SendAuxiliary; the next TrainUpload
    averaging  ReplicasAveraged            the next TrainUpload
    any        AnswerSent                  DropAnswer
    any        RoundDone                   Send RoundAcknowledged
    any        CheckpointWritten           Send Durable
    any        CheckpointFailed            timer "retry", then Checkpoint again
    any        StreamLost of an upload     Send UploadRefused "later"
    any        ClientLeft                  DropUpload for all that is not trainable, ForgetSteps
    any        PsHello                     AdmitSplit | Refuse
    any        PsEnded, RunOver            training goes on to its end, AverageReplicas,
               from all                    Checkpoint, Send Ended, Finish
    any        DrainAsked,                 the same; while the run is not known to be over: no
               timer "alone"               AverageReplicas, and once answers are sent EndSession
                                           instead of Send Ended
    ending     timer "drain"               untrained uploads are dropped, no answer is waited for
    done       any but a hello             nothing
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fsl_async.roles.machine import (
    ClientLeft,
    Deadlines,
    DeclineStream,
    DrainAsked,
    Effect,
    EndSession,
    Event,
    Finish,
    Greeted,
    Note,
    Offered,
    Received,
    Refuse,
    RoleMachine,
    Send,
    StreamLost,
    TimerFired,
)
from fsl_async.roles.messages import Message
from fsl_async.roles.phrasing import counted
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.events import SplitProgress
from fsl_async.roles.split.messages import UploadKey, UploadRefused
from fsl_async.roles.split.methods import method_of
from fsl_async.roles.split.server_state import (
    ALONE,
    RETRY_S,
    Checkpoints,
    Peer,
    SplitShutdown,
    Upload,
    refusal_of,
    replicas_due,
    resumed,
)

if TYPE_CHECKING:
    from fsl_async.config.settings import Config


MAX_CLIENTS = 1000


class SplitServerMachine(RoleMachine):
    """A run at the split server.

    Shells use `handle` and `next_deadline`; the state is there to be read.
    """

    senders = "a client"

    def __init__(self, config: Config, architecture: Mapping[str, str]) -> None:
        self.config = config
        self.method = method_of(config.split)
        self.architecture = dict(architecture)
        self.run = ""
        self.round = -1
        self.averaged = -1
        self.uploads = 0
        self.peers: dict[str, Peer] = {}
        self.ready: deque[UploadKey] = deque()
        self.busy: Effect | None = None  # being carried out by the training thread
        self.deadlines = Deadlines()
        self.shutdown = SplitShutdown(self.deadlines, config.split.alone_s)
        self.checkpoints = Checkpoints(self.deadlines)
        self.handlers = {
            ev.SplitRecovered: self._recovered,
            msg.SplitHello: self._hello,
            msg.PsHello: self._ps_connected,
            ClientLeft: self._left,
            msg.SmashedMeta: self._offered,
            ev.UploadReceived: self._received,
            ev.UploadTrained: self._trained,
            ev.Aligned: self._aligned,
            ev.ReplicasAveraged: self._averaged,
            ev.AnswerSent: self._answer_sent,
            msg.RoundDone: self._round_done,
            msg.RunOver: self._run_over,
            ev.CheckpointWritten: self._written,
            ev.CheckpointFailed: self._write_failed,
            StreamLost: self._stream_lost,
            DrainAsked: lambda event, now: self._drain(event.reason, now),
            ev.PsEnded: self._ps_ended,
            TimerFired: self._timers,
        }

    @property
    def ended(self) -> bool:
        """Nothing is done any more."""
        return self.shutdown.done

    @property
    def run_over(self) -> bool:
        """It has ended, with its run."""
        return self.shutdown.done and not self.shutdown.leaves

    def incarnation_of(self, name: str) -> int | None:
        """The incarnation that has, or had, a session under this name; None: there was none."""
        if self.shutdown.is_ps(name):
            return self.shutdown.ps_incarnation
        peer = self.peers.get(name)
        return peer.incarnation if peer is not None else None

    def progress(self) -> SplitProgress:
        """Return all that a checkpoint has to hold besides tensors, as of now."""
        clients = {name: peer.progress for name, peer in self.peers.items()}
        return SplitProgress(self.run, self.round, self.averaged, self.uploads, clients)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event and return effects in the order in which they are to be carried out."""
        is_over = self.ended and not isinstance(event, Greeted)
        return [] if is_over else super().handle(event, now)

    # --- what follows from the state ---

    def _update_liveness(self, now: float) -> None:
        clients = any(peer.connected for peer in self.peers.values())
        self.shutdown.update(self.run, now, clients=clients)

    def _average(self, round_: int) -> Effect | None:
        """The average that is due before an upload of this round is trained."""
        if not self.method.replicas:
            return None
        return replicas_due(self.peers.values(), self.averaged, round_)

    def _too_late(self, key: UploadKey) -> UploadRefused | None:
        behind = self.round - key.round
        if behind > self.method.max_stale_rounds:
            return UploadRefused(key, "stale", f"{counted(behind, 'round')} behind the newest")
        return None

    # --- start and sessions ---

    def _recovered(self, event: ev.SplitRecovered, now: float) -> list[Effect]:
        found = event.progress
        self.run, self.round, self.averaged = found.run, found.round, found.averaged
        self.uploads = found.uploads
        self.peers = {name: Peer(name, one) for name, one in found.clients.items()}
        for name, version in event.auxiliary_seen.items():
            peer = self.peers.setdefault(name, Peer(name))
            peer.change(auxiliary_seen=max(peer.progress.auxiliary_seen, version))
        self._update_liveness(now)
        return resumed(event)

    def _ps_connected(self, event: Greeted[msg.PsHello], now: float) -> list[Effect]:
        effects = self.shutdown.admit_ps(event, self.run)
        if isinstance(effects[0], split.AdmitSplit):
            self.run = event.message.run
            self._update_liveness(now)
        return effects

    def _hello(self, event: Greeted[msg.SplitHello], now: float) -> list[Effect]:
        refusal = refusal_of(event, self.run, self.architecture)
        if self.shutdown.asked:
            refusal = self.shutdown.hello_refusal()
        elif event.peer not in self.peers and len(self.peers) >= MAX_CLIENTS:
            clients = counted(len(self.peers), "client")
            refusal = "full", f"this server keeps the state of {clients} already"
        if refusal is not None:
            return [Refuse(event.peer, *refusal)]
        self.run = event.message.run
        peer = self.peers.setdefault(event.peer, Peer(event.peer))
        effects = [*peer.lose_session(), *peer.begin_session(event)]
        self._update_liveness(now)
        kept = peer.progress.auxiliary
        welcome = msg.SplitWelcome(self.run, self.method.in_flight, peer.last_trained, kept)
        effects.append(split.AdmitSplit(event.peer, event.incarnation, welcome))
        if self.method.aligned and event.message.auxiliary != kept:
            effects.append(self._send_auxiliary(peer))
        return effects

    def _left(self, event: ClientLeft, now: float) -> list[Effect]:
        if self.shutdown.is_ps(event.peer):
            if self.shutdown.ps_incarnation == event.incarnation:
                self.shutdown.ps_incarnation = None
            self._update_liveness(now)
            return []
        peer = self.peers.get(event.peer)
        if peer is None or peer.incarnation != event.incarnation or not peer.connected:
            return []
        effects = [*peer.lose_session(), *self._end_if_over(now)]
        self._update_liveness(now)
        return [*effects, *self._next(now)] if self.shutdown.asked else effects

    def _send(self, peer: Peer, key: UploadKey, message: Message) -> list[Effect]:
        return [Send(peer.name, message)] if peer.is_connected(key) else []

    # --- uploads ---

    def _offered(self, event: Offered[msg.SmashedMeta], now: float) -> list[Effect]:
        offer, key = event.message, event.message.key
        peer = self.peers.get(event.peer)
        if peer is None or key.client != event.peer or not peer.is_connected(key):
            return [DeclineStream(event.peer, event.stream, "not yours")]
        refusal = peer.refusal(key, self.method.in_flight)
        refusal = refusal or self.shutdown.upload_refusal(key) or self._too_late(key)
        if refusal is None:
            peer.uploads.setdefault(key, Upload(offer)).offer = offer
            return [split.ReceiveUpload(event.peer, event.stream, offer)]
        decline = DeclineStream(event.peer, event.stream, refusal.code)
        if refusal.code == "here":
            return [decline]  # it is answered when it is trained
        if refusal.code == "known":
            kept = key in peer.answers
            again = [split.SendAnswer(event.peer, peer.answers[key])] if kept else []
            known = Send(event.peer, msg.AlreadyTrained(key, kept))
            return [decline, known, *again, *self._stays(peer, offer)]
        return [decline, *self._decline(peer, refusal)]

    def _decline(self, peer: Peer, refusal: UploadRefused) -> list[Effect]:
        """An upload will not be trained, or not now."""
        refused = self._send(peer, refusal.key, refusal)
        if refusal.code == "later" or any(one.key == refusal.key for one in peer.declined):
            return refused
        peer.declined.append(refusal)
        # Recorded first: an upload whose client got an answer is in the ledger, whenever
        # this process dies.
        reason = f"{refusal.code}: {refusal.text}"
        return [split.RecordUpload(refusal.key, "declined", reason), *refused]

    def _received(self, event: ev.UploadReceived, now: float) -> list[Effect]:
        peer = self.peers[event.key.client]
        upload = peer.uploads.get(event.key)
        if upload is None:
            return [split.DropUpload(event.key)]  # its session ended while it was decoded
        upload.received = True
        self.ready.extend(peer.ready())
        return self._next(now)

    def _stream_lost(self, event: StreamLost, now: float) -> list[Effect]:
        if not event.stream.startswith("up:"):
            return []  # the client offers its upload again when the answer does not come
        key = UploadKey.parse(event.stream.removeprefix("up:"))
        peer = self.peers.get(event.peer)
        if peer is None or key not in peer.uploads:
            return []
        return self._send(peer, key, UploadRefused(key, "later", event.reason[:200]))

    def _answer_sent(self, event: ev.AnswerSent, now: float) -> list[Effect]:
        peer = self.peers[event.peer]
        if event.key not in peer.answers:
            return []
        del peer.answers[event.key]
        dropped = split.DropAnswer(event.key)
        return [dropped, *self._next(now)] if self.shutdown.asked else [dropped]

    # --- training ---

    def _next(self, now: float) -> list[Effect]:
        """Start the next job of the training thread, and the checkpoint due between two jobs."""
        effects: list[Effect] = []
        while self.busy is None and self.ready:
            key = self.ready[0]
            peer = self.peers[key.client]
            late = None if self.shutdown.run_over else self._too_late(key)
            if late is not None:
                self.ready.popleft()
                del peer.uploads[key]
                effects += [split.DropUpload(key), *self._decline(peer, late)]
                continue
            self.busy = self._average(key.round)
            if self.busy is None:
                if key.round > self.round:
                    self.checkpoints.request()
                effects.extend(self.checkpoints.due(self.progress))
                self.ready.popleft()
                offer = peer.uploads[key].offer
                wants = offer.wants_gradient and self.method.gradients
                self.busy = split.TrainUpload(key, wants, offer.version)
            effects.append(self.busy)
        if self.busy is None:
            effects.extend(self.checkpoints.due(self.progress))
            effects.extend(self._end_if_done())
        return effects

    def _averaged(self, event: ev.ReplicasAveraged, now: float) -> list[Effect]:
        self.busy = None
        self.averaged = max(self.averaged, event.round)
        self.checkpoints.changed()
        return self._next(now)

    def _trained(self, event: ev.UploadTrained, now: float) -> list[Effect]:
        key = event.key
        peer = self.peers[key.client]
        offer = peer.uploads.pop(key).offer
        self.busy = None
        if event.problem is not None:
            text = f"refused upload {key.text}: {event.problem}"
            refusal = UploadRefused(key, "refused", event.problem)
            effects = [Note(text, "warning"), *self._decline(peer, refusal)]
            return [*effects, *self._stays(peer, offer), *self._next(now)]
        self.uploads += 1
        self.checkpoints.changed()
        self.round = max(self.round, key.round)
        peer.change(last=key, round=key.round)
        effects = [split.RecordUpload(key, "trained"), *self._answer(peer, event)]
        if self.method.aligns_in(key.round) and peer.progress.aligned_round < key.round:
            version = peer.progress.auxiliary_seen + 1
            self.busy = split.Align(peer.name, version, key.round)
            effects += [split.RecordAuxiliary(peer.name, version), self.busy]
        else:
            effects.extend(self._stays(peer, offer))
        return [*effects, *self._next(now)]

    def _answer(self, peer: Peer, event: ev.UploadTrained) -> list[Effect]:
        """Report that an upload is trained: by its answer where it has one."""
        key = event.key
        if self.method.legs > 1:
            peer.open_step = key if not key.leg and peer.is_connected(key) else None
            if not key.leg and peer.open_step is None:
                return [split.DropAnswer(key), split.ForgetSteps(peer.name)]
        if not event.answer:
            return self._send(peer, key, msg.Trained(key, event.loss))
        if key.incarnation != peer.incarnation:
            return [split.DropAnswer(key)]
        meta = peer.answers[key] = msg.GradientMeta(key, event.loss, event.updates)
        effects: list[Effect] = []
        while len(peer.answers) > self.method.in_flight:
            oldest = next(iter(peer.answers))
            del peer.answers[oldest]
            effects.append(split.DropAnswer(oldest))
        return [*effects, split.SendAnswer(peer.name, meta)] if peer.connected else effects

    # --- auxiliary models, rounds ---

    def _stays(self, peer: Peer, offer: msg.SmashedMeta) -> list[Effect]:
        """Send the newest auxiliary model, or that none comes, where this upload expects one."""
        aligning = isinstance(self.busy, split.Align) and self.busy.client == peer.name
        if not offer.alignment_due or not peer.is_connected(offer.key) or aligning:
            return []
        if self.method.aligned and peer.progress.auxiliary != offer.auxiliary:
            return [self._send_auxiliary(peer)]
        stays = msg.AuxiliaryStays(offer.key.round, peer.progress.auxiliary)
        return [Send(peer.name, stays)]

    def _send_auxiliary(self, peer: Peer) -> Effect:
        meta = msg.AuxiliaryMeta(peer.progress.auxiliary, peer.progress.aligned_round)
        return split.SendAuxiliary(peer.name, meta)

    def _aligned(self, event: ev.Aligned, now: float) -> list[Effect]:
        assert isinstance(self.busy, split.Align)
        round_, self.busy = self.busy.round, None
        peer = self.peers[event.client]
        effects: list[Effect] = []
        peer.change(auxiliary_seen=event.version, aligned_round=round_)
        self.checkpoints.changed()
        if event.problem is None:
            peer.change(auxiliary=event.version)
            if peer.connected:
                effects.append(self._send_auxiliary(peer))
        else:
            text = f"the auxiliary model of {peer.name} stays as it is: {event.problem}"
            effects.append(Note(text, "warning"))
            if peer.connected:
                stays = msg.AuxiliaryStays(round_, peer.progress.auxiliary)
                effects.append(Send(peer.name, stays))
        return [*effects, *self._next(now)]

    def _round_done(self, event: Received[msg.RoundDone], now: float) -> list[Effect]:
        peer, done = self.peers.get(event.peer), event.message
        if peer is None or not peer.connected:
            return []
        peer.round_done(done.round, done.samples)
        return [Send(event.peer, msg.RoundAcknowledged(done.round))]

    # --- checkpoints ---

    def _written(self, event: ev.CheckpointWritten, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for name, key in self.checkpoints.written().items():
            effects.extend(self._send(self.peers[name], key, msg.Durable(key)))
        return [*effects, *self._next(now)]

    def _write_failed(self, event: ev.CheckpointFailed, now: float) -> list[Effect]:
        text = f"checkpoint {event.number} could not be written: {event.reason}"
        if self.shutdown.asked:
            self.checkpoints.written()
            return [Note(text, "warning"), *self._end(text)]
        self.checkpoints.failed(now)
        return [Note(f"{text}; next try in {RETRY_S:g} s", "warning")]

    # --- the end ---

    def _run_over(self, event: Received[msg.RunOver], now: float) -> list[Effect]:
        peer = self.peers.get(event.peer)
        if peer is not None and peer.connected:
            peer.run_over = True
        elif not self.shutdown.is_ps(event.peer):
            return []
        self.shutdown.run_over = True
        if self.deadlines.when("over") is None:
            self.deadlines.set("over", now + self.config.session.drain_s)
        return self._end_if_over(now)

    def _ps_ended(self, event: ev.PsEnded, now: float) -> list[Effect]:
        self.shutdown.run_over = True
        return self._drain(event.reason, now)

    def _end_if_over(self, now: float) -> list[Effect]:
        """Begin to end once a peer, and every connected client, has reported the run's end."""
        waits = any(peer.connected and not peer.run_over for peer in self.peers.values())
        if waits or self.deadlines.when("over") is None:
            return []
        return self._drain("the run has ended", now)

    def _drain(self, reason: str, now: float) -> list[Effect]:
        if self.shutdown.asked:
            return []
        self.shutdown.reason = reason
        self.deadlines.clear()
        self.deadlines.set("drain", now + self.config.session.drain_s)
        return [Note(f"ending: {reason}"), *self._next(now)]

    def _timers(self, event: TimerFired, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for name in self.deadlines.pop_due(now):
            if name == "over":
                effects.extend(self._drain("the run has ended", now))
            elif name == ALONE:
                effects.extend(self._drain(self.shutdown.alone_reason(), now))
            elif name == "retry":
                effects.extend(self._next(now))
            else:  # drain: only the job that runs and the checkpoint are waited for
                effects.extend(split.DropUpload(key) for key in self.ready)
                for key in self.ready:
                    del self.peers[key.client].uploads[key]
                self.ready.clear()
                effects.extend(self._next(now))
        return effects

    def _end_if_done(self) -> list[Effect]:
        if not self.shutdown.asked or self.ready or self.checkpoints.writing is not None:
            return []
        self.busy = self._average(self.round + 1) if self.shutdown.run_over else None
        if self.busy is not None:
            return [self.busy]
        self.checkpoints.request()
        last = self.checkpoints.due(self.progress)
        if last:
            return last
        in_time = self.deadlines.when("drain") is not None
        waits = any(peer.connected and peer.answers for peer in self.peers.values())
        return [] if self.shutdown.leaves and waits and in_time else self._end()

    def _end(self, problem: str = "") -> list[Effect]:
        """The last effects; with a problem the process fails."""
        shutdown, reason = self.shutdown, self.shutdown.reason or ""
        reason = f"{reason}; {problem}" if problem else reason
        shutdown.done = True
        self.deadlines.clear()
        here = [peer.name for peer in self.peers.values() if peer.connected]
        here += [msg.PS_ROLE] if self.shutdown.ps_incarnation is not None else []
        effects: list[Effect] = [
            EndSession(name, reason) if shutdown.leaves else Send(name, msg.Ended(reason))
            for name in here
        ]
        return [*effects, Finish(reason, 1 if problem else 0)]
