"""A client's shell for the split server: transport events and uploads in, effects out.

It decides nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
from attrs import define, frozen

import fsl_transport as tp
from fsl_async.accounting.sizes import Category, Direction
from fsl_async.accounting.traffic import Traffic
from fsl_async.learn.split.payload import PayloadError, Values
from fsl_async.nodes.runtime import Journal, Node, Shell, Worker
from fsl_async.nodes.split_streams import Flow, IncomingVector, Outgoing
from fsl_async.nodes.wire import problem_of
from fsl_async.roles.goodbye import reason_for_peers
from fsl_async.roles.machine import (
    SERVER,
    DeclineStream,
    Finish,
    Greeted,
    HelloRefused,
    Note,
    Offered,
    Received,
    Send,
    SendGoodbye,
    SessionLost,
    StreamLost,
)
from fsl_async.roles.messages import MessageError
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.client import SplitClientMachine
from fsl_async.roles.split.messages import UploadKey

if TYPE_CHECKING:
    from fsl_async.learn.split.remote import SplitTraining

REDIAL_S = 5.0
MAX_CHUNKS = 4096
"""Limit of an answer or an auxiliary model: 2 GiB of fp32 values."""


@frozen
class Facts:
    """The content of hellos that stays the same in a run."""

    run: str
    shard: int
    architecture: dict[str, str]


@define(eq=False, slots=False)
class SplitClientShell(Shell):
    """Connects a SplitClientMachine with an endpoint, a worker and the training thread.

    dialer: makes the endpoint from the handler of its events. shares_metrics: whether this site's
    policy allows the errors of coding to leave.
    """

    machine: SplitClientMachine
    training: SplitTraining
    _dialer: Callable[[Callable[[tp.TransportEvent], None]], tp.DialerEndpoint]
    facts: Facts
    worker: Worker
    traffic: Traffic
    _scheduler: tp.Scheduler
    _journal: Journal
    _say: Callable[[Note], None]
    _finished: Callable[[Finish], None]
    _shares_metrics: bool = True

    def __attrs_post_init__(self) -> None:
        self.node = Node(self.machine, self._scheduler, self._execute, self._journal)
        self._over = False
        self._incoming: dict[str, IncomingVector] = {}
        self._sources: dict[tuple[int, int, int], Outgoing] = {}
        self._answers: dict[UploadKey, Values] = {}
        self._models: dict[int, Values] = {}
        self._on_transport: dict[type, Callable[[Any], None]] = {
            tp.PeerUp: self._up,
            tp.PeerDown: self._down,
            tp.Refused: lambda e: self.node.feed(HelloRefused(e.code, e.text)),
            tp.Superseded: self._superseded,
            tp.Unreachable: self._unreachable,
            tp.MessageReceived: lambda e: self.node.feed(Received(SERVER, msg.from_wire(e.body))),
            tp.StreamOffered: self._offered,
            tp.StreamReceived: self._received,
            tp.StreamDeclined: self._lost,
            tp.StreamFailed: self._lost,
        }
        self._executors: dict[type, Callable[[Any, int], None]] = {
            Send: self._send,
            Note: lambda e, _: self._say(e),
            DeclineStream: lambda e, _: self.endpoint.decline(SERVER, e.stream, e.reason),
            SendGoodbye: lambda e, _: self._leave(e.reason),
            Finish: self._finish,
            split.OfferUpload: self._offer,
            split.DropUpload: self._drop,
            split.ReceiveVector: self._receive,
            split.SettleUpload: self._settle,
            split.InstallAuxiliary: self._install,
            split.KeepAuxiliary: lambda *_: self.training.install(None),
            split.SettleRound: lambda e, _: self.training.settle_round(e.round),
            split.DialAgain: lambda *_: self.dial(),
        }
        self.endpoint = self._dialer(self.on_transport)

    def dial(self) -> None:
        """Dial the split server, and after every loss again, until the end."""
        if not self._over:
            facts = self.facts
            self.endpoint.connect(
                lambda: msg.to_wire(
                    self.machine.hello(facts.run, facts.shard, dict(facts.architecture))
                )
            )

    # --- from the transport ---

    def _violated(self, peer: str, error: Exception) -> None:
        text = f"the split server broke the protocol: {problem_of(error)}"
        self._say(Note(text, "warning"))
        self.endpoint.disconnect(SERVER, "protocol")
        self._down(tp.PeerDown(SERVER, 0, "protocol"))
        self._scheduler.call_at(self._scheduler.time() + REDIAL_S, self.dial)

    def _up(self, event: tp.PeerUp) -> None:
        self.node.feed(Greeted(SERVER, msg.from_wire(event.body), self.endpoint.incarnation))

    def _down(self, event: tp.PeerDown) -> None:
        self._incoming.clear()
        self.node.feed(SessionLost(event.reason))

    def _superseded(self, event: tp.Superseded) -> None:
        text = f"another process took over as {self.machine.name} at the split server"
        self.node.feed(HelloRefused("superseded", text))

    def _unreachable(self, event: tp.Unreachable) -> None:
        text = f"no answer from the split server at {event.address} for {event.seconds:.0f} s"
        self._say(Note(f"{text}; trying again", "warning"))

    def _offered(self, event: tp.StreamOffered) -> None:
        if not 1 <= event.chunks <= MAX_CHUNKS:
            raise MessageError(f"a stream of {event.chunks} chunks", "wrong-stream")
        self.node.feed(Offered(SERVER, msg.from_wire(event.meta), event.stream_id))

    def _received(self, event: tp.StreamReceived) -> None:
        incoming = self._incoming.pop(event.stream_id, None)
        if incoming is None:
            return
        meta = incoming.meta

        def decoded(values: Values) -> None:
            if isinstance(meta, msg.GradientMeta):
                self._answers[meta.key] = values
            else:
                self._models[meta.version] = values
            self.node.feed(ev.VectorReceived(meta))

        self.worker.submit(
            lambda: self._decode(incoming), decoded, lambda error: self._violated(SERVER, error)
        )

    def _decode(self, incoming: IncomingVector) -> Values:
        values, meta = incoming.decoded(), incoming.meta
        if isinstance(meta, msg.GradientMeta):
            # A cut gradient is as large as the activations, which in a U-shape were the first leg.
            payload = self.training.payload(meta.key.first_leg.position)
            is_features = self._answers_features(meta.key)
            if payload is not None and not is_features and values.size != payload.values.size:
                raise PayloadError(f"{values.size} gradients for {payload.values.size} activations")
        elif values.size != self.training.auxiliary_values:
            wanted = self.training.auxiliary_values
            raise PayloadError(f"{values.size} values for an auxiliary model of {wanted}")
        return values

    def _lost(self, event: tp.StreamDeclined | tp.StreamFailed) -> None:
        self._incoming.pop(event.stream_id, None)
        if event.stream_id.startswith("up:") and isinstance(event, tp.StreamDeclined):
            return  # a message follows with the outcome of the upload
        self.node.feed(StreamLost(SERVER, event.stream_id, event.reason))

    # --- effects ---

    def _send(self, effect: Send, number: int) -> None:
        message = effect.message
        if isinstance(message, msg.RoundDone) and self._shares_metrics:
            message = attrs.evolve(message, errors=self.traffic.errors())
        self.endpoint.send(SERVER, msg.to_wire(message))

    def _answers_features(self, key: UploadKey) -> bool:
        return self.machine.method.legs > 1 and not key.leg

    def _receive(self, effect: split.ReceiveVector, number: int) -> None:
        meta, formats = effect.meta, self.machine.config.split
        if isinstance(meta, msg.AuxiliaryMeta):
            flow = Flow(Category.AUXILIARY, Direction.DOWN, formats.models)
        else:
            features = self._answers_features(meta.key)
            category = Category.ACTIVATIONS if features else Category.GRADIENTS
            flow = Flow(category, Direction.DOWN, formats.down)
        self._incoming[effect.stream] = incoming = IncomingVector(meta, flow, self.traffic)
        with contextlib.suppress(tp.LocalError):  # offered twice, and the first is being received
            self.endpoint.accept(SERVER, effect.stream, incoming)

    def _offer(self, effect: split.OfferUpload, number: int) -> None:
        key, settings = effect.meta.key, self.machine.config
        source = self._sources.get(key.position)
        if source is None:
            if self.training.payload(key.position) is None:
                return
            category = Category.GRADIENTS if key.leg else Category.ACTIVATIONS
            source = self._sources[key.position] = Outgoing(
                lambda: self.training.payload(key.position),
                Flow(category, Direction.UP, settings.split.up),
                settings.codec.spec_up.step_log2,
                self.worker,
                self.traffic,
            )
        stream = msg.upload_stream(key.text)
        self.endpoint.offer(SERVER, stream, msg.to_wire(effect.meta), source, source.size)

    def _drop(self, effect: split.DropUpload, number: int) -> None:
        self._sources.pop(effect.key.position, None)
        self.training.drop(effect.key.position)

    def _settle(self, effect: split.SettleUpload, number: int) -> None:
        values = self._answers.pop(effect.key, None)
        answer = None if values is None or effect.answer == "lost" else (values, effect.loss)
        waits = effect.answer != "none"
        self.training.settle_upload(effect.key.position, answer, waits=waits)

    def _install(self, effect: split.InstallAuxiliary, number: int) -> None:
        self.training.install(self._models.pop(effect.version))
        self._models.clear()

    def _leave(self, reason: str) -> None:
        self._over = True
        self.endpoint.disconnect(SERVER, reason)

    def _finish(self, effect: Finish, number: int) -> None:
        self._leave(reason_for_peers(effect.reason, effect.exit_code))
        self._finished(effect)
