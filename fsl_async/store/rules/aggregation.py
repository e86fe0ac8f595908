"""The base class of aggregation rules, and the built-in ones. Pure, chunk by chunk.

The store passes a rule the same chunk of every client's delta as rows of a matrix. Row i is
weight_i * Delta_i, one row per client in the order of their names, so that the result does not
depend on the order of arrival. Several deltas of one client are summed into one row: a client that
sends twice counts once.

`Mean` is the weighted sum that `fsl_async.roles.sync.weighting` describes, and needs no rows.
`Latest` is one over rows of all clients, with those of earlier versions. The robust rules count
each client once whatever work it reports, because an attacker would report many tokens: weight_i is
the discount for staleness (times the clipping factor), and the store's scale is not used.

To add a rule for one run: `outer.aggregation = file.py:Class`, a class that derives from `Rule`
(docs/OWN_RULES.md). To add one for all: such a class here, in `RULES`, and its name in
`Aggregation` (`fsl_async.config.settings`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from fsl_async.store.model.manifest import TensorPart

    Values = NDArray[np.float32]
    Clients = Sequence["RowClient"]
    Parts = Sequence[TensorPart]


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
    """Whether it works on rows. If not, deltas are summed with their weights."""
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

    def combine(self, rows: Values, clients: Clients, parts: Parts) -> Values:
        """Return the aggregate of `rows`, float32, (values,).

        rows: float32, (n, values), one of each client; they may be changed, and the result may be
        one of them. clients: of the rows. parts: the tensors that lie in this chunk, by name; a
        rule may treat them differently. The result must follow from the arguments alone: after a
        crash a version is made again. Several threads call this at once, so nothing of the rule may
        change.
        """
        raise NotImplementedError


def sum_of(rows: Values) -> Values:
    """Return the sum of the rows, in the first of them.

    The rows are summed in fp32 in their order, one rounding each, so every machine gets the same
    bits.
    """
    total: Values = rows[0]
    for row in rows[1:]:
        np.add(total, row, out=total)
    return total


def mean_of(rows: Values) -> Values:
    """Return the mean over the rows, in the first of them; see `sum_of`."""
    total = sum_of(rows)
    np.multiply(total, np.float32(1.0 / len(rows)), out=total)
    return total


class Mean(Rule):
    """The weighted mean (McMahan et al. 2017, arXiv:1602.05629).

    One attacker can move it anywhere.
    """

    name = "mean"
    by_rows = False


class TrimmedMean(Rule):
    """The mean of each coordinate without its f largest and f smallest values.

    Yin et al. 2018, arXiv:1803.01498, definition 2.
    """

    name = "trimmed"

    @property
    def least(self) -> int:
        """One more than it leaves out."""
        return 2 * self.byzantine + 1

    def combine(self, rows: Values, clients: Clients, parts: Parts) -> Values:
        """See `Rule.combine`. The remaining values are summed from the smallest up."""
        rows.sort(axis=0)
        return mean_of(rows[self.byzantine : len(rows) - self.byzantine])


class CoordinateMedian(Rule):
    """The middle value of each coordinate, or the mean of the two middle ones.

    Yin et al. 2018, arXiv:1803.01498, definition 1.
    """

    name = "median"

    @property
    def least(self) -> int:
        """Enough that attackers are less than half."""
        return 2 * self.byzantine + 1

    def combine(self, rows: Values, clients: Clients, parts: Parts) -> Values:
        """See `Rule.combine`."""
        rows.sort(axis=0)
        return mean_of(rows[(len(rows) - 1) // 2 : len(rows) // 2 + 1])


class MultiKrum(Rule):
    """The mean of the m = n - f - 2 deltas with the lowest scores; needs 2 f + 2 < n.

    The score of a delta is the sum of its squared distances to its n - f - 2 nearest others. Ties
    go to the first. The paper leaves m open; with m equal to the number of distances in a score,
    every selected delta is close to mostly honest ones. Blanchard et al. 2017, "Machine learning
    with adversaries", section 4.
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

    def combine(self, rows: Values, clients: Clients, parts: Parts) -> Values:
        """See `Rule.combine`; `rows` are the selected ones."""
        return mean_of(rows)


class Latest(Rule):
    """AFA-CS (Yang et al., "Anarchic Federated Learning", ICML 2022).

    The row of a client without a new delta is its newest merged one, so a client that seldom sends
    is in each version. The rows are summed anew for each version: nothing is subtracted in fp32.
    One attacker can move it anywhere.
    """

    name: ClassVar[str] = "latest"
    reuses: ClassVar[bool] = True

    def combine(self, rows: Values, clients: Clients, parts: Parts) -> Values:
        """Return the sum of the rows."""
        with np.errstate(over="ignore", invalid="ignore"):
            return sum_of(rows)


RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (Mean, TrimmedMean, CoordinateMedian, MultiKrum, Latest)
}


def rule_named(name: str, byzantine: int = 1) -> Rule:
    """Return the rule called `name`, against `byzantine` clients that may send anything.

    ValueError lists the rules.
    """
    if name not in RULES:
        raise ValueError(f"no aggregation is called {name!r}; there are {', '.join(RULES)}")
    return RULES[name](byzantine)
