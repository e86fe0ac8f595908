"""The shell of a parameter server in a roster: messages and finished jobs in, effects out.

It decides nothing. The machine is `fsl_async.roles.groups`; disk jobs go to the store's worker,
sums to the helper (`reduction_process`). With the group's own machine it exchanges the events and
effects of `fsl_async.roles.sync.group_hold`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import define

import fsl_transport as tp
from fsl_async.config.recipes import groups_host
from fsl_async.nodes.ps.reduction_process import ReductionJob, ReductionProcess
from fsl_async.nodes.runtime import Node
from fsl_async.nodes.wire import Sink, Source, problem_of
from fsl_async.roles.groups import effects as do
from fsl_async.roles.groups import events as ev
from fsl_async.roles.groups import messages as msg
from fsl_async.roles.groups.machine import GroupsMachine
from fsl_async.roles.groups.member import COORDINATOR
from fsl_async.roles.machine import Done, Effect, Note, Received, Send
from fsl_async.roles.messages import MessageError
from fsl_async.roles.sync import group_hold as group
from fsl_async.roles.sync.events import VersionCommitted
from fsl_async.store.errors import ManifestError
from fsl_async.store.model.manifest import Manifest
from fsl_codecs import CodecSpec, CodecUsageError

if TYPE_CHECKING:
    from fsl_async.config.settings import Config
    from fsl_async.nodes.ps.shell import ParameterServerShell

Helper: TypeAlias = (
    "Callable[[Callable[[int, str, bytes], None], Callable[[int], None],"
    " Callable[[int, str], None]], ReductionProcess]"
)
REDIAL_S = 5.0
TIMEOUT_S = 20.0
"""A reduction fails after this long without a byte of a member."""


@define(eq=False, slots=False)
class GroupsShell:
    """Connects a GroupsMachine with its parameter server, the helper and the other servers.

    dialer: makes the endpoint towards the coordinator; None: this is the coordinator.
    helper: makes what adds up, from on_address, on_done and on_failed (see `ReductionProcess`).
    """

    _config: Config
    _group: ParameterServerShell
    _dialer: Callable[[Callable[[tp.TransportEvent], None]], tp.DialerEndpoint] | None = None
    _helper: Helper = ReductionProcess

    def __attrs_post_init__(self) -> None:
        server = self._group
        self._store, self._worker, self._scheduler = server.store, server.worker, server.scheduler
        self._say, self._listener = server.say, server.endpoint
        self.machine = GroupsMachine(self._config)
        self._keys = {name: place.key for name, place in self._config.groups.servers.items()}
        """Public keys of the servers in the roster; empty ones without encryption."""
        self.node = Node(self.machine, self._scheduler, self._execute, server.journal)
        self.dialer = self._dialer(self._from_coordinator) if self._dialer is not None else None
        self._endpoint: tp.ListenerEndpoint | tp.DialerEndpoint = self.dialer or self._listener
        self.process = self._helper(self._address, self._summed, self._reduction_failed)
        self._reducing = 0
        self._spec = CodecSpec()
        self._addresses: list[do.PassAddress] | None = None
        """Those that came before the files of a reduction were ready; None: it has begun."""
        self._wanted: do.ReceiveGlobal | None = None
        self._stream = ""
        self._problem = ""
        self._redial: tp.Cancellable | None = None
        self._is_closed = False
        self._refusals: set[str] = set()
        self._executors: dict[type, Callable[[Any], None]] = {
            Send: lambda e: self._endpoint.send(e.peer, msg.to_wire(e.message)),
            Note: self._say,
            do.TakeCut: self._hold,
            do.EndGroup: self._group.node.feed,
            do.ResumeMerges: self._group.node.feed,
            do.StartReduction: self._start_reduction,
            do.KillReduction: lambda _: self._kill_reduction(),
            do.PassAddress: self._pass_address,
            do.KeepAttempt: self._keep_attempt,
            do.KeepDecision: self._keep_decision,
            do.ReceiveGlobal: self._receive,
            do.SendGlobal: self._send_global,
            do.Adopt: self._group.node.feed,
        }

    def start(self) -> None:
        """Feed the state on disk, and dial the coordinator; once, after the group has started."""
        state = self._store.groups.open(coordinates=self._config.leads)
        if state.cut is not None:  # a view may come without a poll that takes a cut
            self.process.start()
        self.node.feed(state)
        if self._config.leads and self.machine.round < 0 and self._store.version >= 0:
            self.began()
        self._dial()

    async def aclose(self) -> None:
        """End the helper and the session with the coordinator."""
        self._is_closed = True
        self.node.close()
        if self._redial is not None:
            self._redial.cancel()
        await self.process.aclose()
        if self.dialer is not None:
            self.dialer.disconnect("", "leaving")
            await self.dialer.aclose()

    def _execute(self, effect: Effect, number: int) -> None:
        self._executors[type(effect)](effect)

    # --- the group ---

    def version_made(self, version: int) -> None:
        """Take a version of deltas, or version 0."""
        if version > 0:
            self.node.feed(ev.GroupVersion(version))
        elif self._config.leads:
            self.began()

    def began(self) -> None:
        """Make the first weights of the coordinator's group those of all groups."""
        self._worker.submit(
            self._store.groups.begin,
            lambda first: self.node.feed(ev.Adopted(first, 0, gained=False)),
            lambda error: self._say(Note(f"there are no global weights: {error}", "warning")),
        )

    def _hold(self, effect: do.TakeCut) -> None:
        self.process.start()
        self._group.node.feed(effect)

    def take_cut(self, effect: group.TakeGroupCut, number: int) -> None:
        """Carry out an effect of the group: take a cut."""
        self._worker.submit(
            lambda: self._store.groups.take_cut(effect.round),
            lambda cut: self.node.feed(ev.CutTaken(cut)),
            lambda error: self.node.feed(ev.CutFailed(effect.round, str(error))),
        )

    def commit(self, effect: group.CommitGlobal, number: int) -> None:
        """Carry out an effect of the group: make a version of global weights."""
        begun_at, store = self._scheduler.time(), self._store

        def commit() -> tuple[VersionCommitted, ev.GroupsRecovered]:
            made = store.adopt_global(
                effect.decision,
                counted=effect.counted,
                keeps_momentum=self._config.groups.momentum == "keep",
            )
            return made, store.groups.state

        def done(found: tuple[VersionCommitted, ev.GroupsRecovered]) -> None:
            made, state = found
            self._group.manifest = store.manifest
            self._group.jobs.committed(made, begun_at, number)
            self.node.feed(ev.Adopted(effect.decision, state.since, state.gained))

        def failed(error: Exception) -> None:
            self._group.node.feed(Done(effect, str(error)))
            self.node.feed(ev.AdoptFailed(effect.decision.round, str(error)))

        self._worker.submit(commit, done, failed)

    # --- reductions ---

    def _start_reduction(self, effect: do.StartReduction) -> None:
        view = effect.view
        attempt = self._reducing = view.attempt
        self._addresses = []
        try:
            self._spec = CodecSpec(**view.codec)
        except (CodecUsageError, TypeError) as error:
            self._reduction_failed(attempt, f"updates cannot be coded so: {error}")
            return

        def begun(paths: dict[str, Any]) -> None:
            if self._reducing != attempt or self._is_closed:
                return
            self.process.reduce(
                ReductionJob(
                    attempt=attempt,
                    rank=effect.rank,
                    weights=tuple(share.weight for share in view.members),
                    piece_values=view.piece_values,
                    host=groups_host(self._config),
                    timeout_s=TIMEOUT_S,
                    bytes_per_s=self._config.groups.bytes_per_s,
                    **paths,
                )
            )
            early, self._addresses = self._addresses or (), None
            for address in early:
                self._pass_address(address)

        self._worker.submit(
            lambda: self._store.groups.begin_result(attempt),
            begun,
            lambda error: self._reduction_failed(attempt, str(error)),
        )

    def _pass_address(self, effect: do.PassAddress) -> None:
        if self._addresses is not None:
            self._addresses.append(effect)
        else:
            self.process.address(effect.key, effect.blob)

    def _kill_reduction(self) -> None:
        self._reducing = 0
        self.process.kill()

    def _address(self, attempt: int, key: str, blob: bytes) -> None:
        """Send the address of this rank to the others, by the coordinator."""
        message = msg.Address(attempt, key, blob)
        if self.dialer is not None:
            self.dialer.send(COORDINATOR, msg.to_wire(message))
        else:
            self.node.feed(Received(self._config.run.name, message))

    def _summed(self, attempt: int) -> None:
        spec = self._spec
        self._worker.submit(
            lambda: self._store.groups.finish_result(attempt, spec),
            lambda digest: self.node.feed(ev.ReductionDone(attempt, digest)),
            lambda error: self._reduction_failed(attempt, str(error)),
        )

    def _reduction_failed(self, attempt: int, reason: str) -> None:
        if not self._is_closed:
            self.node.feed(ev.ReductionFailed(attempt, reason))

    # --- the coordinator's ledger, and global weights ---

    def _keep_attempt(self, effect: do.KeepAttempt) -> None:
        self._worker.submit(
            lambda: self._store.groups.keep_attempt(effect.round, effect.attempt),
            lambda _: self.node.feed(ev.AttemptKept(effect.attempt)),
            lambda error: self.node.feed(ev.LedgerFailed(str(error))),
        )

    def _keep_decision(self, effect: do.KeepDecision) -> None:
        self._worker.submit(
            lambda: self._store.groups.keep_decision(
                effect.round, effect.attempt, effect.digest, effect.contributors
            ),
            lambda _: self.node.feed(ev.DecisionKept(effect.round, effect.attempt)),
            lambda error: self.node.feed(ev.LedgerFailed(str(error))),
        )

    def _receive(self, effect: do.ReceiveGlobal) -> None:
        self._wanted = effect

        def looked(found: tuple[bool, bool]) -> None:
            is_here, has_model = found
            if self._wanted is not effect:
                return
            if is_here:
                self._wanted = None
                self.node.feed(ev.GlobalHeld(effect.round))
            elif self.dialer is not None:
                fetch = msg.FetchGlobal(effect.round, not has_model)
                self.dialer.send(COORDINATOR, msg.to_wire(fetch))
            else:
                reason = "the result that was decided is not on disk"
                self.node.feed(ev.GlobalLost(effect.round, reason))

        self._worker.submit(
            lambda: (
                self._store.groups.has(effect.round, effect.attempt, effect.digest),
                self._store.groups.model is not None,
            ),
            looked,
            lambda error: self.node.feed(ev.GlobalLost(effect.round, str(error))),
        )

    def _send_global(self, effect: do.SendGlobal) -> None:
        assert self.machine.coordinator is not None
        decided = self.machine.coordinator.decided
        assert decided is not None, "there are global weights"
        manifest, groups = self._store.manifest, self._store.groups
        if effect.model:
            model = msg.GlobalModel(manifest.to_wire(), manifest.frozen_to_wire())
            self._listener.send(effect.peer, msg.to_wire(model))
        source = Source(
            manifest.chunks, self._worker, lambda index: groups.read_chunk(index, decided)
        )
        meta = msg.to_wire(msg.GlobalMeta(decided.round, decided.digest))
        self._listener.offer(effect.peer, f"global:{decided.round}", meta, source)

    # --- from members (at the coordinator) ---

    def is_of_groups(self, event: tp.TransportEvent) -> bool:
        """Whether an event of the listener is that of a parameter server of the roster."""
        return getattr(event, "peer", "") in self._keys

    def on_listener(self, event: Any) -> None:
        """Take one event of a parameter server that dials in."""
        try:
            match event:
                case tp.HelloReceived():
                    self._hello(event)
                case tp.PeerUp(peer):
                    self.node.feed(ev.PeerHere(peer))
                case tp.PeerDown(peer, _, reason):
                    self.node.feed(ev.PeerGone(peer, reason))
                case tp.MessageReceived(peer, body):
                    self.node.feed(Received(peer, msg.from_wire(body)))
                case tp.StreamOffered(peer, stream):
                    self._listener.decline(peer, stream, "not wanted")
                case _:
                    pass
        except MessageError as error:
            self._end(event.peer, problem_of(error))

    def _end(self, peer: str, problem: str) -> None:
        self._say(Note(f"{peer} broke the protocol of groups: {problem}", "warning"))
        self._listener.disconnect(peer, "protocol")
        self.node.feed(ev.PeerGone(peer, "protocol"))

    def _hello(self, event: tp.HelloReceived) -> None:
        refusal = self._refusal(event)
        if refusal:
            self._listener.refuse(event.peer, "name", refusal)
        else:
            self._listener.welcome(event.peer, msg.to_wire(msg.GroupWelcome()))

    def _refusal(self, event: tp.HelloReceived) -> str:
        """Why a session under a name of the roster is refused; empty if it is not."""
        peer = event.peer
        if event.key != self._keys[peer]:
            return f"groups.roster has another key for {peer}"
        try:
            is_server = isinstance(msg.from_wire(event.hello), msg.GroupHello)
        except MessageError:
            is_server = False
        if not is_server or not self._config.leads:
            return f"{peer} is the name of a parameter server; start with another --name"
        return ""

    # --- from the coordinator (at a member) ---

    def _dial(self) -> None:
        self._redial = None
        if self.dialer is not None:
            self.dialer.connect(lambda: msg.to_wire(msg.GroupHello()))

    def _from_coordinator(self, event: Any) -> None:
        if self._is_closed:
            return
        try:
            self._take(event)
        except (MessageError, ManifestError) as error:
            name = self._config.groups.coordinator
            text = f"{name} broke the protocol of groups: {problem_of(error)}; dialing again"
            self._say(Note(text, "warning"))
            assert self.dialer is not None
            self.dialer.disconnect("", "protocol")
            self._gone("protocol")
            self._dial_later()

    def _take(self, event: Any) -> None:
        match event:
            case tp.PeerUp():
                self._refusals.clear()
                self.node.feed(ev.PeerHere(COORDINATOR))
            case tp.PeerDown():
                self._gone(event.reason)
            case tp.Refused(code, text):
                self._refused(code, text)
            case tp.Superseded():
                self._refused("superseded", "another process of this name took over")
            case tp.MessageReceived(_, body):
                self._message(msg.from_wire(body))
            case tp.StreamOffered():
                self._offered(event)
            case tp.StreamReceived(_, stream) if stream == self._stream:
                self._received()
            case tp.StreamFailed(_, stream, reason) if stream == self._stream:
                self._lost(self._problem or reason)
            case _:
                pass

    def _gone(self, reason: str) -> None:
        self._wanted, self._stream = None, ""
        self.node.feed(ev.PeerGone(COORDINATOR, reason))

    def _refused(self, code: str, text: str) -> None:
        self._gone(code)
        if code not in self._refusals:
            self._refusals.add(code)
            name = self._config.groups.coordinator
            self._say(
                Note(f"{name} has no session for this group: {text}; trying again", "warning")
            )
        self._dial_later()

    def _dial_later(self) -> None:
        if self._redial is None and not self._is_closed:
            self._redial = self._scheduler.call_at(self._scheduler.time() + REDIAL_S, self._dial)

    def _message(self, message: Any) -> None:
        if not isinstance(message, msg.GlobalModel):
            self.node.feed(Received(COORDINATOR, message))
            return
        manifest = Manifest.from_wire(message.manifest, message.frozen)
        self._worker.submit(
            lambda: self._store.groups.use_model(manifest),
            lambda _: None,
            lambda error: self._lost(str(error)),
        )

    def _offered(self, event: tp.StreamOffered) -> None:
        meta, wanted = msg.from_wire(event.meta), self._wanted
        assert self.dialer is not None
        is_wanted = (
            wanted is not None
            and isinstance(meta, msg.GlobalMeta)
            and (meta.round, meta.digest) == (wanted.round, wanted.digest)
        )
        if not is_wanted or wanted is None:
            self.dialer.decline(COORDINATOR, event.stream_id, "not wanted")
            return
        groups = self._store.groups

        def begin() -> int:
            groups.receive(wanted.round, wanted.attempt, wanted.digest)
            return 0 if groups.model is None else groups.model.chunks

        def begun(chunks: int) -> None:
            if self.dialer is None:
                return
            if self._wanted is not wanted:  # the session may be another one
                self.dialer.decline(COORDINATOR, event.stream_id, "not wanted any more")
                return
            if chunks != event.chunks:
                self.dialer.decline(COORDINATOR, event.stream_id, "wrong number of chunks")
                self._lost("it had the wrong number of chunks")
                return
            self._stream, self._problem = event.stream_id, ""
            sink = Sink(self._worker, groups.write_chunk, problem=self._note_problem)
            self.dialer.accept(COORDINATOR, event.stream_id, sink)

        self._worker.submit(begin, begun, lambda error: self._lost(str(error)))

    def _note_problem(self, text: str) -> None:
        self._problem = text

    def _received(self) -> None:
        wanted, self._stream = self._wanted, ""
        if wanted is None:
            return

        def held(_: None) -> None:
            if self._wanted is wanted:
                self._wanted = None
                self.node.feed(ev.GlobalHeld(wanted.round))

        self._worker.submit(
            self._store.groups.finish_receiving, held, lambda error: self._lost(str(error))
        )

    def _lost(self, reason: str) -> None:
        wanted, self._wanted, self._stream = self._wanted, None, ""
        if wanted is not None:
            self.node.feed(ev.GlobalLost(wanted.round, reason))
