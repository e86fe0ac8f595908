"""An aggregation rule: the geometric median of each chunk (Pillutla et al., arXiv:1912.13445).

    fsl-node --role ps --set outer.aggregation=examples/rules/geometric_median.py:GeometricMedian

It is the point with the smallest sum of distances to the clients' changes, so fewer than half of
the clients cannot move it far. Weiszfeld's iteration, smoothed, on each chunk alone.
"""

import numpy as np

from fsl_async.store.rules import Rule


class GeometricMedian(Rule):
    """The geometric median of each chunk."""

    steps, smallest = 20, 1e-6

    @property
    def least(self):
        """Enough clients that `outer.byzantine` of them are less than half."""
        return 2 * self.byzantine + 1

    def combine(self, rows, clients, parts):
        """See `Rule.combine`."""
        points = rows.astype(np.float64)
        median = np.median(points, axis=0)
        for _ in range(self.steps):
            distances = np.linalg.norm(points - median, axis=1)
            shares = 1.0 / np.maximum(distances, self.smallest)
            median = np.sum(shares[:, None] * points, axis=0) / shares.sum()
        return median.astype(np.float32)
