"""The shell of a parameter server in a roster: messages and finished jobs in, effects out.

In a global round the parameter servers of a roster average what their groups gained. This decides
nothing. The machine is `fsl_async.roles.groups`; disk jobs go to the store's worker, sums to
processes of their own (`reduction_process`). With the group's own machine it exchanges the events
and effects of `fsl_async.roles.sync.group_hold`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import define

import fsl_transport as tp
from fsl_async.config.recipes import groups_host
from fsl_async.errors import AddressError, ConfigError, RunDirError
from fsl_async.keys.dialling import HandshakeReports, curve_for
from fsl_async.nodes.ps.reduction_process import ReductionJob, ReductionProcess
from fsl_async.nodes.runtime import Node
from fsl_async.nodes.wire import Sink, Source, problem_of
from fsl_async.roles.groups import effects as do
from fsl_async.roles.groups import events as ev
from fsl_async.roles.groups import messages as msg
from fsl_async.roles.groups.member import COORDINATOR, GroupMember
from fsl_async.roles.machine import Done, Effect, Event, Note, Received, Send
from fsl_async.roles.messages import MessageError
from fsl_async.roles.sync.events import VersionCommitted
from fsl_async.store.errors import ManifestError
from fsl_async.store.model.manifest import Manifest
from fsl_codecs import CodecSpec, CodecUsageError
from fsl_transport.zmq.link import ZmqDialer

if TYPE_CHECKING:
    from fsl_async.config.address import Address
    from fsl_async.config.settings import Config
    from fsl_async.keys.folder import KeysFolder
    from fsl_async.nodes.ps.store_jobs import ParameterServerContext
    from fsl_async.observe.journal import JournalWriter
    from fsl_async.store.commit.groups_store import GroupsStore

Dialer: TypeAlias = "Callable[[Callable[[tp.TransportEvent], None]], tp.DialerEndpoint]"
Helper: TypeAlias = (
    "Callable[[Callable[[int, str, bytes], None], Callable[[int], None],"
    " Callable[[int, str], None]], ReductionProcess]"
)
REDIAL_S = 5.0
TIMEOUT_S = 20.0
"""A reduction fails after this long without a byte of a member."""
ROLE = "group"
"""The role of a parameter server in its hello to the coordinator."""


@define(eq=False, slots=False)
class GroupsShell:
    """Connects a GroupMember with its parameter server, the reductions and the other servers.

    dialer: makes the endpoint towards the coordinator; None: this is the coordinator.
    helper: makes the reductions, from on_address, on_done and on_failed (see `ReductionProcess`).
    """

    _config: Config
    _group: ParameterServerContext
    _dialer: Dialer | None = None
    _helper: Helper = ReductionProcess

    def __attrs_post_init__(self) -> None:
        group = self._group
        self._say, self._scheduler, self._listener = group.say, group.scheduler, group.endpoint
        self.machine = GroupMember(self._config)
        self._keys = {name: place.key for name, place in self._config.groups.servers.items()}
        """Public keys of the servers in the roster; empty ones without encryption."""
        self.node = Node(self.machine, self._scheduler, self._execute, group.journal)
        self.dialer = self._dialer(self._from_coordinator) if self._dialer is not None else None
        self._endpoint: tp.ListenerEndpoint | tp.DialerEndpoint = self.dialer or self._listener
        self.process = self._helper(self._address, self._summed, self._reduction_failed)
        self._reducing = 0
        self._is_beginning = False
        self._spec = CodecSpec()
        self._addresses: list[do.PassAddress] | None = None
        """Those that came before the files of a reduction were ready; None: it has begun."""
        self._wanted: ev.Decision | None = None
        """The global weights that are fetched, `_stream` once they arrive."""
        self._stream = self._problem = ""
        self._redial: tp.Cancellable | None = None
        self._is_closed = False
        self._refusals: set[str] = set()
        feed = group.node.feed
        self._executors: dict[type, Callable[[Any], None]] = {
            Send: lambda e: self._endpoint.send(e.peer, msg.to_wire(e.message)),
            Note: self._say,
            do.TakeCut: self._hold,
            do.EndGroup: feed,
            do.ResumeMerges: feed,
            do.Adopt: feed,
            do.StartReduction: self._start_reduction,
            do.KillReduction: lambda _: self._kill_reduction(),
            do.PassAddress: self._pass_address,
            do.KeepAttempt: lambda e: self._keep(
                e, lambda: self._store.keep_attempt(e.round, e.attempt)
            ),
            do.KeepDecision: lambda e: self._keep(
                e,
                lambda: self._store.keep_decision(e.round, e.attempt, e.digest, e.contributors),
            ),
            do.ReceiveGlobal: self._receive,
            do.SendGlobal: self._send_global,
        }

    @property
    def _store(self) -> GroupsStore:
        return self._group.store.groups

    def start(self) -> None:
        """Feed the state on disk, and dial the coordinator; once, after the group has started."""
        state = self._store.open(coordinates=self._config.leads)
        if state.cut is not None:  # a view may come without a poll that takes a cut
            self.process.start()
        self.node.feed(state)
        if self._config.leads and self.machine.round < 0 and self._group.store.version >= 0:
            self._begin()
        self._dial()

    async def aclose(self) -> None:
        """End the reductions and the session with the coordinator."""
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

    def _submit(
        self,
        job: Callable[[], Any],
        done: Callable[[Any], None],
        failed: Callable[[str], None],
    ) -> None:
        """Run a job of the store. failed: takes the reason."""
        self._group.worker.submit(
            job, done, lambda error: failed(str(error) or type(error).__name__)
        )

    def _run(
        self,
        job: Callable[[], Any],
        done: Callable[[Any], Event],
        failed: Callable[[str], Event],
    ) -> None:
        """Run a job of the store, and feed the event that it ends in."""
        feed = self.node.feed
        self._submit(job, lambda found: feed(done(found)), lambda reason: feed(failed(reason)))

    def _keep(self, effect: Effect, job: Callable[[], None]) -> None:
        """Write a line of the ledger."""
        self._run(job, lambda _: Done(effect), lambda reason: Done(effect, reason))

    # --- the group ---

    def version_made(self, version: int) -> None:
        """Take a version of deltas, or version 0."""
        if version > 0:
            self.node.feed(ev.GroupVersion(version))
        if self._config.leads and self.machine.round < 0 and not self._is_beginning:
            self._begin()  # again after each version: the disk may have been full before

    def _begin(self) -> None:
        """Make the first weights of the coordinator's group those of all groups."""

        def begun(first: ev.Decision) -> None:
            self.node.feed(ev.Adopted(first, 0, gained=False))

        def failed(reason: str) -> None:
            self._is_beginning = False
            text = f"there are no global weights, the next version tries again: {reason}"
            self._say(Note(text, "warning"))

        self._is_beginning = True
        self._submit(self._store.begin, begun, failed)

    def _hold(self, effect: do.TakeCut) -> None:
        self.process.start()
        self._group.node.feed(effect)

    def take_cut(self, effect: do.TakeCut) -> None:
        """Carry out an effect of the group: take a cut."""
        self._run(
            lambda: self._store.take_cut(effect.round),
            ev.CutTaken,
            lambda reason: ev.CutFailed(effect.round, reason),
        )

    def adopt(self, effect: do.Adopt, number: int) -> None:
        """Carry out an effect of the group: make a version of global weights."""
        begun_at, store, decision = self._scheduler.time(), self._group.store, effect.decision

        def adopt() -> tuple[VersionCommitted, ev.GroupsRecovered]:
            made = store.adopt_global(decision, counted=effect.counted)
            return made, store.groups.state

        def done(found: tuple[VersionCommitted, ev.GroupsRecovered]) -> None:
            made, state = found
            self._group.manifest = store.manifest
            self._group.jobs.committed(made, begun_at, number)
            self.node.feed(ev.Adopted(decision, state.since, state.gained))

        def failed(reason: str) -> None:
            event = ev.AdoptFailed(decision.round, reason)
            self._group.node.feed(event)
            self.node.feed(event)

        self._submit(adopt, done, failed)

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

        self._submit(
            lambda: self._store.begin_result(attempt),
            begun,
            lambda reason: self._reduction_failed(attempt, reason),
        )

    def _pass_address(self, effect: do.PassAddress) -> None:
        if self._addresses is not None:
            self._addresses.append(effect)
        else:
            self.process.address(effect.key, effect.blob)

    def _kill_reduction(self) -> None:
        self._reducing = 0
        self._is_beginning = False
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
        self._submit(
            lambda: self._store.finish_result(attempt, spec),
            lambda digest: self.node.feed(ev.ReductionDone(attempt, digest)),
            lambda reason: self._reduction_failed(attempt, reason),
        )

    def _reduction_failed(self, attempt: int, reason: str) -> None:
        if not self._is_closed:
            self.node.feed(ev.ReductionFailed(attempt, reason))

    # --- global weights ---

    def _receive(self, effect: do.ReceiveGlobal) -> None:
        wanted = self._wanted = effect.decision
        store = self._store

        def looked(found: tuple[bool, bool]) -> None:
            is_here, has_model = found
            if self._wanted is not wanted:
                return
            if is_here:
                self._held(wanted)
            elif self.dialer is not None:
                fetch = msg.FetchGlobal(wanted.round, not has_model)
                self.dialer.send(COORDINATOR, msg.to_wire(fetch))
            else:
                self._lost("the result that was decided is not on disk")

        self._submit(lambda: (store.has(wanted), store.model is not None), looked, self._lost)

    def _held(self, decision: ev.Decision) -> None:
        if self._wanted is decision:
            self._wanted = None
            self.node.feed(ev.GlobalHeld(decision.round))

    def _lost(self, reason: str) -> None:
        wanted, self._wanted, self._stream = self._wanted, None, ""
        if wanted is not None:
            self.node.feed(ev.GlobalLost(wanted.round, reason))

    def _send_global(self, effect: do.SendGlobal) -> None:
        manifest, store, decided = self._group.store.manifest, self._store, effect.decision
        if effect.model:
            model = msg.GlobalModel(manifest.to_wire(), manifest.frozen_to_wire())
            self._listener.send(effect.peer, msg.to_wire(model))
        source = Source(
            manifest.chunks, self._group.worker, lambda index: store.read_chunk(index, decided)
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
            peer, text = event.peer, f"broke the protocol of groups: {problem_of(error)}"
            self._say(Note(f"{peer} {text}", "warning"))
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
        self._submit(lambda: self._store.use_model(manifest), lambda _: None, self._lost)

    def _offered(self, event: tp.StreamOffered) -> None:
        meta, wanted, dialer = msg.from_wire(event.meta), self._wanted, self.dialer
        assert dialer is not None
        is_wanted = (
            wanted is not None
            and isinstance(meta, msg.GlobalMeta)
            and (meta.round, meta.digest) == (wanted.round, wanted.digest)
        )
        if not is_wanted or wanted is None:
            dialer.decline(COORDINATOR, event.stream_id, "not wanted")
            return
        store = self._store

        def begin() -> int:
            store.receive(wanted)
            return 0 if store.model is None else store.model.chunks

        def begun(chunks: int) -> None:
            if self._wanted is not wanted:  # the session may be another one
                dialer.decline(COORDINATOR, event.stream_id, "not wanted any more")
                return
            if chunks != event.chunks:
                dialer.decline(COORDINATOR, event.stream_id, "wrong number of chunks")
                self._lost("it had the wrong number of chunks")
                return
            self._stream, self._problem = event.stream_id, ""
            sink = Sink(self._group.worker, store.write_chunk, problem=self._note_problem)
            dialer.accept(COORDINATOR, event.stream_id, sink)

        self._submit(begin, begun, self._lost)

    def _note_problem(self, text: str) -> None:
        self._problem = text

    def _received(self) -> None:
        wanted, self._stream = self._wanted, ""
        if wanted is not None:
            self._submit(self._store.finish_receiving, lambda _: self._held(wanted), self._lost)


def check_history(config: Config, version: int, state: ev.GroupsRecovered) -> None:
    """Raise RunDirError for a run directory whose past does not fit its place in the roster."""
    name, held = config.run.name, state.adopted
    if config.leads:
        if held is not None and state.decided is None:
            raise RunDirError(
                f"groups.roster: {name} is the first name now, and another server decided the"
                f" global weights {held.round} that it holds: put that one first again"
            )
        if held is not None and state.decided is not None and state.decided.round < held.round:
            raise RunDirError(
                f"the ledger of {name} lacks the decision of global weights {held.round} that it"
                " holds: restore the newest one"
            )
    elif version >= 0 and held is None:
        raise RunDirError(
            f"this run directory has a run without groups, at version {version}, which global"
            f" weights of {config.groups.coordinator} would replace: give a new --run-dir, or put"
            f" {name} first in groups.roster"
        )


def check_keys(servers: Mapping[str, Address], *, has_keys: bool) -> None:
    """Raise ConfigError where some parameter servers would encrypt, and others not."""
    for name, place in servers.items():
        if has_keys and not place.key:
            raise ConfigError(
                f"groups.roster: {name} has no key, and this parameter server encrypts: add"
                " ?key=... to its address (there, `fsl-node keys pub` prints it)",
                "groups.roster",
            )
        if place.key and not has_keys:
            raise ConfigError(
                f"groups.roster: {name} has a key, and this parameter server runs without"
                " encryption: make keys for it with `fsl-node keys new`, or remove all keys",
                "groups.roster",
            )


def join_groups(
    group: ParameterServerContext,
    config: Config,
    *,
    writer: JournalWriter,
    keys: KeysFolder | None,
) -> GroupsShell | None:
    """Make a group's part in global rounds; None without a roster. Raises FslError."""
    if not config.groups.is_on:
        return None
    groups, name, loop = config.groups, config.run.name, asyncio.get_running_loop()
    check_history(config, group.store.version, group.store.groups.state)
    check_keys(groups.servers, has_keys=keys is not None)
    dialer: Dialer | None = None
    if not config.leads:
        place = groups.servers[groups.coordinator]
        settings = config.transport()
        curve = None if keys is None or not place.key else curve_for(place, keys)
        reports = HandshakeReports(
            place,
            curve.pair.public if curve is not None else "",
            name,
            scheduler=loop,
            note=writer.note,
            log=lambda line: group.say(Note(line, "warning")),
            is_reserved=True,
        )
        try:
            link = ZmqDialer(place.tcp, name, settings, curve, reports)
        except tp.LocalError as error:
            raise AddressError(f"groups.roster: {error}") from None

        def dialer(take: Callable[[tp.TransportEvent], None]) -> tp.DialerEndpoint:
            return tp.DialerEndpoint(
                link, loop, settings, take, name, incarnation=time.time_ns(), role=ROLE
            )

    return GroupsShell(config, group, dialer)
