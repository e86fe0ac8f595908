"""Decides what a client of split learning does.

Pure: no socket, clock, random number or tensor.

The training thread computes up to the cut and puts uploads into a queue of `in_flight` slots; which
batches it uploads, and whether it waits, depends on the method (`fsl_async.roles.split.methods`).
The machine gets uploads to the split server, and answers back, once each.

Rules
- Uploads are offered in the order of their keys, at most `in_flight` at a time. A slot is free
  again when its upload is settled: trained, and its gradient received if one is needed; or given
  up.
- An upload that is not settled is offered again after every loss, with the same key. A gradient
  that the split server no longer has is given up: that batch trains nothing here.
- The last `RETAIN` settled uploads are kept until a checkpoint of the split server's has them. A
  split server that restarts without them is offered them again, without a gradient.
- An auxiliary model that arrives is installed, whatever its version: the split server's is the one
  that counts. A training thread that waits for one goes on with the old one when the split server
  answers that none comes, and when a new session shows that nothing is due.
- The end of a round is reported to the split server when all its uploads are settled, in every
  session until it is acknowledged. Where the method needs the acknowledgment
  (`waits_at_round_end`), the training thread waits for it.
- The client waits for a split server that leaves or dies before the run ends: another process goes
  on in its folder.
- When the run is over, or the split server has ended, nothing is waited for: all that waits is
  given up.

    state     event or message             -> effects
    any       SplitWelcome                    OfferUpload for all missing there; Send RoundDone
    any       UploadReady                     OfferUpload when a slot is free
    joined    Trained, AlreadyTrained         SettleUpload
    joined    UploadRefused                   SettleUpload, DropUpload; "later": timer "offer"
    joined    GradientMeta, VectorReceived    ReceiveVector; SettleUpload
    joined    AuxiliaryMeta, VectorReceived   ReceiveVector; InstallAuxiliary
    joined    AuxiliaryStays                  KeepAuxiliary
    any       Durable                         DropUpload
    training  RoundEnded                      Send RoundDone once all is settled; SettleRound
    joined    RoundAcknowledged               SettleRound where it was waited for
    any       SessionLost                     Note; uploads wait
    any       StreamLost                      timer "offer", then OfferUpload
    any       RunEnded                        Send RunOver, SettleUpload for all that waits,
                                              SendGoodbye
    any       Ended                           SettleUpload for all that waits, now and later
    any       HelloRefused                    the same, and Finish;
                                              "leaving": timer "dial", then DialAgain
    any       TrainingEnded                   SendGoodbye once all is settled, or after `drain_s`
    over      UploadReady, RoundEnded         SettleUpload; SettleRound
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs
from attrs import mutable

from fsl_async.errors import ExitCode
from fsl_async.roles.machine import (
    SERVER,
    Deadlines,
    DeclineStream,
    Effect,
    Finish,
    Greeted,
    HelloRefused,
    Note,
    Offered,
    Received,
    RoleMachine,
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
from fsl_async.roles.split.messages import UploadKey
from fsl_async.roles.split.methods import method_of

if TYPE_CHECKING:
    from fsl_async.config.settings import Config


RETAIN = 2
"""Trained uploads that a client keeps until a checkpoint has them, to offer them again to a server
that was killed."""


@mutable
class Sent:
    """An upload that is kept. It is settled when the training thread has nothing more to wait for.

    at_server: in this session; missing | offered (and not answered) | there.
    """

    offer: msg.SmashedMeta
    at_server: Literal["missing", "offered", "there"] = "missing"
    settled: bool = False
    not_before: float = 0.0

    @property
    def key(self) -> UploadKey:
        """The key that it is offered with."""
        return self.offer.key

    def settlement(self, reason: str) -> split.SettleUpload:
        """Return its end without an answer. reason: why one that is waited for does not come."""
        if not self.offer.wants_gradient:
            return split.SettleUpload(self.key, "none")
        return split.SettleUpload(self.key, "lost", reason=reason)


class SplitClientMachine(RoleMachine):
    """One client towards the split server. Shells use `hello`, `handle` and `next_deadline`."""

    senders = "a split server"

    def __init__(self, config: Config, name: str, incarnation: int) -> None:
        self.config = config
        self.method = method_of(config.split)
        self.name = name
        self.incarnation = incarnation
        self.connected = False
        self.in_flight = self.method.in_flight
        self.sent: dict[UploadKey, Sent] = {}  # in the order of their keys
        self.auxiliary = -1  # version that is installed
        self.aligning: int | None = None  # round for which a model is expected
        self.incoming: msg.AuxiliaryMeta | None = None  # the model that is being received
        self.done: tuple[int, int] = (-1, 0)  # the last round that is done, and its samples
        self.reported = False  # it, in this session
        self.acknowledged = True
        self.waiting_round: int | None = None  # the training thread waits at the end of it
        self.over = False  # nothing is sent any more
        self.training = True
        self.deadlines = Deadlines()
        self.handlers = {
            TimerFired: self._timers,
            msg.SplitWelcome: self._welcomed,
            SessionLost: self._lost,
            HelloRefused: self._refused,
            msg.Ended: lambda event, _: self._server_ended(event.message.reason),
            ev.UploadReady: self._ready,
            msg.Trained: self._acknowledged,
            msg.AlreadyTrained: self._already_trained,
            msg.UploadRefused: self._declined,
            msg.Durable: self._durable,
            msg.GradientMeta: self._answer_offered,
            msg.AuxiliaryMeta: self._auxiliary_offered,
            ev.VectorReceived: self._vector_received,
            msg.AuxiliaryStays: lambda *_: self._keep_auxiliary(),
            ev.RoundEnded: self._round_ended,
            msg.RoundAcknowledged: self._round_acknowledged,
            StreamLost: self._stream_lost,
            RunEnded: self._run_ended,
            TrainingEnded: self._training_ended,
        }

    @property
    def unsettled(self) -> list[Sent]:
        """Uploads that the training thread may wait for, oldest first."""
        return [sent for sent in self.sent.values() if not sent.settled]

    def hello(self, run: str, shard: int, architecture: dict[str, str]) -> msg.SplitHello:
        """The hello of the next session."""
        round_, samples = self.done if self.acknowledged else (-1, 0)
        return msg.SplitHello(
            run, msg.ROLE, shard, dict(architecture), self.auxiliary, round_, samples
        )

    # --- the session ---

    def _welcomed(self, event: Greeted[msg.SplitWelcome], now: float) -> list[Effect]:
        if self.over:
            return []
        welcome = event.message
        last = UploadKey.parse(welcome.last) if welcome.last else None
        self.connected = True
        self.deadlines.cancel("dial")
        self.in_flight = max(1, min(self.method.in_flight, welcome.in_flight))
        if event.incarnation != self.incarnation:
            self._rename(event.incarnation)  # the handshake raised it; nothing was sent before
        for sent in self.sent.values():
            has = last is not None and sent.key <= last
            sent.at_server = "there" if sent.settled and has else "missing"
            sent.not_before = 0.0
        self.reported = False
        effects: list[Effect] = []
        missing = [sent for sent in self.sent.values() if sent.at_server == "missing"]
        due = any(sent.offer.alignment_due for sent in missing)
        if self.aligning is not None and not due and welcome.auxiliary == self.auxiliary:
            effects.extend(self._keep_auxiliary())  # the split server that aligned it has died
        return [*effects, *self._advance(now)]

    def _rename(self, incarnation: int) -> None:
        self.incarnation = incarnation
        for sent in self.sent.values():
            key = attrs.evolve(sent.key, incarnation=incarnation)
            sent.offer = attrs.evolve(sent.offer, key=key)
        self.sent = {sent.key: sent for sent in self.sent.values()}

    def _lost(self, event: SessionLost, now: float) -> list[Effect]:
        was, self.connected = self.connected, False
        self.incoming = None
        self.deadlines.cancel("offer")
        if not was or self.over:
            return []
        text = f"the split server is away ({event.reason}); uploads wait for it"
        return [Note(text, "warning")]

    def _refused(self, event: HelloRefused, now: float) -> list[Effect]:
        if event.code == "finished":
            return self._server_ended(event.text)
        if event.code == "leaving":
            if not self.over:
                self.deadlines.set("dial", now + self.config.session.reoffer_s)
            return []
        return [*self._give_up_all(event.text), Finish(event.text, ExitCode.BAD_INPUT)]

    def _server_ended(self, reason: str) -> list[Effect]:
        if self.over:
            return []
        note = Note(f"the split server has ended: {reason}", "warning")
        return [note, *self._give_up_all("the split server has ended")]

    # --- uploads ---

    def _ready(self, event: ev.UploadReady, now: float) -> list[Effect]:
        key = attrs.evolve(event.meta.key, client=self.name, incarnation=self.incarnation)
        sent = Sent(attrs.evolve(event.meta, key=key, auxiliary=self.auxiliary))
        self.sent[key] = sent
        if event.meta.alignment_due:
            self.aligning = key.round
        return self._give_up(sent, "nothing is sent any more") if self.over else self._offer(now)

    def _offer(self, now: float) -> list[Effect]:
        """Offer uploads that are missing at the split server, in order, as far as slots are
        free.
        """
        if not self.connected:
            return []
        effects: list[Effect] = []
        free = self.in_flight - sum(sent.at_server == "offered" for sent in self.sent.values())
        for sent in self.sent.values():
            if sent.at_server != "missing":
                continue
            if free < 1:
                break
            if sent.not_before > now:
                self.deadlines.set("offer", sent.not_before)
                break  # later uploads must not overtake it
            sent.at_server = "offered"
            free -= 1
            wants = sent.offer.wants_gradient and not sent.settled
            effects.append(split.OfferUpload(attrs.evolve(sent.offer, wants_gradient=wants)))
        return effects

    def _later(self, sent: Sent, now: float) -> list[Effect]:
        sent.at_server = "missing"
        sent.not_before = now + self.config.session.reoffer_s
        return self._offer(now)

    def _settle(self, sent: Sent, settlement: split.SettleUpload, now: float) -> list[Effect]:
        """The training thread has all that it gets for this upload, which is kept for a while."""
        effects: list[Effect] = [] if sent.settled else [settlement]
        sent.at_server, sent.settled = "there", True
        kept = [each for each in self.sent.values() if each.settled]
        for old in kept[: max(0, len(kept) - RETAIN)]:
            del self.sent[old.key]
            effects.append(split.DropUpload(old.key))
        return [*effects, *self._advance(now)]

    def _advance(self, now: float) -> list[Effect]:
        """Do what has become possible; called after every change."""
        if not self.training and not self.over and not self.unsettled:
            return self._leave("training has ended")
        return [*self._offer(now), *self._report_done()]

    def _acknowledged(self, event: Received[msg.Trained], now: float) -> list[Effect]:
        sent = self.sent.get(event.message.key)
        if sent is None:
            return []
        return self._settle(sent, sent.settlement("the split server gave no gradient"), now)

    def _already_trained(self, event: Received[msg.AlreadyTrained], now: float) -> list[Effect]:
        sent = self.sent.get(event.message.key)
        if sent is None:
            return []
        if event.message.answer and sent.offer.wants_gradient and not sent.settled:
            return []  # its answer is on the way
        text = "the split server no longer has its gradient"
        return self._settle(sent, sent.settlement(text), now)

    def _declined(self, event: Received[msg.UploadRefused], now: float) -> list[Effect]:
        refused = event.message
        sent = self.sent.get(refused.key)
        if sent is None:
            return []
        if refused.code == "later":
            return self._later(sent, now)
        note = Note(f"the split server declined upload {sent.key.text}: {refused.text}", "warning")
        return [note, *self._give_up(sent, refused.text), *self._advance(now)]

    def _give_up(self, sent: Sent, reason: str) -> list[Effect]:
        """Forget an upload that will not be trained."""
        del self.sent[sent.key]
        effects: list[Effect] = []
        if sent.offer.alignment_due and self.aligning == sent.key.round:
            effects.extend(self._keep_auxiliary())
        if not sent.settled:
            effects.append(sent.settlement(reason))
        return [*effects, split.DropUpload(sent.key)]

    def _durable(self, event: Received[msg.Durable], now: float) -> list[Effect]:
        kept = [sent.key for sent in self.sent.values() if sent.settled]
        durable = [key for key in kept if key <= event.message.key]
        for key in durable:
            del self.sent[key]
        return [split.DropUpload(key) for key in durable]

    def _answer_offered(self, event: Offered[msg.GradientMeta], now: float) -> list[Effect]:
        sent = self.sent.get(event.message.key)
        if sent is None or sent.settled or not sent.offer.wants_gradient:
            return [DeclineStream(SERVER, event.stream, "not wanted")]
        return [split.ReceiveVector(event.stream, event.message)]

    def _vector_received(self, event: ev.VectorReceived, now: float) -> list[Effect]:
        meta = event.meta
        if isinstance(meta, msg.AuxiliaryMeta):
            if self.incoming != meta:
                return []  # of a session that is over: the next welcome has the version that counts
            self.incoming = self.aligning = None
            self.auxiliary = meta.version
            return [split.InstallAuxiliary(meta.version)]
        sent = self.sent.get(meta.key)
        if sent is None or sent.settled:
            return []
        return self._settle(sent, split.SettleUpload(meta.key, "here", meta.loss), now)

    def _stream_lost(self, event: StreamLost, now: float) -> list[Effect]:
        kind, _, text = event.stream.partition(":")
        if kind == "aux":
            self.incoming = None
            return self._keep_auxiliary()
        sent = self.sent.get(UploadKey.parse(text))
        if sent is None or sent.settled or not self.connected:
            return []
        return self._later(sent, now)  # also for a gradient: the split server streams it again

    # --- auxiliary models ---

    def _auxiliary_offered(self, event: Offered[msg.AuxiliaryMeta], now: float) -> list[Effect]:
        if not self.method.aligned or self.over:
            return [DeclineStream(SERVER, event.stream, "not wanted")]
        self.incoming = event.message
        return [split.ReceiveVector(event.stream, event.message)]

    def _keep_auxiliary(self) -> list[Effect]:
        round_, self.aligning = self.aligning, None
        return [] if round_ is None else [split.KeepAuxiliary(round_)]

    # --- rounds ---

    def _round_ended(self, event: ev.RoundEnded, now: float) -> list[Effect]:
        if self.over:
            return [split.SettleRound(event.round)]
        self.done, self.reported, self.acknowledged = (event.round, event.samples), False, False
        self.waiting_round = event.round
        effects = self._report_done()
        return effects if self.method.waits_at_round_end else [*effects, *self._settle_round()]

    def _report_done(self) -> list[Effect]:
        """Report the round as done once all its uploads are settled."""
        round_, samples = self.done
        waits = any(sent.key.round <= round_ for sent in self.unsettled)
        if self.acknowledged or self.reported or waits or not self.connected:
            return []
        self.reported = True
        return [Send(SERVER, msg.RoundDone(round_, samples))]

    def _round_acknowledged(
        self, event: Received[msg.RoundAcknowledged], now: float
    ) -> list[Effect]:
        if event.message.round != self.done[0]:
            return []
        self.acknowledged = True
        return self._settle_round()

    def _settle_round(self) -> list[Effect]:
        round_, self.waiting_round = self.waiting_round, None
        return [] if round_ is None else [split.SettleRound(round_)]

    # --- the end ---

    def _give_up_all(self, reason: str) -> list[Effect]:
        """From here on nothing is sent and nothing waited for."""
        self.over = True
        self.deadlines.clear()
        effects: list[Effect] = []
        for sent in list(self.sent.values()):
            effects.extend(self._give_up(sent, reason))
        return [*effects, *self._keep_auxiliary(), *self._settle_round()]

    def _run_ended(self, event: RunEnded, now: float) -> list[Effect]:
        if self.over:
            return [SendGoodbye(event.reason)]
        sent = [Send(SERVER, msg.RunOver(event.reason))] if self.connected else []
        return [*sent, *self._give_up_all(event.reason), SendGoodbye(event.reason)]

    def _training_ended(self, event: TrainingEnded, now: float) -> list[Effect]:
        self.training = False
        if self.over:
            return []
        if event.error is not None or not self.unsettled:
            # Not the error's text: it may quote the data.
            return self._leave("training has ended" if event.error is None else "training failed")
        self.deadlines.set("end", now + self.config.session.drain_s)
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
