"""The parameter server's shell: transport events and finished disk jobs in, effects out.

It decides nothing. Everything slow (disk, decoding) goes to its one worker, in order: streams in
`receiving` and `serving`, other jobs in `store_jobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

import fsl_transport as tp
from fsl_async.accounting.sizes import Direction
from fsl_async.config.load import to_wire
from fsl_async.nodes.ps.groups import GroupsShell
from fsl_async.nodes.ps.receiving import Receiving
from fsl_async.nodes.ps.serving import Serving
from fsl_async.nodes.ps.store_jobs import ParameterServerContext, StoreJobs
from fsl_async.nodes.runtime import Journal, Node, Shell, Worker
from fsl_async.nodes.wire import (
    Hello,
    TransferProgress,
    Welcome,
    beat_of,
    code_of,
    problem_of,
    violation,
)
from fsl_async.roles.goodbye import Goodbye
from fsl_async.roles.groups.effects import Adopt, TakeCut
from fsl_async.roles.groups.events import GroupEnds
from fsl_async.roles.machine import (
    ClientLeft,
    DeclineStream,
    EndSession,
    Finish,
    Note,
    Offered,
    Received,
    Refuse,
    Send,
)
from fsl_async.roles.messages import MessageError
from fsl_async.roles.phrasing import MessageThrottle
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.facts import RunFacts
from fsl_async.roles.sync.ps import ParameterServerMachine
from fsl_async.store.deltas.delta_kind import MaskedSeeds
from fsl_async.store.errors import ManifestError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.store import Store
from fsl_codecs import CodecError, decode_seeds


@frozen(kw_only=True)
class Surroundings:
    """The parts of a process that the shell uses."""

    store: Store
    worker: Worker
    scheduler: tp.Scheduler
    journal: Journal
    listener: Callable[[Callable[[tp.TransportEvent], None]], tp.ListenerEndpoint]
    """Makes the endpoint from the handler of its events."""
    say: Callable[[Note], None]
    finished: Callable[[Finish], None]
    after_commit: Callable[[int], None] | None = None
    """See `StoreJobs`."""
    count: Callable[[Manifest, Direction, int, bytes], None] = lambda *_: None
    """Takes each chunk of weights sent or received; the direction is as seen from the client."""


class ParameterServerShell(Shell):
    """Connects a ParameterServerMachine with an endpoint, a store and a worker."""

    def __init__(self, machine: ParameterServerMachine, surroundings: Surroundings) -> None:
        around, config = surroundings, machine.config
        self.machine = machine
        self.shards = config.shards
        """Parts of the data of this group; 0 where it is not divided."""
        groups = list(config.groups.servers) or [config.run.name]
        self._parts = len(groups) * self.shards
        self._first_part = groups.index(config.run.name) * self.shards
        """The parts of groups follow each other; each has as many."""
        self._tables = to_wire(config)
        self.groups: GroupsShell | None = None
        """Set before `start` where this is the parameter server of a group."""
        self.node = Node(
            machine, around.scheduler, self._execute, around.journal, RunFacts(machine).after
        )
        self.endpoint = endpoint = around.listener(self.on_transport)
        # Client -> its manifest, before version 0: one may become the run's.
        self._models: dict[str, Manifest] = {}
        self._early: tuple[str, msg.Attach] | None = None
        """The model of an evaluator that came before version 0, by which the run's is known."""
        self._store, self._around = around.store, around
        self._transfer_progress = TransferProgress()
        self._throttle = MessageThrottle(by_thing=True)
        jobs = StoreJobs(
            around.store,
            around.worker,
            self.node.feed,
            shards=self.shards,
            scheduler=around.scheduler,
            say=around.say,
            after_commit=around.after_commit,
            on_version=self._version_made,
        )
        self.context = ParameterServerContext(
            machine=machine,
            node=self.node,
            endpoint=endpoint,
            store=around.store,
            worker=around.worker,
            scheduler=around.scheduler,
            journal=around.journal,
            jobs=jobs,
            say=around.say,
            count=around.count,
        )
        self._receiving = Receiving(self.context)
        self._serving = Serving(self.context)
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
            Send: lambda e, _: endpoint.send(e.peer, msg.to_wire(e.message)),
            Note: lambda e, _: around.say(e),
            DeclineStream: lambda e, _: self._decline(e),
            Finish: lambda e, _: around.finished(e),
            do.CheckTransfers: lambda _, number: self._check_transfers(number),
            do.Admit: jobs.admit,
            do.Welcome: self._welcome,
            Refuse: lambda e, _: endpoint.refuse(e.peer, e.code, e.text),
            EndSession: lambda e, _: self._end_session(e.peer, e.reason),
            do.UseModel: self._use_model,
            do.KeepShard: jobs.keep_shard,
            do.ReceiveInitial: self._receiving.initial,
            do.ReceiveDelta: self._receiving.delta,
            do.SendVersion: self._serving.serve,
            do.SendDelta: self._serving.serve_delta,
            do.KeepDecay: jobs.keep_decay,
            do.KeepSum: jobs.keep_sum,
            do.OpenSum: jobs.open_sum,
            do.Quarantine: jobs.quarantine,
            do.Release: jobs.release,
            do.Commit: jobs.commit,
            do.VerifyVersion: jobs.verify,
            TakeCut: lambda e, _: self._in_groups().take_cut(e),
            GroupEnds: lambda e, _: self._in_groups().node.feed(e),
            Adopt: lambda e, number: self._in_groups().adopt(e, number),
        }

    def start(self, recovered: ev.Recovered) -> None:
        """Feed the result of `store.recover()`; call once, before any transport event."""
        self.context.manifest = self._store.manifest if recovered.version >= 0 else None
        for name, incarnation in recovered.incarnations.items():
            # The transport lost them with the last process. Without them a client whose clock is
            # behind would be admitted, and each of its deltas refused as of an earlier incarnation.
            self.endpoint.remember(name, incarnation)
        self.node.feed(recovered)
        if self.groups is not None:
            self.groups.start()

    def _version_made(self, version: int) -> None:
        peer, attach = self._early or ("", None)
        self._early = None
        if attach is not None and peer in self.machine.members:
            self._attach(peer, attach)
        if self.groups is not None:
            self.groups.version_made(version)

    def _in_groups(self) -> GroupsShell:
        assert self.groups is not None, "only a member of a roster asks for this"
        return self.groups

    # --- from the transport ---

    def on_transport(self, event: tp.TransportEvent) -> None:
        """Take one event of the endpoint."""
        if self.groups is not None and self.groups.is_of_groups(event):
            self.groups.on_listener(event)
            return
        super().on_transport(event)

    def _violated(self, peer: str, error: Exception) -> None:
        problem = problem_of(error)
        more = self._throttle.lets(peer, self._around.scheduler.time())
        if more is not None:
            self._around.say(Note(f"{peer} broke the protocol: {problem}{more}", "warning"))
        self._end_session(peer, "protocol", violation(problem), code_of(error))

    def _end_session(self, peer: str, reason: str, text: str = "", code: str = "") -> None:
        """End a session from this side, of which the transport then reports no end.

        text: for the peer, instead of the reason. code: the kind of violation that ended it.
        """
        self.endpoint.disconnect(peer, text or reason)
        member = self.machine.members.get(peer)
        incarnation = 0 if member is None else member.incarnation
        self._down(tp.PeerDown(peer, incarnation, reason), code)

    def _hello(self, event: tp.HelloReceived) -> None:
        try:
            hello = Hello.from_wire(event.hello)
        except MessageError as error:
            self.endpoint.refuse(event.peer, "hello", problem_of(error))
            return
        shard = hello.shard - self._first_part
        if self._parts > self.shards and not 0 <= shard < self.shards:
            shard = -1  # a part of another group
        held = (hello.run, hello.version, hello.digest, shard, hello.duty)
        self.node.feed(ev.ClientHello(event.peer, event.incarnation, *held))

    def _down(self, event: tp.PeerDown, violation: str = "") -> None:
        self._receiving.left(event.peer)
        self._serving.left(event.peer)
        self._models.pop(event.peer, None)
        goodbye = Goodbye.read(event.text if event.reason == "bye" else "")
        returns = goodbye.relaunch_in_s is not None
        left = (event.peer, event.incarnation, event.reason)
        self.node.feed(ClientLeft(*left, violation or goodbye.reason, returns))

    def _message(self, event: tp.MessageReceived) -> None:
        peer, message = event.peer, msg.from_wire(event.body)
        if isinstance(message, msg.Attach):
            self._attach(peer, message)
        elif isinstance(message, msg.Measured):
            self._measured(peer, message)
        else:
            self.node.feed(Received(peer, message))
        if isinstance(message, msg.Holding) and message.version == self.machine.version:
            self._serving.caught_up(peer)

    def _measured(self, peer: str, measured: msg.Measured) -> None:
        member = self.machine.members.get(peer)
        if member is None:
            return
        try:
            base = decode_seeds(measured.frame).first
        except CodecError as error:
            raise MessageError(f"not a frame of scalars: {error}", "bad-scalars") from None
        delta = measured.delta(peer, member.incarnation, base)
        stream = msg.delta_stream(delta.key.text)
        # No other message reports the version that it is measured from.
        self.node.feed(Received(peer, msg.Holding(base, measured.digest)))
        self._serving.measured(peer, base)
        if not self._receiving.finishes(delta.key):
            self._receiving.measured(peer, stream, measured.frame)
            self.node.feed(Offered(peer, msg.DeltaMeta(delta), stream))

    def _attach(self, peer: str, attach: msg.Attach) -> None:
        manifest = self.context.manifest
        if manifest is None or manifest.fingerprint != attach.fingerprint:
            try:
                theirs = Manifest.from_wire(attach.manifest, attach.frozen)
            except ManifestError as error:
                raise MessageError(f"not a manifest: {error}", "bad-manifest") from None
        else:
            theirs = manifest
        member = self.machine.members.get(peer)
        if self.machine.version < 0 and member is not None:
            if not member.trains:
                self._early = peer, attach
            self._models[peer] = theirs
        difference = None if manifest is None else theirs.difference(manifest)
        self.node.feed(ev.ModelAttached(peer, theirs.fingerprint, theirs.values, difference))

    def _offered(self, event: tp.StreamOffered) -> None:
        meta = msg.from_wire(event.meta)
        if isinstance(meta, msg.DeltaMeta):
            key = meta.delta.key
            if event.stream_id != msg.delta_stream(key.text):
                shown = event.stream_id[:80]
                raise MessageError(f"stream {shown!r} carries delta {key.text}", "wrong-stream")
            if self._receiving.finishes(key):
                self.endpoint.decline(event.peer, event.stream_id, "known")
                return
            kind = self._store.kind
            is_seeds = kind.has_seeds and event.chunks == 1
            if not (is_seeds or self._has_frames(event, kind.frames)):
                return
        elif isinstance(meta, msg.InitialMeta):
            if not self._has_frames(event, lambda manifest: manifest.chunks):
                return
            if meta.fingerprint != self.context.known_manifest().fingerprint:
                self.endpoint.decline(event.peer, event.stream_id, "weights of another model")
                return
        if isinstance(meta, msg.DeltaMeta) and isinstance(self._store.kind, MaskedSeeds):
            # As with scalars, no other message reports the version that it is measured from.
            key, digest = meta.delta.key, meta.delta.base_digest
            if digest:
                self.node.feed(Received(event.peer, msg.Holding(key.base, digest)))
            self._serving.measured(event.peer, key.base)
        self.node.feed(Offered(event.peer, meta, event.stream_id))

    def _has_frames(self, event: tp.StreamOffered, wanted: Callable[[Manifest], int]) -> bool:
        """Whether a stream has as many frames as the model needs; else it is declined."""
        manifest = self.context.manifest
        if manifest is not None and event.chunks == wanted(manifest):
            return True
        self.endpoint.decline(event.peer, event.stream_id, "wrong number of chunks")
        return False

    def _decline(self, effect: DeclineStream) -> None:
        if not self._receiving.declined(effect.peer, effect.stream):
            self.endpoint.decline(effect.peer, effect.stream, effect.reason)

    def _stream_failed(self, event: tp.StreamFailed) -> None:
        self._serving.failed(event.peer, event.stream_id)
        self._receiving.failed(event.peer, event.stream_id, event.reason)

    # --- effects ---

    def _check_transfers(self, number: int) -> None:
        transfers = self.endpoint.transfers()
        seen = self._transfer_progress.look(transfers, self._receiving.storing)
        self.node.feed(seen, number)

    def _welcome(self, effect: do.Welcome, number: int) -> None:
        position, part = self._store.run.position(effect.peer), self._first_part + effect.shard
        welcome = Welcome(self.machine.run, part, self._parts, self._tables, position)
        self.endpoint.welcome(effect.peer, welcome.to_wire())

    def _use_model(self, effect: do.UseModel, number: int) -> None:
        self.context.manifest = self._models[effect.peer]
