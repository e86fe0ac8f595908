"""A parameter server process: store, machine, endpoint and loop. Never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import importlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import define, frozen

import fsl_transport as tp
from fsl_async.accounting.traffic import CountedLink, Traffic, TrafficNotes
from fsl_async.cluster.restarts import Launching
from fsl_async.config import address as addresses
from fsl_async.config.fixed import keep_settings
from fsl_async.config.recipes import check_groups, with_implied, with_split_server
from fsl_async.config.settings import Config
from fsl_async.config.site_policy import needs_of
from fsl_async.errors import AddressError, FslError, RunDirError, disk_words
from fsl_async.keys.access_control import AccessControl, check_guarded
from fsl_async.keys.folder import KeysFolder
from fsl_async.learn.data.facts import described
from fsl_async.nodes.capacity import Capacity, and_capacity, check_open_files, within
from fsl_async.nodes.ps.aggregation import (
    adapter_rule_of,
    channel_of,
    check_aggregation,
    merging_of,
    optimizer_of,
    rule_of,
    weighting_of,
)
from fsl_async.nodes.ps.decay_requests import DecayRequests, check_date
from fsl_async.nodes.ps.directory import check_directory
from fsl_async.nodes.ps.ending import ending
from fsl_async.nodes.ps.groups import join_groups
from fsl_async.nodes.ps.own_rules import keep_texts, rule_facts, with_base_rule
from fsl_async.nodes.ps.relaunching import known_members, relauncher_of, watched
from fsl_async.nodes.ps.run_end_notifier import RunEndNotifier, notify_split_server
from fsl_async.nodes.ps.shell import ParameterServerShell, Surroundings
from fsl_async.nodes.runtime import LoopLag, ThreadWorker
from fsl_async.nodes.wire import count_weights
from fsl_async.observe.journal import JournalWriter
from fsl_async.observe.journal_lines import MAX_ITEMS
from fsl_async.observe.table import GarbageWatch, Reporter
from fsl_async.process.stopper import Stopper
from fsl_async.roles.machine import Event, Finish
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.ps import ParameterServerMachine
from fsl_async.roles.sync.ps_state import GRACE_MADS
from fsl_async.store.book.records import VersionRecord
from fsl_async.store.deltas.delta_kind import (
    DeltaKind,
    Dense,
    FullWeights,
    Masked,
    MaskedSeeds,
    Mixed,
    Seeds,
)
from fsl_async.store.deltas.seed_step import directions_of
from fsl_async.store.errors import CheckpointDamaged, StoreError
from fsl_async.store.merge.merge_upstream import Upstream
from fsl_async.store.settings import StoreSettings
from fsl_async.store.store import Store
from fsl_transport.loop import run as run_loop
from fsl_transport.zmq.link import ZmqListener

JOURNAL = "journal.jsonl"
GOODBYE_S = 5.0
LEAST_AWAY_S = 15.0
"""Time in which a running client reconnects after a restart: an attempt to connect may take 10 s,
and begins some seconds after the one before."""


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


@frozen(kw_only=True)
class Options:
    """Arguments of a parameter server besides its configuration and run directory."""

    announce: Callable[[str], None]
    """Called with the bound address once clients can connect."""
    log: Callable[[str], None]
    """Takes one line for the operator at a time."""
    stop: Stopper
    from_version: int | None = None
    record: Callable[..., None] | None = None
    """Takes the run's events as a kind and fields, instead of lines."""
    after_commit: Callable[[int], None] | None = None
    """Called in the store's thread with each durable version, before it is announced; it must not
    raise."""
    launching: Launching | None = None
    """Relaunches clients that died; None: no relaunches."""
    keys: KeysFolder | None = None
    """Encrypt with this pair, and admit the keys on this list."""
    upstream: Upstream | None = None
    """The server that a cell sends its means to."""


SNAPSHOT_BYTES_PER_S = 2e8
"""Checkpoints that are not late are written at most this fast."""


def store_settings_of(config: Config) -> StoreSettings:
    """The part of the configuration that the store uses."""
    codec, adapters = config.codec, adapter_rule_of(config)
    # Versions in bases of their own have no mean.
    has_bases = adapters is not None and adapters.merges_products
    kind: DeltaKind = FullWeights() if config.split.sends_whole else Dense()
    directions = directions_of(config)
    if directions is not None:
        is_pure = config.tune.method == "zeroth"
        kind = Seeds(directions) if is_pure else Mixed(directions)
        if config.tune.secure:
            kind = MaskedSeeds(directions) if is_pure else Masked()
    return StoreSettings(
        config.store.keep_versions,
        codec.spec_down,
        optimizer_of(config),
        codec.threads,
        rule=rule_of(config),
        reuse=config.sync.staleness_limit if rule_of(config).reuses else 0,
        kind=kind,
        resident=config.store.resident,
        may_keep_mean=not (
            config.run.rounds or config.run.tokens or config.run.seconds or has_bases
        ),
        snapshot_bytes_per_s=SNAPSHOT_BYTES_PER_S,
        adapters=adapters,
        adapter_scale=config.tune.scale,
        adapter_seed=config.run.seed,
        channel=channel_of(config),
        history=config.tune.history,
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
            f"{text}; start again with --from-version {error.previous_version} to go on from the"
            " version before"
        ) from None
    except StoreError as error:
        raise RunDirError(str(error)) from None


def start_facts(config: Config) -> dict[str, Any]:
    """Return the fields of the note node_started that follow from the configuration."""
    sync = config.sync
    return {
        "every_s": sync.every_s if sync.trigger == "clock" else 0.0,
        "quorum": sync.quorum,
        "grace": [GRACE_MADS, sync.grace_min_s, sync.first_grace_s],
        "needs": list(needs_of(config)),
        "counts": "samples" if config.split.is_on else "tokens",
        **({"secure": True} if config.tune.secure else {}),
        **({"rules": rules} if (rules := rule_facts(config)) else {}),
    }


def check_bindable(address: str) -> None:
    """Raise AddressError if no socket can listen at `address`. Nothing is created on disk."""
    given = addresses.parse_listen(address)
    if given.port == 0:
        return
    try:
        found = socket.getaddrinfo(
            given.host, given.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As ZeroMQ does: a port whose last connections are still closing is free, a port with a
            # listener is not.
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


def serve(config: Config, run_dir: Path, **options: Any) -> Summary:
    """Run the parameter server until the run ends or it is asked to stop. Makes its own loop.

    options: the fields of `Options`.
    Raises RunDirError (damaged, in use, no space), AddressError (port in use), KeysError, and
    ConfigError (reachable from other machines with neither keys nor `listen.insecure`), each in one
    line.
    """
    given = Options(**options)
    keys = given.keys
    config = described(config)
    config = with_split_server(config, keys.pair().public if keys is not None else "")
    notifier = functools.partial(notify_split_server, keys=keys, log=given.log)
    with prepared(config, run_dir, given, notifier=notifier) as run:
        return run_loop(run(config))


@contextlib.contextmanager
def prepared(
    config: Config,
    run_dir: Path,
    options: Options,
    *,
    notifier: Callable[..., RunEndNotifier] = lambda _, run, *__: RunEndNotifier(run),
    capacity: Capacity | None = None,
) -> Iterator[Callable[[Config], Coroutine[Any, Any, Summary]]]:
    """Lock the run directory and yield a function that serves it once, in the caller's loop.

    That function takes the configuration for clients: addresses in it may be known only late.
    See `serve`.
    notifier: makes the notifier of a split server in another process; by default there is none.
    capacity: of the listener; by default that of this process.
    """
    config = with_implied(with_base_rule(config))
    if config.tune.secure:
        importlib.import_module("fsl_async.secure.masks")  # raises without the extra
    listen, log, keys = config.listen, options.log, options.keys
    check_guarded("listen.address", listen.address, insecure=listen.insecure, keys=keys)
    check_aggregation(config)
    check_date(config)
    check_groups(config)
    check_bindable(config.listen.address)
    if capacity is None:
        capacity = check_open_files(config)
        announce = and_capacity(options.announce, capacity, log, options.record)
        options = attrs.evolve(options, announce=announce)
    check_directory(run_dir)
    settings = attrs.evolve(store_settings_of(config), upstream=options.upstream)
    store = Store(run_dir, settings, from_version=options.from_version)
    recovered = _recover(store, run_dir)
    try:
        store.rejoin_upstream()
        servers = {name: one.key for name, one in config.groups.servers.items()}
        access = AccessControl(keys, run_dir, servers=servers)
        keep_settings(run_dir, config, recovered.version)
        keep_texts(run_dir, config)
        members = known_members(run_dir, log)
        run = store.run.start_run(f"{config.run.name}-{secrets.token_hex(4)}")
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
    server = _Server(
        options=options,
        run=run,
        run_dir=run_dir,
        store=store,
        recovered=recovered,
        members=members,
        writer=journal,
        access=access,
        notifier=notifier,
        capacity=capacity,
    )
    try:
        yield server.serve
        if not options.stop.hard:
            with contextlib.suppress(StoreError):
                store.finish_snapshot()
    finally:
        journal.close()
        store.close()


def _note_versions(journal: Reporter, records: Sequence[VersionRecord], now: float) -> None:
    """Record which deltas the kept versions merged: the last process may not have written that."""
    for record in records:
        keys = [entry.key.text for entry in record.merged]
        for start in range(0, len(keys), MAX_ITEMS):
            part = keys[start : start + MAX_ITEMS]
            journal.note("version_found", now, version=record.version, merged=part)


def _name_bugs(
    loop: asyncio.AbstractEventLoop, journal: Reporter, log: Callable[[str], None]
) -> None:
    """Report an exception in a callback as a bug, and go on: it ends only what the callback did."""

    def broken(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        what = f"{context['message']}: {context.get('exception')!r}"
        journal.note("callback_failed", loop.time(), text=what)
        log(f"bug: {what}")

    loop.set_exception_handler(broken)


def _listener(config: Config, access: AccessControl, settings: tp.TransportSettings) -> ZmqListener:
    try:
        return ZmqListener(config.listen.address, settings, access.curve, access.handshake_failed)
    except tp.LocalError as error:
        raise AddressError(str(error)) from None


def _passed(
    loop: asyncio.AbstractEventLoop, shell: ParameterServerShell, event: Callable[[str], Event]
) -> Callable[[str], None]:
    """Return a function that passes the store's lines about damage to the machine."""

    def passed(line: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(shell.node.feed, event(line))

    return passed


async def _goodbye(endpoint: tp.ListenerEndpoint, notifier: RunEndNotifier) -> None:
    """Wait until connected clients and a split server elsewhere have received the end of the run.

    Otherwise they would dial this address forever.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + GOODBYE_S
    while endpoint.peers and loop.time() < give_up_at:  # noqa: ASYNC110 - a few looks, once in a run
        await asyncio.sleep(0.05)
    await notifier.wait()


@define(kw_only=True, eq=False, slots=False)
class _Server:
    """A locked run directory, and everything that serves it, once."""

    options: Options
    run: str
    run_dir: Path
    store: Store
    recovered: ev.Recovered
    members: frozenset[str]
    """Members of the run when the last parameter server ended."""
    writer: JournalWriter
    access: AccessControl
    notifier: Callable[..., RunEndNotifier]
    capacity: Capacity

    def _open(self, config: Config) -> None:
        """Make what serves, in the loop. config: for clients, within the capacity."""
        self._loop = loop = asyncio.get_running_loop()
        self._begun = time.monotonic()
        options = self.options
        self._settings = config.transport(self.capacity.connections)
        self._link = _listener(config, self.access, self._settings)
        self._finished: asyncio.Future[Finish] = loop.create_future()
        self._worker = ThreadWorker(loop, "store")
        self._journal = Reporter(self.writer, options.log, loop.time, record=options.record)
        self._traffic = Traffic()
        self._machine = ParameterServerMachine(
            config, merging_of(config), weighting_of(config), self.run
        )
        self._relauncher = relauncher_of(
            options.launching or Launching(),
            self._machine,
            self._journal,
            self.run_dir,
            self.access.reached_at(self._link.address),
        )
        self._endpoint: tp.ListenerEndpoint
        self._shell = ParameterServerShell(
            self._machine,
            Surroundings(
                store=self.store,
                worker=self._worker,
                scheduler=loop,
                journal=self._journal,
                listener=self._listen,
                say=self._journal.say,
                finished=self._finish,
                after_commit=options.after_commit,
                count=functools.partial(count_weights, self._traffic, config=config),
            ),
        )
        self._shell.groups = self._groups = join_groups(
            self._shell.context, config, writer=self.writer, keys=options.keys
        )

    def _listen(self, handle: Callable[[tp.TransportEvent], None]) -> tp.ListenerEndpoint:
        self._endpoint = tp.ListenerEndpoint(
            CountedLink(self._link, self._traffic, at_client=False),
            self._loop,
            self._settings,
            watched(handle, self._relauncher),
            "ps",
            incarnation=time.time_ns(),
            admit=self.access.admit,
        )
        return self._endpoint

    def _finish(self, effect: Finish) -> None:
        if not self._finished.done():
            self._finished.set_result(effect)
        if effect.exit_code and not self._machine.ended:  # what follows from the cause is no news
            self._shell.node.close()

    def _note_start(self, config: Config) -> None:
        self._journal.note(
            "node_started",
            self._loop.time(),
            role="ps",
            run=self.run,
            address=self._link.address,
            pid=os.getpid(),
            host=socket.gethostname(),
            encrypted=self.access.curve is not None,
            **start_facts(config),
        )
        _note_versions(self._journal, self.store.records, self._loop.time())

    async def serve(self, config: Config) -> Summary:
        """Serve until the end. config: for clients."""
        config = within(with_implied(config), self.capacity)
        self._open(config)
        options, loop = self.options, self._loop
        shell, machine, journal, endpoint = (
            self._shell,
            self._machine,
            self._journal,
            self._endpoint,
        )
        stop, access = options.stop, self.access
        self.store.report = _passed(loop, shell, ev.DamageRepaired)
        self.store.gone = _passed(loop, shell, ev.StoreFailed)
        lag = LoopLag(loop)
        garbage = GarbageWatch(loop, endpoint, journal)
        counted = TrafficNotes(loop, journal, self._traffic)
        _name_bugs(loop, journal, options.log)
        unsaved = self.store.unsaved
        asked = ending(stop, shell, journal, self.run_dir, unsaved=unsaved, finish=self._finish)
        unsubscribe = stop.subscribe(asked)
        self._note_start(config)
        notifier = self.notifier(config, self.run, journal, self.writer)
        decays = DecayRequests(
            self.run_dir,
            shell.node.feed,
            loop,
            at=config.train.decay_at,
            has_begun=lambda: machine.version >= 0,
            was_asked=lambda: machine.progress.was_asked,
        )
        try:
            shell.start(self.recovered)
            decays.start()
            away_s = max(config.session.expire_after_s, LEAST_AWAY_S)
            self._relauncher.recovered(self.members, away_s)
            options.announce(self._link.address)
            heartbeat_s = config.session.heartbeat_every_s
            access.open(loop, endpoint, journal.note, journal.say, heartbeat_s=heartbeat_s)
            ended = await self._finished
            # Any other end is that of this process only: the next one continues the run.
            if machine.ended and not (ended.exit_code or stop.hard):
                notifier.run_ended(ended.reason)
            if machine.ended and not stop.hard:
                await _goodbye(endpoint, notifier)
        finally:
            unsubscribe()
            decays.close()
            if self._groups is not None:
                await self._groups.aclose()
            await notifier.aclose()
            access.close()
            counted.close()
            await self._relauncher.close()
            journal.note("node_ended", loop.time(), garbage=endpoint.garbage, **lag.summary())
            shell.node.close()
            garbage.close()
            lag.close()
            await endpoint.aclose()
            self._worker.close()
        if ended.exit_code:
            raise RunDirError(ended.reason)
        return Summary(
            self.run,
            machine.version,
            machine.tokens_total,
            machine.digest,
            ended.reason,
            round(time.monotonic() - self._begun, 3),
            str(self.run_dir),
        )
