"""A parameter server process: store, machine, endpoint and loop put together. Never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

import fsl_transport as tp
from fsl_async.accounting.traffic import CountedLink, Traffic
from fsl_async.accounting.traffic_notes import TrafficNotes
from fsl_async.cluster.launch_file import Launching
from fsl_async.cluster.members_file import FILE as MEMBERS
from fsl_async.cluster.members_file import MembersFile, MembersKeeper
from fsl_async.cluster.relauncher import Relauncher
from fsl_async.config import address as addresses
from fsl_async.config.fixed import keep_settings
from fsl_async.config.load import to_wire
from fsl_async.config.settings import Config
from fsl_async.config.site_policy import needs_of
from fsl_async.config.split_rules import with_implied, with_split_server
from fsl_async.config.transport_settings import transport_settings
from fsl_async.errors import AddressError, FslError, RunDirError, disk_words
from fsl_async.keys.access_control import AccessControl, check_guarded
from fsl_async.keys.folder import KeysFolder
from fsl_async.learn.data.facts import described
from fsl_async.nodes.capacity import Capacity, within
from fsl_async.nodes.open_files import and_capacity, check_open_files
from fsl_async.nodes.ps.aggregation import check_aggregation, rule_of, weighting_of
from fsl_async.nodes.ps.run_end_notifier import RunEndNotifier
from fsl_async.nodes.ps.shell import ParameterServerShell, RunFacts
from fsl_async.nodes.runtime import ThreadWorker
from fsl_async.observe.journal import JournalWriter
from fsl_async.observe.journal_lines import MAX_ITEMS
from fsl_async.observe.reporter import GarbageWatch, Reporter
from fsl_async.process.lag import LoopLag
from fsl_async.process.stopper import Stopper
from fsl_async.roles.machine import DrainAsked, Finish, Note
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.norm_guard import GuardRules
from fsl_async.roles.sync.ps import ParameterServerMachine, ParameterServerRules
from fsl_async.roles.sync.round import RoundRules
from fsl_async.store.delta_kind import Dense, FullWeights
from fsl_async.store.errors import CheckpointDamaged, StoreError
from fsl_async.store.outer import OuterSettings
from fsl_async.store.records import StoreSettings, VersionRecord
from fsl_async.store.store import Store
from fsl_transport.loop import run as run_loop
from fsl_transport.zmq.link import ZmqListener

JOURNAL = "journal.jsonl"
LAUNCHED = "launched.log"
GOODBYE_S = 5.0
LEAST_AWAY_S = 15.0
"""In which a client that lives has come back to a server that was away: a try to connect may take 10 s, and begins some seconds after the one before."""
NO_HERALD = functools.partial(RunEndNotifier, keys=None, log=lambda _: None, dials=False)


@frozen
class Summary:
    """How a run ended."""

    run: str
    version: int
    tokens: int
    digest: str
    reason: str
    seconds: float
    run_dir: str


def rules_of(config: Config) -> ParameterServerRules:
    """What of the configuration decides anything at the server."""
    sync = config.sync
    return ParameterServerRules(
        trigger=sync.trigger,
        every_s=sync.every_s,
        round_cap_s=sync.round_cap_s,
        round=RoundRules(sync.quorum, sync.grace_mad_factor, sync.grace_min_s, sync.first_grace_s),
        min_clients=sync.min_clients,
        max_staleness=sync.max_staleness,
        limit_rounds=config.run.rounds,
        limit_tokens=config.run.tokens,
        limit_s=config.run.seconds,
        drain_s=max(2 * config.session.heartbeat_every_s, 5.0),
        drain_cap_s=config.transfer.drain_cap_s,
        keep_versions=config.checkpoint.keep_versions,
        guard=GuardRules(**attrs.asdict(config.guard)),
        least_clients=rule_of(config).least,
        aggregation=config.outer.aggregation,
    )


def _store_settings(config: Config) -> StoreSettings:
    outer = OuterSettings(config.outer.optimizer, config.outer.learning_rate, config.outer.momentum)
    codec = config.codec
    return StoreSettings(
        config.checkpoint.keep_versions,
        codec.spec_down,
        outer,
        codec.threads,
        rule=rule_of(config),
        kind=FullWeights() if config.split.sends_whole else Dense(),
    )


def _recover(store: Store, run_dir: Path) -> ev.Recovered:
    try:
        return store.recover()
    except CheckpointDamaged as error:
        text = f"{run_dir}: version {error.version} is damaged ({error.file})"
        if error.previous_version is None:
            raise RunDirError(
                f"{text}, and no older version is intact; restore it from a backup"
            ) from None
        raise RunDirError(
            f"{text}; start again with --from-version {error.previous_version} to go on from the version before"
        ) from None
    except StoreError as error:
        raise RunDirError(str(error)) from None


def check_bindable(address: str) -> None:
    """Raise AddressError when nothing can listen at `address`, before anything is created on disk."""
    given = addresses.parse_listen(address)
    if given.port == 0:
        return
    try:
        found = socket.getaddrinfo(
            given.host, given.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As ZeroMQ does it: a port whose last connections are still closing is free, one that is listened at is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"port in use: {address} is taken; stop the other process or choose another port"
        else:
            text = (
                f"cannot listen at {address}: {error.strerror}; is it an address of this machine?"
            )
        raise AddressError(text) from None


def serve(
    config: Config,
    run_dir: Path,
    *,
    from_version: int | None,
    announce: Callable[[str], None],
    log: Callable[[str], None],
    stop: Stopper,
    record: Callable[..., None] | None = None,
    after_commit: Callable[[int], None] | None = None,
    launching: Launching | None = None,
    keys: KeysFolder | None = None,
) -> Summary:
    """Run the parameter server until the run ends or `stop` is asked. Blocks; makes its own loop.

    announce: called with the bound address once clients can come. log: one line for the operator at a time. record: what happens in the run as a kind and fields,
    in place of lines. after_commit: called in the store's thread with each version that is durable, before anybody hears of it; it must not raise.
    launching: who launches clients that died; nobody if left out. keys: encrypt with this pair, and let in who is on this list.
    Raises RunDirError (damaged, in use, no room), AddressError (port in use), KeysError, and ConfigError (others reach it, and it has neither keys
    nor `listen.insecure`), each in one line.
    """
    config = described(config)
    config = with_split_server(config, keys.pair().public if keys is not None else "")
    herald = functools.partial(RunEndNotifier, keys=keys, log=log, dials=True)
    with prepared(
        config,
        run_dir,
        from_version=from_version,
        announce=announce,
        log=log,
        stop=stop,
        record=record,
        after_commit=after_commit,
        launching=launching,
        keys=keys,
        herald=herald,
    ) as run:
        return run_loop(run(config))


@contextlib.contextmanager
def prepared(
    config: Config,
    run_dir: Path,
    *,
    from_version: int | None,
    announce: Callable[[str], None],
    log: Callable[[str], None],
    stop: Stopper,
    record: Callable[..., None] | None = None,
    after_commit: Callable[[int], None] | None = None,
    launching: Launching | None = None,
    keys: KeysFolder | None = None,
    herald: Callable[..., RunEndNotifier] = NO_HERALD,
    capacity: Capacity | None = None,
) -> Iterator[Callable[[Config], Coroutine[Any, Any, Summary]]]:
    """Take the run directory and give what serves it, once, in a loop of the caller's; see `serve`.

    What is yielded takes the configuration that clients are handed: of it addresses may have become known meanwhile. herald: makes what tells a
    split server of another process that the run is over; none if left out. capacity: of the listener; by default all that this process has.
    """
    config = with_implied(config)
    listen = config.listen
    check_guarded("listen.address", listen.address, insecure=listen.insecure, keys=keys)
    check_aggregation(config)
    check_bindable(config.listen.address)
    if capacity is None:
        capacity = check_open_files(config)
        announce = and_capacity(announce, capacity, log, record)
    room = capacity
    store = Store(run_dir, _store_settings(config), from_version=from_version)
    recovered = _recover(store, run_dir)
    try:
        gate = AccessControl(keys, run_dir)
        keep_settings(run_dir, config, recovered.version)
        members = _members(run_dir, log)
        run = store.start_run(f"{config.run.name}-{secrets.token_hex(4)}")
        for notice in store.notices:
            log(notice)
        journal = JournalWriter(run_dir / JOURNAL)
    except OSError as error:
        store.close()
        raise RunDirError(f"cannot write in {run_dir}: {disk_words(error)}") from None
    except StoreError as error:
        store.close()
        raise RunDirError(str(error)) from None
    except FslError:
        store.close()
        raise
    try:
        yield lambda told: _serve(
            within(with_implied(told), room),
            run_dir,
            store,
            recovered,
            members,
            run,
            journal,
            announce,
            log,
            stop,
            record,
            after_commit,
            launching,
            gate,
            herald,
            room,
        )
    finally:
        journal.close()
        store.close()


def _note_versions(journal: Reporter, records: Sequence[VersionRecord], now: float) -> None:
    """What the kept versions have merged: the last process may have been killed before its journal said so."""
    for record in records:
        keys = [entry.key.text for entry in record.merged]
        for start in range(0, len(keys), MAX_ITEMS):
            part = keys[start : start + MAX_ITEMS]
            journal.note("version_found", now, version=record.version, merged=part)


def _name_bugs(
    loop: asyncio.AbstractEventLoop, journal: Reporter, log: Callable[[str], None]
) -> None:
    """A defect of ours in a callback costs what it was doing, is named, and the run goes on for the others."""

    def broken(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        what = f"{context['message']}: {context.get('exception')!r}"
        journal.note("callback_failed", loop.time(), text=what)
        log(f"bug: {what}")

    loop.set_exception_handler(broken)


def _members(run_dir: Path, log: Callable[[str], None]) -> frozenset[str]:
    """The clients that belonged to the run when the last server ended; none where that cannot be read. RunDirError: it was altered."""
    file = MembersFile(run_dir / MEMBERS)
    try:
        return file.read()
    except OSError as error:
        log(
            f"{file.path} cannot be read ({error.strerror}): clients that died meanwhile are not asked for"
        )
        return frozenset()


def _relauncher(
    launching: Launching,
    machine: ParameterServerMachine,
    journal: Reporter,
    run_dir: Path,
    address: str,
) -> Relauncher:
    """One that writes what it does into the journal, and tells people. It knows who belonged to the run when the last server ended."""
    loop = asyncio.get_running_loop()

    def tell(what: str, client: str, text: str) -> None:
        journal.note("relaunch", loop.time(), what=what, client=client)
        journal.say(Note(text, "warning" if what in {"failed", "gave up"} else "info"))

    def wanted() -> bool:
        return not (machine.ended or machine.ending.asked)

    def trouble(error: OSError) -> None:
        text = f"{file.path} could not be written ({error.strerror}): a server that is started again does not know whom to ask for"
        journal.say(Note(text, "warning"))

    file = MembersFile(run_dir / MEMBERS)
    made = Relauncher(
        loop,
        launching,
        tell,
        wanted=wanted,
        log_path=run_dir / LAUNCHED,
        keeper=MembersKeeper(file, trouble),
    )
    made.address = address
    return made


def watched(
    handle: Callable[[tp.TransportEvent], None], relauncher: Relauncher
) -> Callable[[tp.TransportEvent], None]:
    """Show `relauncher` which sessions begin and end, on their way to the machine."""

    def on_transport(event: tp.TransportEvent) -> None:
        handle(event)
        if isinstance(event, tp.PeerUp):
            relauncher.seen(event.peer)
        elif isinstance(event, tp.PeerDown):
            relauncher.left(event.peer, event.reason, event.text)

    return on_transport


def _listener(config: Config, gate: AccessControl, settings: tp.TransportSettings) -> ZmqListener:
    try:
        return ZmqListener(config.listen.address, settings, gate.curve, gate.handshake_failed)
    except tp.LocalError as error:
        raise AddressError(str(error)) from None


def _ending(
    stop: Stopper,
    shell: ParameterServerShell,
    journal: Reporter,
    run_dir: Path,
    finish: Callable[[Finish], None],
) -> Callable[[bool], None]:
    """What is done when an end is asked for: Ctrl-C ends the run, SIGTERM this process (docs/adr/0088). Called in any thread."""
    loop = asyncio.get_running_loop()

    def end(hard: bool) -> None:
        if not (hard or stop.comes_back):
            shell.node.feed(DrainAsked(stop.reason))
            return
        if not (hard or shell.machine.ended):
            text = f"{stop.reason}: leaving; the run goes on when this server is started again in {run_dir}"
            journal.say(Note(text))
        finish(Finish(stop.reason, 0))

    def asked(hard: bool) -> None:
        loop.call_soon_threadsafe(end, hard)

    return asked


def _mended(loop: asyncio.AbstractEventLoop, shell: ParameterServerShell) -> Callable[[str], None]:
    """Takes the store's lines about damage, in its thread, to the machine."""

    def repaired(line: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(shell.node.feed, ev.DamageRepaired(line))

    return repaired


async def _goodbye(endpoint: tp.ListenerEndpoint, told: RunEndNotifier) -> None:
    """Whoever is still here must hear that the run is over, or it would dial this address for ever; and so must a split server elsewhere."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + GOODBYE_S
    while endpoint.peers and loop.time() < give_up_at:  # noqa: ASYNC110 - a few looks, once in a run
        await asyncio.sleep(0.05)
    await told.wait()


async def _serve(  # noqa: PLR0917 - private, called once
    config: Config,
    run_dir: Path,
    store: Store,
    recovered: ev.Recovered,
    members: frozenset[str],
    run: str,
    writer: JournalWriter,
    announce: Callable[[str], None],
    log: Callable[[str], None],
    stop: Stopper,
    record: Callable[..., None] | None,
    after_commit: Callable[[int], None] | None,
    launching: Launching | None,
    gate: AccessControl,
    herald: Callable[..., RunEndNotifier],
    capacity: Capacity,
) -> Summary:
    loop = asyncio.get_running_loop()
    begun = time.monotonic()
    settings = transport_settings(config, capacity.connections)
    link = _listener(config, gate, settings)
    finished: asyncio.Future[Finish] = loop.create_future()
    worker = ThreadWorker(loop, "store")
    journal = Reporter(writer, log, loop.time, record=record)
    traffic = Traffic()
    machine = ParameterServerMachine(rules_of(config), weighting_of(config), run)

    def finish(effect: Finish) -> None:
        if not finished.done():
            finished.set_result(effect)

    shell = ParameterServerShell(
        machine,
        RunFacts(run, config.shards, to_wire(config)),
        store,
        worker=worker,
        scheduler=loop,
        journal=journal,
        say=journal.say,
        finished=finish,
        count=lambda *chunk: traffic.weights(*chunk, is_cut=config.split.has_server),
        after_commit=after_commit,
    )
    relauncher = _relauncher(
        launching or Launching(),
        machine,
        journal,
        run_dir,
        gate.reached_at(link.address),
    )
    shell.endpoint = endpoint = tp.ListenerEndpoint(
        CountedLink(link, traffic, at_client=False),
        loop,
        settings,
        watched(shell.on_transport, relauncher),
        "ps",
        incarnation=time.time_ns(),
        admit=gate.admit,
    )
    store.report = _mended(loop, shell)
    lag = LoopLag(loop)
    garbage = GarbageWatch(loop, endpoint, journal)
    counted = TrafficNotes(loop, journal, traffic)

    _name_bugs(loop, journal, log)

    unsubscribe = stop.subscribe(_ending(stop, shell, journal, run_dir, finish))
    journal.note(
        "node_started",
        loop.time(),
        role="ps",
        run=run,
        address=link.address,
        pid=os.getpid(),
        host=socket.gethostname(),
        every_s=config.sync.every_s if config.sync.trigger == "clock" else 0.0,
        quorum=config.sync.quorum,
        encrypted=gate.curve is not None,
        needs=list(needs_of(config)),
    )
    _note_versions(journal, store.records, loop.time())
    told = herald(config, run, journal, writer)
    try:
        shell.start(recovered)
        relauncher.recovered(members, max(config.session.expire_after_s, LEAST_AWAY_S))
        announce(link.address)
        gate.open(loop, endpoint, journal, config.session.heartbeat_every_s)
        ended = await finished
        # Any other end is this process's alone: the run goes on when it is started again.
        if machine.ended and not (ended.exit_code or stop.hard):
            told.run_ended(ended.reason)
        if machine.ended and not stop.hard:
            await _goodbye(endpoint, told)
    finally:
        unsubscribe()
        await told.aclose()
        gate.close()
        counted.close()
        await relauncher.close()
        journal.note("node_ended", loop.time(), garbage=endpoint.garbage, **lag.summary())
        shell.node.close()
        garbage.close()
        lag.close()
        await endpoint.aclose()
        worker.close()
    if ended.exit_code:
        raise RunDirError(ended.reason)
    return Summary(
        run,
        machine.version,
        machine.tokens_total,
        machine.digest,
        ended.reason,
        round(time.monotonic() - begun, 3),
        str(run_dir),
    )
