"""A simulation with a split server beside the parameter server.

Machines, shells, sessions and streams are those of production. They have a network of their own,
because a client is one endpoint in each. The split server is killed like the parameter server, and
as often asked to end while the run goes on.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import fsl_transport as tp
from fsl_async.accounting.traffic import CountedLink, Traffic
from fsl_async.files.memory_files import MemoryDisk, MemoryFiles
from fsl_async.nodes.client.split_shell import Facts, SplitClientShell
from fsl_async.nodes.split_server.shell import SplitServerShell, Workers
from fsl_async.roles.machine import DrainAsked, Event, Finish, Note
from fsl_async.roles.split.client import SplitClientMachine
from fsl_async.roles.split.methods import method_of
from fsl_async.roles.split.server import SplitServerMachine
from fsl_async.tools.sim.simulation import Simulation
from fsl_async.tools.sim.world import ProcessClock

if TYPE_CHECKING:
    from fsl_async.config.settings import Config
    from fsl_async.learn.split.remote import SplitTraining
    from fsl_async.learn.split.server_training import ServerTraining
    from fsl_async.nodes.runtime import Journal

SPLIT_NAME = "split"
SPLIT_WORKERS = ("code", "train", "write")
"""Names of the split server's workers."""
SPLIT_GOODBYE_S = 0.5
"""Between the last effect of a split server and the end of its process."""


class SplitServerSimulation(Simulation):
    """A simulation whose clients have sessions with a split server, if its method has one."""

    def add_split_server(self, config: Config, conditions: tp.Conditions | None = None) -> None:
        """Prepare for a split server, before the run begins.

        config: its own, which may differ from that of the parameter server. conditions: of its
        network.
        """
        self.split_config, self.method = config, method_of(config.split)
        network = tp.MemNetwork(
            self.scheduler, self.settings.seed + 1, conditions or tp.Conditions()
        )
        self.split_network = network
        self.networks.insert(0, (network, SPLIT_NAME))
        self.split_disk = MemoryDisk()
        self.split_files = MemoryFiles(self.split_disk)
        """The disk as the newest split server sees it."""
        self.split_shell: SplitServerShell | None = None
        """None between the end of a process and the launch of the next."""
        self.split_clients: dict[str, SplitClientShell] = {}
        """The sessions of clients with the split server."""
        self.client_traffic, self.server_traffic = Traffic(), Traffic()
        self.left_in_order = False
        """Whether the last process has ended because it was asked to."""
        self._split_clock = ProcessClock(self.scheduler)
        self._split_is_new = self.method.has_server
        """Whether no process was launched yet."""

    # --- what differs between simulations ---

    def _split_server(self, files: MemoryFiles) -> tuple[SplitServerMachine, ServerTraining]:
        """Make the machine and the training of a process of the split server."""
        raise NotImplementedError

    def _open_split_journal(self, clock: ProcessClock) -> tuple[Traffic, Journal]:
        """Open the journal of a process of the split server, and what counts its bytes."""
        return self.server_traffic, self.journal

    def _split_failed(self, text: str) -> None:
        """Take a line about a split server that has ended and should not have."""
        self.world.violated(text)

    def _split_says(self, note: Note) -> None:
        """Take a line of the split server."""

    def _session_finished(self, name: str, finish: Finish) -> None:
        """Take the end of a client's session with the split server."""

    # --- the split server ---

    @property
    def split_run_over(self) -> bool:
        """Whether the split server has ended with its run, or does not run."""
        return self.split_shell is None or self.split_shell.machine.run_over

    def _launch_server(self) -> None:
        super()._launch_server()
        if self._split_is_new:
            self._split_is_new = False
            self._launch_split()
            self._plan(self.profile.server_kill_every_s, self._kill_split)
            self._plan(self.profile.server_kill_every_s, self._ask_split)

    def _launch_split(self) -> None:
        """Launch a process of the split server, on the files that the one before has left."""
        clock = self._split_clock = ProcessClock(self.scheduler)
        incarnation = self._next_incarnation(SPLIT_NAME)
        self.split_files = MemoryFiles(self.split_disk)
        machine, training = self._split_server(self.split_files)
        traffic, journal = self._open_split_journal(clock)
        link = CountedLink(self.split_network.listener(SPLIT_NAME), traffic, at_client=False)
        shell = SplitServerShell(
            machine,
            training,
            self._listens(link, clock, SPLIT_NAME, incarnation),
            workers=Workers(*(self._worker(clock, name) for name in SPLIT_WORKERS)),
            traffic=traffic,
            scheduler=clock,
            journal=journal,
            say=self._split_says,
            finished=lambda finish: self._split_finished(shell, finish),
        )
        self.split_shell = shell
        self._split_launched(shell)
        shell.start()
        for name, peer in machine.peers.items():
            if peer.incarnation >= 0:
                shell.endpoint.remember(name, peer.incarnation)

    def _split_launched(self, shell: SplitServerShell) -> None:
        """Take a process of the split server before it starts."""

    def _kill_split(self) -> None:
        """Kill the split server."""
        if self.split_shell is not None:
            self.counts.fault("split server killed")
            self._end_split(in_order=False)

    def _ask_split(self) -> None:
        """Ask it to end, as SIGTERM does: it ends in good order, and another process goes on."""
        if self.split_shell is not None:
            self.counts.fault("split server asked to end")
            self.split_shell.node.feed(DrainAsked("SIGTERM"))

    def _close_split(self) -> None:
        """End the process as kill -9 does, also where it has ended by itself."""
        self._split_clock.alive = False
        self.split_files.die()
        self.split_network.kill(SPLIT_NAME)
        self.split_shell = None

    def _end_split(self, *, in_order: bool) -> None:
        """Take the process away, and launch the next one after a while."""
        self._close_split()
        self.left_in_order = in_order
        self._at(self._chance.uniform(*self.profile.server_return_s), self._launch_split)

    def _split_finished(self, shell: SplitServerShell, finish: Finish) -> None:
        if finish.exit_code:
            self._split_failed(f"the split server failed: {finish.reason}")
        if shell.machine.shutdown.leaves:
            self._at(SPLIT_GOODBYE_S, self._split_gone, shell)
        elif not self._ending:
            self._split_failed("the split server ended before its run")

    def _split_gone(self, shell: SplitServerShell) -> None:
        if self.split_shell is shell:
            self._end_split(in_order=True)

    # --- clients ---

    def _launch_client(self, name: str) -> None:
        self.split_clients.pop(name, None)
        super()._launch_client(name)

    def _open_session(
        self, name: str, incarnation: int, training: SplitTraining, facts: Facts
    ) -> SplitClientShell:
        """Return a client's side of its session with the split server; the caller dials."""
        clock, link = self.processes[name].clock, self.split_network.dialer(name, SPLIT_NAME)
        rng = self._rng(name, incarnation, "split")
        shell = SplitClientShell(
            SplitClientMachine(self.split_config, name, incarnation),
            training,
            self._dials(link, clock, name, incarnation, rng=rng),
            facts=facts,
            worker=self._worker(clock, name),
            traffic=self.client_traffic,
            scheduler=clock,
            journal=self._journal_of(name, clock),
            say=functools.partial(self._client_says, name),
            finished=functools.partial(self._session_finished, name),
        )
        self.split_clients[name] = shell
        return shell

    def _run_over(self, name: str, event: Event) -> None:
        """Give a client's session an event of its training thread, or the end of the run."""
        if name in self.split_clients:
            self.split_clients[name].node.feed(event)
