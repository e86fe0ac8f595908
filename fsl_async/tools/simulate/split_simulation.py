"""A simulated run of a function that trains a split model.

Beside the parameter server runs the production split server, with files in `server/` of the run
directory, as `--role server` with the same --run-dir. The parameter server sends it the end of the
run, as in production. Its jobs take no longer than those of a store.
"""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path
from typing import Any, cast

import fsl_transport as tp
from fsl_async.accounting.traffic import Traffic, TrafficNotes
from fsl_async.config.split_rules import split_rules
from fsl_async.errors import FslError, RefusedError
from fsl_async.learn.client.fed_base import choose_device
from fsl_async.learn.split.build import build_server
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.learn.split.server_training import ServerTraining
from fsl_async.nodes.ps.node import JOURNAL
from fsl_async.nodes.ps.run_end_notifier import RunEndNotifier
from fsl_async.nodes.split_server.node import SERVER as SPLIT_SERVER
from fsl_async.nodes.split_server.shell import Workers
from fsl_async.nodes.split_streams import Formats
from fsl_async.nodes.wire import Welcome
from fsl_async.observe.journal import JournalWriter
from fsl_async.observe.reporter import Reporter
from fsl_async.roles.machine import Event, Finish
from fsl_async.roles.split.messages import PS_ROLE
from fsl_async.roles.split.server import SplitServerMachine
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.store.memory_files import MemoryDisk, MemoryFiles
from fsl_async.tools.sim.split_processes import (
    SPLIT_NAME,
    SplitRun,
    SplitServerProcess,
    SplitSupervisor,
)
from fsl_async.tools.sim.training import VirtualWorker
from fsl_async.tools.sim.world import ProcessClock
from fsl_async.tools.simulate.client import OwnTraining
from fsl_async.tools.simulate.simulation import JOB_S, OwnSimulation, SilentJournal
from fsl_async.tools.simulate.split_session import SplitSession


class OwnSplitSimulation(OwnSimulation):
    """A run with a split server. Takes the arguments of `OwnSimulation`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        config, split = self.config, self.config.split
        network = tp.MemNetwork(self.scheduler, config.run.seed + 1)
        self._split = SplitRun(
            seed=config.run.seed,
            rules=split_rules(config),
            formats=Formats(split.up, split.down, split.models, config.codec.step_log2),
            transport=self._transport,
            network=network,
        )
        self._split_disk = MemoryDisk()
        self._supervisor = SplitSupervisor(
            self.scheduler,
            self.profile,
            self._chance,
            self.counts,
            make=self._split_process,
            failed=lambda line: self.places.note("failed", SPLIT_NAME, FslError(line)),
            calm=lambda: self._calm,
            ending=lambda: bool(self._reason),
        )
        self._notifier: RunEndNotifier | None = None
        """The notifier of the running process of the parameter server."""
        self._notifier_clock = ProcessClock(self.scheduler)
        for number, name in enumerate(self.names):
            up, down = self.own.link_of(number).conditions(self.profile)
            network.set_direction(name, SPLIT_NAME, up)
            network.set_direction(SPLIT_NAME, name, down)

    # --- the split server ---

    def _split_process(self) -> SplitServerProcess:
        """Make a process of the split server, on the files of the one before."""
        config, clock = self.config, ProcessClock(self.scheduler)
        server, method, uploads, parts = build_server(config, choose_device(config.train.device))
        files, traffic = MemoryFiles(self._split_disk), Traffic()
        disk = ServerDisk(Path("/") / SPLIT_SERVER, files)
        self.traffics.append(traffic)
        folder = self.root / SPLIT_SERVER
        folder.mkdir(mode=0o700, exist_ok=True)
        writer = JournalWriter(folder / JOURNAL, self._wall)
        journal = Reporter(writer, lambda _: None, clock.time, self._wall)
        notes = TrafficNotes(clock, journal, traffic)

        def closed() -> None:
            if self._reason:
                notes.close()
                journal.note("node_ended", clock.time())
            writer.close()
            files.die()

        process = SplitServerProcess(
            self._split,
            clock,
            self._next_incarnation(SPLIT_NAME),
            SplitServerMachine(self._split.rules, parts.architecture),
            ServerTraining(method, server, uploads, disk),
            workers=Workers(
                *(VirtualWorker(clock, lambda: JOB_S, failures=Exception) for _ in range(3))
            ),
            traffic=traffic,
            journal=journal,
            say=journal.say,
            closed=closed,
        )
        journal.note(
            "node_started",
            clock.time(),
            role=SPLIT_SERVER,
            method=config.split.method,
            address=f"mem://{SPLIT_NAME}",
            pid=os.getpid(),
            host="simulated",
            encrypted=False,
        )
        return process

    def write_out(self) -> None:
        """See `OwnSimulation.write_out`."""
        if self._supervisor.process is not None:
            self._supervisor.process.close()
        super().write_out()
        path = Path("/") / SPLIT_SERVER
        if MemoryFiles(self._split_disk).exists(path):
            self._split_disk.write_to(self.root / SPLIT_SERVER, path)

    @property
    def all_over(self) -> bool:
        """See `OwnSimulation.all_over`."""
        return super().all_over and self._supervisor.run_over

    # --- the parameter server, which sends the split server the end of the run ---

    def _launch_server(self) -> None:
        super()._launch_server()
        self._open_notifier()
        if self._supervisor.is_new:
            self._supervisor.launch()
            self._supervisor.plan_faults()

    def _open_notifier(self) -> None:
        incarnation = self._next_incarnation(PS_ROLE)
        clock = self._notifier_clock = ProcessClock(self.scheduler)
        link = self._split.network.dialer(PS_ROLE, SPLIT_NAME)
        rng = random.Random(f"{self._split.seed}/{PS_ROLE}/{incarnation}")  # noqa: S311
        self._notifier = RunEndNotifier(
            self.run_name,
            lambda take: tp.DialerEndpoint(
                link,
                clock,
                self._split.transport,
                take,
                PS_ROLE,
                incarnation=incarnation,
                role=PS_ROLE,
                rng=rng,
            ),
            redial_s=self._split.rules.reoffer_s,
            scheduler=clock,
        )

    def _server_finished(self, finish: Finish) -> None:
        super()._server_finished(finish)
        if self._notifier is not None and not finish.exit_code:
            self._notifier.run_ended(finish.reason)

    # --- clients ---

    def _welcomed(self, name: str, welcome: Welcome) -> None:
        process = self.processes[name]
        training, machine = process.training, cast("ClientMachine", process.shell.machine)
        assert isinstance(training, OwnTraining)
        if training.split is None:
            training.split = SplitSession(
                self._split,
                process.clock,
                welcome,
                name,
                machine.incarnation,
                worker=self._worker(process.clock, name),
                journal=SilentJournal(),
                say=functools.partial(self._client_says, name),
                finished=functools.partial(self._split_finished, name),
            )
        super()._welcomed(name, welcome)

    def _run_over(self, name: str, event: Event) -> None:
        process = self.processes.get(name)
        if process is not None and isinstance(process.training, OwnTraining):
            process.training.end_split(event)

    def _split_finished(self, name: str, finish: Finish) -> None:
        if finish.exit_code:
            self._at(0.0, self._ended_itself, name, RefusedError(finish.reason))

    # --- faults ---

    def _kill(self, name: str) -> bool:
        killed = super()._kill(name)
        if killed and name == self.server:
            self._notifier_clock.alive = False
            self._split.network.kill(PS_ROLE)
        elif killed:
            self._split.network.kill(name)
        return killed

    def _reset(self, name: str) -> None:
        if not self._calm:
            self._split.network.reset(name, SPLIT_NAME)
        super()._reset(name)

    def _cut(self, name: str) -> None:
        if not self._calm:
            self._split.network.cut(name, SPLIT_NAME)
        super()._cut(name)

    def _heal(self, name: str) -> None:
        self._split.network.heal(name, SPLIT_NAME)
        super()._heal(name)
