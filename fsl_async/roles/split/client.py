"""A client's decisions towards the split server. Pure: no socket, no clock, no chance, no tensor.

The training thread computes up to the cut and puts what is to be sent into a queue of `in_flight` slots; what it decides by itself (which
batches, whether to wait) is the method's (`roles.split_methods`). The machine gets uploads to the server, and answers back, once each.

Rules
- Uploads are offered in the order of their keys, at most `in_flight` at a time. A slot is free again when its upload is settled: trained, and
  its gradient here where one is wanted; or given up.
- What is not settled is offered again after every loss, with the same key. A gradient that the server does not have any more is given
  up: that batch trains nothing here.
- The last `retain` settled uploads are kept until a checkpoint of the server's has them. A server that comes back without them is offered
  them again, without a gradient wanted.
- An auxiliary model that comes is installed, whatever its version: the server's is the one that counts. Who waits for one goes on with the
  old when the server says that none comes, and when a new session shows that nothing is due.
- The end of a round is said to the server when everything of it is settled, again in every session until it is noted. Where the method
  needs it noted (`waits_at_round_end`), the training thread waits; else it goes on at once.
- A server that ends before the run does is waited for, as one that died is: another process goes on in its folder.
- When the run is over, or the server says that it is, nothing is waited for: whatever waits is given up.

    state      event                         -> effects
    any        SplitWelcomed                    OfferUpload for all that is missing there; Tell RoundDone
    any        UploadReady                      OfferUpload when there is room
    joined     UploadAcknowledged               ReportLoss, FreeSlot
    joined     UploadAlreadyTrained                      FreeSlot; AbandonUpload when a gradient is wanted and gone
    joined     UploadDeclined                   AbandonUpload, FreeSlot, DropUpload; "later": timer "offer"
    joined     AnswerOffered, AnswerReceived    ReceiveAnswer; DeliverAnswer, FreeSlot
    joined     AuxiliaryOffered, ...Received    ReceiveAuxiliary; InstallAuxiliary
    joined     AuxiliaryUnchanged               KeepAuxiliary
    any        UploadsDurable                   DropUpload
    training   RoundEnded                       Tell RoundDone once all is settled; SettleRound
    joined     RoundAcknowledged                    SettleRound where it was waited for
    any        StreamLost                       timer "offer", then OfferUpload
    any        RunEnded                         Tell RunOver, AbandonUpload for all that waits, Leave
    any        SplitServerEnded                 AbandonUpload for all that waits, now and later
    any        HelloRefused                    the same, and Finish; "leaving": timer "dial", then DialAgain
    any        TrainingEnded                    Leave once all is settled, or after `drain_s`
    over       UploadReady, RoundEnded          AbandonUpload and FreeSlot; SettleRound
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from attrs import mutable

from fsl_async.roles.machine import (
    Deadlines,
    DeclineStream,
    Effect,
    Event,
    Finish,
    HelloRefused,
    Note,
    RunEnded,
    Send,
    SendGoodbye,
    SessionLost,
    StreamLost,
    TimerFired,
    TrainingEnded,
)
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.events import UploadKey
from fsl_async.roles.split.methods import SplitRules, method_of
from fsl_async.roles.sync.client_state import EXIT_REFUSED, SERVER


@mutable
class Sent:
    """An upload that is not forgotten. It is settled when the training thread has nothing to wait for any more."""

    key: UploadKey
    offer: split.OfferUpload
    at_server: str = (
        "missing"  # as far as this session knows: missing | open (offered, not answered) | there
    )
    settled: bool = False
    not_before: float = 0.0
    loss: float = 0.0


class SplitClientMachine:
    """One client's dealings with the split server. `handle` and `next_deadline` are the whole interface."""

    def __init__(self, rules: SplitRules, name: str, incarnation: int) -> None:
        self.rules = rules
        self.method = method_of(rules)
        self.name = name
        self.incarnation = incarnation
        self.connected = False
        self.in_flight = self.method.in_flight
        self.sent: dict[UploadKey, Sent] = {}  # in the order of their keys
        self.auxiliary = -1  # version that is installed
        self.aligning: int | None = None  # round for which a model is expected
        self.coming: tuple[str, int, int] | None = None  # stream, version, round
        self.done: tuple[int, int] = (-1, 0)  # the last round that is done, and its samples
        self.said = False  # in this session
        self.noted = True
        self.waiting_round: int | None = None  # the training thread waits at the end of it
        self.over = False  # nothing is sent any more
        self.training = True
        self.deadlines = Deadlines()
        self._handlers: dict[type[Event], Callable[[Any, float], list[Effect]]] = {
            TimerFired: self._timers,
            ev.SplitWelcomed: self._welcomed,
            SessionLost: self._lost,
            HelloRefused: self._refused,
            ev.SplitServerEnded: self._server_ended,
            ev.UploadReady: self._ready,
            ev.UploadAcknowledged: self._acknowledged,
            ev.UploadAlreadyTrained: self._known,
            ev.UploadDeclined: self._unwanted,
            ev.UploadsDurable: self._durable,
            ev.AnswerOffered: self._answer_offered,
            ev.AnswerReceived: self._answer_received,
            ev.AuxiliaryOffered: self._auxiliary_offered,
            ev.AuxiliaryReceived: self._auxiliary_received,
            ev.AuxiliaryUnchanged: self._auxiliary_unchanged,
            ev.RoundEnded: self._round_ended,
            ev.RoundAcknowledged: self._round_noted,
            StreamLost: self._stream_lost,
            RunEnded: self._run_ended,
            TrainingEnded: self._training_ended,
        }

    def next_deadline(self) -> float | None:
        """When `handle(TimerFired())` is due, in seconds of the caller's clock."""
        return self.deadlines.next()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event and return what is to be done, in order."""
        handler = self._handlers.get(type(event))
        return handler(event, now) if handler is not None else []

    @property
    def unsettled(self) -> list[Sent]:
        """What the training thread may wait for, oldest first."""
        return [sent for sent in self.sent.values() if not sent.settled]

    def hello(self, run: str, shard: int, architecture: dict[str, str]) -> msg.SplitHello:
        """What to say first in a session; made anew for each."""
        round_, samples = self.done if self.noted else (-1, 0)
        return msg.SplitHello(
            run, msg.ROLE, shard, dict(architecture), self.auxiliary, round_, samples
        )

    # --- the session ---

    def _welcomed(self, event: ev.SplitWelcomed, now: float) -> list[Effect]:
        if self.over:
            return []
        self.connected = True
        self.deadlines.cancel("dial")
        self.in_flight = max(1, min(self.method.in_flight, event.in_flight))
        if event.incarnation is not None and event.incarnation != self.incarnation:
            self._rename(event.incarnation)  # the handshake raised it; nothing was sent before
        for sent in self.sent.values():
            has = event.last is not None and sent.key <= event.last
            sent.at_server = "there" if sent.settled and has else "missing"
            sent.not_before = 0.0
        self.said = False
        effects: list[Effect] = []
        missing = [sent for sent in self.sent.values() if sent.at_server == "missing"]
        due = any(sent.offer.alignment_due for sent in missing)
        if self.aligning is not None and not due and event.auxiliary == self.auxiliary:
            effects.extend(self._keep_auxiliary())  # it was aligned by a server that is no more
        return [*effects, *self._advance(now)]

    def _rename(self, incarnation: int) -> None:
        self.incarnation = incarnation
        for sent in self.sent.values():
            sent.key = attrs.evolve(sent.key, incarnation=incarnation)
            sent.offer = attrs.evolve(sent.offer, key=sent.key)
        self.sent = {sent.key: sent for sent in self.sent.values()}

    def _lost(self, event: SessionLost, now: float) -> list[Effect]:
        was, self.connected = self.connected, False
        self.coming = None
        self.deadlines.cancel("offer")
        if not was or self.over:
            return []
        text = f"the split server is away ({event.reason}); uploads wait for it"
        return [Note(text, "warning")]

    def _refused(self, event: HelloRefused, now: float) -> list[Effect]:
        if event.code == "finished":
            return self._server_ended(ev.SplitServerEnded(event.text), now)
        if event.code == "leaving":
            if not self.over:
                self.deadlines.set("dial", now + self.rules.reoffer_s)
            return []
        return [*self._give_up_all(event.text), Finish(event.text, EXIT_REFUSED)]

    def _server_ended(self, event: ev.SplitServerEnded, now: float) -> list[Effect]:
        if self.over:
            return []
        note = Note(f"the split server has ended: {event.reason}", "warning")
        return [note, *self._give_up_all("the split server has ended")]

    # --- uploads ---

    def _ready(self, event: ev.UploadReady, now: float) -> list[Effect]:
        key = UploadKey(self.name, self.incarnation, event.round, event.step, event.leg)
        offer = split.OfferUpload(
            key,
            event.version,
            self.auxiliary,
            event.samples,
            event.wants_gradient,
            event.alignment_due,
        )
        sent = self.sent[key] = Sent(key, offer)
        if event.alignment_due:
            self.aligning = event.round
        return self._give_up(sent, "nothing is sent any more") if self.over else self._offer(now)

    def _offer(self, now: float) -> list[Effect]:
        """Offer what is missing at the server, in order, as far as there is room."""
        if not self.connected:
            return []
        effects: list[Effect] = []
        room = self.in_flight - sum(sent.at_server == "open" for sent in self.sent.values())
        for sent in self.sent.values():
            if sent.at_server != "missing":
                continue
            if room < 1:
                break
            if sent.not_before > now:
                self.deadlines.set("offer", sent.not_before)
                break  # what comes after it must not overtake it
            sent.at_server = "open"
            room -= 1
            wants = sent.offer.wants_gradient and not sent.settled
            effects.append(attrs.evolve(sent.offer, wants_gradient=wants))
        return effects

    def _later(self, sent: Sent, now: float) -> list[Effect]:
        sent.at_server = "missing"
        sent.not_before = now + self.rules.reoffer_s
        return self._offer(now)

    def _settle(self, sent: Sent, now: float) -> list[Effect]:
        """The training thread has what it can get for this upload; it is kept for a while all the same."""
        effects: list[Effect] = []
        sent.at_server = "there"
        if not sent.settled:
            sent.settled = True
            effects.append(split.FreeSlot(sent.key))
        kept = [each for each in self.sent.values() if each.settled]
        for old in kept[: max(0, len(kept) - self.rules.retain)]:
            del self.sent[old.key]
            effects.append(split.DropUpload(old.key))
        return [*effects, *self._advance(now)]

    def _advance(self, now: float) -> list[Effect]:
        """Do what has become possible; called after every change."""
        if not self.training and not self.over and not self.unsettled:
            return self._leave("training has ended")
        return [*self._offer(now), *self._say_done()]

    def _acknowledged(self, event: ev.UploadAcknowledged, now: float) -> list[Effect]:
        sent = self.sent.get(event.key)
        if sent is None:
            return []
        effects: list[Effect] = []
        if not sent.settled:
            effects.append(split.ReportLoss(sent.key, event.loss))
            if sent.offer.wants_gradient:
                effects.append(split.AbandonUpload(sent.key, "the server gave no gradient"))
        return [*effects, *self._settle(sent, now)]

    def _known(self, event: ev.UploadAlreadyTrained, now: float) -> list[Effect]:
        sent = self.sent.get(event.key)
        if sent is None:
            return []
        if event.answer and sent.offer.wants_gradient and not sent.settled:
            return []  # it is on its way
        gone = sent.offer.wants_gradient and not sent.settled
        effects = (
            [split.AbandonUpload(sent.key, "the server has its gradient no more")] if gone else []
        )
        return [*effects, *self._settle(sent, now)]

    def _unwanted(self, event: ev.UploadDeclined, now: float) -> list[Effect]:
        sent = self.sent.get(event.key)
        if sent is None:
            return []
        if event.code == "later":
            return self._later(sent, now)
        note = Note(f"the split server declined upload {sent.key.text}: {event.text}", "warning")
        return [note, *self._give_up(sent, event.text), *self._advance(now)]

    def _give_up(self, sent: Sent, reason: str) -> list[Effect]:
        """Nothing comes of an upload any more: forget it."""
        del self.sent[sent.key]
        effects: list[Effect] = []
        if sent.offer.alignment_due and self.aligning == sent.key.round:
            effects.extend(self._keep_auxiliary())
        if not sent.settled:
            if sent.offer.wants_gradient:
                effects.append(split.AbandonUpload(sent.key, reason))
            effects.append(split.FreeSlot(sent.key))
        return [*effects, split.DropUpload(sent.key)]

    def _durable(self, event: ev.UploadsDurable, now: float) -> list[Effect]:
        durable = [
            sent.key for sent in self.sent.values() if sent.settled and sent.key <= event.key
        ]
        for key in durable:
            del self.sent[key]
        return [split.DropUpload(key) for key in durable]

    def _answer_offered(self, event: ev.AnswerOffered, now: float) -> list[Effect]:
        sent = self.sent.get(event.key)
        if sent is None or sent.settled or not sent.offer.wants_gradient:
            return [DeclineStream(SERVER, event.stream, "not wanted")]
        sent.loss = event.loss
        return [split.ReceiveAnswer(event.stream, event.key)]

    def _answer_received(self, event: ev.AnswerReceived, now: float) -> list[Effect]:
        sent = self.sent.get(event.key)
        if sent is None or sent.settled:
            return []
        return [split.DeliverAnswer(sent.key, sent.loss), *self._settle(sent, now)]

    def _stream_lost(self, event: StreamLost, now: float) -> list[Effect]:
        kind, _, text = event.stream.partition(":")
        if kind == "aux":
            self.coming = None
            return self._keep_auxiliary()
        sent = self.sent.get(UploadKey.parse(text))
        if sent is None or sent.settled or not self.connected:
            return []
        return self._later(sent, now)  # also for a gradient: the server streams it again

    # --- auxiliary models ---

    def _auxiliary_offered(self, event: ev.AuxiliaryOffered, now: float) -> list[Effect]:
        if not self.method.aligned or self.over:
            return [DeclineStream(SERVER, event.stream, "not wanted")]
        self.coming = (event.stream, event.version, event.round)
        return [split.ReceiveAuxiliary(event.stream, event.version)]

    def _auxiliary_received(self, event: ev.AuxiliaryReceived, now: float) -> list[Effect]:
        if self.coming is None or self.coming[1] != event.version:
            return []  # of a session that is over: the next one tells which version counts
        round_ = self.coming[2]
        self.coming = self.aligning = None
        self.auxiliary = event.version
        return [split.InstallAuxiliary(event.version, round_)]

    def _auxiliary_unchanged(self, event: ev.AuxiliaryUnchanged, now: float) -> list[Effect]:
        return self._keep_auxiliary()

    def _keep_auxiliary(self) -> list[Effect]:
        round_, self.aligning = self.aligning, None
        return [] if round_ is None else [split.KeepAuxiliary(round_)]

    # --- rounds ---

    def _round_ended(self, event: ev.RoundEnded, now: float) -> list[Effect]:
        if self.over:
            return [split.SettleRound(event.round)]
        self.done, self.said, self.noted = (event.round, event.samples), False, False
        self.waiting_round = event.round
        effects = self._say_done()
        return effects if self.method.waits_at_round_end else [*effects, *self._settle_round()]

    def _say_done(self) -> list[Effect]:
        """Say that the round is done once everything of it is settled."""
        round_, samples = self.done
        waits = any(sent.key.round <= round_ for sent in self.unsettled)
        if self.noted or self.said or waits or not self.connected:
            return []
        self.said = True
        return [Send(SERVER, msg.RoundDone(round_, samples))]

    def _round_noted(self, event: ev.RoundAcknowledged, now: float) -> list[Effect]:
        if event.round != self.done[0]:
            return []
        self.noted = True
        return self._settle_round()

    def _settle_round(self) -> list[Effect]:
        round_, self.waiting_round = self.waiting_round, None
        return [] if round_ is None else [split.SettleRound(round_)]

    # --- the end ---

    def _give_up_all(self, reason: str) -> list[Effect]:
        """Nothing is sent any more, and nothing waited for."""
        self.over = True
        self.deadlines.clear()
        effects: list[Effect] = []
        for sent in list(self.sent.values()):
            effects.extend(self._give_up(sent, reason))
        return [*effects, *self._keep_auxiliary(), *self._settle_round()]

    def _run_ended(self, event: RunEnded, now: float) -> list[Effect]:
        if self.over:
            return [SendGoodbye(event.reason)]
        said = [Send(SERVER, msg.RunOver(event.reason))] if self.connected else []
        return [*said, *self._give_up_all(event.reason), SendGoodbye(event.reason)]

    def _training_ended(self, event: TrainingEnded, now: float) -> list[Effect]:
        self.training = False
        if self.over:
            return []
        if event.error is not None or not self.unsettled:
            # Not the error's text: it may quote the data.
            return self._leave("training has ended" if event.error is None else "training failed")
        self.deadlines.set("end", now + self.rules.drain_s)
        return []

    def _leave(self, reason: str) -> list[Effect]:
        return [*self._give_up_all(reason), SendGoodbye(reason)]

    def _timers(self, event: TimerFired, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for name in self.deadlines.pop_due(now):
            if name == "offer":
                effects.extend(self._offer(now))
            elif name == "dial":
                effects.append(split.DialAgain())
            else:  # end
                effects.extend(self._leave("what was sent last was not answered in time"))
        return effects
