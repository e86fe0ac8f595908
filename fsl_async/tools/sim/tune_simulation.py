"""`fsl-node sim --tune lora|zeroth`: runs that tune by rounds, under a virtual clock.

As `fsl_async.tools.sim.simulation` for pretraining: production machines and shells, with counting
instead of tensors (`tune_counting`). Besides its faults, some clients have slow links or slow
disks, writes fail, and in a run of zeroth order some deltas are not finite and some frames cannot
be replayed. Links are cut for longer than the history lasts. Besides the invariants of pretraining:

- No delta of an older version has weight in a version, and each is recorded with its staleness.
- In a run of zeroth order a client that holds a version has replayed exactly the steps that lead to
  it, in order, since the last version that it fetched in full.
- No version that arrives is lost on its way into the base.
- A client that is connected gets newer versions, and a run with clients makes versions.
- Versions are kept on disk for a client no longer than it needs them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal, cast

from attrs import evolve, field, frozen, mutable

from fsl_async.nodes.runtime import Journal
from fsl_async.roles.machine import Event
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.ps import ParameterServerMachine, Phase
from fsl_async.tools.sim.counting import CountingLearner, CountingStore, VirtualWorker
from fsl_async.tools.sim.invariants import Invariants
from fsl_async.tools.sim.simulation import (
    SERVER_NAME,
    STEP_S,
    TOKENS_PER_STEP,
    Simulation,
    SimulationSettings,
)
from fsl_async.tools.sim.tune_counting import (
    RoundLearner,
    RoundStore,
    TuneDisk,
    ZerothLearner,
    ZerothStore,
)
from fsl_async.tools.sim.world import ProcessClock

Mode = Literal["lora", "zeroth"]
MODES: tuple[Mode, ...] = ("lora", "zeroth")
SLOW_SHARE = 0.2
"""Of the clients: they have slow links; as many have slow disks."""
SLOW_BYTES_PER_S = 200.0
SLOW_JOB_S = (1.0, 15.0)
SLOW_JOBS = 0.1
"""Share of the jobs of a slow disk that take so long."""
REPORT_S = 0.1
"""Between the end of a job in the worker and its result in the loop, which may be busy."""
CLIENT_FAILS = 0.02
"""Share of deltas that are not finite, and of frames that cannot be replayed, with faults."""
DISK_FAILS = 0.005
"""Share of the writes of deltas and versions, with faults."""
WATCH_EVERY_S = 30.0
STUCK_S = 300.0
"""Longer than a client needs for a version, or a run for a round, once lost sessions are known."""
KEPT_COMMITS = 3


@frozen
class TuneSettings:
    """What to simulate beyond `SimulationSettings`, of which `every_s` is the cap of a round."""

    mode: Mode = "zeroth"
    history: int = 8
    drain_s: float = 150.0


@mutable
class TuneInvariants(Invariants):
    """What happened in a run that tunes, and the violations found."""

    disk: TuneDisk = field(factory=TuneDisk)
    stale_declined: int = 0
    late_merged: int = 0
    _replayed: dict[str, int] = field(factory=dict)
    """Client -> the version up to which its replays were checked."""
    _kept: tuple[int | None, int] = (None, 0)
    """The version from which clients are served, and for how many commits in vain."""

    def after_server(
        self, machine: ParameterServerMachine, event: Event, effects: list[Any], now: float
    ) -> None:
        """See `Invariants.after_server`."""
        super().after_server(machine, event, effects, now)
        for effect in effects:
            if isinstance(effect, do.Average):
                self._check_average(effect, now)
        if isinstance(event, ev.VersionCommitted) and event.version:
            self._check_weights(machine, event.version, now)
            self._check_kept(machine, event.version, now)

    def _check_average(self, effect: do.Average, now: float) -> None:
        for one in effect.merged:
            staleness = effect.version - 1 - one.key.base
            # One that came during a merge which failed joins it, and keeps its staleness.
            if not staleness <= one.staleness <= staleness + 1:
                text = f"delta {one.key.text} is {staleness} versions late, not {one.staleness}"
                self.violated(text, now)
            self.late_merged += staleness > 0

    def _check_weights(self, machine: ParameterServerMachine, version: int, now: float) -> None:
        fresh = 0
        for key, weight in self.disk.weights.items():
            fresh += weight > 0.0
            if weight and key.base != version - 1:
                self.violated(f"delta {key.text} has weight in version {version}", now)
        if not fresh and not machine.end.asked:
            self.violated(f"version {version} is made without a delta of its round", now)

    def _check_kept(self, machine: ParameterServerMachine, version: int, now: float) -> None:
        """Versions are kept for clients of which all hold later ones."""
        members = [one for one in machine.members.values() if one.attached]
        kept, commits = self._kept
        served = self.disk.kept_from
        in_vain = (
            served is not None and served < version - 1 and bool(members)
            and all(one.version >= version - 1 for one in members)
        )  # fmt: skip
        if not in_vain:
            self._kept = None, 0
            return
        self._kept = served, commits + 1 if served == kept else 1
        if self._kept[1] == KEPT_COMMITS:
            self.violated(f"version {served} is kept, and all clients hold {version - 1}", now)

    def after_client(
        self,
        machine: ClientMachine,
        learner: CountingLearner,
        event: Event,
        effects: list[Any],
        now: float,
    ) -> None:
        """See `Invariants.after_client`."""
        super().after_client(machine, learner, event, effects, now)
        if isinstance(event, ev.FetchFailed):
            self.violated(f"{machine.name} lost version {event.version}: {event.reason}", now)
        elif isinstance(event, ev.DeltaRefused):
            self.stale_declined += event.code == "stale"
        elif isinstance(event, ev.BaseReplaced):
            assert isinstance(learner, RoundLearner)
            self._check_replayed(machine.name, learner, event.version, now)

    def _check_replayed(self, name: str, learner: RoundLearner, version: int, now: float) -> None:
        applied = learner.applied
        numbers = [number for number, _ in applied]
        if applied and numbers != list(range(self._replayed[name] + 1, version + 1)):
            text = f"{name} replayed {numbers} on version {self._replayed[name]}"
            self.violated(text, now)
        for number, step in applied:
            if self.disk.steps[number] != step:
                self.violated(f"{name} replayed another step to version {number}", now)
        applied.clear()
        self._replayed[name] = version


class TuneSimulation(Simulation):
    """A simulated run; `invariants` and `counts` hold the result."""

    disk: TuneDisk
    invariants: TuneInvariants

    def __init__(
        self,
        settings: SimulationSettings,
        tune: TuneSettings,
        *,
        keep_journal: Journal | None = None,
    ) -> None:
        super().__init__(settings, keep_journal=keep_journal)
        self.tune = tune
        self.disk = TuneDisk()
        self.invariants = TuneInvariants(disk=self.disk)
        self._weighting = "tokens"
        self._rules = evolve(
            self._rules,
            trigger="rounds",
            round_cap_s=settings.every_s,
            max_staleness=0,
            drain_s=tune.drain_s,
            history=tune.history if tune.mode == "zeroth" else 0,
        )
        self._has_faults = settings.faults != "none"
        chance = random.Random(f"{settings.seed}/slow")  # noqa: S311
        slow = [name for name in self.names if chance.random() < 2 * SLOW_SHARE]
        self._slow_links = set(slow[::2]) if self._has_faults else set()
        self._slow_disks = set(slow[1::2]) | {SERVER_NAME} if self._has_faults else set()
        self._held: dict[str, tuple[int, int, float]] = {}
        """Client -> its incarnation, its version, and since when it is at that one."""
        self._made = 0, 0.0
        """The newest version, and when clients were last seen without another one."""

    def run(self, progress: Callable[[float], None] | None = None) -> None:
        """See `Simulation.run`."""
        for name in self._slow_links:
            slow = evolve(self.network_conditions, bytes_per_s=SLOW_BYTES_PER_S)
            self.network.set_conditions(name, SERVER_NAME, slow)
        self._at(WATCH_EVERY_S, self._watch)
        super().run(progress)

    def _may_end(self, machine: ParameterServerMachine) -> bool:
        return machine.phase is not Phase.EMPTY

    # --- processes ---

    def _worker(self, clock: ProcessClock, name: str) -> VirtualWorker:
        chance = random.Random(f"{self.settings.seed}/{name}/{self._incarnations}/worker")  # noqa: S311
        slow = SLOW_JOBS if name in self._slow_disks else 0.0
        if name == SERVER_NAME:
            slow /= 10.0

        def cost_s() -> float:
            if slow and chance.random() < slow:
                return chance.uniform(*SLOW_JOB_S)
            return chance.uniform(0.001, 0.02)

        return VirtualWorker(clock, cost_s, REPORT_S)

    def _store(self, clock: ProcessClock) -> CountingStore:
        keep, time = self.settings.keep_versions, self.scheduler.time
        chance = random.Random(f"{self.settings.seed}/disk/{self._incarnations}")  # noqa: S311
        fails = lambda: self._has_faults and chance.random() < DISK_FAILS  # noqa: E731
        if self.tune.mode == "lora":
            return RoundStore(self.disk, keep, time, clock.call_at, fails=fails)
        history = self.tune.history
        return ZerothStore(self.disk, keep, time, clock.call_at, fails=fails, history=history)

    def _learner(
        self, clock: ProcessClock, on_event: Callable[[Event], None], chance: random.Random
    ) -> CountingLearner:
        kind = ZerothLearner if self.tune.mode == "zeroth" else RoundLearner
        return kind(
            clock,
            on_event,
            step_s=chance.uniform(0.5, 1.5) * STEP_S,
            tokens_per_step=TOKENS_PER_STEP,
            initial=chance.getrandbits(40),
            chance=random.Random(chance.getrandbits(64)),  # noqa: S311
            fails=CLIENT_FAILS if self._has_faults else 0.0,
        )

    # --- progress ---

    def _watch(self) -> None:
        """Check that clients and run make progress. A lost session is known after a while."""
        now = self.scheduler.time()
        longest_s = STUCK_S + self.settings.expire_after_s
        connected = False
        for name in self.names:
            process = self.processes.get(name)
            if process is None:
                self._held.pop(name, None)
                continue
            machine = cast("ClientMachine", process.shell.machine)
            connected = connected or machine.connected
            before = self._held.get(name)
            at = machine.incarnation, machine.base.version
            is_behind = machine.connected and machine.base.version < machine.latest.version
            if before is None or before[:2] != at or not is_behind:
                self._held[name] = *at, now
            elif now - before[2] > longest_s:
                text = f"{name} stays at version {at[1]}, and {machine.latest.version} is announced"
                self.invariants.violated(text, now)
        version = len(self.disk.models)
        if version != self._made[0] or not connected or SERVER_NAME not in self.processes:
            self._made = version, now
        elif now - self._made[1] > longest_s and not self._ending:
            self.invariants.violated(f"no version after {version - 1} is made", now)
        self._at(WATCH_EVERY_S, self._watch)

    def tune_facts(self) -> dict[str, Any]:
        """Return the figures of tuning."""
        return {
            "mode": self.tune.mode,
            "late": self.invariants.late_merged,
            "stale": self.invariants.stale_declined,
            "quarantined": len(self.disk.quarantined),
            "full_fetches": self.disk.full_reads,
            "replays": self.disk.replays,
        }


__all__ = ["MODES", "TuneInvariants", "TuneSettings", "TuneSimulation"]
