"""How far the deltas of a round agree, which tells whether clients train too long alone. Pure.

A delta is progress that all clients make, and drift that is its client's own. The cosine between
two clients' deltas is about the share of the first: near 1 averaging loses nothing, near 0 most of
what each client trained is averaged away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsl_async.roles.sync.delta import MergedDelta


def mean_cosine(merged: Sequence[MergedDelta], scale: float, average_norm: float) -> float | None:
    """The weighted mean cosine between two deltas of a round, -1 to 1; None with fewer than two.

    average_norm: L2 norm of scale * sum_i weight_i * Delta_i. With a_i = weight_i |Delta_i| the
    square of the sum is sum_i a_i^2 + sum_(i != j) a_i a_j cos_ij, so no delta is read again.
    """
    lengths = [one.weight * one.norm for one in merged]
    own = math.fsum(length**2 for length in lengths)
    pairs = math.fsum(lengths) ** 2 - own
    if not scale or pairs <= 1e-9 * own or not math.isfinite(pairs):
        return None
    return max(-1.0, min(1.0, ((average_norm / scale) ** 2 - own) / pairs))
