"""Simulated processes of split learning: the split server, and clients' sessions with it.

Machines, shells, sessions and streams are those of production. They have a network of their own,
because a client is one endpoint in each.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import frozen

import fsl_transport as tp
from fsl_async.accounting.traffic import CountedLink, Traffic
from fsl_async.nodes.client.split_shell import Facts, SplitClientShell
from fsl_async.nodes.split_server.shell import SplitServerShell, Workers
from fsl_async.nodes.split_streams import Formats
from fsl_async.roles.machine import DrainAsked, Finish, Note
from fsl_async.roles.split.client import SplitClientMachine
from fsl_async.roles.split.methods import SplitRules
from fsl_async.roles.split.server import SplitServerMachine
from fsl_async.tools.sim.faults import FaultProfile
from fsl_async.tools.sim.world import Counts, ProcessClock

if TYPE_CHECKING:
    from fsl_async.nodes.client.split_shell import Training as ClientTraining
    from fsl_async.nodes.runtime import Journal, Worker
    from fsl_async.nodes.split_server.shell import Training as ServerTraining

SPLIT_NAME = "split"
SPLIT_GOODBYE_S = 0.5
"""Between the last effect of a split server and the end of its process."""


@frozen(kw_only=True)
class SplitRun:
    """The parts that all processes of a simulated split run share.

    network: of the connections to the split server.
    """

    seed: int
    rules: SplitRules
    formats: Formats
    transport: tp.TransportSettings
    network: tp.MemNetwork

    def client(
        self,
        name: str,
        incarnation: int,
        clock: ProcessClock,
        training: ClientTraining,
        *,
        facts: Facts,
        worker: Worker,
        traffic: Traffic,
        journal: Journal,
        say: Callable[[Note], None],
        finished: Callable[[Finish], None],
    ) -> SplitClientShell:
        """Return a client's side of its session with the split server; the caller dials."""
        rng = random.Random(f"{self.seed}/{name}/{incarnation}/split")  # noqa: S311
        link = self.network.dialer(name, SPLIT_NAME)
        return SplitClientShell(
            SplitClientMachine(self.rules, name, incarnation),
            training,
            lambda take: tp.DialerEndpoint(
                link, clock, self.transport, take, name, incarnation=incarnation, rng=rng
            ),
            facts=facts,
            formats=self.formats,
            worker=worker,
            traffic=traffic,
            scheduler=clock,
            journal=journal,
            say=say,
            finished=finished,
        )


class SplitServerProcess:
    """One process of the split server, on the files that the one before has left.

    closed: called when the process has ended, in order or not.
    """

    def __init__(
        self,
        run: SplitRun,
        clock: ProcessClock,
        incarnation: int,
        machine: SplitServerMachine,
        training: ServerTraining,
        *,
        workers: Workers,
        traffic: Traffic,
        journal: Journal,
        say: Callable[[Note], None],
        closed: Callable[[], None],
    ) -> None:
        self.clock, self.machine, self.training = clock, machine, training
        self.closed = closed
        self.finish: Callable[[Finish], None] = lambda _: None
        """Takes the effect with which it ends by itself."""
        self._run = run
        link = CountedLink(run.network.listener(SPLIT_NAME), traffic, at_client=False)
        rng = random.Random(f"{run.seed}/split/{incarnation}")  # noqa: S311
        self.shell = SplitServerShell(
            machine,
            training,
            lambda take: tp.ListenerEndpoint(
                link, clock, run.transport, take, SPLIT_NAME, incarnation=incarnation, rng=rng
            ),
            workers=workers,
            formats=run.formats,
            traffic=traffic,
            scheduler=clock,
            journal=journal,
            say=say,
            finished=lambda effect: self.finish(effect),  # noqa: PLW0108 - set later
        )

    def start(self) -> None:
        """Restore the state on disk, and serve."""
        self.shell.start()
        for name, peer in self.machine.peers.items():
            if peer.incarnation >= 0:
                self.shell.endpoint.remember(name, peer.incarnation)

    def close(self) -> None:
        """End it as kill -9 does, also where it has ended by itself."""
        self.clock.alive = False
        self.closed()
        self._run.network.kill(SPLIT_NAME)


class SplitSupervisor:
    """Launches the split server, kills it, asks it to end, and launches it again.

    make: makes a process. failed: takes a line about one that has ended and should not have.
    calm: returns whether there are no new faults. ending: whether the run is to end.
    """

    def __init__(
        self,
        scheduler: tp.VirtualScheduler,
        profile: FaultProfile,
        chance: random.Random,
        counts: Counts,
        *,
        make: Callable[[], SplitServerProcess],
        failed: Callable[[str], None],
        calm: Callable[[], bool],
        ending: Callable[[], bool],
    ) -> None:
        self.process: SplitServerProcess | None = None
        """None between the end of one and the launch of the next."""
        self.left_in_order = False
        """Whether the last process has ended because it was asked to."""
        self.is_new = True
        """Whether no process was launched yet."""
        self._scheduler, self._profile, self._chance = scheduler, profile, chance
        self._counts = counts
        self._make, self._failed, self._calm, self._ending = make, failed, calm, ending

    @property
    def run_over(self) -> bool:
        """Whether the split server has ended with its run, or does not run."""
        return self.process is None or self.process.machine.run_over

    def launch(self) -> None:
        """Launch a process."""
        self.is_new = False
        process = self._make()
        process.finish = lambda effect: self._finished(process, effect)
        self.process = process
        process.start()

    def plan_faults(self) -> None:
        """Plan the first kill, and the first request to end."""
        self._plan(self.kill)
        self._plan(self.ask)

    def kill(self) -> None:
        """Kill it, and plan the next time."""
        if self.process is not None and not self._calm():
            self._counts.fault("split server killed")
            self.end_process(in_order=False)
        self._plan(self.kill)

    def ask(self) -> None:
        """Ask it to end, as SIGTERM does: it ends in good order, and another process goes on."""
        if self.process is not None and not self._calm():
            self._counts.fault("split server asked to end")
            self.process.shell.node.feed(DrainAsked("SIGTERM"))
        self._plan(self.ask)

    def end_process(self, *, in_order: bool) -> None:
        """Take the process away, and launch the next one after a while."""
        assert self.process is not None
        self.process.close()
        self.process = None
        self.left_in_order = in_order
        self._at(self._chance.uniform(*self._profile.server_return_s), self.launch)

    def _finished(self, process: SplitServerProcess, effect: Finish) -> None:
        if effect.exit_code:
            self._failed(f"the split server failed: {effect.reason}")
        if process.machine.shutdown.leaves:
            self._at(SPLIT_GOODBYE_S, lambda: self._gone(process))
        elif not self._ending():
            self._failed("the split server ended before its run")

    def _gone(self, process: SplitServerProcess) -> None:
        if self.process is process:
            self.end_process(in_order=True)

    def _at(self, delay_s: float, action: Callable[[], None]) -> None:
        self._scheduler.call_at(self._scheduler.time() + delay_s, action)

    def _plan(self, action: Callable[[], None]) -> None:
        every_s = self._profile.server_kill_every_s
        if every_s and not self._calm():
            self._at(self._chance.expovariate(1.0 / every_s), action)
