"""Simulates a complete run in one process under a virtual clock.

Machines, shells, sessions and streams are those of production. Replaced are the network
(`fsl_transport.testing.mem_link`), the clock, the worker threads, the disk and the learning
(`fsl_async.tools.sim.counting`). Processes die as with kill -9: nothing of them runs afterwards,
and only their `Disk` remains for the next one. One seed decides everything; the same seed gives the
same trace.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

from attrs import frozen

import fsl_transport as tp
from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.ps.shell import ParameterServerShell, RunFacts, Surroundings
from fsl_async.nodes.runtime import Journal
from fsl_async.nodes.wire import Welcome
from fsl_async.roles.machine import DrainAsked, Effect, Event
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync.client import ClientMachine, ClientRules
from fsl_async.roles.sync.ps import ParameterServerMachine, ParameterServerRules, Phase
from fsl_async.roles.sync.ps_state import PaceRules
from fsl_async.roles.sync.weighting import staleness_discount, weighting_named
from fsl_async.tools.sim.counting import CountingLearner, CountingStore, Disk, VirtualWorker
from fsl_async.tools.sim.faults import HOUR_S, PROFILES, FaultProfile
from fsl_async.tools.sim.invariants import Invariants
from fsl_async.tools.sim.latest_counting import LatestDisk, LatestStore
from fsl_async.tools.sim.world import CheckedMachine, Process, ProcessClock, World

SERVER_NAME = "ps"
LONGEST_END_S = 2 * HOUR_S
STEP_S = 3.0
MOST_OWN_STEPS = 50
"""Steps that a task that sends at its own pace trains at most before it sends."""
Pace = Literal["called", "time", "steps", "speed", "own"]
"""When a client sends: when it is called, or by itself (`roles.sync.pacing`)."""
TOKENS_PER_STEP = 4096
BUFFERED_STALENESS = 20


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

    @property
    def pace_rules(self) -> PaceRules | None:
        """Of the parameter server; None: it calls."""
        steps = max(1, round(self.every_s / (4 * STEP_S)))
        return {
            "called": None,
            "time": PaceRules(seconds=self.every_s),
            "steps": PaceRules(steps),
            "speed": PaceRules(steps, by_speed=True),
            "own": PaceRules(),
        }[self.pace]

    @property
    def heartbeat_every_s(self) -> float:
        """Ten heartbeats in a period, at least one a minute: the choice of a run with that
        period.
        """
        return min(60.0, self.every_s / 10)

    @property
    def expire_after_s(self) -> float:
        """Three missed heartbeats."""
        return 3 * self.heartbeat_every_s


def _asynchronous(settings: SimulationSettings) -> dict[str, Any]:
    """The rules of a parameter server whose clients send by themselves; none if it calls them."""
    if settings.pace_rules is None:
        return {}
    return {
        "trigger": "buffer",
        "buffer": max(2, (settings.clients + 1) // 2),
        "least_s": 0.02 * settings.every_s,
        "max_staleness": BUFFERED_STALENESS,
        "pace": settings.pace_rules,
        "reuses": settings.latest,
    }


class Simulation:
    """A simulated run; `run()` plays it to its end, `invariants` and `counts` hold the result."""

    def __init__(
        self,
        settings: SimulationSettings,
        *,
        keep_journal: Journal | None = None,
        world: World | None = None,
        place: str = "",
    ) -> None:
        """world: shared with other groups; place: begins the names of all processes."""
        self.settings = settings
        self.profile: FaultProfile = PROFILES[settings.faults]
        self.world = world or World(self.profile, settings.seed, keep_journal)
        self.scheduler, self.network = self.world.scheduler, self.world.network
        self.trace, self.journal = self.world.trace, self.world.journal
        self.network_conditions = self.world.conditions
        self.disk = LatestDisk() if settings.latest else Disk()
        self.invariants = Invariants(self.disk)
        self.counts = self.world.counts
        self.participation = self.world.participation
        self.server = f"{place}{SERVER_NAME}"
        self.names = [f"{place}c{number:04d}" for number in range(settings.clients)]
        self.processes: dict[str, Process] = {}
        self._chance = random.Random(f"{settings.seed}/{place}faults")  # noqa: S311 - not for secrets
        self._rules = ParameterServerRules(
            every_s=settings.every_s,
            keep_versions=settings.keep_versions,
            shards=settings.clients,
            **_asynchronous(settings),
        )
        self._weighting = "anarchic" if settings.pace == "own" else "batch"
        if settings.latest:
            self._weighting = "latest"
        self._incarnations = 0
        self._calm = False  # no new faults: the run is to end
        self._ending = False
        self._ended: dict[str, CountingLearner] = {}
        self._transport = tp.TransportSettings(
            heartbeat_every_s=settings.heartbeat_every_s, expire_after_s=settings.expire_after_s
        )

    # --- running ---

    def run(self, progress: Callable[[float], None] | None = None) -> None:
        """Run to the end of the simulated time, then end the run in order.

        `progress(hours)` is called about every hour.
        """
        self.begin()
        try:
            self.world.run(self.settings.hours, self.invariants.violations, self._end, progress)
        except AssertionError as error:
            self.invariants.violated(f"{error}", self.scheduler.time())
        self.invariants.server_died(self.scheduler.time())

    def begin(self) -> None:
        """Launch all processes, and plan their faults."""
        self._launch_server()
        for name in self.names:
            self._at(self._chance.uniform(0.0, 30.0), self._launch_client, name)
            self._plan_client_faults(name)
        self._plan(self.profile.server_kill_every_s, self._kill_server)

    def _end(self) -> None:
        """End the run: no new faults; when all nodes are back, the parameter server is asked to
        end.

        Messages are still lost and repeated.
        """
        calm_s = self.calm()
        give_up_s = calm_s + LONGEST_END_S
        while not self.invariants.violations and self.scheduler.time() < give_up_s:
            self.scheduler.run_until(self.scheduler.time() + self.settings.heartbeat_every_s)
            if self.scheduler.time() > calm_s:
                self.ask_to_end()
            if self.has_ended:
                break
        self.check_end()

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
        if self._ending and not self.invariants.violations:
            self.invariants.run_ended(self._ended, self.names, self.scheduler.time())

    def _may_end(self, machine: ParameterServerMachine) -> bool:
        """Whether the parameter server may be asked to end now: not while it calls a round."""
        return machine.phase is Phase.READY or machine.rounds.awaits_nothing

    @property
    def violations(self) -> list[str]:
        """The violations found."""
        return self.invariants.violations

    @property
    def groups(self) -> Sequence[Simulation]:
        """The groups of clients: this one."""
        return [self]

    def split_facts(self) -> dict[str, Any]:
        """Return the figures of split learning; empty here."""
        return {}

    def group_facts(self) -> dict[str, Any]:
        """Return the figures of global rounds; empty here."""
        return {}

    def tune_facts(self) -> dict[str, Any]:
        """Return the figures of tuning; empty here."""
        return {}

    def _at(self, delay_s: float, action: Callable[..., object], *args: object) -> None:
        self.scheduler.call_at(self.scheduler.time() + delay_s, action, *args)

    def _plan(self, every_s: float, action: Callable[..., object], *args: object) -> None:
        if every_s and not self._calm:
            self._at(self._chance.expovariate(1.0 / every_s), action, *args)

    # --- processes ---

    def _worker(self, clock: ProcessClock, name: str) -> VirtualWorker:
        chance = random.Random(f"{self.settings.seed}/{name}/{self._incarnations}/worker")  # noqa: S311
        return VirtualWorker(clock, lambda: chance.uniform(0.001, 0.02))

    def _next_incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    def _launch_server(self) -> None:
        clock = ProcessClock(self.scheduler)
        incarnation = self._next_incarnation()
        machine = ParameterServerMachine(self._rules, weighting_named(self._weighting), "sim")

        def check(event: Event, effects: list[Effect], now: float) -> None:
            self.counts.events += 1
            for effect in effects:
                if isinstance(effect, do.Average):
                    for merged in effect.merged:
                        self.invariants.delta_merged(merged.key, now)
            self.invariants.after_server(machine, event, effects, now)

        store = self._store(clock)

        def listener(handle: Callable[[tp.TransportEvent], None]) -> tp.ListenerEndpoint:
            return tp.ListenerEndpoint(
                self.network.listener(self.server),
                clock,
                self._transport,
                handle,
                self.server,
                incarnation=incarnation,
                rng=random.Random(f"{self.settings.seed}/{self.server}/{incarnation}"),  # noqa: S311
            )

        shell = ParameterServerShell(
            machine,
            RunFacts("sim", self.settings.clients, {}),
            Surroundings(
                store=store,
                worker=self._worker(clock, self.server),
                scheduler=clock,
                journal=self.journal,
                listener=listener,
                say=self.participation.note,
                finished=lambda _: None,
            ),
        )
        shell.node.machine = CheckedMachine(machine, check)
        self.processes[self.server] = Process(clock, shell)
        self._prepare(clock, shell, store, incarnation)
        shell.start(store.recover())

    def _prepare(
        self, clock: ProcessClock, shell: ParameterServerShell, store: CountingStore, number: int
    ) -> None:
        """Add to a parameter server's process, incarnation `number`, before it starts."""

    def _store(self, clock: ProcessClock) -> CountingStore:
        """The store of a parameter server's process."""
        if isinstance(self.disk, LatestDisk):
            return LatestStore(
                self.disk,
                self.settings.keep_versions,
                self.scheduler.time,
                clock.call_at,
                reuse=BUFFERED_STALENESS,
                weight=lambda steps, staleness: staleness_discount(staleness) / steps,
            )
        return CountingStore(
            self.disk, self.settings.keep_versions, self.scheduler.time, clock.call_at
        )

    def _learner(
        self, clock: ProcessClock, on_event: Callable[[Event], None], chance: random.Random
    ) -> CountingLearner:
        """The training thread of a client's process."""
        return CountingLearner(
            clock,
            on_event,
            step_s=chance.uniform(0.5, 1.5) * STEP_S,
            tokens_per_step=TOKENS_PER_STEP,
            initial=chance.getrandbits(40),
            own_pace=(
                functools.partial(chance.randint, 1, MOST_OWN_STEPS)
                if self.settings.pace == "own"
                else None
            ),
        )

    def _launch_client(self, name: str) -> None:
        clock = ProcessClock(self.scheduler)
        incarnation = self._next_incarnation()
        machine = ClientMachine(ClientRules(), name, incarnation)
        chance = random.Random(f"{self.settings.seed}/{name}/{incarnation}")  # noqa: S311

        def feed(event: Event) -> None:
            shell.node.feed(event)

        learner = self._learner(clock, feed, chance)

        def check(event: Event, effects: list[Effect], now: float) -> None:
            self.counts.events += 1
            self.invariants.after_client(machine, learner, event, effects, now)
            if self.settings.pace != "called" and learner.is_held and not self._ending:
                self.invariants.violated(f"{name} waits in a step", now)

        def dialer(take: Callable[[tp.TransportEvent], None]) -> tp.DialerEndpoint:
            return tp.DialerEndpoint(
                self.network.dialer(name, self.server),
                clock,
                self._transport,
                take,
                name,
                incarnation=incarnation,
                rng=chance,
                beat_payload=lambda _: {"step": learner.steps},
            )

        shell = ClientShell(
            machine,
            learner,
            dialer,
            worker=self._worker(clock, name),
            scheduler=clock,
            journal=self.journal,
            say=lambda _: None,
            finished=lambda _: self._gone(name),
            welcomed=_ignore_welcome,
            end_training=lambda _: learner.stop(),
        )
        shell.node.machine = CheckedMachine(machine, check)
        self.processes[name] = Process(clock, shell)
        shell.dial()
        clock.call_at(clock.time() + chance.uniform(2.0, 15.0), learner.attach)

    def _gone(self, name: str) -> None:
        """Record the end of a client by itself, which no simulated run asks for before its end."""
        if not self._ending:
            self.invariants.violated(f"{name} gave up", self.scheduler.time())
            return
        learner = self.processes[name].shell.learner  # type: ignore[union-attr]
        assert isinstance(learner, CountingLearner)
        self._ended[name] = learner
        self._kill(name)

    # --- faults ---

    def _plan_client_faults(self, name: str) -> None:
        profile = self.profile
        self._plan(profile.client_kill_every_s, self._kill_client, name)
        self._plan(profile.reset_every_s, self._reset, name)
        self._plan(profile.partition_every_s, self._cut, name)

    def _kill(self, name: str) -> bool:
        process = self.processes.pop(name, None)
        if process is None:
            return False
        process.clock.alive = False
        self.network.kill(name)
        return True

    def _kill_client(self, name: str) -> None:
        if not self._calm and self._kill(name):
            self.counts.fault("client killed")
            self.counts.relaunches += 1
            self._at(self._chance.uniform(*self.profile.client_return_s), self._launch_client, name)
        self._plan(self.profile.client_kill_every_s, self._kill_client, name)

    def _kill_server(self) -> None:
        if not self._calm and self._kill(self.server):
            self.counts.fault("server killed")
            self.invariants.server_died(self.scheduler.time())
            self._at(self._chance.uniform(*self.profile.server_return_s), self._launch_server)
        self._plan(self.profile.server_kill_every_s, self._kill_server)

    def _reset(self, name: str) -> None:
        if name in self.processes and not self._calm:
            self.counts.fault("connection reset")
            self.network.reset(name, self.server)
        self._plan(self.profile.reset_every_s, self._reset, name)

    def _cut(self, name: str) -> None:
        if self._calm:
            return
        self.counts.fault("partition")
        self.network.cut(name, self.server)
        self._at(self._chance.uniform(*self.profile.partition_s), self._heal, name)

    def _heal(self, name: str) -> None:
        self.network.heal(name, self.server)
        self._plan(self.profile.partition_every_s, self._cut, name)


def _ignore_welcome(welcome: Welcome) -> None:
    """Ignore the welcome: the simulator's clients need no configuration."""
