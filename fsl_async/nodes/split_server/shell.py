"""The split server's shell: transport events and finished jobs in, effects out. It decides nothing.

Three workers run beside the loop: one decodes and codes, one trains (every use of a tensor, in the
order of the machine's effects), one writes checkpoints. An upload is kept coded while it arrives,
and decoded when it is complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import define, frozen

import fsl_transport as tp
from fsl_async.accounting.sizes import Category, Direction
from fsl_async.accounting.traffic import Traffic
from fsl_async.learn.split.payload import Payload, Values, chunks_of, size_of
from fsl_async.nodes.runtime import Journal, Node, Shell, Worker
from fsl_async.nodes.split_streams import Flow, IncomingUpload, Outgoing
from fsl_async.nodes.wire import beat_of, code_of, problem_of
from fsl_async.roles.machine import (
    ClientLeft,
    DeclineStream,
    EndSession,
    Event,
    Finish,
    Greeted,
    Note,
    Offered,
    Received,
    Refuse,
    Send,
    StreamLost,
)
from fsl_async.roles.messages import MessageError
from fsl_async.roles.phrasing import MessageThrottle
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.messages import UploadKey
from fsl_async.roles.split.server import SplitServerMachine
from fsl_async.roles.split.server_state import SplitClients
from fsl_async.roles.sync import events as base

if TYPE_CHECKING:
    from fsl_async.learn.split.server_training import ServerTraining


@frozen
class Workers:
    """The workers beside the loop."""

    code: Worker
    """Decodes uploads, codes answers and auxiliary models."""
    train: Worker
    write: Worker


@define(eq=False, slots=False)
class SplitServerShell(Shell):
    """Connects a SplitServerMachine with an endpoint, the parts that train, and three workers.

    listener: makes the endpoint from the handler of its events.
    """

    machine: SplitServerMachine
    training: ServerTraining
    _listener: Callable[[Callable[[tp.TransportEvent], None]], tp.ListenerEndpoint]
    workers: Workers
    traffic: Traffic
    _scheduler: tp.Scheduler
    _journal: Journal
    _say: Callable[[Note], None]
    _finished: Callable[[Finish], None]

    def __attrs_post_init__(self) -> None:
        facts = SplitClients().after
        self.node = Node(self.machine, self._scheduler, self._execute, self._journal, facts)
        self._now = self._scheduler.time
        self._throttle = MessageThrottle(by_thing=True)
        self._incoming: dict[tuple[str, str], IncomingUpload] = {}
        self._on_transport: dict[type, Callable[[Any], None]] = {
            tp.HelloReceived: self._hello,
            tp.PeerDown: self._down,
            tp.MessageReceived: lambda e: self.node.feed(Received(e.peer, msg.from_wire(e.body))),
            tp.HeartbeatReceived: lambda e: self.node.feed(
                base.HeartbeatReceived(e.peer, beat_of(e.payload))
            ),
            tp.StreamOffered: self._offered,
            tp.StreamReceived: self._received,
            tp.StreamSent: self._sent,
            tp.StreamDeclined: self._lost,
            tp.StreamFailed: self._lost,
        }
        self._executors: dict[type, Callable[[Any, int], None]] = {
            Send: lambda e, _: self.endpoint.send(e.peer, msg.to_wire(e.message)),
            Note: lambda e, _: self._say(e),
            DeclineStream: lambda e, _: self.endpoint.decline(e.peer, e.stream, e.reason),
            Refuse: lambda e, _: self.endpoint.refuse(e.peer, e.code, e.text),
            EndSession: lambda e, _: self.endpoint.disconnect(e.peer, e.reason),
            Finish: lambda e, _: self._finished(e),
            split.AdmitSplit: lambda e, _: self.endpoint.welcome(e.peer, msg.to_wire(e.welcome)),
            split.ReceiveUpload: self._receive,
            split.DropUpload: lambda e, _: self.training.drop(e.key),
            split.TrainUpload: lambda e, n: self._run(lambda: self.training.train(e), n),
            split.Align: lambda e, n: self._run(lambda: self.training.align(e), n),
            split.AverageReplicas: lambda e, n: self._run(lambda: self.training.average(e), n),
            split.RecordUpload: lambda e, _: self.training.disk.append(
                "upload", key=e.key.text, outcome=e.outcome, reason=e.reason
            ),
            split.RecordAuxiliary: lambda e, _: self.training.disk.append(
                "auxiliary", client=e.client, version=e.version
            ),
            split.SendAnswer: self._send_answer,
            split.DropAnswer: lambda e, _: self.training.drop_answer(e.key),
            split.SendAuxiliary: self._send_auxiliary,
            split.ForgetSteps: self._forget,
            split.Checkpoint: self._checkpoint,
        }
        self.endpoint = self._listener(self.on_transport)

    def start(self) -> None:
        """Restore the state on disk; call once, before any transport event."""
        self.node.feed(self.training.recover())

    # --- from the transport ---

    def _violated(self, peer: str, error: Exception) -> None:
        problem = problem_of(error)
        more = self._throttle.lets(peer, self._now())
        if more is not None:
            self._say(Note(f"{peer} broke the protocol: {problem}{more}", "warning"))
        self.endpoint.disconnect(peer, "protocol")
        incarnation = self.machine.incarnation_of(peer)
        if incarnation is not None:
            self._down(tp.PeerDown(peer, incarnation, "protocol"), code_of(error))

    def _hello(self, event: tp.HelloReceived) -> None:
        try:
            hello = msg.from_wire(event.hello)
        except MessageError as error:
            self.endpoint.refuse(event.peer, "hello", problem_of(error))
            return
        roles = {msg.PsHello: msg.PS_ROLE, msg.SplitHello: msg.ROLE}
        if getattr(hello, "role", None) != roles.get(type(hello), ""):
            text = "this is a split server: start the client with the parameter server's address"
            self.endpoint.refuse(event.peer, "hello", text)
            return
        self.node.feed(Greeted(event.peer, hello, event.incarnation))

    def _down(self, event: tp.PeerDown, violation: str = "") -> None:
        for stream in [one for one in self._incoming if one[0] == event.peer]:
            del self._incoming[stream]
        self.node.feed(ClientLeft(event.peer, event.incarnation, event.reason, violation))

    def _offered(self, event: tp.StreamOffered) -> None:
        meta = msg.from_wire(event.meta)
        offered = Offered(event.peer, meta, event.stream_id)
        if not isinstance(meta, msg.SmashedMeta):
            self.node.feed(offered)
            return
        key = meta.key
        if event.stream_id != msg.upload_stream(key.text):
            text = f"stream {event.stream_id[:80]!r} carries upload {key.text}"
            raise MessageError(text, "wrong-stream")
        problem = self.training.objection(meta.shape, meta.lengths, meta.samples, meta.label_bytes)
        wanted = chunks_of(size_of(meta.shape)) + (1 if meta.label_bytes else 0)
        if problem is None and event.chunks != wanted:
            problem = f"{event.chunks} chunks where {wanted} are right"
        if problem is not None:
            self.endpoint.decline(event.peer, event.stream_id, "refused")
            refusal = msg.UploadRefused(key, "refused", problem)
            self.endpoint.send(event.peer, msg.to_wire(refusal))
            reason = f"refused: {problem}"
            self.training.disk.append("upload", key=key.text, outcome="declined", reason=reason)
            return
        self.node.feed(offered)

    def _received(self, event: tp.StreamReceived) -> None:
        incoming = self._incoming.pop((event.peer, event.stream_id), None)
        if incoming is None:
            return
        key = incoming.meta.key
        self.workers.code.submit(
            lambda: self.training.put(key, incoming.decoded()),
            lambda _: self.node.feed(ev.UploadReceived(event.peer, key)),
            lambda error: self._violated(event.peer, error),
        )

    def _sent(self, event: tp.StreamSent) -> None:
        if event.stream_id.startswith("down:"):
            key = UploadKey.parse(event.stream_id.removeprefix("down:"))
            self.node.feed(ev.AnswerSent(event.peer, key))

    def _lost(self, event: tp.StreamDeclined | tp.StreamFailed) -> None:
        self._incoming.pop((event.peer, event.stream_id), None)
        self.node.feed(StreamLost(event.peer, event.stream_id, event.reason))

    # --- effects ---

    def _receive(self, effect: split.ReceiveUpload, number: int) -> None:
        meta = effect.meta
        category = Category.GRADIENTS if meta.key.leg else Category.ACTIVATIONS
        flow = Flow(category, Direction.UP, self.machine.config.split.up)
        incoming = IncomingUpload(meta, flow, self.traffic)
        self._incoming[effect.peer, effect.stream] = incoming
        with contextlib.suppress(tp.LocalError):  # offered twice, and the first is being received
            self.endpoint.accept(effect.peer, effect.stream, incoming)

    def _run(self, job: Callable[[], Event], number: int) -> None:
        self.workers.train.submit(job, lambda event: self.node.feed(event, number), self._broken)

    def _broken(self, error: Exception) -> None:
        # The parts may be in the middle of a step: only the disk is consistent.
        self._finished(Finish(f"training failed: {type(error).__name__}: {error}", 1))

    def _forget(self, effect: split.ForgetSteps, number: int) -> None:
        self.workers.train.submit(
            lambda: self.training.server.forget(effect.client), lambda _: None, self._broken
        )

    def _outgoing(self, give: Callable[[], Payload | None], flow: Flow) -> Outgoing:
        return Outgoing(
            give,
            flow,
            self.machine.config.codec.spec_down.step_log2,
            self.workers.code,
            self.traffic,
        )

    def _send_answer(self, effect: split.SendAnswer, number: int) -> None:
        key = effect.meta.key
        if key not in self.training.answers:
            return
        features = self.machine.method.legs > 1 and not key.leg
        category = Category.ACTIVATIONS if features else Category.GRADIENTS
        flow = Flow(category, Direction.DOWN, self.machine.config.split.down)
        source = self._outgoing(lambda: self.training.answers.get(key), flow)
        # Eager: the client waits, and a round trip may take longer than the transfer.
        stream = msg.answer_stream(key.text)
        self.endpoint.offer(effect.peer, stream, msg.to_wire(effect.meta), source, source.size)

    def _send_auxiliary(self, effect: split.SendAuxiliary, number: int) -> None:
        peer = effect.peer

        def ready(vector: Values) -> None:
            payload = Payload(vector, vector.shape)
            flow = Flow(Category.AUXILIARY, Direction.DOWN, self.machine.config.split.models)
            source = self._outgoing(lambda: payload, flow)
            stream = msg.auxiliary_stream(peer, effect.meta.version)
            self.endpoint.offer(peer, stream, msg.to_wire(effect.meta), source)

        self.workers.train.submit(lambda: self.training.auxiliary(peer), ready, self._broken)

    def _checkpoint(self, effect: split.Checkpoint, number: int) -> None:
        def failed(error: Exception) -> None:
            self.node.feed(ev.CheckpointFailed(effect.number, str(error)[:200]), number)

        def copied(write: Callable[[], None]) -> None:
            written = ev.CheckpointWritten(effect.number)
            self.workers.write.submit(write, lambda _: self.node.feed(written, number), failed)

        self.workers.train.submit(lambda: self.training.copy(effect), copied, failed)
