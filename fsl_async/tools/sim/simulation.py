"""Simulates a complete run in one process under a virtual clock.

Machines, shells, sessions, streams, the store, the coder and the clients' exchange are those of
production, with production settings. Replaced are the network (`fsl_transport.testing.mem_link`),
the clock, the worker threads, the disk (`fsl_async.files.memory_files`) and training
(`fsl_async.tools.sim.training`). Processes die as with kill -9, the parameter server's also in the
middle of a call to its disk, which may lose its power then. One seed decides everything; the same
seed gives the same trace.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from attrs import evolve, frozen

import fsl_transport as tp
from fsl_async.accounting.sizes import Direction
from fsl_async.config.load import load
from fsl_async.config.recipes import with_implied
from fsl_async.config.settings import Config
from fsl_async.files.memory_files import Faults, Killed, MemoryDisk, MemoryFiles
from fsl_async.nodes.client.client_node import configure_exchange
from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.ps.aggregation import merging_of, weighting_of
from fsl_async.nodes.ps.node import store_settings_of
from fsl_async.nodes.ps.shell import ParameterServerShell, Surroundings
from fsl_async.nodes.runtime import Journal
from fsl_async.nodes.wire import Welcome
from fsl_async.roles.machine import DrainAsked, Effect, Event, Finish, Note
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.events import Recovered
from fsl_async.roles.sync.ps import ParameterServerMachine, Phase
from fsl_async.store.errors import LearnError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.store import Store
from fsl_async.tools.sim.invariants import Invariants, Lineage
from fsl_async.tools.sim.training import MANIFEST, Trainer, VirtualTraining, VirtualWorker
from fsl_async.tools.sim.world import (
    PROFILES,
    STEP_S,
    CheckedMachine,
    FaultProfile,
    Launch,
    Process,
    ProcessClock,
    World,
)

SERVER_NAME = "ps"
MOST_OWN_STEPS = 50
"""Steps that a task that sends at its own pace trains at most before it sends."""
Pace = Literal["called", "time", "steps", "speed", "own"]
"""When a client sends: when it is called, or by itself (`roles.sync.pacing`)."""
SNAPSHOT_S = 45.0
"""From a version until its checkpoint is written: disks are slow, or have a limit."""
NOON = 1_800_000_000.0
"""Wall clock at the start of a simulation, seconds since 1970."""
MOST_CALLS = 40
"""A planned death, or failure, comes within so many calls to the disk."""
MOST_FAILURES = 6
"""Calls in a row that a full disk refuses."""


@frozen
class SimulationSettings:
    """Settings of a simulation. Times in seconds of virtual time."""

    clients: int = 100
    hours: float = 24.0
    seed: int = 0
    faults: str = "storm"
    every_s: float = 600.0
    keep_versions: int = 3
    pace: Pace = "called"
    latest: bool = False
    """Whether versions use the newest delta of each other client again; with pace "own"."""
    groups: int = 1
    """Parameter servers; `clients` are those of each."""

    def config(self, *more: str) -> Config:
        """Return the run's production settings. more: `table.key=value`, as for `--set`."""
        steps = max(1, round(self.every_s / (4 * STEP_S)))
        heartbeat_s = min(60.0, self.every_s / 10)
        pace = {
            "called": [],
            "time": [],
            "steps": [f"sync.local_steps={steps}"],
            "speed": [f"sync.local_steps={steps}", "sync.dylu=true"],
            "own": ["sync.pace=own", "train.task=own", "sync.weighting=anarchic"],
        }[self.pace]
        if self.pace != "called":
            pace.append("sync.trigger=buffer")
        if self.latest:
            pace[1:1] = ["outer.aggregation=latest", "outer.optimizer=average"]
            pace.remove("sync.weighting=anarchic")
        given = load(
            None,
            [
                f"sync.every_s={self.every_s}",
                f"sync.clients={self.clients}",
                f"store.keep_versions={self.keep_versions}",
                f"session.heartbeat_every_s={heartbeat_s}",
                f"session.expire_after_s={3 * heartbeat_s}",
                "codec.up=fp32",  # so that a delta can be compared with the work of its steps
                *pace,
                *more,
            ],
        )
        return with_implied(given)


class Simulation:
    """A simulated run; `run()` plays it to its end, `violations` and `counts` hold the result."""

    kind = ""
    """The member of the report that has figures of this kind of run; empty: none has."""

    def __init__(
        self,
        settings: SimulationSettings,
        *,
        keep_journal: Journal | None = None,
        world: World | None = None,
        place: str = "",
        config: Config | None = None,
    ) -> None:
        """world: shared with other groups; place: begins the names of all processes. config: of the
        run, instead of `settings.config()`.
        """
        self.settings = settings
        self.profile: FaultProfile = PROFILES[settings.faults]
        self.world = world or World(self.profile, settings.seed, keep_journal)
        self.scheduler, self.network = self.world.scheduler, self.world.network
        self.trace, self.journal = self.world.trace, self.world.journal
        self.network_conditions = self.world.conditions
        self.config = config or settings.config()
        self.manifest = MANIFEST
        self.disk = MemoryDisk()
        self.run_dir = Path("/") / (place or "run")
        lineage = Lineage(
            self.config.codec.spec_down, self.manifest, self.config.sync.staleness_limit
        )
        self.invariants = Invariants(lineage, self.world.violated)
        self.counts, self._at = self.world.counts, self.world.at
        self.server = f"{place}{SERVER_NAME}"
        self.networks = [(self.network, self.server)]
        """The networks of a client, and the name of the server in each."""
        self.run_name = "sim"
        self.names = [f"{place}c{number:04d}" for number in range(settings.clients)]
        self.processes: dict[str, Process] = {}
        self._chance = random.Random(f"{settings.seed}/{place}faults")  # noqa: S311 - not for secrets
        self._incarnations = 0
        self._failed_starts = 0  # in a row
        self._calm = False  # no new faults: the run is to end
        self._ending = False
        self._ended: dict[str, VirtualTraining] = {}
        self._files = MemoryFiles(self.disk)
        """The disk as the newest process of the parameter server sees it."""
        self._transport = self._dials_with = self.config.transport()

    # --- running ---

    def run(self, progress: Callable[[float], None] | None = None) -> None:
        """Run to the end of the simulated time, then end the run in order.

        `progress(hours)` is called about every hour.
        """
        self.begin()
        self.world.run(self.settings.hours, self._end, progress)

    def begin(self) -> None:
        """Launch the processes that are here, and plan their faults."""
        if self._is_here(self.server):
            self._launch_server()
        for name in self.names:
            if self._is_here(name):
                self._plan_launch(name)
            self._plan_client_faults(name)
        if self._is_here(self.server):
            self._plan(self.profile.server_kill_every_s, self._kill_server)
            self._plan(self.profile.disk_full_every_s, self._fill_disk)

    def _end(self) -> None:
        """End the run."""
        self.world.end([self], self._transport.heartbeat_every_s)
        self.check_end()

    def _is_here(self, name: str) -> bool:
        """Whether a process belongs to this one of the places that simulate."""
        return True

    def _plan_launch(self, name: str) -> None:
        self._at(self._chance.uniform(0.0, 30.0), self._launch_client, name)

    def calm(self) -> float:
        """Plan no new faults; return when all processes and links are back."""
        self._calm = True
        return self.scheduler.time() + self.profile.longest_s

    @property
    def has_ended(self) -> bool:
        """Whether all clients have ended."""
        return len(self._ended) == len(self.names)

    def ask_to_end(self) -> None:
        """Ask the parameter server to end, once, if all processes run and it may."""
        server = self.processes.get(self.server)
        if server is None or len(self.processes) + len(self._ended) <= len(self.names):
            return
        machine = server.shell.machine
        assert isinstance(machine, ParameterServerMachine)
        if self._may_end(machine) and not machine.end.asked:
            self._ending = True
            server.shell.node.feed(DrainAsked("the simulated time is over"))

    def check_end(self) -> None:
        """Check what is left after the end."""
        if self._ending and not self.violations:
            self.invariants.run_ended(self._ended, self.names)

    def _may_end(self, machine: ParameterServerMachine) -> bool:
        """Whether the parameter server may be asked to end now: not while it calls a round."""
        return machine.phase is Phase.READY or machine.rounds.awaits_nothing

    @property
    def violations(self) -> list[str]:
        """The violations found."""
        return self.world.violations

    @property
    def groups(self) -> Sequence[Simulation]:
        """The groups of clients: this one."""
        return [self]

    def facts(self) -> dict[str, Any]:
        """Return the figures of this kind of run, for the member `kind` of the report."""
        return {}

    def _plan(
        self,
        every_s: float,
        action: Callable[..., object],
        *args: object,
        chance: random.Random | None = None,
    ) -> None:
        if every_s and not self._calm:
            self._at((chance or self._chance).expovariate(1.0 / every_s), action, *args)

    def _chance_of(self, name: str, fault: str) -> random.Random:
        """Return the chance that decides a fault of a client."""
        return self._chance

    # --- processes ---

    def _worker(self, clock: ProcessClock, name: str) -> VirtualWorker:
        chance = random.Random(f"{self.settings.seed}/{name}/{self._incarnations}/worker")  # noqa: S311
        return VirtualWorker(clock, lambda: chance.uniform(0.001, 0.02))

    def _next_incarnation(self, name: str) -> int:
        self._incarnations += 1
        return self._incarnations

    def _journal_of(self, name: str, clock: ProcessClock) -> Journal:
        """The journal of a process."""
        return self.journal

    def _link_of(self, name: str) -> tp.Link:
        """The link on which a parameter server listens."""
        return self.network.listener(name)

    def _launch_server(self) -> None:
        clock = ProcessClock(self.scheduler)
        incarnation = self._next_incarnation(self.server)
        self._files = MemoryFiles(self.disk, Faults())
        machine = ParameterServerMachine(
            self.config, merging_of(self.config), weighting_of(self.config), self.run_name
        )

        def listener(handle: Callable[[tp.TransportEvent], None]) -> tp.ListenerEndpoint:
            return tp.ListenerEndpoint(
                self._link_of(self.server),
                clock,
                self._transport,
                handle,
                self.server,
                incarnation=incarnation,
                rng=random.Random(f"{self.settings.seed}/{self.server}/{incarnation}"),  # noqa: S311
            )

        worker = self._worker(clock, self.server)
        worker.killed = self._server_is_dead
        store = self._store(clock)
        shell = ParameterServerShell(
            machine,
            Surroundings(
                store=store,
                worker=worker,
                scheduler=clock,
                journal=self._journal_of(self.server, clock),
                listener=listener,
                say=self._server_says,
                finished=self._server_finished,
                count=self._count,
            ),
        )
        shell.node.machine = CheckedMachine(machine, functools.partial(self._after_server, machine))
        self.processes[self.server] = Process(clock, shell)
        self._prepare(clock, shell, store, incarnation)
        try:
            recovered = store.recover()
            store.start_run(self.run_name)
        except LearnError as error:
            self._failed_starts += 1
            if self._failed_starts > MOST_FAILURES + 1:  # a full disk does not stay full
                self.invariants.violated(f"the server cannot start: {error}")
            self._server_is_dead()
            return
        self._failed_starts = 0
        self._recovered(store, recovered)
        shell.start(recovered)

    def _recovered(self, store: Store, recovered: Recovered) -> None:
        """Take the store of a parameter server's process."""
        self.invariants.recovered(store, recovered)

    def _after_server(
        self, machine: ParameterServerMachine, event: Event, effects: list[Effect]
    ) -> None:
        self.counts.events += 1
        self.invariants.after_server(machine, event, effects)

    def _server_says(self, note: Note) -> None:
        """Take a line of the parameter server, and count those that close a round."""
        self.counts.called += int(note.facts.get("called", 0))
        self.counts.answered += int(note.facts.get("answered", 0))

    def _count(self, manifest: Manifest, direction: Direction, index: int, frame: bytes) -> None:
        """Take a chunk of weights that the parameter server sent or received."""

    def _store(self, clock: ProcessClock) -> Store:
        """The store of a parameter server's process."""

        def later(write: Callable[[], None]) -> None:
            clock.call_at(clock.time() + SNAPSHOT_S, self._in_server, write)

        return Store(
            self.run_dir,
            evolve(store_settings_of(self.config), threads=1, resident=True),
            files=self._files,
            wall_clock=lambda: NOON + self.scheduler.time(),
            clock=self.scheduler.time,
            later=later,
        )

    def _server_finished(self, finish: Finish) -> None:
        """Launch a parameter server again that ended with an error, as its launcher does."""
        if finish.exit_code:
            self._at(0.0, self._server_is_dead)

    def _in_server(self, act: Callable[[], None]) -> None:
        """Do what a thread of the parameter server does; it may die in the middle."""
        try:
            act()
        except Killed:
            self._server_is_dead()

    def _prepare(
        self, clock: ProcessClock, shell: ParameterServerShell, store: Store, number: int
    ) -> None:
        """Add to a parameter server's process, incarnation `number`, before it starts."""

    def _training(self, launch: Launch) -> Trainer:
        """The training thread of a client's process."""
        return VirtualTraining(
            launch.clock,
            launch.feed,
            step_s=launch.step_s(),
            initial=np.array([launch.chance.gauss(0.0, 1.0) for _ in range(self.manifest.values)]),
            unit=launch.chance.uniform(0.5, 1.5),
            manifest=self.manifest,
            own_pace=(
                functools.partial(launch.chance.randint, 1, MOST_OWN_STEPS)
                if self.settings.pace == "own"
                else None
            ),
        )

    def _launch_client(self, name: str) -> None:
        clock = ProcessClock(self.scheduler)
        incarnation = self._next_incarnation(name)
        machine = ClientMachine(name, incarnation)
        chance = random.Random(f"{self.settings.seed}/{name}/{incarnation}")  # noqa: S311

        def feed(event: Event) -> None:
            shell.node.feed(event)

        training = self._training(Launch(name, incarnation, clock, feed, chance))
        configure_exchange(training.exchange, self.config)
        training.exchange.pool.threads = 1
        self._launched(name, incarnation, training)

        def dialer(take: Callable[[tp.TransportEvent], None]) -> tp.DialerEndpoint:
            return tp.DialerEndpoint(
                self.network.dialer(name, self.server),
                clock,
                self._dials_with,
                take,
                name,
                incarnation=incarnation,
                rng=chance,
                beat_payload=lambda _: training.report(),
            )

        shell = ClientShell(
            machine,
            training.exchange,
            dialer,
            worker=self._worker(clock, name),
            scheduler=clock,
            journal=self._journal_of(name, clock),
            say=functools.partial(self._client_says, name),
            finished=functools.partial(self._client_finished, name),
            welcomed=functools.partial(self._welcomed, name),
            end_training=lambda _: training.stop(),
            on_end=functools.partial(self._run_over, name),
            announced=training.announced,
        )
        shell.node.machine = CheckedMachine(
            machine, functools.partial(self._after_client, machine, training)
        )
        self.processes[name] = Process(clock, shell, training)
        shell.dial()
        training.begin(chance)

    def _launched(self, name: str, incarnation: int, training: Trainer) -> None:
        self.invariants.launched(name, incarnation, cast("VirtualTraining", training))

    def _after_client(
        self,
        machine: ClientMachine,
        training: Trainer,
        event: Event,
        effects: list[Effect],
    ) -> None:
        self.counts.events += 1
        checked = cast("VirtualTraining", training)
        self.invariants.after_client(machine, checked, event, effects)
        if self.settings.pace != "called" and training.is_held and not self._ending:
            self.world.violated(f"{machine.name} waits in a step")

    def _client_says(self, name: str, note: Note) -> None:
        """Take a line of a client; here nothing prints it."""

    def _client_finished(self, name: str, effect: Finish) -> None:
        self._gone(name)

    def _welcomed(self, name: str, welcome: Welcome) -> None:
        """Take a client's welcome; pretraining needs nothing of it."""

    def _run_over(self, name: str, event: Event) -> None:
        """Take the end of the run at a client; pretraining ends nothing else."""

    def _gone(self, name: str) -> None:
        """Record the end of a client by itself, which no simulated run asks for before its end."""
        if not self._ending:
            self.world.violated(f"{name} gave up")
            return
        training = self.processes[name].training
        assert training is not None, "it is a client"
        self._ended[name] = cast("VirtualTraining", training)
        self._kill(name)

    # --- faults ---

    def _plan_client_faults(self, name: str) -> None:
        profile = self.profile
        self._plan_fault(profile.client_kill_every_s, self._kill_client, name)
        self._plan_fault(profile.reset_every_s, self._reset, name)
        self._plan_fault(profile.partition_every_s, self._cut, name)

    def _plan_fault(self, every_s: float, fault: Callable[[str], None], name: str) -> None:
        self._plan(every_s, fault, name, chance=self._chance_of(name, fault.__name__))

    def _kill(self, name: str) -> bool:
        process = self.processes.pop(name, None)
        if process is None:
            return False
        process.clock.alive = False
        for network, _ in self.networks:
            network.kill(name)
        if process.training is not None:
            process.training.end()
        if name == self.server:
            self._files.die()
            if self._chance.random() < self.profile.power_cuts:
                self.counts.fault("power cut")
                self.disk.lose_power(self._chance.getrandbits(32))
        return True

    def _kill_client(self, name: str) -> None:
        if not self._calm and self._kill(name):
            self.counts.fault("client killed")
            self.counts.relaunches += 1
            back_s = self._chance_of(name, "_kill_client").uniform(*self.profile.client_return_s)
            self._at(back_s, self._launch_client, name)
        self._plan_fault(self.profile.client_kill_every_s, self._kill_client, name)

    def _kill_server(self) -> None:
        """Kill the parameter server, as often as not in the middle of a call to its disk."""
        if not self._calm and self.server in self.processes:
            if self._chance.random() < self.profile.disk_kills:
                self._in_a_call(self._chance.choice(["before", "torn", "after"]))
            else:
                self._server_is_dead()
        self._plan(self.profile.server_kill_every_s, self._kill_server)

    def _in_a_call(self, mode: Literal["before", "torn", "after", "error"]) -> None:
        """Have the parameter server die, or its disk fail, in one of its next calls."""
        faults = self._files.faults
        faults.at = len(faults.calls) + self._chance.randint(1, MOST_CALLS)
        faults.mode = mode

    def _fill_disk(self) -> None:
        if not self._calm and self.server in self.processes:
            self.counts.fault("disk full")
            self._files.faults.failures = self._chance.randint(1, MOST_FAILURES)
            self._in_a_call("error")
        self._plan(self.profile.disk_full_every_s, self._fill_disk)

    def _server_is_dead(self) -> None:
        """Take the parameter server's process away, and launch it again."""
        if self._kill(self.server):
            self.counts.fault("server killed")
            self._at(self._chance.uniform(*self.profile.server_return_s), self._launch_server)

    def _reset(self, name: str) -> None:
        if self._is_up(name) and not self._calm:
            self._count_fault("connection reset", name)
            for network, server in self.networks:
                network.reset(name, server)
        self._plan_fault(self.profile.reset_every_s, self._reset, name)

    def _cut(self, name: str) -> None:
        if self._calm:
            return
        self._count_fault("partition", name)
        for network, server in self.networks:
            network.cut(name, server)
        until_s = self._chance_of(name, "cut").uniform(*self.profile.partition_s)
        self._at(until_s, self._heal, name)

    def _heal(self, name: str) -> None:
        for network, server in self.networks:
            network.heal(name, server)
        self._plan_fault(self.profile.partition_every_s, self._cut, name)

    def _is_up(self, name: str) -> bool:
        """Whether a client has a connection that can break."""
        return name in self.processes

    def _count_fault(self, kind: str, name: str) -> None:
        """Count a fault of a client's connection, where the client is."""
        if self._is_here(name):
            self.counts.fault(kind)
