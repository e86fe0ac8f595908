"""A client's shell: events of transport, training and finished jobs in, effects out.

It decides nothing. Coding, decoding and hashing go to the one worker, in order; weights are copied
by the training thread (`fsl_async.learn.client`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from attrs import define, evolve, field, mutable

import fsl_transport as tp
from fsl_async.accounting.sizes import Direction
from fsl_async.errors import ExitCode, FslError, NotAllowedError
from fsl_async.learn.client.exchange import Exchange, FetchKind
from fsl_async.learn.client.probes import EvaluatorExchange
from fsl_async.nodes.runtime import Journal, Node, Shell, Worker
from fsl_async.nodes.wire import (
    Hello,
    Sink,
    Source,
    TransferProgress,
    Welcome,
    eager_bytes,
    problem_of,
    violation_in,
)
from fsl_async.roles.goodbye import Goodbye, reason_for_peers
from fsl_async.roles.machine import (
    SERVER,
    DeclineStream,
    Done,
    Event,
    Finish,
    HelloRefused,
    Note,
    Offered,
    Received,
    RunEnded,
    Send,
    SendGoodbye,
    SessionLost,
    StreamLost,
)
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.delta import MASKS, ORDER
from fsl_async.roles.sync.progress import RunPosition
from fsl_async.store.model.manifest import Manifest

if TYPE_CHECKING:
    from fsl_async.nodes.client.secure_side import SecureSide

REDIAL_S = 5.0


@mutable
class FetchProgress:
    """The version being fetched. It is kept across sessions, so a transfer resumes at the chunk."""

    kind: str
    version: int
    chunks: int
    next_chunk: int = 0
    stream: str = ""


@define(eq=False, slots=False)
class ClientShell(Shell):
    """Connects a ClientMachine with an endpoint, a learner and a worker.

    dialer: makes the endpoint from the handler of its events. count: called with each chunk of
    weights. on_end: called when the parameter server ends the run. announced: called with the run's
    position of each announcement. shares_metrics: whether this
    site's policy allows metrics to leave.
    """

    machine: ClientMachine
    learner: Exchange
    _dialer: Callable[[Callable[[tp.TransportEvent], None]], tp.DialerEndpoint]
    worker: Worker
    _scheduler: tp.Scheduler
    _journal: Journal
    _say: Callable[[Note], None]
    _finished: Callable[[Finish], None]
    _welcomed: Callable[[Welcome], None]
    _end_training: Callable[[str], None]
    count: Callable[[Direction, int, bytes], None] = lambda *_: None
    _on_end: Callable[[Event], None] = lambda _: None
    _announced: Callable[[RunPosition], None] = lambda _: None
    _shares_metrics: bool = True
    rollouts: deque[msg.Rollout] = field(factory=deque)
    """Answers of clients that roll out, for the training thread."""
    secure: SecureSide | None = None
    """Set by the welcome of a run with secure sums."""

    def __attrs_post_init__(self) -> None:
        self.node = Node(self.machine, self._scheduler, self._execute, self._journal)
        self._over = False
        self._shard = -1
        self._fetch: FetchProgress | None = None
        self._waiting: do.OfferDelta | None = None
        """A delta whose masks are not here."""
        self._scalars = "", b""
        """The name that a stream of the scalars that came would have, and their frame."""
        self._scored: dict[str, do.ReceiveDelta] = {}
        """Stream -> the delta of another client that it carries."""
        self._transfer_progress = TransferProgress()
        self._on_transport: dict[type, Callable[[Any], None]] = {
            tp.PeerUp: self._up,
            tp.PeerDown: self._down,
            tp.Refused: self._refused,
            tp.Superseded: self._superseded,
            tp.Unreachable: self._unreachable,
            tp.MessageReceived: self._message,
            tp.StreamOffered: self._offered,
            tp.StreamReceived: self._received,
            tp.StreamDeclined: self._stream_lost,
            tp.StreamFailed: self._stream_lost,
        }
        self._executors: dict[type, Callable[[Any, int], None]] = {
            Send: lambda e, _: self.endpoint.send(SERVER, msg.to_wire(e.message)),
            Note: lambda e, _: self._say(e),
            DeclineStream: lambda e, _: self._decline(e),
            Finish: self._finish,
            do.SendManifest: self._send_manifest,
            do.OfferInitial: self._offer_initial,
            do.TakeSnapshot: lambda e, _: self._take_snapshot(e),
            do.CountSteps: lambda e, _: self.learner.count_steps(e.steps),
            do.ResumeTraining: lambda *_: self.learner.resume(),
            do.CheckTransfers: lambda _, number: self._look(number),
            do.OfferDelta: self._offer_delta,
            do.FinishEncoding: self._finish_encoding,
            do.DropDelta: lambda e, _: self.learner.drop_delta(e.sequence),
            do.ReceiveVersion: self._receive_version,
            do.ReceiveDelta: self._receive_delta,
            do.TakeRollout: lambda e, _: self.rollouts.append(e.message),
            do.ScoreDeltas: lambda e, _: self._scorer.score(e.version, e.shares),
            do.ReplaceBase: self._replace_base,
            do.Rebase: self._rebase,
            SendGoodbye: lambda e, _: self._leave(e.reason),
            do.EndTraining: lambda e, _: self._end_training(e.reason),
        }
        self.endpoint = self._dialer(self.on_transport)

    def dial(self) -> None:
        """Dial the parameter server, and after every loss again, until the end."""
        if not self._over:
            self.endpoint.connect(self.hello)

    def hello(self) -> dict[str, Any]:
        """The hello for one attempt, with the version that this client holds now."""
        base = self.machine.base
        held = self.machine.run, base.version, base.digest, self._shard
        return Hello(*held, self.machine.duty).to_wire()

    # --- from the transport ---

    def _violated(self, peer: str, error: Exception) -> None:
        text = f"the parameter server broke the protocol: {problem_of(error)}"
        self._say(Note(text, "warning"))
        self.endpoint.disconnect(SERVER, "protocol")
        self.node.feed(SessionLost("protocol"))
        self._scheduler.call_at(self._scheduler.time() + REDIAL_S, self.dial)

    def _up(self, event: tp.PeerUp) -> None:
        welcome = Welcome.from_wire(event.body)
        if self._shard < 0:
            self._shard = welcome.shard  # the training function keeps its first one
        try:
            self._welcomed(welcome)
        except NotAllowedError as error:
            self._refuse("policy", error.message, error.message)
            return
        except FslError as error:  # this release does not support the configuration
            text = f"the parameter server's configuration: {error.message}"
            self._refuse("config", error.message, text)
            return
        incarnation = self.endpoint.incarnation
        self.node.feed(ev.Welcomed(welcome.run, welcome.shard, welcome.shards, incarnation))

    def _down(self, event: tp.PeerDown) -> None:
        self.node.feed(SessionLost(event.reason, violation_in(event.text)))

    def _refuse(self, code: str, text: str, reason: str) -> None:
        self.learner.refuse(code, text)
        self.node.feed(HelloRefused(code, reason))

    def _refused(self, event: tp.Refused) -> None:
        self._refuse(event.code, event.text, event.text)

    def _superseded(self, event: tp.Superseded) -> None:
        name = self.machine.name
        text = (
            f"another process took over as {name}: if that was not meant, give each client its own"
            " --name"
        )
        self._refuse("superseded", text, text)

    def _unreachable(self, event: tp.Unreachable) -> None:
        text = (
            f"no answer from {event.address} for {event.seconds:.0f} s; trying again (is the"
            " parameter server running, is the address right?)"
        )
        self._say(Note(text, "warning"))

    def _message(self, event: tp.MessageReceived) -> None:
        message = msg.from_wire(event.body)
        if self.secure is not None and self.secure.takes(message):
            self._send_masked()
            return
        match message:
            case msg.Announce(position=position):
                self._announced(position)
            case msg.Scalars(version, _, frame, position):
                if position != RunPosition():
                    self._announced(position)
                self._scalars = msg.version_stream("seeds", version), frame
            case msg.Reject(code, text):
                self.learner.refuse(code, text)
            case msg.Stop(reason):
                self._on_end(RunEnded(reason))
        self.node.feed(Received(SERVER, message))

    def _offered(self, event: tp.StreamOffered) -> None:
        meta = msg.from_wire(event.meta)
        if isinstance(meta, msg.DeltaMeta) and event.chunks != self._chunks:
            self.endpoint.decline(SERVER, event.stream_id, "wrong number of chunks")
            self.node.feed(StreamLost(SERVER, event.stream_id, "wrong number of chunks"))
            return
        self.node.feed(Offered(SERVER, meta, event.stream_id))

    def _received(self, event: tp.StreamReceived) -> None:
        scored = self._scored.pop(event.stream_id, None)
        if scored is not None:
            self.node.feed(Done(scored))
            return
        fetch = self._fetch
        if fetch is not None and fetch.stream == event.stream_id:
            self._fetch = None
            self.node.feed(Done(do.ReceiveVersion(fetch.stream, fetch.kind, fetch.version)))

    def _stream_lost(self, event: tp.StreamDeclined | tp.StreamFailed) -> None:
        self._scored.pop(event.stream_id, None)
        self.node.feed(StreamLost(SERVER, event.stream_id, event.reason))

    # --- effects ---

    def _look(self, number: int) -> None:
        self.node.feed(self._transfer_progress.look(self.endpoint.transfers()), number)

    def _known_manifest(self) -> Manifest:
        manifest = self.learner.manifest
        assert manifest is not None
        return manifest

    def _send_manifest(self, effect: do.SendManifest, number: int) -> None:
        manifest = self._known_manifest()
        wire, frozen = manifest.to_wire(), manifest.frozen_to_wire()
        self.endpoint.send(SERVER, msg.to_wire(msg.Attach(manifest.fingerprint, wire, frozen)))

    def _offer_initial(self, effect: do.OfferInitial, number: int) -> None:
        manifest = self._known_manifest()
        source = Source(
            manifest.chunks,
            self.worker,
            self.learner.encode_initial,
            lambda index, frame: self.count(Direction.UP, index, frame),
        )
        stream = msg.initial_stream(self.machine.name, self.machine.incarnation)
        self.endpoint.offer(
            SERVER, stream, msg.to_wire(msg.InitialMeta(manifest.fingerprint)), source
        )

    def _take_snapshot(self, effect: do.TakeSnapshot) -> None:
        if effect.round >= 0:
            self.learner.begin_round(effect.sequence, effect.round)
        else:
            self.learner.request_snapshot(effect.sequence, hold=effect.hold)

    def _offer_delta(self, effect: do.OfferDelta, number: int) -> None:
        delta, sequence = effect.delta, effect.delta.key.sequence
        if self.secure is not None:
            masks = self.secure.masks_of(delta)
            self._waiting = effect if masks is None else None
            if masks is None:
                return
            delta = evolve(delta, facts={**delta.facts, MASKS: masks})
        chunks = self.learner.delta_frames(sequence)
        source = Source(
            chunks,
            self.worker,
            lambda index: self.learner.encode_delta(sequence, index),
            lambda index, frame: self.count(Direction.UP, index, frame),
        )
        if not self._shares_metrics:
            delta = evolve(delta, metrics={})
        frame = self.learner.scalars_frame(sequence)
        if frame is not None and delta.key.incarnation == self.machine.incarnation:
            measured = msg.Measured(
                sequence,
                delta.base_digest,
                delta.tokens,
                delta.steps,
                frame,
                delta.metrics,
                {name: fact for name, fact in delta.facts.items() if name != ORDER},
            )
            self.endpoint.send(SERVER, msg.to_wire(measured))
            self.count(Direction.UP, 0, frame)
            return
        meta = msg.to_wire(msg.DeltaMeta(delta))
        stream = msg.delta_stream(delta.key.text)
        self.endpoint.offer(SERVER, stream, meta, source, eager_bytes(chunks))

    def _send_masked(self) -> None:
        """Offer the delta that has waited for its masks, if they are here or will not come."""
        waiting = self._waiting
        if waiting is not None and waiting.delta == self.machine.delta and self.machine.connected:
            self._offer_delta(waiting, 0)

    def _finish_encoding(self, effect: do.FinishEncoding, number: int) -> None:
        def finished(_: None) -> None:
            self.node.feed(Done(effect), number)
            self._send_masked()

        self.worker.submit(
            lambda: self.learner.finish_encoding(effect.sequence), finished, self._broken
        )

    def _receive_version(self, effect: do.ReceiveVersion, number: int) -> None:
        version = effect.version
        fetch = self._fetch
        if fetch is None or (fetch.kind, fetch.version) != (effect.kind, version):
            kind = effect.kind
            try:
                self.learner.begin_fetch(cast("FetchKind", kind), version)
            except Exception as error:  # noqa: BLE001 - the reason for declining
                self.endpoint.decline(SERVER, effect.stream, str(error)[:200])
                self.node.feed(StreamLost(SERVER, effect.stream, str(error)), number)
                return
            chunks = 1 if kind == "seeds" else self._known_manifest().chunks
            fetch = FetchProgress(kind, version, chunks)
        fetch.stream = effect.stream
        name, frame = self._scalars
        if effect.stream == name:
            self._receive_scalars(effect, number, frame)
            return
        self._fetch = fetch

        def taken(index: int, frame: bytes) -> None:
            fetch.next_chunk = max(fetch.next_chunk, index + 1)
            self.count(Direction.DOWN, index, frame)

        def put(first: int, *frames: bytes) -> None:
            for index, frame in enumerate(frames, first):
                self.learner.put_fetch(version, index, frame)

        sink = Sink(self.worker, put, taken)
        self.endpoint.accept(SERVER, effect.stream, sink, fetch.next_chunk)

    def _receive_delta(self, effect: do.ReceiveDelta, number: int) -> None:
        """Receive a delta of another client, to score it."""
        key = effect.delta.key
        self._scored[effect.stream] = effect
        sink = Sink(
            self.worker,
            lambda first, *frames: self._scorer.put_delta(key, first, *frames),
            lambda index, frame: self.count(Direction.DOWN, index, frame),
        )
        self.endpoint.accept(SERVER, effect.stream, sink)

    @property
    def _scorer(self) -> EvaluatorExchange:
        assert isinstance(self.learner, EvaluatorExchange), "its machine is an evaluator's"
        return self.learner

    @property
    def _chunks(self) -> int:
        manifest = self.learner.manifest
        return 0 if manifest is None else manifest.chunks

    def _receive_scalars(self, effect: do.ReceiveVersion, number: int, frame: bytes) -> None:
        self._fetch, self._scalars = None, ("", b"")

        def taken(_: None) -> None:
            self.count(Direction.DOWN, 0, frame)
            self.node.feed(Done(effect), number)

        self.worker.submit(
            lambda: self.learner.put_fetch(effect.version, 0, frame),
            taken,
            lambda error: self.node.feed(StreamLost(SERVER, effect.stream, str(error)), number),
        )

    def _decline(self, effect: DeclineStream) -> None:
        if effect.stream == self._scalars[0]:
            self._scalars = "", b""
        else:
            self.endpoint.decline(SERVER, effect.stream, effect.reason)

    def _replace_base(self, effect: do.ReplaceBase, number: int) -> None:
        version, learner = effect.version, self.learner
        self.worker.submit(
            learner.adopt_initial if effect.is_own else lambda: learner.finish_fetch(version),
            lambda digest: self.node.feed(
                ev.BaseReplaced(version, digest, learner.global_digest), number
            ),
            lambda error: self.node.feed(Done.failed(effect, error), number),
        )

    def _rebase(self, effect: do.Rebase, number: int) -> None:
        digest = self.machine.base.digest
        self.learner.request_rebase(effect.version, digest, discard=effect.discard)

    def _broken(self, error: Exception) -> None:
        self._finished(Finish(f"cannot code this client's delta: {error}", 1))

    def finish(self, effect: Finish) -> None:
        """End now; the goodbye with the reason may still be sent."""
        self._finish(effect, 0)

    def _leave(self, reason: str) -> None:
        self._over = True
        self.endpoint.disconnect(SERVER, reason)

    def _finish(self, effect: Finish, number: int) -> None:
        left_s = None
        if effect.exit_code == ExitCode.RELAUNCH:
            left_s = 0.0 if effect.deadline is None else effect.deadline - self._scheduler.time()
        reason = reason_for_peers(effect.reason, effect.exit_code)
        self._leave(Goodbye(reason, left_s).text)
        self._finished(effect)
