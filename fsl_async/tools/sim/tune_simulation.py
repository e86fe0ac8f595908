"""`fsl-node sim --tune lora|zeroth`: runs that tune by rounds, under a virtual clock.

As `fsl_async.tools.sim.simulation` for pretraining, with its faults, and with training by rounds.
Besides, some clients have slow links or slow disks, and in a run of zeroth order some deltas are
not finite and some scalars cannot be replayed. Links are cut for longer than the history lasts.
Besides the invariants of pretraining:

- A delta of an older version has no weight in a version, and is recorded with its staleness.
- With adapters the product of a version's factors is the weighted mean of its clients' products,
  but for what coding keeps back, which the next version makes up for.
- In a run of zeroth order a version is its predecessor, moved along the round's directions by the
  weighted mean of the scalars that clients measured.
- No version that arrives is lost on its way into the base.
- A client that is connected gets newer versions, and a run with clients makes versions.
- Versions are kept on disk for a client no longer than it needs them.

A client trains ROUND_STEPS steps when it is called, gives the exchange its delta, and waits for the
next version. Orders that come during a round are carried out at its end.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
from attrs import evolve, field, mutable
from numpy.typing import NDArray

from fsl_async.learn.client.ports import Move, Moved, RoundOrder, SnapshotOrder, Vector, Work
from fsl_async.nodes.runtime import Journal
from fsl_async.roles.machine import Done, Effect, Event, Received
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.delta import ORDER, DeltaKey, MergedDelta
from fsl_async.roles.sync.ps import ParameterServerMachine, Phase
from fsl_async.roles.sync.weighting import staleness_discount
from fsl_async.store.book.records import VersionRecord
from fsl_async.store.deltas.seed_step import Directions, directions_of, keys_of
from fsl_async.store.errors import LearnerError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.store import Store
from fsl_async.tools.sim.invariants import Lineage
from fsl_async.tools.sim.settings import SimulationSettings
from fsl_async.tools.sim.simulation import Simulation
from fsl_async.tools.sim.training import (
    Launch,
    Trainer,
    VirtualTraining,
    VirtualWorker,
    WatchedExchange,
)
from fsl_async.tools.sim.world import ProcessClock
from fsl_codecs import add_signs, is_seeds
from fsl_transport import Scheduler

PRODUCT_TOLERANCE = 5e-3
"""Largest error of a product by coding its factors, relative to it; the next version repairs it."""


@mutable
class RoundLineage(Lineage):
    """Versions of a run by rounds: a delta of an older version has no weight."""

    late: int = 0
    """Deltas that entered a version without weight."""

    def _check(self, record: VersionRecord, held: Vector) -> list[str]:
        wrong = super()._check(record, held)
        for one in record.merged:
            staleness = record.version - 1 - one.key.base
            # One that came during a merge which failed joins it, and keeps its staleness.
            if not staleness <= one.staleness <= staleness + 1:
                text = f"delta {one.key.text} is {staleness} versions late, not {one.staleness}"
                wrong.append(text)
            if staleness and one.weight:
                wrong.append(f"delta {one.key.text} has weight in version {record.version}")
            self.late += staleness > 0
        return wrong

    @staticmethod
    def fresh(record: VersionRecord) -> list[MergedDelta]:
        """Return the deltas of which a version is made."""
        return [one for one in record.merged if one.weight and one.key.base == record.version - 1]


@mutable
class ProductLineage(RoundLineage):
    """Versions whose product is the weighted mean of the clients' products."""

    _unsent: NDArray[np.float64] = field(factory=lambda: np.zeros((2, 2)))
    """The product that coding has kept back so far."""

    def _compare(
        self, record: VersionRecord, values: Mapping[DeltaKey, Vector], held: Vector
    ) -> list[str]:
        before, wanted = self.weights[-1].astype(np.float64), self._unsent
        fresh = self.fresh(record)
        total = sum(one.weight for one in fresh)
        for client in sorted({one.key.client for one in fresh}):
            mine = [one for one in fresh if one.key.client == client]
            weight = sum(one.weight for one in mine)
            after = before.copy()
            for one in mine:
                after -= one.clip * one.weight / weight * values[one.key]
            wanted = wanted + weight / total * product(after)
        if not fresh:
            wanted = wanted + product(before)
        self._unsent = wanted - product(held.astype(np.float64))
        if np.abs(self._unsent).max() <= PRODUCT_TOLERANCE * (1.0 + np.abs(wanted).max()):
            return []
        return [f"the product of version {record.version} is not the mean of its clients'"]


@mutable
class ScalarLineage(RoundLineage):
    """Versions that lead from one to the next by the mean of scalars.

    directions: of the run.
    """

    directions: Directions = field(kw_only=True)

    def sent(self, key: DeltaKey) -> Vector | None:
        """Return the scalars that a client measured."""
        work = self.works.get((key.client, key.incarnation))
        return None if work is None else work.expected.get(key.sequence)

    def _compare(
        self, record: VersionRecord, values: Mapping[DeltaKey, Vector], held: Vector
    ) -> list[str]:
        fresh, number = self.fresh(record), record.version
        if record.seeds is None or record.seeds.round != number - 1:
            return [f"version {number} has not the scalars of its round"]
        mean, weights = np.zeros(self.directions.scalars), 0.0
        for one in fresh:
            mean += one.weight * values[one.key].astype(np.float64)
            # A clipped delta is shorter, as is one that came during a merge which failed.
            weights += one.weight / one.clip / staleness_discount(one.staleness)
        wrong, wanted = [], self.directions.step(number - 1, mean / (weights or 1.0)).scalars
        if not np.allclose(
            record.seeds.scalars, wanted, rtol=1e-5, atol=1e-5 * self.directions.rate
        ):
            wrong.append(f"the steps to version {number} are not the mean of its clients' scalars")
        made = self.weights[-1].copy()
        add_signs(made, 0, *keys_of([record.seeds]))
        if not np.array_equal(made, held):
            wrong.append(f"version {number} holds other weights than its steps lead to")
        return wrong


def product(factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the product of an adapter of `tune_training.ADAPTERS`, of its flat factors."""
    a, b = factors.reshape(2, 2, 2)
    made: NDArray[np.float64] = b.T @ a
    return made


ADAPTERS = Manifest.from_shapes([("layer.lora_A", (2, 2)), ("layer.lora_B", (2, 2))])
"""Factors of full rank: their product can be any matrix, so a merge of products loses nothing."""
LARGE = Manifest.from_shapes([("weights", (1000,))])
"""A full version takes longer than a round on a slow link."""
ROUND_STEPS = 4
"""Steps of a client in a round."""
SKIPS = 0.01
"""Share of rounds in which a client trains nothing."""


class RoundTraining(VirtualTraining):
    """Trains rounds when it is called.

    chance: decides in which rounds it trains nothing. fails: probability of each fault of training.
    """

    manifest: Manifest

    def __init__(
        self,
        clock: Scheduler,
        on_event: Callable[[Event], None],
        *,
        step_s: float,
        chance: random.Random,
        fails: float,
    ) -> None:
        initial = np.array([chance.gauss(0.0, 1.0) for _ in range(self.manifest.values)])
        super().__init__(
            clock,
            on_event,
            step_s=step_s,
            initial=initial,
            unit=chance.uniform(0.005, 0.015),
            manifest=self.manifest,
        )
        self._chance = chance
        self._fails = fails
        self._free_at = 0.0  # when the round under way ends

    def resume(self) -> None:
        """Go on waiting for the next round."""

    def _begin(self, order: SnapshotOrder | RoundOrder) -> None:
        if isinstance(order, RoundOrder):
            assert self.exchange.version == order.number, "a round is trained from its version"
            begins_at = max(self._clock.time(), self._free_at)
            self._free_at = begins_at + ROUND_STEPS * self._step_s
            if self._chance.random() >= SKIPS:
                self._clock.call_at(begins_at, super().resume)
        super()._begin(order)

    def _at_next_step(self, action: Callable[[], None]) -> None:
        self._clock.call_at(max(self._clock.time(), self._free_at), action)

    def _move(self, move: Move) -> Moved:
        moved = super()._move(move)
        if self._held_at is None:  # the first version
            self._held_at = self._clock.time()
        return moved


class AdapterTraining(RoundTraining):
    """Trains the factors of an adapter: each step moves one value halfway to a value of this
    client.
    """

    manifest = ADAPTERS

    @cached_property
    def _goal(self) -> Vector:
        return np.array([self._chance.uniform(-1.0, 1.0) for _ in self.values], np.float32)

    @cached_property
    def _changes(self) -> list[np.float32]:
        """The change in each step so far."""
        return []

    def work(self, begin: int, end: int) -> Vector:
        """See `VirtualTraining.work`; steps that are new begin at the present values."""
        size = len(self.values)
        for step in range(len(self._changes), end):
            place = step % size
            self._changes.append((self._goal[place] - self.values[place]) / np.float32(2))
        change = np.zeros(size, np.float32)
        np.add.at(change, np.arange(begin, end) % size, self._changes[begin:end])
        return change


class _FailingExchange(WatchedExchange):
    """Runs out of memory in some replays."""

    def put_fetch(self, version: int, index: int, frame: bytes) -> None:
        """See `Exchange.put_fetch`."""
        assert isinstance(self._training, ScalarTraining)
        if is_seeds(frame) and self._training.fails():
            raise LearnerError("not enough memory")
        super().put_fetch(version, index, frame)


class ScalarTraining(RoundTraining):
    """Measures the scalars of rounds of zeroth order, some of which are not finite."""

    manifest = LARGE
    exchange_type = _FailingExchange

    def fails(self) -> bool:
        """Whether the next replay or measurement fails."""
        return self._chance.random() < self._fails

    def _put(self, sequence: int, work: Work) -> None:
        if not work.steps:
            super()._put(sequence, work)
            return
        directions = self.exchange.directions
        assert directions is not None, "it is configured before it trains"
        shape = directions.steps, directions.probes
        scalars = np.array([self._chance.gauss(0.0, 1.0) for _ in range(math.prod(shape))])
        if self.fails():
            scalars[-1] = math.nan
        self.sent.expected[sequence] = scalars.astype(np.float32)
        made = self.sent.expected[sequence].reshape(shape)
        facts = {ORDER: 0.0}
        is_finite = not math.isnan(scalars[-1])
        self.exchange.put_snapshot(
            sequence, None, evolve(work, finite=is_finite, facts=facts, scalars=made)
        )


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
KEPT_COMMITS = 3
HEARTBEAT_S = 20.0
"""Two are the time in which a client on a slow link must take the last version."""
EXACT = ["codec.up=fp32", "codec.down=fp32"]
"""A product then shows what it is made of."""


SETTINGS = {
    "lora": ["tune.method=lora", "tune.rule=flexlora", "tune.rank=2", *EXACT],
    "zeroth": ["tune.method=zeroth", "tune.zo_history=8"],
}
"""Mode -> settings of the run."""


class TuneSimulation(Simulation):
    """A simulated run; `violations` and `counts` hold the result.

    `every_s` of its settings is the cap of a round.
    """

    kind = "tune"
    stuck_s = 300.0
    """Longer than a client needs for a version, or a run for a round, once lost sessions are known.
    """

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
        chance = self._rng("slow")
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
            slow = evolve(self.world.conditions, bytes_per_s=SLOW_BYTES_PER_S)
            self.network.set_conditions(name, self.server, slow)
        self._at(WATCH_EVERY_S, self._watch)
        super().begin()

    def _may_end(self, machine: ParameterServerMachine) -> bool:
        return machine.phase is not Phase.EMPTY

    # --- processes ---

    def _worker(self, clock: ProcessClock, name: str) -> VirtualWorker:
        chance = self._rng(name, self._incarnations, "worker")
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
        if event.topic in {ev.VersionCommitted, do.Commit}:
            self._is_full = event.topic is do.Commit
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
        if isinstance(event, Done) and isinstance(event.of, do.ReplaceBase):
            lost = event.of.version
            self.world.violated(f"{machine.name} lost version {lost}: {event.problem}")
        elif isinstance(event, Received) and isinstance(event.message, msg.Declined):
            self.happened[event.message.code] += 1

    def _watch(self) -> None:
        """Check that clients and run make progress. A lost session is known after a while."""
        now = self.scheduler.time()
        longest_s = self.stuck_s + self.config.session.expire_after_s
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
            newest = machine.version_sync.latest.version
            is_behind = machine.connected and machine.base.version < newest
            if before is None or before[:2] != at or not is_behind:
                self._held[name] = *at, now
            elif now - before[2] > longest_s:
                text = f"{name} stays at version {at[1]}, and {newest} is announced"
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
