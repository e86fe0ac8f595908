"""What an aggregation rule is. Pure, chunk by chunk.

The store passes a rule the same chunk of every client's delta as rows of a matrix. Row i is
weight_i * Delta_i, one row per client in the order of their names, so that the result does not
depend on the order of arrival. Several deltas of one client are summed into one row: a client that
sends twice counts once.

`Mean` is the weighted sum that `fsl_async.roles.sync.weighting` describes, and needs no rows.
`Latest` is one over rows of all clients, with those of earlier versions. The robust rules count
each client once whatever work it reports, because an attacker would report many tokens: weight_i is
the discount for staleness (times the clipping factor), and the store's scale is not used.

To add a rule for one run: `outer.aggregation = file.py:Class`, a class that derives from `Rule`
(docs/OWN_RULES.md). To add one for all: a file with such a class, and its name in `RULES`
(`__init__.py`) and in `Aggregation` (`fsl_async.config.settings`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from fsl_async.store.manifest import TensorPart


@frozen
class RowClient:
    """The client of a row. Of several deltas of one client: sums, the largest staleness, and the
    metrics of its last delta.

    weight: by which the row was multiplied; of several deltas their sum. staleness: versions
    between the delta's base and the newest one. metrics: as the client sent them with its delta;
    None: a number that is not finite.
    """

    name: str
    weight: float
    tokens: int
    steps: int
    staleness: int
    metrics: Mapping[str, float | None]


class Rule:
    """An aggregation rule that tolerates `byzantine` clients that may send anything."""

    name: ClassVar[str]
    by_rows: ClassVar[bool] = True
    """Whether it works on rows. If not, deltas are summed with their weights as they arrive."""
    reuses: ClassVar[bool] = False
    """Whether clients without a new delta have a row too, of their newest merged one.

    The result is then the weighted sum, which the store's scale multiplies.
    """
    needs_distances: ClassVar[bool] = False
    """Whether it selects by distances between complete rows: an extra pass over the deltas."""

    reads_metrics: ClassVar[bool] = False
    """Whether the clients' metrics are recorded with each version, for `combine`."""

    def __init__(self, byzantine: int = 1) -> None:
        self.byzantine = byzantine

    @property
    def least(self) -> int:
        """Smallest number of clients it accepts."""
        return 1

    def choose(self, squared_distances: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which rows are used, bool (n,). Called when `needs_distances`.

        squared_distances: float64 (n, n).
        """
        return np.ones(len(squared_distances), np.bool_)

    def combine(
        self,
        rows: NDArray[np.float32],
        clients: Sequence[RowClient],
        parts: Sequence[TensorPart],
    ) -> NDArray[np.float32]:
        """Return the aggregate of `rows`, float32, (values,).

        rows: float32, (n, values), one of each client; they may be changed, and the result may be
        one of them. clients: of the rows. parts: the tensors that lie in this chunk, by name; a
        rule may treat them differently. The result must follow from the arguments alone: after a
        crash a version is made again.
        """
        raise NotImplementedError


class Mean(Rule):
    """The weighted mean (McMahan et al. 2017, arXiv:1602.05629).

    One attacker can move it anywhere.
    """

    name = "mean"
    by_rows = False


def sum_of(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the sum of the rows, in the first of them.

    The rows are summed in fp32 in their order, one rounding each, so every machine gets the same
    bits.
    """
    total: NDArray[np.float32] = rows[0]
    for row in rows[1:]:
        np.add(total, row, out=total)
    return total


def mean_of(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean over the rows, in the first of them; see `sum_of`."""
    total = sum_of(rows)
    np.multiply(total, np.float32(1.0 / len(rows)), out=total)
    return total
