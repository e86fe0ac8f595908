"""A simulated parameter server: production machine, shell, store and journal, in virtual time."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import attrs

import fsl_transport as tp
from fsl_async.accounting.traffic import CountedLink, Traffic
from fsl_async.accounting.traffic_notes import TrafficNotes
from fsl_async.config.fixed import keep_settings
from fsl_async.config.settings import Config
from fsl_async.config.transport_settings import transport_settings
from fsl_async.nodes.ps.aggregation import weighting_of
from fsl_async.nodes.ps.node import JOURNAL, rules_of, run_facts, start_facts, store_settings_of
from fsl_async.nodes.ps.shell import ParameterServerShell, Surroundings
from fsl_async.nodes.wire import exchanged_category
from fsl_async.observe.journal import JournalWriter
from fsl_async.observe.reporter import Reporter
from fsl_async.roles.machine import DrainAsked, Effect, Event, Finish
from fsl_async.roles.sync.ps import ParameterServerMachine
from fsl_async.store.files import Files
from fsl_async.store.store import Store
from fsl_async.tools.sim.training import VirtualWorker
from fsl_async.tools.sim.world import CheckedMachine, ProcessClock
from fsl_async.tools.simulate.client import JOB_S, SERVER

WALL_S = 1_577_836_800.0
"""Seconds since 1970 at which virtual time begins, 2020-01-01 UTC: the same in every simulation, so
that the same seed gives the same files."""


class UnsyncedFiles(Files):
    """Files that are never synced: simulated processes die, and this machine does not."""

    def sync(self, descriptor: int) -> None:
        """Leave the content to the operating system."""

    def sync_directory(self, path: Path) -> None:
        """Leave the names to the operating system."""


@attrs.frozen(kw_only=True)
class ServerSite:
    """The parts that all processes of the parameter server share."""

    config: Config
    run: str
    run_dir: Path
    seed: int
    network: tp.MemNetwork
    watch: Callable[[SimulatedServer, Event, list[Effect], float], None]
    """Called after each event."""
    finished: Callable[[Finish], None]


class SimulatedServer:
    """One process of the parameter server, on the files that the one before has left.

    Raises RunDirError and StoreError.
    """

    def __init__(self, site: ServerSite, clock: ProcessClock, incarnation: int) -> None:
        config = site.config
        self._site = site
        self._clock = clock
        self.traffic = Traffic()
        settings = attrs.evolve(store_settings_of(config), threads=1, snapshot_thread=False)
        self._store = Store(
            site.run_dir,
            settings,
            files=UnsyncedFiles(),
            wall_clock=self._wall,
            clock=clock.time,
        )
        self._recovered = self._store.recover()
        keep_settings(site.run_dir, config, self._recovered.version)
        run = self._store.start_run(site.run)
        self._writer = JournalWriter(site.run_dir / JOURNAL, self._wall)
        self._journal = Reporter(self._writer, lambda _: None, clock.time, self._wall)
        self.machine = machine = ParameterServerMachine(rules_of(config), weighting_of(config), run)
        category = exchanged_category(config)
        self._shell = ParameterServerShell(
            machine,
            run_facts(run, config),
            Surroundings(
                store=self._store,
                worker=VirtualWorker(clock, lambda: JOB_S),
                scheduler=clock,
                journal=self._journal,
                listener=lambda handle: self._listener(handle, incarnation),
                say=self._journal.say,
                finished=site.finished,
                count=lambda *chunk: self.traffic.weights(*chunk, category=category),
            ),
        )
        self._shell.node.machine = CheckedMachine(
            machine, lambda *happened: site.watch(self, *happened)
        )
        self._notes = TrafficNotes(clock, self._journal, self.traffic)

    def start(self) -> None:
        """Begin to serve."""
        self._journal.note(
            "node_started",
            self._clock.time(),
            role="ps",
            run=self.machine.run,
            address=f"mem://{SERVER}",
            pid=os.getpid(),
            host="simulated",
            encrypted=False,
            **start_facts(self._site.config),
        )
        self._shell.start(self._recovered)

    def end_run(self, reason: str) -> None:
        """End the run in order, as Ctrl-C does; harmless twice."""
        if not self.machine.end.asked:
            self._shell.node.feed(DrainAsked(reason))

    def kill(self) -> None:
        """End it as kill -9 does."""
        self._clock.alive = False
        self._site.network.kill(SERVER)
        self._writer.close()
        self._store.close()

    def close(self) -> None:
        """End it in order: write what is still to be written."""
        self._notes.close()
        self._journal.note("node_ended", self._clock.time())
        self._store.finish_snapshot()
        self.kill()

    def _wall(self) -> float:
        return WALL_S + self._clock.time()

    def _listener(
        self, handle: Callable[[tp.TransportEvent], None], incarnation: int
    ) -> tp.ListenerEndpoint:
        site = self._site
        return tp.ListenerEndpoint(
            CountedLink(site.network.listener(SERVER), self.traffic, at_client=False),
            self._clock,
            transport_settings(site.config, max(1024, 2 * site.config.sync.clients)),
            handle,
            SERVER,
            incarnation=incarnation,
            rng=random.Random(f"{site.seed}/{SERVER}/{incarnation}"),  # noqa: S311
        )
