"""A split server process: model parts, machine, endpoint and loop. Imports torch.

The parameter server may run in the same process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import define, frozen

import fsl_transport as tp
from fsl_async.accounting.traffic import CountedLink, Traffic, TrafficNotes
from fsl_async.config.load import threads_here
from fsl_async.config.recipes import with_implied
from fsl_async.config.rules import SettingError
from fsl_async.config.settings import Config, check_listen
from fsl_async.errors import AddressError, ConfigError, RunDirError
from fsl_async.keys.access_control import AccessControl, check_guarded
from fsl_async.keys.folder import KeysFolder
from fsl_async.learn.client.context import choose_device
from fsl_async.learn.client.ports import Vector
from fsl_async.learn.data.facts import described
from fsl_async.learn.split.build import build_server
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.learn.split.server_training import ServerTraining
from fsl_async.nodes.capacity import and_capacity, check_open_files, within
from fsl_async.nodes.ps import node as node_ps
from fsl_async.nodes.ps.node import GOODBYE_S, JOURNAL, check_bindable
from fsl_async.nodes.runtime import LoopLag, ThreadWorker
from fsl_async.nodes.split_server.shell import SplitServerShell, Workers
from fsl_async.observe.journal import JournalWriter
from fsl_async.observe.table import Reporter
from fsl_async.process.memory import keep_freed_blocks
from fsl_async.process.stopper import Stopper
from fsl_async.roles.machine import DrainAsked, Finish
from fsl_async.roles.split.events import PsEnded
from fsl_async.roles.split.messages import PS_ROLE
from fsl_async.roles.split.server import SplitServerMachine
from fsl_transport.loop import run as run_loop
from fsl_transport.zmq.link import ZmqListener

PS = "ps"
SERVER = "server"
"""Folders in the run directory of a process that runs both."""


_COPY_S = 60.0
Scored = Callable[[int, Callable[[], dict[str, Vector]]], None]
"""Takes a version, and a function that copies the split server's weights."""


@frozen
class Summary:
    """The result of a split server."""

    run: str
    uploads: int
    alignments: int
    """Auxiliary models aligned in all of the run."""
    round: int
    reason: str
    seconds: float
    traffic: dict[str, Any]
    run_dir: str
    ps: node_ps.Summary | None = None


def serve(
    config: Config,
    run_dir: Path,
    *,
    with_ps: bool,
    from_version: int | None = None,
    announce: Callable[[str, str], None],
    log: Callable[[str], None],
    stop: Stopper,
    scored: Scored | None = None,
    keys: KeysFolder | None = None,
    record: Callable[..., None] | None = None,
) -> Summary:
    """Run the split server until the run ends or `stop` is asked. Blocks.

    with_ps: the parameter server runs in the same loop.
    announce: called with "server" or "ps" and the bound address once clients can connect.
    scored: with_ps only; called in the store's thread with each durable version, before it is
    announced, and a function that copies the split server's weights; it must not raise.
    keys: encrypt with this pair, and admit the keys on this list.
    record: takes the run's events as a kind and fields, for programs.
    Raises ConfigError, KeysError, RunDirError and AddressError, each in one line.
    """
    keep_freed_blocks()
    config = described(with_implied(config))
    if not config.split.is_on:
        raise ConfigError("split.method is none: say what to train with", "split.method")
    if not config.split.has_server:
        raise ConfigError(
            f"{config.split.method} has no split server: start --role ps alone", "split.method"
        )
    try:
        check_listen("split.listen", config.split.listen)
    except SettingError as error:
        raise ConfigError(str(error), error.key) from None
    insecure = config.listen.insecure
    check_guarded("split.listen", config.split.listen, insecure=insecure, keys=keys)
    check_bindable(config.split.listen)
    capacity = check_open_files(config, trains=True, listeners=1 + with_ps)
    config = within(config, capacity)
    announced = and_capacity(announce, capacity, log, record)
    torch.set_num_threads(threads_here(config.train.threads))
    disk = ServerDisk(run_dir / SERVER)
    with contextlib.ExitStack() as stack:
        stack.callback(disk.close)
        access = AccessControl(keys, run_dir / SERVER, PS_ROLE)
        served = _Serving(
            config,
            disk,
            announced,
            log,
            stop,
            access=access,
            with_ps=with_ps,
            max_connections=capacity.connections,
        )
        if not with_ps:
            return run_loop(served.alone())
        ps_dir = run_dir / PS
        prepared = node_ps.prepared(
            config,
            ps_dir,
            node_ps.Options(
                announce=lambda address: announce(PS, address),
                log=log,
                stop=stop,
                from_version=from_version,
                after_commit=None if scored is None else lambda v: scored(v, served.weights),
                keys=keys,
            ),
            capacity=capacity,
        )
        return run_loop(served.with_ps(stack.enter_context(prepared)))


@define(eq=False, slots=False)
class _Serving:
    """One split server."""

    config: Config
    _disk: ServerDisk
    _announce: Callable[[str, str], None]
    _log: Callable[[str], None]
    _stop: Stopper
    _access: AccessControl
    _with_ps: bool
    _max_connections: int

    def __attrs_post_init__(self) -> None:
        server, method, uploads, parts = build_server(
            self.config, choose_device(self.config.train.device)
        )
        self.training = ServerTraining(method, server, uploads, self._disk)
        config = self.config
        if self._with_ps:  # the run's end comes from this process
            config = attrs.evolve(config, split=attrs.evolve(config.split, alone_s=0.0))
        self.machine = SplitServerMachine(config, parts.architecture)
        self.traffic = Traffic()

    def weights(self) -> dict[str, Vector]:
        """Copy the split server's weights between two trainings.

        "" is the common model; replicas have their clients' names. May be called in any thread
        except the loop's and the training's.
        """
        found: concurrent.futures.Future[dict[str, Vector]] = concurrent.futures.Future()
        self._trainer.submit(self.training.server.export, found.set_result, found.set_exception)
        return found.result(_COPY_S)

    async def alone(self) -> Summary:
        """Serve until the end. Asked to stop, leave; the next process continues in this folder."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[str] = loop.create_future()

        def stop_asked(hard: bool) -> None:
            loop.call_soon_threadsafe(self._end, DrainAsked(self._stop.reason), hard)

        unsubscribe = self._stop.subscribe(stop_asked)
        try:
            return await self._serve(ready)
        finally:
            unsubscribe()

    async def with_ps(
        self, ps: Callable[[Config], Coroutine[Any, Any, node_ps.Summary]]
    ) -> Summary:
        """Serve beside the parameter server, and end after it."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[str] = loop.create_future()
        serving = asyncio.create_task(self._serve(ready))
        try:
            waited: list[asyncio.Future[Any]] = [serving, ready]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                return serving.result()
            split = self.config.split
            split = attrs.evolve(split, server=split.server or ready.result())
            ending = asyncio.create_task(ps(attrs.evolve(self.config, split=split)))
            try:
                await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
                if serving.done() and serving.exception() is not None:
                    serving.result()
                found = await ending
            finally:
                ending.cancel()
            leaves = self._stop.requested and self._stop.comes_back
            self._end(
                DrainAsked(found.reason) if leaves else PsEnded(found.reason),
                self._stop.hard,
            )
            return attrs.evolve(await serving, ps=found)
        finally:
            if not serving.done():
                serving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await serving

    def _end(self, event: DrainAsked | PsEnded, hard: bool) -> None:
        if hard:
            self._finish(Finish(event.reason, 0))
        else:
            self._shell.node.feed(event)

    def _finish(self, effect: Finish) -> None:
        if not self._finished.done():
            self._finished.set_result(effect)

    async def _serve(self, ready: asyncio.Future[str]) -> Summary:
        loop = asyncio.get_running_loop()
        begun = time.monotonic()
        config = self.config
        self._finished: asyncio.Future[Finish] = loop.create_future()
        writer = JournalWriter(self._disk.run_dir / JOURNAL)
        journal = Reporter(writer, self._log, loop.time)
        workers = [ThreadWorker(loop, name) for name in ("codec", "train", "write")]
        self._trainer = workers[1]
        split = config.split
        settings = config.transport(self._max_connections)
        try:
            link = ZmqListener(
                split.listen, settings, self._access.curve, self._access.handshake_failed
            )
        except tp.LocalError as error:
            raise AddressError(str(error)) from None
        counted = CountedLink(link, self.traffic, at_client=False)

        def listener(take: Callable[[tp.TransportEvent], None]) -> tp.ListenerEndpoint:
            self._endpoint = tp.ListenerEndpoint(
                counted,
                loop,
                settings,
                take,
                SERVER,
                incarnation=time.time_ns(),
                admit=self._access.admit,
            )
            return self._endpoint

        self._shell = shell = SplitServerShell(
            self.machine,
            self.training,
            listener,
            workers=Workers(*workers),
            traffic=self.traffic,
            scheduler=loop,
            journal=journal,
            say=journal.say,
            finished=self._finish,
        )
        endpoint = self._endpoint
        lag = LoopLag(loop)
        notes = TrafficNotes(loop, journal, self.traffic)
        journal.note(
            "node_started",
            loop.time(),
            role=SERVER,
            method=split.method,
            address=link.address,
            pid=os.getpid(),
            host=socket.gethostname(),
            encrypted=self._access.curve is not None,
        )
        try:
            shell.start()
            for name, peer in self.machine.peers.items():
                if peer.incarnation >= 0:
                    endpoint.remember(name, peer.incarnation)
            self._announce(SERVER, link.address)
            heartbeat_s = config.session.heartbeat_every_s
            self._access.open(loop, endpoint, journal.note, journal.say, heartbeat_s=heartbeat_s)
            ready.set_result(self._access.reached_at(link.address))
            ended = await self._finished
            give_up_at = loop.time() + (0.0 if self._stop.hard else GOODBYE_S)
            while endpoint.peers and loop.time() < give_up_at:  # noqa: ASYNC110 - once in a run
                await asyncio.sleep(0.05)
        finally:
            self._access.close()
            notes.close()
            journal.note("node_ended", loop.time(), garbage=endpoint.garbage, **lag.summary())
            shell.node.close()
            lag.close()
            await endpoint.aclose()
            for worker in workers:
                worker.close()
            writer.close()
        if ended.exit_code:
            raise RunDirError(ended.reason)
        return Summary(
            self.machine.run,
            self.machine.uploads,
            sum(peer.progress.auxiliary + 1 for peer in self.machine.peers.values()),
            self.machine.round,
            ended.reason,
            round(time.monotonic() - begun, 3),
            self.traffic.as_dict(),
            str(self._disk.run_dir),
        )
