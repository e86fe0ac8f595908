"""Tuning by rounds on the virtual clock: adapters, and scalars of zeroth order.

A client trains ROUND_STEPS steps when it is called, gives the exchange its delta, and waits for the
next version. Orders that come during a round are carried out at its end.

Versions of runs that tune by rounds, made a second time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np
from attrs import evolve, field, mutable
from numpy.typing import NDArray

from fsl_async.learn.client.ports import Move, Moved, RoundOrder, SnapshotOrder, Vector, Work
from fsl_async.roles.machine import Event
from fsl_async.roles.sync.delta import ORDER, DeltaKey, MergedDelta
from fsl_async.roles.sync.weighting import staleness_discount
from fsl_async.store.errors import LearnerError
from fsl_async.store.manifest import Manifest
from fsl_async.store.records import VersionRecord
from fsl_async.store.seed_step import Directions, keys_of
from fsl_async.tools.sim.invariants import Lineage
from fsl_async.tools.sim.training import VirtualTraining, WatchedExchange
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
