"""A simulated run of a function that trains a split model.

Beside the parameter server runs the production split server, with files in `server/` of the run
directory, as `--role server` with the same --run-dir. The parameter server sends it the end of the
run, as in production. Its jobs take no longer than those of a store.
"""

import functools
from pathlib import Path
from typing import Any, cast

from fsl_async.accounting.traffic import Traffic
from fsl_async.errors import FslError, RefusedError
from fsl_async.files.memory_files import MemoryFiles
from fsl_async.learn.client.context import choose_device
from fsl_async.learn.split.build import build_server
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.learn.split.server_training import ServerTraining
from fsl_async.nodes.client.split_shell import Facts
from fsl_async.nodes.ps.run_end_notifier import RunEndNotifier
from fsl_async.nodes.ps.shell import ParameterServerShell
from fsl_async.nodes.runtime import Journal
from fsl_async.nodes.split_server.node import SERVER as SPLIT_SERVER
from fsl_async.nodes.wire import Welcome
from fsl_async.roles.machine import Finish, Note
from fsl_async.roles.split.messages import PS_ROLE
from fsl_async.roles.split.server import SplitServerMachine
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.store.store import Store
from fsl_async.tools.sim.split_server import SPLIT_NAME, SPLIT_WORKERS, SplitServerSimulation
from fsl_async.tools.sim.task_simulation import ServerJournal, TaskSimulation
from fsl_async.tools.sim.task_training import TaskTraining
from fsl_async.tools.sim.training import VirtualWorker
from fsl_async.tools.sim.world import ProcessClock


class TaskSplitSimulation(SplitServerSimulation, TaskSimulation):
    """A run with a split server. Takes the arguments of `TaskSimulation`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.add_split_server(self.config)
        self._set_links(self.split_network, SPLIT_NAME)
        self._notifier: RunEndNotifier | None = None
        """The notifier of the running process of the parameter server."""

    # --- the split server ---

    def _split_server(self, files: MemoryFiles) -> tuple[SplitServerMachine, ServerTraining]:
        device = choose_device(self.config.train.device)
        server, method, uploads, parts = build_server(self.config, device)
        disk = ServerDisk(Path("/") / SPLIT_SERVER, files, self._wall, self.scheduler.time)
        training = ServerTraining(method, server, uploads, disk)
        return SplitServerMachine(self.config, parts.architecture), training

    def _open_split_journal(self, clock: ProcessClock) -> tuple[Traffic, Journal]:
        folder = self.root / SPLIT_SERVER
        folder.mkdir(mode=0o700, exist_ok=True)
        journal = self._split_journal = ServerJournal(folder, clock, self._wall)
        self.traffics.append(journal.traffic)
        journal.started(SPLIT_SERVER, SPLIT_NAME, method=self.config.split.method)
        return journal.traffic, journal.reporter

    def _split_says(self, note: Note) -> None:
        self._split_journal.reporter.say(note)

    def _split_failed(self, text: str) -> None:
        self.note("failed", SPLIT_NAME, FslError(text))

    def _worker(self, clock: ProcessClock, name: str) -> VirtualWorker:
        """See `Simulation`. The parts of the user's model may fail with any error."""
        worker = super()._worker(clock, name)
        if name in SPLIT_WORKERS:
            worker.failures = Exception
        return worker

    def _close_split(self) -> None:
        self._split_journal.close(in_order=bool(self._reason))
        super()._close_split()

    def write_out(self) -> None:
        """See `TaskSimulation.write_out`."""
        if self.split_shell is not None:
            self._close_split()
        super().write_out()
        path = Path("/") / SPLIT_SERVER
        if MemoryFiles(self.split_disk).exists(path):
            self.split_disk.write_to(self.root / SPLIT_SERVER, path)

    @property
    def all_over(self) -> bool:
        """See `TaskSimulation.all_over`."""
        return super().all_over and self.split_run_over

    # --- the parameter server, which sends the split server the end of the run ---

    def _prepare(
        self, clock: ProcessClock, shell: ParameterServerShell, store: Store, number: int
    ) -> None:
        link = self.split_network.dialer(PS_ROLE, SPLIT_NAME)
        self._notifier = RunEndNotifier(
            self.run_name,
            self._dials(link, clock, PS_ROLE, number, role=PS_ROLE),
            redial_s=self.config.session.reoffer_s,
            scheduler=clock,
        )

    def _server_finished(self, finish: Finish) -> None:
        super()._server_finished(finish)
        if self._notifier is not None and not finish.exit_code:
            self._notifier.run_ended(finish.reason)

    def _kill(self, name: str) -> bool:
        killed = super()._kill(name)
        if killed and name == self.server:
            self.split_network.kill(PS_ROLE)
        return killed

    # --- clients ---

    def _welcomed(self, name: str, welcome: Welcome) -> None:
        training = self.processes[name].training
        assert isinstance(training, TaskTraining)
        training.opens_session = functools.partial(self._open, name, welcome)
        training.on_split = functools.partial(self._run_over, name)
        super()._welcomed(name, welcome)

    def _open(
        self, name: str, welcome: Welcome, training: Any, architecture: dict[str, str]
    ) -> None:
        """Open the session of a client whose training thread has built its part of the model."""
        machine = cast("ClientMachine", self.processes[name].shell.machine)
        facts = Facts(welcome.run, welcome.shard, architecture)
        self._open_session(name, machine.incarnation, training, facts).dial()

    def _session_finished(self, name: str, finish: Finish) -> None:
        if finish.exit_code:
            self._at(0.0, self.ended_itself, name, RefusedError(finish.reason))
