"""Latest: the mean over all clients of the newest update of each, whether it is new or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fsl_async.store.aggregation.base import Rule, sum_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fsl_async.store.aggregation.base import RowClient
    from fsl_async.store.manifest import TensorPart


class Latest(Rule):
    """AFA-CS (Yang et al., "Anarchic Federated Learning", ICML 2022).

    The row of a client without a new delta is its newest merged one, so a client that seldom sends
    is in each version. The rows are summed anew for each version: nothing is subtracted in fp32.
    One attacker can move it anywhere.
    """

    name: ClassVar[str] = "latest"
    reuses: ClassVar[bool] = True

    def combine(
        self,
        rows: NDArray[np.float32],
        clients: Sequence[RowClient],
        parts: Sequence[TensorPart],
    ) -> NDArray[np.float32]:
        """Return the sum of the rows."""
        with np.errstate(over="ignore", invalid="ignore"):
            return sum_of(rows)
