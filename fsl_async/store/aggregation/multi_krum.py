"""Multi-Krum (Blanchard et al. 2017, "Machine learning with adversaries", section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fsl_async.store.aggregation.base import Rule, mean_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fsl_async.store.aggregation.base import RowClient
    from fsl_async.store.manifest import TensorPart


class MultiKrum(Rule):
    """The mean of the m = n - f - 2 deltas with the lowest scores; needs 2 f + 2 < n.

    The score of a delta is the sum of its squared distances to its n - f - 2 nearest others. Ties
    go to the first. The paper leaves m open; with m equal to the number of distances in a score,
    every selected delta is close to mostly honest ones.
    """

    name = "multi-krum"
    needs_distances = True

    @property
    def least(self) -> int:
        """The smallest n that the paper's theorem allows."""
        return 2 * self.byzantine + 3

    def choose(self, squared_distances: NDArray[np.float64]) -> NDArray[np.bool_]:
        """See `Rule.choose`."""
        count = len(squared_distances)
        near = count - self.byzantine - 2
        others = squared_distances.copy()
        np.fill_diagonal(others, np.inf)
        others.sort(axis=1)
        scores = others[:, :near].sum(axis=1)
        chosen = np.zeros(count, np.bool_)
        chosen[np.argsort(scores, kind="stable")[:near]] = True
        return chosen

    def combine(
        self,
        rows: NDArray[np.float32],
        clients: Sequence[RowClient],
        parts: Sequence[TensorPart],
    ) -> NDArray[np.float32]:
        """See `Rule.combine`; `rows` are the selected ones."""
        return mean_of(rows)
