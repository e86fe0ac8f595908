"""What an aggregation rule is. Pure, chunk by chunk.

The store passes a rule the same chunk of every client's delta as rows of a matrix. Row i is
weight_i * Delta_i, one row per client in the order of their names, so that the result does not
depend on the order of arrival. Several deltas of one client are summed into one row: a client that
sends twice counts once.

`Mean` is the weighted sum that `fsl_async.roles.sync.weighting` describes, and needs no rows.
`Latest` is one over rows of all clients, with those of earlier versions. The robust rules count
each client once whatever work it reports, because an attacker would report many tokens: weight_i is
the discount for staleness (times the clipping factor), and the store's scale is not used.

To add a rule: a file with a class like those here, and its name in `RULES` (`__init__.py`) and in
`Aggregation` (`fsl_async.config.settings`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fsl_async.store.manifest import TensorPart


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
        out: NDArray[np.float32],
        parts: Sequence[TensorPart],
    ) -> None:
        """Write the aggregate of `rows` into `out`.

        rows: float32, (n, values), may be changed. out: float32, (values,). parts: the tensors that
        lie in this chunk, by name; a rule may treat them differently.
        """
        raise NotImplementedError


class Mean(Rule):
    """The weighted mean (McMahan et al. 2017, arXiv:1602.05629).

    One attacker can move it anywhere.
    """

    name = "mean"
    by_rows = False


def mean_of(rows: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Write the mean over the rows into `out`.

    The rows are summed in fp32 in their order, one rounding each, so every machine gets the same
    bits.
    """
    np.copyto(out, rows[0])
    for row in rows[1:]:
        np.add(out, row, out=out)
    np.multiply(out, np.float32(1.0 / len(rows)), out=out)
