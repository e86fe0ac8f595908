"""What a rule of aggregation is. Pure, chunk by chunk.

The store hands a rule the same chunk of every client's delta at a time, as rows of a matrix: row i
is weight_i * Delta_i, one for each client, in the order of their names, so that the same deltas
give the same bits whatever the order in which they came. Several deltas of one client are one row,
their sum: who sends twice shall not count twice.

Weights. `Mean` is the weighted sum that `fsl_async.roles.sync.weighting` describes, and needs no
rows. The robust rules count each client once, whatever it says of its work, because tokens are what
a liar would claim: weight_i is the discount for staleness (times what clipping leaves), and the
store's scale is not used.

To add a rule: a file with a class like those here, and its name in `RULES` (`__init__.py`) and in
`Aggregation` (`fsl_async.config.settings`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Rule:
    """A rule against `byzantine` clients that may send anything."""

    name: ClassVar[str]
    by_rows: ClassVar[bool] = True
    """Whether it works on rows. If not, deltas are added up as they come, by their weights."""
    needs_distances: ClassVar[bool] = False
    """Whether it chooses by the distances between whole rows, which takes a pass of its own over
    the deltas.
    """

    def __init__(self, byzantine: int = 1) -> None:
        self.byzantine = byzantine

    @property
    def least(self) -> int:
        """How many clients it needs."""
        return 1

    def choose(self, squared_distances: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which rows are used, bool (n,); `squared_distances`: float64 (n, n). Asked where
        `needs_distances`.
        """
        return np.ones(len(squared_distances), np.bool_)

    def combine(self, rows: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Write what the rows (float32, n x values; may be changed) come to into `out` (float32,
        values).
        """
        raise NotImplementedError


class Mean(Rule):
    """The weighted mean (McMahan et al. 2017, arXiv:1602.05629). One client that lies can move it
    anywhere.
    """

    name = "mean"
    by_rows = False


def mean_of(rows: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """The mean over the rows, summed in fp32 in their order: one rounding for each, on every
    machine.
    """
    np.copyto(out, rows[0])
    for row in rows[1:]:
        np.add(out, row, out=out)
    np.multiply(out, np.float32(1.0 / len(rows)), out=out)
