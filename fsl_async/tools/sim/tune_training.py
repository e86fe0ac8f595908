"""Tuning by rounds on the virtual clock: adapters, and scalars of zeroth order.

A client trains ROUND_STEPS steps when it is called, gives the exchange its delta, and waits for the
next version. Orders that come during a round are carried out at its end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cached_property

import numpy as np
from attrs import evolve

from fsl_async.learn.client.ports import Move, Moved, RoundOrder, SnapshotOrder, Vector, Work
from fsl_async.roles.machine import Event
from fsl_async.roles.sync.delta import ORDER
from fsl_async.store.errors import LearnerError
from fsl_async.store.manifest import Manifest
from fsl_async.tools.sim.training import VirtualTraining, WatchedExchange
from fsl_codecs import is_seeds
from fsl_transport import Scheduler

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
