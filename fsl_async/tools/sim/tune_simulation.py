"""`fsl-node sim --tune lora|zeroth`: runs that tune by rounds, under a virtual clock.

As `fsl_async.tools.sim.simulation` for pretraining, with its faults, and with training by rounds
(`tune_training`). Besides, some clients have slow links or slow disks, and in a run of zeroth order
some deltas are not finite and some scalars cannot be replayed. Links are cut for longer than the
history lasts. Besides the invariants of pretraining:

- A delta of an older version has no weight in a version, and is recorded with its staleness.
- With adapters the product of a version's factors is the weighted mean of its clients' products,
  but for what coding keeps back, which the next version makes up for.
- In a run of zeroth order a version is its predecessor, moved along the round's directions by the
  weighted mean of the scalars that clients measured.
- No version that arrives is lost on its way into the base.
- A client that is connected gets newer versions, and a run with clients makes versions.
- Versions are kept on disk for a client no longer than it needs them.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Literal, cast

from attrs import evolve

from fsl_async.nodes.runtime import Journal
from fsl_async.roles.machine import Effect, Event
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.ps import ParameterServerMachine, Phase
from fsl_async.store.seed_step import directions_of
from fsl_async.store.store import Store
from fsl_async.tools.sim.simulation import Simulation, SimulationSettings
from fsl_async.tools.sim.training import Trainer, VirtualWorker
from fsl_async.tools.sim.tune_training import (
    ADAPTERS,
    LARGE,
    AdapterTraining,
    ProductLineage,
    RoundLineage,
    RoundTraining,
    ScalarLineage,
    ScalarTraining,
)
from fsl_async.tools.sim.world import Launch, ProcessClock

Mode = Literal["lora", "zeroth"]
MODES: tuple[Mode, ...] = ("lora", "zeroth")
SLOW_SHARE = 0.2
"""Share of the clients that have slow links; as many have slow disks."""
SLOW_BYTES_PER_S = 200.0
SLOW_JOB_S = (1.0, 15.0)
SLOW_JOBS = 0.1
"""Share of the jobs of a slow disk that take so long."""
REPORT_S = 0.1
"""Between the end of a job in the worker and its result in the loop, which may be busy."""
CLIENT_FAILS = 0.02
"""Share of deltas that are not finite, and of scalars that cannot be replayed, with faults."""
WATCH_EVERY_S = 30.0
STUCK_S = 300.0
"""Longer than a client needs for a version, or a run for a round, once lost sessions are known."""
KEPT_COMMITS = 3
HEARTBEAT_S = 20.0
"""Two are the time in which a client on a slow link must take the last version."""
FINE = "codec.step_log2=40"
"""Codes versions so finely that a product shows what it is made of."""


SETTINGS = {
    "lora": ["tune.method=lora", "tune.rule=flexlora", "tune.rank=2", FINE],
    "zeroth": ["tune.method=zeroth", "tune.zo_history=8"],
}
"""Mode -> settings of the run."""


class TuneSimulation(Simulation):
    """A simulated run; `violations` and `counts` hold the result.

    `every_s` of its settings is the cap of a round.
    """

    kind = "tune"

    def __init__(
        self,
        settings: SimulationSettings,
        mode: Mode,
        *,
        keep_journal: Journal | None = None,
    ) -> None:
        config = settings.config(
            f"sync.round_cap_s={settings.every_s}",
            f"session.heartbeat_every_s={HEARTBEAT_S}",
            f"session.expire_after_s={3 * HEARTBEAT_S}",
            *SETTINGS[mode],
        )
        super().__init__(settings, keep_journal=keep_journal, config=config)
        self.mode = mode
        codec, directions = config.codec.spec_down, directions_of(config)
        assert directions is not None, "a run that tunes has directions"
        self.lineage: RoundLineage = ProductLineage(codec, ADAPTERS)
        if mode == "zeroth":
            self.lineage = ScalarLineage(codec, LARGE, directions=directions)
        self.invariants.lineage = self.lineage
        self.happened: Counter[str] = Counter()
        """Fetches and refused deltas, by kind."""
        self._has_faults = settings.faults != "none"
        chance = random.Random(f"{settings.seed}/slow")  # noqa: S311
        slow = [name for name in self.names if chance.random() < 2 * SLOW_SHARE]
        self._slow_links = set(slow[::2]) if self._has_faults else set()
        self._slow_disks = set(slow[1::2]) | {self.server} if self._has_faults else set()
        self._held: dict[str, tuple[int, int, float]] = {}
        """Client -> its incarnation, its version, and since when it is at that one."""
        self._made = 0, 0.0
        """The newest version, and when clients were last seen without another one."""
        self._is_full = False
        """Whether the last version could not be written; pauses between attempts grow to hours."""
        self._kept: tuple[int | None, int] = (None, 0)
        """The version from which clients are served, and for how many commits in vain."""

    def begin(self) -> None:
        """See `Simulation.begin`."""
        for name in self._slow_links:
            slow = evolve(self.network_conditions, bytes_per_s=SLOW_BYTES_PER_S)
            self.network.set_conditions(name, self.server, slow)
        self._at(WATCH_EVERY_S, self._watch)
        super().begin()

    def _may_end(self, machine: ParameterServerMachine) -> bool:
        return machine.phase is not Phase.EMPTY

    # --- processes ---

    def _worker(self, clock: ProcessClock, name: str) -> VirtualWorker:
        chance = random.Random(f"{self.settings.seed}/{name}/{self._incarnations}/worker")  # noqa: S311
        slow = SLOW_JOBS if name in self._slow_disks else 0.0
        if name == self.server:
            slow /= 10.0

        def cost_s() -> float:
            if slow and chance.random() < slow:
                return chance.uniform(*SLOW_JOB_S)
            return chance.uniform(0.001, 0.02)

        return VirtualWorker(clock, cost_s, lambda: REPORT_S)

    def _training(self, launch: Launch) -> RoundTraining:
        kind = ScalarTraining if self.mode == "zeroth" else AdapterTraining
        return kind(
            launch.clock,
            launch.feed,
            step_s=launch.step_s(),
            chance=random.Random(launch.chance.getrandbits(64)),  # noqa: S311
            fails=CLIENT_FAILS if self._has_faults else 0.0,
        )

    # --- checks ---

    def _after_server(
        self, machine: ParameterServerMachine, event: Event, effects: list[Effect]
    ) -> None:
        super()._after_server(machine, event, effects)
        for effect in effects:
            if isinstance(effect, do.SendVersion):
                self.happened[effect.kind] += 1
        if isinstance(event, ev.VersionCommitted | ev.CommitFailed):
            self._is_full = isinstance(event, ev.CommitFailed)
        if isinstance(event, ev.VersionCommitted) and event.version:
            store = self.invariants.store
            assert store is not None, "a version is of a store"
            if not self.lineage.fresh(store.records[-1]) and not machine.end.asked:
                self.world.violated(f"version {event.version} is made without a delta of its round")
            self._check_kept(machine, event.version, store)

    def _check_kept(self, machine: ParameterServerMachine, version: int, store: Store) -> None:
        """Versions are kept for clients of which all hold later ones."""
        members = [one for one in machine.members.values() if one.attached]
        kept, commits = self._kept
        served = store._serving_from  # noqa: SLF001
        in_vain = (
            served is not None and served < version - 1 and bool(members)
            and all(one.version >= version - 1 for one in members)
        )  # fmt: skip
        if not in_vain:
            self._kept = None, 0
            return
        self._kept = served, commits + 1 if served == kept else 1
        if self._kept[1] == KEPT_COMMITS:
            self.world.violated(f"version {served} is kept, and all clients hold {version - 1}")

    def _after_client(
        self, machine: ClientMachine, training: Trainer, event: Event, effects: list[Effect]
    ) -> None:
        super()._after_client(machine, training, event, effects)
        if isinstance(event, ev.FetchFailed):
            self.world.violated(f"{machine.name} lost version {event.version}: {event.reason}")
        elif isinstance(event, ev.DeltaRefused):
            self.happened[event.code] += 1

    def _watch(self) -> None:
        """Check that clients and run make progress. A lost session is known after a while."""
        now = self.scheduler.time()
        longest_s = STUCK_S + self.config.session.expire_after_s
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
                self.world.violated(text)
        version = self.lineage.version
        is_served = connected and self.server in self.processes and not self._is_full
        if version != self._made[0] or not is_served:
            self._made = version, now
        elif now - self._made[1] > longest_s and not self._ending:
            self.world.violated(f"no version after {version} is made")
        self._at(WATCH_EVERY_S, self._watch)

    def facts(self) -> dict[str, Any]:
        """Return the figures of tuning."""
        return {
            "mode": self.mode,
            "late": self.lineage.late,
            "stale": self.happened["stale"],
            "quarantined": self.happened["quarantined"],
            "full_fetches": self.happened["full"],
            "replays": self.happened["seeds"],
        }


__all__ = ["MODES", "TuneSimulation"]
