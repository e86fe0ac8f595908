"""The coordinate-wise trimmed mean (Yin et al. 2018, arXiv:1803.01498, definition 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fsl_async.store.aggregation.base import Rule, mean_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fsl_async.store.aggregation.base import RowClient
    from fsl_async.store.manifest import TensorPart


class TrimmedMean(Rule):
    """The mean of each coordinate without its f largest and f smallest values."""

    name = "trimmed"

    @property
    def least(self) -> int:
        """One more than it leaves out."""
        return 2 * self.byzantine + 1

    def combine(
        self,
        rows: NDArray[np.float32],
        clients: Sequence[RowClient],
        parts: Sequence[TensorPart],
    ) -> NDArray[np.float32]:
        """See `Rule.combine`. The remaining values are summed from the smallest up."""
        rows.sort(axis=0)
        return mean_of(rows[self.byzantine : len(rows) - self.byzantine])
