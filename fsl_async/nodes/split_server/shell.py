"""The split server's shell: transport events and finished jobs in, effects out. It decides nothing.

Three threads beside the loop: one decodes and codes, one trains (every touch of a tensor, in the order of the machine's effects), one
writes checkpoints. An upload is kept coded while it arrives, and decoded once it is whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from attrs import define, field, frozen

import fsl_transport as tp
from fsl_async.accounting.categories import Category, Direction
from fsl_async.accounting.sizes import FORMATS
from fsl_async.accounting.traffic import Traffic
from fsl_async.learn.split.payload import (
    Payload,
    Values,
    chunks_of,
    coding_loss,
    decode_chunks,
    encode_chunk,
    size_of,
    spec_for,
)
from fsl_async.nodes.ports import Listener
from fsl_async.nodes.runtime import Journal, Node, Worker
from fsl_async.nodes.wire import beat_of, problem_of
from fsl_async.roles.machine import (
    ClientLeft,
    DeclineStream,
    Effect,
    EndSession,
    Event,
    Finish,
    Note,
    Refuse,
    Send,
    StreamLost,
)
from fsl_async.roles.messages import MessageError
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.events import UploadKey
from fsl_async.roles.split.server import SplitServerMachine
from fsl_async.roles.sync import events as base
from fsl_async.store.manifest import CHUNK_VALUES

_FRAME_HEAD_BYTES = 256


class Disk(Protocol):
    """What the shell needs from the server's folder."""

    def append(self, key: str, outcome: str, reason: str) -> None:
        """Enter what became of an upload."""
        ...

    def append_auxiliary(self, client: str, version: int) -> None:
        """Enter that a number is given away."""
        ...


class Training(Protocol):
    """What the shell needs of the parts that train (`fsl_async.learn.split.server_training.ServerTraining`)."""

    # ruff: noqa: D102 - the implementation has them
    @property
    def disk(self) -> Disk: ...
    def recover(self) -> ev.SplitRecovered: ...
    def objection(
        self, shape: Sequence[int], lengths: Sequence[int], samples: int, label_bytes: int
    ) -> str | None: ...
    def put(self, key: UploadKey, payload: Payload) -> None: ...
    def drop(self, key: UploadKey) -> None: ...
    def drop_answer(self, key: UploadKey) -> None: ...
    def answer(self, key: UploadKey) -> Payload | None: ...
    def train(self, effect: split.TrainUpload) -> ev.UploadTrained: ...
    def align(self, effect: split.Align) -> ev.Aligned: ...
    def auxiliary(self, client: str) -> Values: ...
    def average(self, effect: split.AverageReplicas) -> ev.ReplicasAveraged: ...
    def forget(self, client: str) -> None: ...
    def copy(self, effect: split.Checkpoint) -> Callable[[], None]: ...


@frozen
class Formats:
    """Number formats of what crosses the cut, and of auxiliary models."""

    up: str = "bf16"
    down: str = "bf16"
    models: str = "fp32"
    step_log2: int = 14


@define(eq=False)
class Incoming:
    """An upload on its way: its announcement and the chunks that are here."""

    key: UploadKey
    meta: msg.SmashedMeta
    chunks: list[bytes | None]
    traffic: Traffic
    number_format: str

    @property
    def frames(self) -> int:
        """Chunks without that of the labels."""
        return chunks_of(size_of(self.meta.shape))

    def write(self, index: int, data: tp.Buffer, done: Callable[[bool], None]) -> None:
        """Take a chunk."""
        if not 0 <= index < len(self.chunks):
            done(False)
            return
        self.chunks[index] = found = bytes(data)
        if index < self.frames:
            values = frame_values(size_of(self.meta.shape), index)
            category = Category.GRADIENTS if self.key.leg else Category.ACTIVATIONS
            self.traffic.values(category, Direction.UP, self.number_format, values, len(found))
        elif len(found) != self.meta.label_bytes:
            done(False)
            return
        else:
            self.traffic.plain(Category.LABELS, Direction.UP, len(found))
        done(True)

    def payload(self) -> Payload:
        """Decode; raises PayloadError."""
        shape = tuple(self.meta.shape)
        frames = [bytes(chunk or b"") for chunk in self.chunks]
        labels = frames.pop() if self.meta.label_bytes else b""
        values = decode_chunks(frames, size_of(shape))
        return Payload(values, shape, labels, tuple(self.meta.lengths))


def frame_values(values: int, index: int) -> int:
    """Of frame number `index` of a flat vector."""
    return min(CHUNK_VALUES, values - index * CHUNK_VALUES)


@define(eq=False)
class Outgoing:
    """A vector that is coded by the worker as the link has room. `give` says None when it is not there any more."""

    chunks: int
    give: Callable[[], Payload | None]
    worker: Worker
    number_format: str
    step_log2: int
    category: Category
    direction: Direction
    traffic: Traffic
    measured: set[int] = field(factory=set)
    losses: dict[int, tuple[float, float]] = field(factory=dict)  # of frames not counted yet

    @property
    def size(self) -> int:
        """About how many bytes it will be, rather more than fewer: what may be sent before it is accepted."""
        payload = self.give()
        if payload is None:
            return 0
        coded = FORMATS[self.number_format].payload(payload.values.size)
        return coded + len(payload.labels) + coded // 32 + self.chunks * _FRAME_HEAD_BYTES

    def read(self, index: int, deliver: Callable[[tp.Buffer | None], None]) -> None:
        """Code a chunk."""
        self.worker.submit(
            lambda: self._frame(index),
            lambda frame: self._counted(index, frame, deliver),
            lambda _: deliver(None),
        )

    def _frame(self, index: int) -> bytes | None:
        payload = self.give()
        if payload is None:
            return None
        if index >= chunks_of(payload.values.size):
            return payload.labels
        # Coded anew when it is asked for again, which is seldom: frames that are kept would be memory per client.
        spec = spec_for(self.number_format, payload.shape[-1], self.step_log2)
        frame = encode_chunk(payload.values, index, spec)
        if index not in self.measured:
            self.measured.add(index)
            self.losses[index] = coding_loss(payload.values, index, frame)
        return frame

    def _counted(
        self, index: int, frame: bytes | None, deliver: Callable[[tp.Buffer | None], None]
    ) -> None:
        payload = self.give()
        if frame is not None and payload is not None:
            if index < chunks_of(payload.values.size):
                values = frame_values(payload.values.size, index)
                place = (self.category, self.direction, self.number_format)
                self.traffic.values(*place, values, len(frame))
                loss = self.losses.pop(index, None)
                if loss is not None:
                    self.traffic.lost(self.category, self.direction, *loss)
            else:
                self.traffic.plain(Category.LABELS, self.direction, len(frame))
        deliver(frame)


class SplitServerShell:
    """Joins a SplitServerMachine with an endpoint, the parts that train, and three workers."""

    def __init__(
        self,
        machine: SplitServerMachine,
        training: Training,
        *,
        formats: Formats,
        code: Worker,
        train: Worker,
        write: Worker,
        scheduler: tp.Scheduler,
        journal: Journal,
        say: Callable[[Note], None],
        finished: Callable[[Finish], None],
        traffic: Traffic,
    ) -> None:
        self.machine = machine
        self.training = training
        self.formats = formats
        self.traffic = traffic
        self.node = Node(machine, scheduler, self._execute, journal)
        self.endpoint: Listener
        self._code, self._train, self._write = code, train, write
        self._say = say
        self._finished = finished
        self._incoming: dict[tuple[str, str], Incoming] = {}
        self._metas: dict[tuple[str, str], msg.SmashedMeta] = {}
        self._losses: dict[UploadKey, tuple[float, int]] = {}  # of the answers that are kept
        self._on_transport: dict[type, Callable[[Any], None]] = {
            tp.HelloReceived: self._hello,
            tp.PeerDown: self._down,
            tp.MessageReceived: self._message,
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
            DeclineStream: self._decline,
            Refuse: lambda e, _: self.endpoint.refuse(e.peer, e.code, e.text),
            EndSession: lambda e, _: self.endpoint.disconnect(e.peer, e.reason),
            Finish: lambda e, _: self._finished(e),
            split.AdmitSplit: lambda e, _: self.endpoint.welcome(e.peer, msg.to_wire(e.welcome)),
            split.ReceiveUpload: self._receive,
            split.DropUpload: lambda e, _: self.training.drop(e.key),
            split.TrainUpload: self._train_upload,
            split.Align: lambda e, n: self._run(lambda: self.training.align(e), n),
            split.AverageReplicas: lambda e, n: self._run(lambda: self.training.average(e), n),
            split.RecordUpload: lambda e, _: self.training.disk.append(
                e.key.text, e.outcome, e.reason
            ),
            split.RecordAuxiliary: lambda e, _: self.training.disk.append_auxiliary(
                e.client, e.version
            ),
            split.SendAnswer: self._send_answer,
            split.DropAnswer: self._drop_answer,
            split.SendAuxiliary: self._send_auxiliary,
            split.ForgetSteps: self._forget,
            split.Checkpoint: self._checkpoint,
        }

    def start(self) -> None:
        """Go on from the disk; call once, before any transport event."""
        self.node.feed(self.training.recover())

    # --- from the transport ---

    def on_transport(self, event: tp.TransportEvent) -> None:
        """Take one event of the endpoint."""
        handler = self._on_transport.get(type(event))
        if handler is None:
            return
        try:
            handler(event)
        except (MessageError, ValueError) as error:
            self._violated(getattr(event, "peer", ""), problem_of(error))

    def _violated(self, peer: str, problem: str) -> None:
        self._say(Note(f"{peer} sent what no client sends: {problem}", "warning"))
        self.endpoint.disconnect(peer, "protocol")
        life = self.machine.life_of(peer)
        if life is not None:
            self._down(tp.PeerDown(peer, life, "protocol"))

    def _hello(self, event: tp.HelloReceived) -> None:
        try:
            hello = msg.from_wire(event.hello)
        except MessageError as error:
            self.endpoint.refuse(event.peer, "hello", problem_of(error))
            return
        if isinstance(hello, msg.PsHello) and hello.role == msg.PS_ROLE:
            self.node.feed(ev.PsConnected(event.peer, event.incarnation, hello.run))
            return
        if not isinstance(hello, msg.SplitHello) or hello.role != msg.ROLE:
            text = "this is a split server: start the client with the parameter server's address"
            self.endpoint.refuse(event.peer, "hello", text)
            return
        self.node.feed(
            ev.SplitClientHello(
                event.peer,
                event.incarnation,
                hello.run,
                hello.shard,
                hello.architecture,
                hello.auxiliary,
                hello.done_round,
                hello.done_samples,
            )
        )

    def _down(self, event: tp.PeerDown) -> None:
        for stream in {*self._incoming, *self._metas}:
            if stream[0] == event.peer:
                self._incoming.pop(stream, None)
                self._metas.pop(stream, None)
        self.node.feed(ClientLeft(event.peer, event.incarnation, event.reason))

    def _message(self, event: tp.MessageReceived) -> None:
        match msg.from_wire(event.body):
            case msg.RoundDone(number, samples, errors):
                self.node.feed(ev.RoundDoneReceived(event.peer, number, samples, errors))
            case msg.RunOver(reason):
                self.node.feed(ev.RunOverReceived(event.peer, reason))
            case other:
                raise MessageError(f"{type(other).__name__} is not for {event.peer} to say")

    def _offered(self, event: tp.StreamOffered) -> None:
        meta = msg.from_wire(event.meta)
        if not isinstance(meta, msg.SmashedMeta):
            raise MessageError(f"a client streams no {type(meta).__name__}")
        key = UploadKey.parse(meta.key)
        if event.stream_id != msg.upload_stream(key.text):
            raise MessageError(f"stream {event.stream_id[:80]!r} carries upload {key.text}")
        problem = self.training.objection(meta.shape, meta.lengths, meta.samples, meta.label_bytes)
        wanted = chunks_of(size_of(meta.shape)) + (1 if meta.label_bytes else 0)
        if problem is None and event.chunks != wanted:
            problem = f"{event.chunks} chunks where {wanted} are right"
        if problem is not None:
            self.endpoint.decline(event.peer, event.stream_id, "refused")
            told = msg.UploadRefused(key.text, "refused", problem)
            self.endpoint.send(event.peer, msg.to_wire(told))
            self.training.disk.append(key.text, "declined", f"refused: {problem}")
            return
        self._metas[event.peer, event.stream_id] = meta
        self.node.feed(
            ev.UploadOffered(
                event.peer,
                event.stream_id,
                key,
                meta.version,
                meta.auxiliary,
                meta.samples,
                meta.wants_gradient,
                meta.alignment_due,
            )
        )

    def _received(self, event: tp.StreamReceived) -> None:
        incoming = self._incoming.pop((event.peer, event.stream_id), None)
        if incoming is None:
            return
        key = incoming.key
        size = sum(len(chunk or b"") for chunk in incoming.chunks)
        self._code.submit(
            lambda: self.training.put(key, incoming.payload()),
            lambda _: self.node.feed(ev.UploadReceived(event.peer, key, size)),
            lambda error: self._violated(event.peer, problem_of(error)),
        )

    def _sent(self, event: tp.StreamSent) -> None:
        if event.stream_id.startswith("down:"):
            key = UploadKey.parse(event.stream_id.removeprefix("down:"))
            self.node.feed(ev.AnswerSent(event.peer, key))

    def _lost(self, event: tp.StreamDeclined | tp.StreamFailed) -> None:
        self._incoming.pop((event.peer, event.stream_id), None)
        self.node.feed(StreamLost(event.peer, event.stream_id, event.reason))

    # --- to the world ---

    def _execute(self, effect: Effect, number: int) -> None:
        self._executors[type(effect)](effect, number)

    def _decline(self, effect: DeclineStream, number: int) -> None:
        self._metas.pop((effect.peer, effect.stream), None)
        self.endpoint.decline(effect.peer, effect.stream, effect.reason)

    def _receive(self, effect: split.ReceiveUpload, number: int) -> None:
        meta = self._metas.pop((effect.peer, effect.stream), None)
        if meta is None:
            return
        chunks: list[bytes | None] = [None] * chunks_of(size_of(meta.shape))
        if meta.label_bytes:
            chunks.append(None)
        incoming = Incoming(effect.key, meta, chunks, self.traffic, self.formats.up)
        self._incoming[effect.peer, effect.stream] = incoming
        with contextlib.suppress(tp.LocalError):  # offered twice, and the first is under way
            self.endpoint.accept(effect.peer, effect.stream, incoming)

    def _run(self, job: Callable[[], Event], number: int) -> None:
        self._train.submit(job, lambda event: self.node.feed(event, number), self._broken)

    def _train_upload(self, effect: split.TrainUpload, number: int) -> None:
        def trained(event: ev.UploadTrained) -> None:
            if event.answer:
                self._losses[event.key] = (event.loss, event.updates)
            self.node.feed(event, number)

        self._train.submit(lambda: self.training.train(effect), trained, self._broken)

    def _drop_answer(self, effect: split.DropAnswer, number: int) -> None:
        self._losses.pop(effect.key, None)
        self.training.drop_answer(effect.key)

    def _broken(self, error: Exception) -> None:
        # The parts may be half way through a step: what is on disk is what counts.
        self._finished(Finish(f"training failed: {type(error).__name__}: {error}", 1))

    def _forget(self, effect: split.ForgetSteps, number: int) -> None:
        self._train.submit(
            lambda: self.training.forget(effect.client), lambda _: None, self._broken
        )

    def _send_answer(self, effect: split.SendAnswer, number: int) -> None:
        key = effect.key
        payload = self.training.answer(key)
        if payload is None:
            return
        trained = self._losses.get(key, (0.0, 0))
        meta = msg.GradientMeta(key.text, *trained)
        features = self.machine.method.legs > 1 and not key.leg
        source = Outgoing(
            chunks_of(payload.values.size),
            lambda: self.training.answer(key),
            self._code,
            self.formats.down,
            self.formats.step_log2,
            Category.ACTIVATIONS if features else Category.GRADIENTS,
            Direction.DOWN,
            self.traffic,
        )
        # With the offer: a client waits for it, and a round trip may be longer than the transfer.
        stream = msg.answer_stream(key.text)
        self.endpoint.offer(effect.peer, stream, msg.to_wire(meta), source, source.size)

    def _send_auxiliary(self, effect: split.SendAuxiliary, number: int) -> None:
        peer = effect.peer

        def ready(vector: Values) -> None:
            payload = Payload(vector, vector.shape)
            source = Outgoing(
                chunks_of(vector.size),
                lambda: payload,
                self._code,
                self.formats.models,
                self.formats.step_log2,
                Category.AUXILIARY,
                Direction.DOWN,
                self.traffic,
            )
            meta = msg.to_wire(msg.AuxiliaryMeta(effect.version, effect.round))
            stream = msg.auxiliary_stream(peer, effect.version)
            self.endpoint.offer(peer, stream, meta, source)

        self._train.submit(lambda: self.training.auxiliary(peer), ready, self._broken)

    def _checkpoint(self, effect: split.Checkpoint, number: int) -> None:
        def failed(error: Exception) -> None:
            self.node.feed(ev.CheckpointFailed(effect.number, str(error)[:200]), number)

        def copied(write: Callable[[], None]) -> None:
            written = ev.CheckpointWritten(effect.number)
            self._write.submit(write, lambda _: self.node.feed(written, number), failed)

        self._train.submit(lambda: self.training.copy(effect), copied, failed)
