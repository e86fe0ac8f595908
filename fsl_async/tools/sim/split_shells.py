"""The shells of split learning for the simulator: production machines, sessions and streams, counting halves, a virtual worker.

They carry effects out and decide nothing. Payload bytes are counted by category where a stream is read and where it is written.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import fsl_transport as tp
from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.client.split_shell import event_of
from fsl_async.nodes.runtime import Journal, Node, Worker
from fsl_async.roles.machine import (
    ClientLeft,
    DeclineStream,
    Effect,
    EndSession,
    Event,
    Finish,
    HelloRefused,
    Note,
    Refuse,
    Send,
    SendGoodbye,
    SessionLost,
    StreamLost,
)
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.client import SplitClientMachine
from fsl_async.roles.split.events import UploadKey
from fsl_async.roles.split.server import SplitServerMachine
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync.client_state import SERVER
from fsl_async.tools.sim.split_counting import (
    CountingModelParts,
    RoundLearner,
    SplitDisk,
    coded,
    decoded,
)

EARLY_BYTES = 1 << 10

CATEGORIES = {
    "up": ("activations_up", "labels_up"),
    "down": ("gradients_down", "gradients_down"),
    "aux": ("auxiliary_down", "auxiliary_down"),
}


class Chunks:
    """A stream from memory, counted as it is read. `give` is asked anew each time: what was dropped is not there any more."""

    chunks = 2

    def __init__(
        self, kind: str, give: Callable[[], list[bytes] | None], counts: Counter[str]
    ) -> None:
        self._categories = CATEGORIES[kind]
        self._give = give
        self._counts = counts

    def read(self, index: int, deliver: Callable[[tp.Buffer | None], None]) -> None:
        """Hand a chunk out."""
        chunks = self._give()
        if chunks is not None:
            self._counts[self._categories[index]] += len(chunks[index])
        deliver(None if chunks is None else chunks[index])


class Taken:
    """Takes a stream into memory."""

    def __init__(self, kind: str, counts: Counter[str]) -> None:
        self.chunks: dict[int, bytes] = {}
        self._categories = CATEGORIES[kind]
        self._counts = counts

    def write(self, index: int, data: tp.Buffer, done: Callable[[bool], None]) -> None:
        """Take a chunk."""
        self.chunks[index] = bytes(data)
        self._counts[self._categories[index]] += len(self.chunks[index])
        done(True)


class _Shell:
    """What both sides have in common."""

    endpoint: Any
    node: Node

    def __init__(self, sent: Counter[str], received: Counter[str]) -> None:
        self.sent, self.received = sent, received
        self.taking: dict[tuple[str, str], tuple[Taken, Any]] = {}

    def take(self, peer: str, stream: str, what: Any) -> None:
        """Accept a stream."""
        taken = Taken(stream.partition(":")[0], self.received)
        self.taking[(peer, stream)] = (taken, what)
        with contextlib.suppress(tp.LocalError):  # offered twice, and the first is under way
            self.endpoint.accept(peer, stream, taken)

    def failed(self, event: tp.StreamDeclined | tp.StreamFailed) -> None:
        """A stream ended before its end."""
        self.taking.pop((event.peer, event.stream_id), None)
        self.node.feed(StreamLost(event.peer, event.stream_id, event.reason))


class SplitServerShell(_Shell):
    """Joins a SplitServerMachine with an endpoint, counting halves, a training thread and a disk thread."""

    def __init__(
        self,
        machine: SplitServerMachine,
        disk: SplitDisk,
        *,
        train: Worker,
        write: Worker,
        scheduler: tp.Scheduler,
        journal: Journal,
        say: Callable[[Note], None],
        finished: Callable[[Finish], None],
        sent: Counter[str],
        received: Counter[str],
    ) -> None:
        super().__init__(sent, received)
        self.machine = machine
        self.halves = CountingModelParts(disk, machine.method)
        self.disk = disk
        self.node = Node(machine, scheduler, self._execute, journal)
        self._train = train
        self._write = write
        self._say = say
        self._finished = finished

    def start(self) -> None:
        """Go on from the disk."""
        self.node.feed(self.halves.recover())

    def on_transport(self, event: tp.TransportEvent) -> None:  # noqa: C901 - a case for each event
        """Take one event of the endpoint."""
        match event:
            case tp.HelloReceived(peer, incarnation, body):
                hello = msg.from_wire(body)
                assert isinstance(hello, msg.SplitHello)
                self.node.feed(
                    ev.SplitClientHello(
                        peer,
                        incarnation,
                        hello.run,
                        hello.shard,
                        hello.architecture,
                        hello.auxiliary,
                        hello.done_round,
                        hello.done_samples,
                    )
                )
            case tp.PeerDown(peer, incarnation, reason):
                for stream in [each for each in self.taking if each[0] == peer]:
                    del self.taking[stream]
                self.node.feed(ClientLeft(peer, incarnation, reason))
            case tp.MessageReceived(peer, body):
                match msg.from_wire(body):
                    case msg.RoundDone(number, samples):
                        self.node.feed(ev.RoundDoneReceived(peer, number, samples))
                    case msg.RunOver(reason):
                        self.node.feed(ev.RunOverReceived(peer, reason))
            case tp.StreamOffered(peer, stream, body):
                meta = msg.from_wire(body)
                assert isinstance(meta, msg.SmashedMeta)
                key = UploadKey.parse(meta.key)
                work = (meta.samples, meta.wants_gradient, meta.alignment_due)
                offered = ev.UploadOffered(peer, stream, key, meta.version, meta.auxiliary, *work)
                self.node.feed(offered)
            case tp.StreamReceived(peer, stream):
                taken = self.taking.pop((peer, stream), None)
                if taken is not None:
                    content = decoded(taken[0].chunks)
                    key = taken[1]
                    assert content["key"] == key.text, "the upload that was offered"
                    self.halves.uploads[key] = content["samples"]
                    self.node.feed(ev.UploadReceived(peer, key))
            case tp.StreamSent(peer, stream):
                if stream.startswith("down:"):
                    key = UploadKey.parse(stream.removeprefix("down:"))
                    self.node.feed(ev.AnswerSent(peer, key))
            case tp.StreamDeclined() | tp.StreamFailed():
                self.failed(event)

    def _execute(self, effect: Effect, number: int) -> None:  # noqa: C901 - and for each effect
        endpoint, halves = self.endpoint, self.halves
        match effect:
            case Send(peer, message):
                endpoint.send(peer, msg.to_wire(message))
            case Note():
                self._say(effect)
            case DeclineStream(peer, stream, reason):
                endpoint.decline(peer, stream, reason)
            case Refuse(peer, code, text):
                endpoint.refuse(peer, code, text)
            case EndSession(peer, reason):
                endpoint.disconnect(peer, reason)
            case Finish():
                self._finished(effect)
            case split.AdmitSplit(peer, _, welcome):
                endpoint.welcome(peer, msg.to_wire(welcome))
            case split.ReceiveUpload(peer, stream, key):
                self.take(peer, stream, key)
            case split.DropUpload(key):
                halves.uploads.pop(key, None)
            case split.TrainUpload():
                self._run(lambda: halves.train(effect), number)
            case split.Align():
                self._run(lambda: halves.align(effect), number)
            case split.AverageReplicas():
                self._run(lambda: halves.average(effect), number)
            case split.Checkpoint():
                self._train.submit(
                    lambda: halves.copy(effect), lambda job: self._store(job, number), self._broken
                )
            case split.RecordUpload(key, outcome):
                self.disk.ledger.append((key, outcome))
            case split.RecordAuxiliary(client, version):
                self.disk.versions[client] = version
            case split.SendAnswer(peer, key):
                answer = lambda: self._answer(key)  # noqa: E731
                meta = msg.to_wire(msg.GradientMeta(key.text, 1.0, 0))
                source = Chunks("down", answer, self.sent)
                endpoint.offer(peer, msg.answer_stream(key.text), meta, source, EARLY_BYTES)
            case split.DropAnswer(key):
                halves.answers.pop(key, None)
            case split.SendAuxiliary(peer, version, round_):
                held = halves.state.auxiliary.get(peer, (-1, "x_a"))
                assert held[0] == version, "what is kept is sent"
                chunks = coded(version=version, content=held[1])
                meta = msg.to_wire(msg.AuxiliaryMeta(version, round_))
                source = Chunks("aux", lambda: chunks, self.sent)
                endpoint.offer(peer, msg.auxiliary_stream(peer, version), meta, source)
            case split.ForgetSteps(client):
                halves.open.pop(client, None)

    def _answer(self, key: UploadKey) -> list[bytes] | None:
        content = self.halves.answers.get(key)
        return None if content is None else coded(key=key.text, content=content)

    def _run(self, job: Callable[[], Event], number: int) -> None:
        self._train.submit(job, lambda event: self.node.feed(event, number), self._broken)

    def _store(self, job: Callable[[], Event], number: int) -> None:
        self._write.submit(job, lambda event: self.node.feed(event, number), self._broken)

    def _broken(self, error: Exception) -> None:
        raise AssertionError(str(error))


class RoundClientShell(ClientShell):
    """The client's shell towards the parameter server, whose learner knows rounds."""

    def _execute(self, effect: Effect, number: int) -> None:
        if isinstance(effect, do.BeginRound):
            assert isinstance(self.learner, RoundLearner)
            self.learner.begin_round(effect.sequence, effect.round)
        else:
            super()._execute(effect, number)


class SplitClientShell(_Shell):
    """Joins a SplitClientMachine with an endpoint and a training thread."""

    def __init__(
        self,
        machine: SplitClientMachine,
        learner: RoundLearner,
        *,
        scheduler: tp.Scheduler,
        journal: Journal,
        architecture: dict[str, str],
        sent: Counter[str],
        received: Counter[str],
    ) -> None:
        super().__init__(sent, received)
        self.machine = machine
        self.learner = learner
        self.architecture = architecture
        self.node = Node(machine, scheduler, self._execute, journal)
        self.run, self.shard = "", -1
        self.kept: set[tuple[int, int, int]] = set()  # uploads that are not dropped
        self.answers: dict[UploadKey, str] = {}
        self.models: dict[int, str] = {}
        self.finished: Finish | None = None

    def dial(self, run: str, shard: int) -> None:
        """Dial the split server; the parameter server has said which run this is."""
        self.run, self.shard = run, shard
        self.endpoint.connect(
            lambda: msg.to_wire(self.machine.hello(self.run, self.shard, self.architecture))
        )

    def feed(self, event: Event) -> None:
        """Take an event of the training thread or of the node."""
        if isinstance(event, ev.UploadReady):
            self.kept.add((event.round, event.step, event.leg))
        self.node.feed(event)

    def on_transport(self, event: tp.TransportEvent) -> None:  # noqa: C901 - a case for each event
        """Take one event of the endpoint."""
        feed = self.node.feed
        match event:
            case tp.PeerUp(_, _, body):
                welcome = msg.from_wire(body)
                assert isinstance(welcome, msg.SplitWelcome)
                last = UploadKey.parse(welcome.last) if welcome.last else None
                life = self.endpoint.incarnation
                held = (welcome.in_flight, last, welcome.auxiliary, life)
                feed(ev.SplitWelcomed(welcome.run, *held))
            case tp.PeerDown(_, _, reason):
                self.taking.clear()
                feed(SessionLost(reason))
            case tp.Refused(code, text):
                feed(HelloRefused(code, text))
            case tp.MessageReceived(_, body):
                feed(event_of(msg.from_wire(body)))
            case tp.StreamOffered(_, stream, body):
                match msg.from_wire(body):
                    case msg.GradientMeta(key, loss, updates):
                        feed(ev.AnswerOffered(stream, UploadKey.parse(key), loss, updates))
                    case msg.AuxiliaryMeta(version, round_):
                        feed(ev.AuxiliaryOffered(stream, version, round_))
            case tp.StreamReceived(_, stream):
                taken = self.taking.pop((SERVER, stream), None)
                if taken is not None:
                    self._received(decoded(taken[0].chunks), taken[1])
            case tp.StreamDeclined() | tp.StreamFailed():
                self.failed(event)

    def _received(self, content: dict[str, Any], what: UploadKey | int) -> None:
        if isinstance(what, UploadKey):
            assert content["key"] == what.text, "the answer to this upload"
            self.answers[what] = content["content"]
            self.node.feed(ev.AnswerReceived(what))
        else:
            self.models[what] = content["content"]
            self.node.feed(ev.AuxiliaryReceived(what))

    def _execute(self, effect: Effect, number: int) -> None:  # noqa: C901 - and for each effect
        learner = self.learner
        match effect:
            case Send(_, message):
                self.endpoint.send(SERVER, msg.to_wire(message))
            case DeclineStream(_, stream, reason):
                self.endpoint.decline(SERVER, stream, reason)
            case SendGoodbye(reason):
                self.endpoint.disconnect(SERVER, reason)
            case split.DialAgain():
                self.dial(self.run, self.shard)
            case Finish():
                self.finished = effect
            case split.OfferUpload():
                self._offer(effect)
            case split.DropUpload(key):
                self.kept.discard((key.round, key.step, key.leg))
            case split.ReceiveAnswer(stream, key):
                self.take(SERVER, stream, key)
            case split.DeliverAnswer(key, _):
                learner.deliver_answer(key, self.answers.pop(key))
            case split.AbandonUpload(key, _):
                learner.give_up(key)
            case split.FreeSlot():
                learner.free_slot()
            case split.ReceiveAuxiliary(stream, version):
                self.take(SERVER, stream, version)
            case split.InstallAuxiliary(version, _):
                learner.install(version, self.models.pop(version))
            case split.KeepAuxiliary():
                learner.keep()
            case split.SettleRound(round_):
                learner.settle_round(round_)

    def _offer(self, effect: split.OfferUpload) -> None:
        key = effect.key
        place = (key.round, key.step, key.leg)
        assert place in self.kept, "what is offered is still here"
        chunks = coded(key=key.text, samples=effect.samples)
        source = Chunks("up", lambda: chunks if place in self.kept else None, self.sent)
        meta = msg.SmashedMeta(
            key.text,
            effect.version,
            effect.auxiliary,
            [effect.samples, 4],
            [],
            effect.samples,
            8,
            effect.wants_gradient,
            effect.alignment_due,
        )
        stream = msg.upload_stream(key.text)
        self.endpoint.offer(SERVER, stream, msg.to_wire(meta), source, EARLY_BYTES)
