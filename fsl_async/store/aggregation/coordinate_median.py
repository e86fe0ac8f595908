"""The coordinate-wise median (Yin et al. 2018, arXiv:1803.01498, definition 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fsl_async.store.aggregation.base import Rule, mean_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fsl_async.store.aggregation.base import RowClient
    from fsl_async.store.manifest import TensorPart


class CoordinateMedian(Rule):
    """The middle value of each coordinate, or the mean of the two middle ones."""

    name = "median"

    @property
    def least(self) -> int:
        """Enough that attackers are less than half."""
        return 2 * self.byzantine + 1

    def combine(
        self,
        rows: NDArray[np.float32],
        clients: Sequence[RowClient],
        parts: Sequence[TensorPart],
    ) -> NDArray[np.float32]:
        """See `Rule.combine`."""
        rows.sort(axis=0)
        return mean_of(rows[(len(rows) - 1) // 2 : len(rows) // 2 + 1])
