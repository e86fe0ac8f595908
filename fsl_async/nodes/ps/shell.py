"""The parameter server's shell: transport events and finished disk jobs in, effects out.

It decides nothing. What takes time (every touch of the disk, every decode) goes to the one worker, in order; that order is what
makes "accumulate these, then commit" mean what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

import fsl_transport as tp
from fsl_async.accounting.categories import Direction
from fsl_async.nodes.ports import Listener, Reduction, Store
from fsl_async.nodes.ps.receiving import Receiving
from fsl_async.nodes.ps.serving import Serving
from fsl_async.nodes.ps.shards import Shards
from fsl_async.nodes.ps.store_jobs import StoreJobs
from fsl_async.nodes.runtime import Journal, Node, Worker
from fsl_async.nodes.transfer_progress import TransferProgress
from fsl_async.nodes.wire import Hello, Welcome, beat_of, delta_stream, problem_of
from fsl_async.roles.machine import (
    ClientLeft,
    DeclineStream,
    Effect,
    EndSession,
    Finish,
    Note,
    Refuse,
    Send,
)
from fsl_async.roles.messages import MessageError
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.ps import ParameterServerMachine
from fsl_async.store.errors import ManifestError
from fsl_async.store.manifest import Manifest
from fsl_transport.rate_limit import Rate, TokenBucket


@frozen
class RunFacts:
    """What every client is told when it is welcomed."""

    run: str
    shards: int
    config: dict[str, Any]


class ParameterServerShell:
    """Joins a ParameterServerMachine with an endpoint, a store and a worker."""

    def __init__(
        self,
        machine: ParameterServerMachine,
        facts: RunFacts,
        store: Store,
        *,
        worker: Worker,
        scheduler: tp.Scheduler,
        journal: Journal,
        say: Callable[[Note], None],
        finished: Callable[[Finish], None],
        after_commit: Callable[[int], None] | None = None,
        reduction: Reduction | None = None,
        count: Callable[[Manifest, Direction, int, bytes], None] = lambda *_: None,
    ) -> None:
        """after_commit, reduction: see `StoreJobs`.

        count: called with each chunk of weights that came or goes, seen from the client.
        """
        self.machine = machine
        self.facts = facts
        self.store = store
        self.worker = worker
        self.node = Node(machine, scheduler, self._execute, journal)
        self.manifest: Manifest | None = None
        self.endpoint: Listener
        self.scheduler = scheduler
        self.say = say
        self._finished = finished
        self._count_chunk = count
        self._shards = Shards(facts.shards)
        self._refusals = TokenBucket(Rate(0.2, 10.0), scheduler.time())  # of which people are told
        self._incarnations: dict[str, int] = {}
        self._agreeing: set[str] = (
            set()
        )  # whose model is the manifest's, in the sessions that stand
        self.jobs = StoreJobs(
            store,
            worker,
            self.node.feed,
            scheduler=scheduler,
            say=say,
            after_commit=after_commit,
            reduction=reduction,
        )
        self._receiving = Receiving(self)
        self._serving = Serving(self)
        self._transfer_progress = TransferProgress()
        self._on_transport: dict[type, Callable[[Any], None]] = {
            tp.HelloReceived: self._hello,
            tp.PeerDown: self._down,
            tp.MessageReceived: self._message,
            tp.HeartbeatReceived: lambda e: self.node.feed(
                ev.HeartbeatReceived(e.peer, beat_of(e.payload))
            ),
            tp.StreamOffered: self._offered,
            tp.StreamReceived: lambda e: self._receiving.received(e.peer, e.stream_id),
            tp.StreamSent: lambda e: self._serving.sent(e.peer, e.stream_id),
            tp.StreamDeclined: lambda e: self._serving.failed(e.peer, e.stream_id),
            tp.StreamFailed: self._stream_failed,
        }
        self._executors: dict[type, Callable[[Any, int], None]] = {
            Send: self._tell,
            Note: lambda e, _: self.say(e),
            DeclineStream: lambda e, _: self.endpoint.decline(e.peer, e.stream, e.reason),
            Finish: lambda e, _: self._finished(e),
            do.CheckTransfers: lambda _, number: self._look(number),
            do.Admit: self._admit,
            Refuse: lambda e, _: self.endpoint.refuse(e.peer, e.code, e.text),
            EndSession: lambda e, _: self.endpoint.disconnect(e.peer, e.reason),
            do.ReceiveInitial: self._receiving.initial,
            do.ReceiveDelta: self._receiving.delta,
            do.SendVersion: self._serving.serve,
            do.Accumulate: self.jobs.accumulate,
            do.Quarantine: self.jobs.quarantine,
            do.Release: self.jobs.release,
            do.Average: self.jobs.average,
            do.Reduce: self.jobs.reduce,
            do.Commit: self.jobs.commit,
            do.VerifyVersion: self.jobs.verify,
        }

    def start(self, recovered: ev.Recovered) -> None:
        """Feed what `store.recover()` found; call once, before any transport event."""
        self.manifest = self.store.manifest if recovered.version >= 0 else None
        self._shards.recovered(recovered.leases, recovered.loans, self.scheduler.time())
        self._incarnations = dict(recovered.incarnations)
        for name, incarnation in self._incarnations.items():
            # The transport forgot them with the last process; without them a client whose clock is behind would be let in
            # and have every delta refused as one of a former life.
            self.endpoint.remember(name, incarnation)
        self.node.feed(recovered)

    # --- from the transport ---

    def on_transport(self, event: tp.TransportEvent) -> None:
        """Take one event of the endpoint."""
        handler = self._on_transport.get(type(event))
        if handler is None:
            return
        try:
            handler(event)
        except (MessageError, ValueError) as error:
            peer: str = getattr(event, "peer", "")
            self.say(Note(f"{peer} sent what no client sends: {problem_of(error)}", "warning"))
            self.endpoint.disconnect(peer, "protocol")
            member = self.machine.members.get(peer)
            if member is not None:
                self._down(tp.PeerDown(peer, member.incarnation, "protocol"))

    def _hello(self, event: tp.HelloReceived) -> None:
        try:
            hello = Hello.from_wire(event.hello)
        except MessageError as error:
            self.endpoint.refuse(event.peer, "hello", problem_of(error))
            return
        self._agreeing.discard(event.peer)
        self._shards.wants(event.peer, hello.shard)
        self.node.feed(
            ev.ClientHello(event.peer, event.incarnation, hello.run, hello.version, hello.digest)
        )

    def _down(self, event: tp.PeerDown) -> None:
        self._receiving.left(event.peer)
        self._serving.left(event.peer)
        self._shards.left(event.peer, event.reason, self.scheduler.time())
        self._agreeing.discard(event.peer)
        self.node.feed(ClientLeft(event.peer, event.incarnation, event.reason))

    def _message(self, event: tp.MessageReceived) -> None:
        peer = event.peer
        match msg.from_wire(event.body):
            case msg.Attach(fingerprint, tensors):
                self._attach(peer, fingerprint, tensors)
            case msg.Fetch(version, digest):
                self.node.feed(ev.FetchAsked(peer, version, digest))
            case msg.Holding(version, digest):
                self.node.feed(ev.VersionHeld(peer, version, digest))
                if version == self.machine.version:
                    self._serving.caught_up(peer)
            case msg.Skip(number, reason):
                self.node.feed(ev.RoundSkipped(peer, number, reason))
            case other:
                raise MessageError(f"{type(other).__name__} is not for a client to say")

    def _attach(self, peer: str, fingerprint: str, tensors: list[Any]) -> None:
        manifest = self.manifest
        if manifest is not None and manifest.fingerprint == fingerprint:
            attached = ev.ModelAttached(peer, fingerprint, manifest.values, None)
            self._agreeing.add(peer)
            self._book_shard(peer, lambda: self._join(attached))
            return
        try:
            theirs = Manifest.from_wire(tensors)
        except ManifestError as error:
            raise MessageError(f"not a manifest: {error}") from None
        if manifest is None or (self.machine.version < 0 and not self._agreeing):
            # Before version 0 the manifest of the first one who is here counts, as its weights will, while it or
            # another one with that model is here.
            self.manifest = manifest = theirs
        difference = theirs.difference(manifest)
        answer = ev.ModelAttached(peer, theirs.fingerprint, theirs.values, difference)
        if difference is None:
            self._agreeing.add(peer)
            self._book_shard(peer, lambda: self._join(answer))
        else:
            self.node.feed(answer)

    def _join(self, event: ev.ModelAttached) -> None:
        shard = self._shards.of(event.peer)
        if self.machine.trigger.selection.by_shard and shard is not None:
            self.node.feed(ev.ShardAssigned(event.peer, shard))
        self.node.feed(event)

    def _offered(self, event: tp.StreamOffered) -> None:
        meta = msg.from_wire(event.meta)
        if self.manifest is None or event.chunks != self.manifest.chunks:
            self.endpoint.decline(event.peer, event.stream_id, "wrong number of chunks")
            return
        match meta:
            case msg.DeltaMeta(delta):
                if event.stream_id != delta_stream(delta.key.text):
                    shown = event.stream_id[:80]
                    raise MessageError(f"stream {shown!r} carries delta {delta.key.text}")
                self.node.feed(ev.DeltaOffered(event.peer, event.stream_id, delta))
            case msg.InitialMeta(fingerprint) if fingerprint != self.manifest.fingerprint:
                self.endpoint.decline(event.peer, event.stream_id, "weights of another model")
            case msg.InitialMeta():
                self.node.feed(ev.InitialOffered(event.peer, event.stream_id))
            case other:
                raise MessageError(f"a client streams no {type(other).__name__}")

    def _stream_failed(self, event: tp.StreamFailed) -> None:
        self._serving.failed(event.peer, event.stream_id)
        self._receiving.failed(event.peer, event.stream_id, event.reason)

    # --- to the world ---

    def _look(self, number: int) -> None:
        seen = self._transfer_progress.look(self.endpoint.transfers(), self._receiving.storing)
        self.node.feed(seen, number)

    def _execute(self, effect: Effect, number: int) -> None:
        self._executors[type(effect)](effect, number)

    def _tell(self, effect: Send, number: int) -> None:
        self.endpoint.send(effect.peer, msg.to_wire(effect.message))

    def _admit(self, effect: do.Admit, number: int) -> None:
        """Welcome with a data shard: the one the client has, else one that nobody has (see `shells.shards`)."""
        if self._incarnations.get(effect.peer, -1) >= effect.incarnation:
            self._welcome(effect)
            return
        if self._shards.pick(effect.peer, self.scheduler.time()) is None:
            self._refuse_shard(effect)  # before it is written down: there is no end of names
            return
        self.worker.submit(
            lambda: self.store.record_incarnation(effect.peer, effect.incarnation),
            lambda _: self._welcome(effect),
            lambda error: self.endpoint.disconnect(effect.peer, str(error)),  # it says hello again
        )

    def _welcome(self, effect: do.Admit) -> None:
        peer = effect.peer
        member = self.machine.members.get(peer)
        if member is None or member.incarnation != effect.incarnation:
            return  # it left, or came back as another, while its incarnation was written down
        self._incarnations[peer] = max(effect.incarnation, self._incarnations.get(peer, -1))
        shards = self.facts.shards
        shard = self._shards.pick(peer, self.scheduler.time())
        if shard is None:
            self._refuse_shard(effect)
            return
        welcome = Welcome(self.facts.run, shard, shards, self.facts.config)
        if self._shards.of(peer) == shard and not self._shards.is_lent(peer):
            self.endpoint.welcome(peer, welcome.to_wire())
            return
        self._shards.lend(peer, shard)  # at once, so that nobody else is told the same

        def lent(_: int | None) -> None:
            found = self.machine.members.get(peer)
            if found is not None and found.incarnation == effect.incarnation:
                self.endpoint.welcome(peer, welcome.to_wire())

        def failed(error: Exception) -> None:
            self._shards.take_back(peer)
            self.endpoint.disconnect(peer, str(error))  # it says hello again

        self.worker.submit(lambda: self.store.lease(peer, shards, shard, loan=True), lent, failed)

    def _refuse_shard(self, effect: do.Admit) -> None:
        peer = effect.peer
        holders = ", ".join(self._shards.holders[:8])
        text = (
            f"all {self.facts.shards} data shards are taken (by {holders}): start this client again under one of these names,"
            " or set data.shards (or sync.clients) higher at the server"
        )
        if self._refusals.take(self.scheduler.time()):  # strangers must not write the log
            self.say(Note(f"{peer} is refused: {text}", "warning"))
        self.endpoint.refuse(peer, "shards", text)
        self.node.feed(ClientLeft(peer, effect.incarnation, "no data shard"))

    def _book_shard(self, peer: str, then: Callable[[], None]) -> None:
        """Make a client's shard its own for good, then go on."""
        if not self._shards.is_lent(peer):
            then()
            return

        def booked(_: int | None) -> None:
            self._shards.keep(peer)
            then()

        self.worker.submit(
            lambda: self.store.lease(peer, self.facts.shards),
            booked,
            lambda error: self.endpoint.disconnect(peer, str(error)),  # it says hello again
        )

    def counting(self, direction: Direction) -> Callable[[int, bytes], None]:
        """What counts the chunks of weights that come or go."""

        def count(index: int, frame: bytes) -> None:
            if self.manifest is not None:
                self._count_chunk(self.manifest, direction, index, frame)

        return count
