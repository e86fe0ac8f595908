"""World: what all processes of a simulation share, and what each of them lives in.

One seed decides all faults, so a storm can be repeated. In a fault profile mean times between
faults are those of one client (or of one server); times are exponential, as for independent
failures. `storm` is a bad week: every client is killed about every two hours, connections are
reset, links are cut for minutes, messages are lost, duplicated, delayed and reordered, and the
parameter server is killed every few hours.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import field, frozen, mutable

import fsl_transport as tp
from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.ps.shell import ParameterServerShell
from fsl_async.nodes.runtime import Journal
from fsl_async.observe.journal import TraceHash
from fsl_async.roles.machine import Effect, Event
from fsl_async.tools.sim.training import Trainer

if TYPE_CHECKING:
    from fsl_async.tools.sim.groups_simulation import GroupsSimulation
    from fsl_async.tools.sim.simulation import Simulation


@frozen
class FaultProfile:
    """Mean seconds between faults (0 = never), seconds of recovery (from, to), probabilities per
    message.
    """

    client_kill_every_s: float = 0.0
    client_return_s: tuple[float, float] = (20.0, 120.0)
    reset_every_s: float = 0.0
    partition_every_s: float = 0.0
    partition_s: tuple[float, float] = (30.0, 600.0)
    server_kill_every_s: float = 0.0
    server_return_s: tuple[float, float] = (5.0, 60.0)
    disk_full_every_s: float = 0.0
    """A parameter server's disk is full: some calls in a row fail."""
    disk_kills: float = 0.0
    """Kills of the parameter server in the middle of a call to its disk."""
    power_cuts: float = 0.0
    """Deaths of the parameter server after which its disk has lost what was not synced."""
    server_pause_every_s: float = 0.0
    """Each group's parameter server is stopped for a while, as by SIGSTOP."""
    server_pause_s: tuple[float, float] = (5.0, 400.0)
    group_cut_every_s: float = 0.0
    """One parameter server is parted from another one, or from all others."""
    reduction_fails: float = 0.0
    """Reductions that end well at some members and with an error at the others."""
    reduction_differs: float = 0.0
    """Reductions that give another result at one member."""
    delay_s: float = 0.03
    jitter_s: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0

    @property
    def longest_s(self) -> float:
        """Seconds after the last fault within which every process and link is back."""
        longest_s = max(self.client_return_s[1], self.partition_s[1], self.server_return_s[1])
        return max(longest_s, self.server_pause_s[1] if self.server_pause_every_s else 0.0) + 60.0


HOUR_S = 3600.0
LONGEST_END_S = 2 * HOUR_S

PROFILES = {
    "none": FaultProfile(),
    "mild": FaultProfile(
        client_kill_every_s=12 * HOUR_S,
        reset_every_s=4 * HOUR_S,
        partition_every_s=24 * HOUR_S,
        server_kill_every_s=24 * HOUR_S,
        jitter_s=0.02,
        drop=0.0002,
        reduction_fails=0.02,
    ),
    "storm": FaultProfile(
        client_kill_every_s=2 * HOUR_S,
        reset_every_s=0.5 * HOUR_S,
        partition_every_s=4 * HOUR_S,
        server_kill_every_s=4 * HOUR_S,
        server_pause_every_s=6 * HOUR_S,
        group_cut_every_s=1 * HOUR_S,
        reduction_fails=0.3,
        reduction_differs=0.02,
        disk_full_every_s=2 * HOUR_S,
        disk_kills=0.5,
        power_cuts=0.5,
        jitter_s=0.1,
        drop=0.003,
        duplicate=0.002,
        reorder=0.005,
    ),
}


STEP_S = 3.0
"""Mean seconds of a step."""


class ProcessClock:
    """The clock of one process: after a kill, none of its planned calls happens.

    A process that is paused, as by SIGSTOP, makes up for its calls when it goes on.
    """

    __slots__ = ("_paused", "_scheduler", "alive", "time")

    def __init__(self, scheduler: tp.VirtualScheduler) -> None:
        self._scheduler = scheduler
        self._paused: list[tuple[Callable[..., object], tuple[object, ...]]] | None = None
        self.alive = True
        self.time = scheduler.time

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object
    ) -> tp.Cancellable:
        """Plan a call that happens only if this process is still alive."""
        return self._scheduler.call_at(when, self._run, callback, args)

    def _run(self, callback: Callable[..., object], args: tuple[object, ...]) -> None:
        if self._paused is not None:
            self._paused.append((callback, args))
        elif self.alive:
            callback(*args)

    def pause(self) -> None:
        """Stop the process; harmless if it is stopped."""
        if self._paused is None:
            self._paused = []

    def go_on(self) -> None:
        """Let it run; harmless if it does."""
        waiting, self._paused = self._paused or (), None
        for callback, args in waiting:
            self.call_at(self.time(), callback, *args)


class SilentJournal:
    """Keeps nothing."""

    def event(self, _event: Any, _now: float, _cause: int | None = None) -> int:
        """Keep nothing."""
        return 0

    effect = fact = event


class CheckedMachine:
    """A machine with a check after every event."""

    def __init__(self, machine: Any, check: Callable[[Event, list[Effect]], None]) -> None:
        self._machine = machine
        self._check = check
        self.next_deadline, self.check = machine.next_deadline, machine.check

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle an event, then check."""
        effects: list[Effect] = self._machine.handle(event, now)
        self._check(event, effects)
        return effects


@frozen
class Launch:
    """A client's process, as its training needs it. feed: takes the events of training."""

    name: str
    incarnation: int
    clock: ProcessClock
    feed: Callable[[Event], None]
    chance: random.Random

    def step_s(self) -> float:
        """Return the seconds of a step of this process, by chance."""
        return self.chance.uniform(0.5, 1.5) * STEP_S


@frozen
class Process:
    """A process: its clock, the shell in it, and a client's training."""

    clock: ProcessClock
    shell: ParameterServerShell | ClientShell
    training: Trainer | None = None


@mutable
class Counts:
    """Counts of events and faults."""

    faults: int = 0
    relaunches: int = 0
    events: int = 0
    bytes_sent: int = 0
    kinds: dict[str, int] = field(factory=dict)
    called: int = 0
    """Clients called for a round, over all merged rounds."""
    answered: int = 0
    """Those of them whose delta is in their round."""

    @property
    def participation(self) -> float:
        """Deltas in a merged round over the clients called for it."""
        return self.answered / self.called if self.called else 0.0

    def fault(self, kind: str) -> None:
        """Count an injected fault."""
        self.faults += 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1


class World:
    """Time, network, journal and counts of one simulation."""

    def __init__(
        self, profile: FaultProfile, seed: int, keep_journal: Journal | None = None
    ) -> None:
        self.scheduler = tp.VirtualScheduler()
        self.conditions = tp.Conditions(
            delay_s=profile.delay_s,
            jitter_s=profile.jitter_s,
            drop=profile.drop,
            duplicate=profile.duplicate,
            reorder=profile.reorder,
        )
        self.network = tp.MemNetwork(self.scheduler, seed, self.conditions)
        self.trace = TraceHash()
        self.journal: Journal = keep_journal or self.trace
        self.counts = Counts()
        self.violations: list[str] = []
        """The violations of invariants that were found."""

    def violated(self, text: str) -> None:
        """Record a violation of an invariant."""
        self.violations.append(f"at {self.scheduler.time():.3f} s: {text}")

    def at(self, delay_s: float, action: Callable[..., object], *args: object) -> None:
        """Plan a call, so many seconds from now."""
        self.scheduler.call_at(self.scheduler.time() + delay_s, action, *args)

    def end(
        self,
        groups: Sequence[Simulation],
        step_s: float,
        is_settled: Callable[[], bool] = lambda: True,
    ) -> None:
        """End groups: no new faults; when all nodes are back, the parameter servers are asked to.

        Messages are still lost and repeated. step_s: from one look to the next. is_settled:
        whether they may be asked.
        """
        calm_s = max(group.calm() for group in groups)
        give_up_s = calm_s + LONGEST_END_S
        while not self.violations and self.scheduler.time() < give_up_s:
            self.scheduler.run_until(self.scheduler.time() + step_s)
            if self.scheduler.time() <= calm_s or not is_settled():
                continue
            for group in groups:
                group.ask_to_end()
            if all(group.has_ended for group in groups):
                break

    def run(
        self,
        hours: float,
        end: Callable[[], None],
        progress: Callable[[float], None] | None,
    ) -> None:
        """Run for some hours, then `end`. Stops within a minute of a violation.

        An AssertionError is a violation. `progress(hours)` is called about every hour.
        """
        hour = 0.0
        # dead processes are reference cycles; collecting them once an hour costs less
        gc.disable()
        try:
            while hour < hours and not self.violations:
                hour = min(hour + 1.0, hours)
                self._run_until(hour * HOUR_S)
                gc.collect()
                if progress is not None:
                    progress(hour)
            end()
        except AssertionError as error:
            self.violated(f"{error}")
        finally:
            gc.enable()

    def _run_until(self, end_s: float) -> None:
        while not self.violations and self.scheduler.time() < end_s:
            self.scheduler.run_until(min(self.scheduler.time() + 60.0, end_s))


def report(
    simulation: Simulation | GroupsSimulation, seconds: float, journal: str
) -> dict[str, Any]:
    """Make the report of a simulation. Of groups, versions, deltas and clients are added up.

    Losses are None: nothing is learned. Kinds of run other than pretraining have a member with
    their own figures, of their name; it is None for the others.
    """
    counts, world = simulation.counts, simulation.world
    groups = simulation.groups
    lineages = [group.invariants.lineage for group in groups]
    messages = world.network.counts
    kinds = dict(counts.kinds)
    for kind in ("dropped", "duplicated", "reordered"):
        if messages.get(kind):
            kinds[f"message {kind}"] = messages[kind]
    found = {
        "rounds": sum(max(0, lineage.version) for lineage in lineages),
        "clients": simulation.settings.clients * len(groups),
        "tokens": sum(lineage.tokens for lineage in lineages),
        "loss_first": None,
        "loss_last": None,
        "eval_loss": None,
        "bytes_raw": 0,
        "bytes_sent": 0,
        "ratio": None,
        "relaunches": counts.relaunches,
        "deltas_merged": sum(len(lineage.merged) for lineage in lineages),
        "deltas_lost": sum(group.invariants.deltas_lost for group in groups),
        "deltas_doubled": sum(lineage.doubled for lineage in lineages),
        "participation": round(counts.participation, 4),
        "seconds": round(seconds, 3),
        "run_dir": journal,
        "virtual_hours": world.scheduler.time() / 3600.0,
        "events": counts.events,
        "faults": sum(kinds.values()),
        "faults_by_kind": kinds,
        "seed": simulation.settings.seed,
        "invariant_violations": len(simulation.violations),
        "trace_sha256": None if journal else world.trace.hexdigest(),
        **dict.fromkeys(("split", "tune", "deltas_reused", "groups")),
    }
    if simulation.settings.latest:
        found["deltas_reused"] = sum(lineage.uses_again for lineage in lineages)
    if simulation.kind:
        found[simulation.kind] = simulation.facts()
    return found
