"""Versions of runs that tune by rounds, made a second time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from attrs import field, mutable
from numpy.typing import NDArray

from fsl_async.learn.client.ports import Vector
from fsl_async.roles.sync.delta import DeltaKey, MergedDelta
from fsl_async.roles.sync.weighting import staleness_discount
from fsl_async.store.records import VersionRecord
from fsl_async.store.seed_step import Directions, keys_of
from fsl_async.tools.sim.invariants import Lineage
from fsl_codecs import add_signs

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
