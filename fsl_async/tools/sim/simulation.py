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
import gc
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from attrs import evolve, frozen

import fsl_transport as tp
from fsl_async.accounting.sizes import Direction
from fsl_async.config.settings import Config
from fsl_async.files.memory_files import Faults, Killed, MemoryDisk, MemoryFiles
from fsl_async.nodes.client.client_node import configure_exchange
from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.ps.aggregation import merging_of, weighting_of
from fsl_async.nodes.ps.node import store_settings_of
from fsl_async.nodes.ps.shell import ParameterServerShell, Surroundings
from fsl_async.nodes.runtime import Journal, Node
from fsl_async.nodes.wire import Welcome
from fsl_async.roles.machine import DrainAsked, Effect, Event, Finish, Note
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.events import Recovered
from fsl_async.roles.sync.ps import ParameterServerMachine, Phase
from fsl_async.store.errors import LearnError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.store import Store
from fsl_async.tools.sim.invariants import Invariants, Lineage
from fsl_async.tools.sim.settings import HOUR_S, SimulationSettings
from fsl_async.tools.sim.training import MANIFEST, Launch, Trainer, VirtualTraining, VirtualWorker
from fsl_async.tools.sim.world import CheckedMachine, ProcessClock, World

SERVER_NAME = "ps"
MOST_OWN_STEPS = 50
"""Steps that a task that sends at its own pace trains at most before it sends."""
SNAPSHOT_S = 45.0
"""From a version until its checkpoint is written: disks are slow, or have a limit."""
NOON = 1_800_000_000.0
"""Wall clock at the start of a simulation, seconds since 1970."""
MOST_CALLS = 40
"""A planned death, or failure, comes within so many calls to the disk."""
MOST_FAILURES = 6
"""Calls in a row that a full disk refuses."""
LONGEST_END_S = 2 * HOUR_S
Receiver = Callable[[tp.TransportEvent], None]


@frozen
class Process:
    """A process: its clock, the shell in it, and a client's training."""

    clock: ProcessClock
    shell: ParameterServerShell | ClientShell
    training: Trainer | None = None


class Run:
    """A simulated run of one or more groups of clients in one world.

    `run()` plays it to its end; `violations` and `counts` hold the result.
    """

    kind = ""
    """The member of the report that has figures of this kind of run; empty: none has."""
    groups: Sequence[Simulation]

    def __init__(self, settings: SimulationSettings, world: World, faults: str) -> None:
        """faults: names the chance that decides them."""
        self.settings, self.world = settings, world
        self.profile = settings.profile
        self.scheduler, self.network = world.scheduler, world.network
        self.counts, self.violations, self._at = world.counts, world.violations, world.at
        self._chance = self._rng(faults)
        self._calm = False  # no new faults: the run is to end

    def _rng(self, *names: object) -> random.Random:
        """Return a chance that the seed and these names decide."""
        return random.Random("/".join(map(str, (self.settings.seed, *names))))  # noqa: S311

    def _check_events(self, node: Node, after: Callable[..., None], *given: object) -> None:
        """Count each event of a node, and call `after` with `given`, the event and its effects."""

        def check(event: Event, effects: list[Effect]) -> None:
            self.counts.events += 1
            after(*given, event, effects)

        node.machine = CheckedMachine(node.machine, check)

    def _plan(
        self,
        every_s: float,
        fault: Callable[..., float | None],
        *args: object,
        chance: random.Random | None = None,
    ) -> None:
        """Have a fault again and again, at random times; it may return how many s it lasts."""
        if every_s and not self._calm:
            delay_s = (chance or self._chance).expovariate(1.0 / every_s)
            self._at(delay_s, self._strike, every_s, fault, args, chance)

    def _strike(
        self,
        every_s: float,
        fault: Callable[..., float | None],
        args: tuple[object, ...],
        chance: random.Random | None,
    ) -> None:
        if not self._calm:
            again = functools.partial(self._plan, every_s, fault, *args, chance=chance)
            self._at(lasts_s, again) if (lasts_s := fault(*args)) else again()

    def run(self, progress: Callable[[float], None] | None = None) -> None:
        """Run to the end of the simulated time, then end the run in order.

        Stops within a minute of a violation; an AssertionError is one. `progress(hours)` is called
        about every hour.
        """
        hour, hours, scheduler = 0.0, self.settings.hours, self.scheduler
        # dead processes are reference cycles; collecting them once an hour costs less
        gc.disable()
        try:
            self.begin()
            while hour < hours and not self.violations:
                hour = min(hour + 1.0, hours)
                while not self.violations and scheduler.time() < hour * HOUR_S:
                    scheduler.run_until(min(scheduler.time() + 60.0, hour * HOUR_S))
                gc.collect()
                if progress is not None:
                    progress(hour)
            self._end()
        except AssertionError as error:
            self.world.violated(f"{error}")
        finally:
            gc.enable()

    def begin(self) -> None:
        """Launch all processes, and plan their faults."""
        for group in self.groups:
            group.begin()

    def _end(self) -> None:
        """End all groups: no new faults; when all nodes are back, the parameter servers are asked.

        Messages are still lost and repeated.
        """
        calm_s = max(group.calm() for group in self.groups)
        while not self.violations and self.scheduler.time() < calm_s + LONGEST_END_S:
            self.scheduler.run_until(self.scheduler.time() + self.look_s)
            if self.scheduler.time() <= calm_s or not self._is_settled():
                continue
            for group in self.groups:
                group.ask_to_end()
            if all(group.has_ended for group in self.groups):
                break
        for group in self.groups:
            group.check_end()

    @property
    def look_s(self) -> float:
        """Seconds from one look at the ending groups to the next."""
        return 10.0

    def _is_settled(self) -> bool:
        """Whether the parameter servers may be asked to end."""
        return True

    def facts(self) -> dict[str, Any]:
        """Return the figures of this kind of run, for the member `kind` of the report."""
        return {}

    def report(self, seconds: float, journal: str) -> dict[str, Any]:
        """Return the report. Of groups, versions, deltas and clients are added up.

        Losses are None: nothing is learned. Kinds of run other than pretraining have a member with
        their own figures, of their name; it is None for the others.
        """
        lineages = [group.invariants.lineage for group in self.groups]
        found = {
            "rounds": sum(max(0, lineage.version) for lineage in lineages),
            "clients": self.settings.clients * len(self.groups),
            "tokens": sum(lineage.tokens for lineage in lineages),
            **dict.fromkeys(("loss_first", "loss_last", "eval_loss")),
            "bytes_raw": 0,
            "bytes_sent": 0,
            "ratio": None,
            "deltas_merged": sum(len(lineage.merged) for lineage in lineages),
            "deltas_lost": sum(group.invariants.deltas_lost for group in self.groups),
            "deltas_doubled": sum(lineage.doubled for lineage in lineages),
            "seconds": round(seconds, 3),
            "run_dir": journal,
            "seed": self.settings.seed,
            **self.world.figures(),
            "trace_sha256": None if journal else self.world.trace.hexdigest(),
            **dict.fromkeys(("split", "tune", "deltas_reused", "groups")),
        }
        if self.settings.latest:
            found["deltas_reused"] = sum(lineage.uses_again for lineage in lineages)
        if self.kind:
            found[self.kind] = self.facts()
        return found


class Simulation(Run):
    """A run of one parameter server and its clients."""

    def __init__(
        self,
        settings: SimulationSettings,
        *,
        keep_journal: Journal | None = None,
        world: World | None = None,
        prefix: str = "",
        config: Config | None = None,
    ) -> None:
        """world: shared with other groups; prefix: of the names of all processes. config: of the
        run, instead of `settings.config()`.
        """
        world = world or World(settings.profile, settings.seed, keep_journal)
        super().__init__(settings, world, f"{prefix}faults")
        self.groups = [self]
        self.journal = world.journal
        self.config = config or settings.config()
        self.manifest = MANIFEST
        self.disk = MemoryDisk()
        self.run_dir = Path("/") / (prefix or "run")
        codec, limit = self.config.codec, self.config.sync.staleness_limit
        lineage = Lineage(codec.spec_down, self.manifest, codec.up == "fp32", limit)
        self.invariants = Invariants(lineage, world.violated)
        self.server = f"{prefix}{SERVER_NAME}"
        self.networks = [(self.network, self.server)]
        """The networks of a client, and the name of the server in each."""
        self.run_name = "sim"
        self.names = [f"{prefix}c{number:04d}" for number in range(settings.clients)]
        self.processes: dict[str, Process] = {}
        self._incarnations = 0
        self._failed_starts = 0  # in a row
        self._ending = False
        self._ended: dict[str, VirtualTraining] = {}
        self._files = MemoryFiles(self.disk)
        """The disk as the newest process of the parameter server sees it."""
        self._transport = self._dials_with = self.config.transport()

    # --- running ---

    def begin(self) -> None:
        """Launch the processes that are here, and plan their faults."""
        if self._is_here(self.server):
            self._launch_server()
        for name in self.names:
            if self._is_here(name):
                delay_s = self._chance_of(name, "launch").uniform(0.0, self.launch_s)
                self._at(delay_s, self._launch_client, name)
                self._plan_fault(self.profile.client_kill_every_s, self._kill_client, name)
            self._plan_fault(self.profile.reset_every_s, self._reset, name)
            self._plan_fault(self.profile.partition_every_s, self._cut, name)
        if self._is_here(self.server):
            self._plan(self.profile.server_kill_every_s, self._kill_server)
            self._plan(self.profile.disk_full_every_s, self._fill_disk)

    launch_s = 30.0
    """Seconds in which clients are launched first."""

    @property
    def look_s(self) -> float:
        """See `Run.look_s`."""
        return self._transport.heartbeat_every_s

    def _is_here(self, name: str) -> bool:
        """Whether this process simulates a process."""
        return True

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

    # --- processes ---

    def _worker(self, clock: ProcessClock, name: str) -> VirtualWorker:
        chance = self._rng(name, self._incarnations, "worker")
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

    def _listens(
        self, link: tp.Link, clock: ProcessClock, name: str, incarnation: int
    ) -> Callable[[Receiver], tp.ListenerEndpoint]:
        """Return what makes the endpoint of a server's process."""
        settings, rng = self._transport, self._rng(name, incarnation)
        return lambda handle: tp.ListenerEndpoint(
            link, clock, settings, handle, name, incarnation=incarnation, rng=rng
        )

    def _dials(
        self,
        link: tp.Link,
        clock: ProcessClock,
        name: str,
        incarnation: int,
        *,
        settings: tp.TransportSettings | None = None,
        rng: random.Random | None = None,
        **more: Any,
    ) -> Callable[[Receiver], tp.DialerEndpoint]:
        """Return what makes an endpoint that dials. more: for the endpoint."""
        settings, rng = settings or self._transport, rng or self._rng(name, incarnation)
        return lambda handle: tp.DialerEndpoint(
            link, clock, settings, handle, name, incarnation=incarnation, rng=rng, **more
        )

    def _launch_server(self) -> None:
        name, clock = self.server, ProcessClock(self.scheduler)
        incarnation = self._next_incarnation(name)
        self._files = MemoryFiles(self.disk, Faults())
        machine = ParameterServerMachine(
            self.config, merging_of(self.config), weighting_of(self.config), self.run_name
        )
        worker, store = self._worker(clock, name), self._store(clock)
        worker.killed = self._server_is_dead
        journal = self._journal_of(name, clock)
        shell = ParameterServerShell(
            machine,
            Surroundings(
                store=store,
                worker=worker,
                scheduler=clock,
                journal=journal,
                listener=self._listens(self._link_of(name), clock, name, incarnation),
                say=self._server_says,
                finished=self._server_finished,
                count=self._count,
            ),
        )
        self._check_events(shell.node, self._after_server, machine)
        self.processes[name] = Process(clock, shell)
        self._prepare(clock, shell, store, incarnation)
        try:
            recovered = store.recover()
            store.run.start_run(self.run_name)
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
        own = functools.partial(launch.chance.randint, 1, MOST_OWN_STEPS)
        return VirtualTraining(
            launch.clock,
            launch.feed,
            step_s=launch.step_s(),
            initial=np.array([launch.chance.gauss(0.0, 1.0) for _ in range(self.manifest.values)]),
            unit=launch.chance.uniform(0.5, 1.5),
            manifest=self.manifest,
            own_pace=own if self.settings.pace == "own" else None,
        )

    def _client(self, name: str, incarnation: int) -> ClientMachine:
        """The machine of a client's process."""
        return ClientMachine(name, incarnation)

    def _launch_client(self, name: str) -> None:
        clock = ProcessClock(self.scheduler)
        incarnation = self._next_incarnation(name)
        machine, chance = self._client(name, incarnation), self._rng(name, incarnation)

        def feed(event: Event) -> None:
            shell.node.feed(event)

        training = self._training(Launch(name, incarnation, clock, feed, chance))
        configure_exchange(training.exchange, self.config)
        training.exchange.pool.threads = 1
        shell = ClientShell(
            machine,
            training.exchange,
            self._dials(
                self.network.dialer(name, self.server), clock, name, incarnation,
                settings=self._dials_with, rng=chance, beat_payload=lambda _: training.report(),
            ),
            worker=self._worker(clock, name),
            scheduler=clock,
            journal=self._journal_of(name, clock),
            say=functools.partial(self._client_says, name),
            finished=functools.partial(self._client_finished, name),
            welcomed=functools.partial(self._welcomed, name),
            end_training=lambda _: training.stop(),
            on_end=functools.partial(self._run_over, name),
            announced=training.announced,
        )  # fmt: skip
        self._check_events(shell.node, self._after_client, machine, training)
        self.processes[name] = Process(clock, shell, training)
        shell.dial()
        training.begin(chance)

    def _after_client(
        self, machine: ClientMachine, training: Trainer, event: Event, effects: list[Effect]
    ) -> None:
        checked = cast("VirtualTraining", training)
        self.invariants.after_client(machine, checked, event, effects)
        if self.settings.pace != "called" and training.is_held and not self._ending:
            self.world.violated(f"{machine.name} waits in a step")

    def _client_says(self, name: str, note: Note) -> None:
        """Take a line of a client; here nothing prints it."""

    def _client_finished(self, name: str, finish: Finish) -> None:
        """Record the end of a client by itself, which no simulated run asks for before its end."""
        if not self._ending:
            self.world.violated(f"{name} gave up")
            return
        self._ended[name] = cast("VirtualTraining", self.processes[name].training)
        self._kill(name)

    def _welcomed(self, name: str, welcome: Welcome) -> None:
        """Take a client's welcome; pretraining needs nothing of it."""

    def _run_over(self, name: str, event: Event) -> None:
        """Take the end of the run at a client; pretraining ends nothing else."""

    # --- faults ---

    def _chance_of(self, name: str, fault: str) -> random.Random:
        """Return the chance that decides a fault of a client."""
        return self._chance

    def _plan_fault(self, every_s: float, fault: Callable[[str], float | None], name: str) -> None:
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
        if self._kill(name):
            self.counts.fault("client killed")
            self.counts.relaunches += 1
            back_s = self._chance_of(name, "_kill_client").uniform(*self.profile.client_return_s)
            self._at(back_s, self._launch_client, name)

    def _kill_server(self) -> None:
        """Kill the parameter server, as often as not in the middle of a call to its disk."""
        if self.server not in self.processes:
            return
        if self._chance.random() < self.profile.disk_kills:
            self._in_a_call(self._chance.choice(["before", "torn", "after"]))
        else:
            self._server_is_dead()

    def _in_a_call(self, mode: Literal["before", "torn", "after", "error"]) -> None:
        """Have the parameter server die, or its disk fail, in one of its next calls."""
        faults = self._files.faults
        faults.at = len(faults.calls) + self._chance.randint(1, MOST_CALLS)
        faults.mode = mode

    def _fill_disk(self) -> None:
        if self.server in self.processes:
            self.counts.fault("disk full")
            self._files.faults.failures = self._chance.randint(1, MOST_FAILURES)
            self._in_a_call("error")

    def _server_is_dead(self) -> None:
        """Take the parameter server's process away, and launch it again."""
        if self._kill(self.server):
            self.counts.fault("server killed")
            self._at(self._chance.uniform(*self.profile.server_return_s), self._launch_server)

    def _reset(self, name: str) -> None:
        if self._is_up(name):
            self._count_fault("connection reset", name)
            for network, server in self.networks:
                network.reset(name, server)

    def _cut(self, name: str) -> float:
        self._count_fault("partition", name)
        lasts_s = self._chance_of(name, "cut").uniform(*self.profile.partition_s)
        for network, server in self.networks:
            network.cut(name, server)
            self._at(lasts_s, network.heal, name, server)
        return lasts_s

    def _is_up(self, name: str) -> bool:
        """Whether a client has a connection that can break."""
        return name in self.processes

    def _count_fault(self, kind: str, name: str) -> None:
        """Count a fault of a client's connection, where the client is."""
        if self._is_here(name):
            self.counts.fault(kind)
