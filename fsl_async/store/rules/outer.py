"""Outer step: from the average pseudo-gradient to the change that every node applies.

Pure, chunk by chunk, fp32. Signs: a client that trained from Theta_v to u sends the pseudo-gradient
Delta = Theta_v - u, so descending along Delta moves towards u, as for any gradient (Douillard et
al., DiLoCo, arXiv:2311.08105).

    average    = scale * sum_i weight_i * Delta_i       (fsl_async.roles.sync.weighting)
    change     = optimizer.step(average, state)         such as -learning_rate * nesterov(average)
    desired    = change + residual
    sent       = decode(encode(desired))                lossy; this is what clients receive
    Theta_next = Theta + sent                           one fp32 add, bit-identical on every node
    residual   = desired - sent                         coding error, sent with the next version

The ps applies what it sent, not what it wanted to send, so all nodes stay equal; the residual is
error feedback (Seide et al. 2014, 1-bit SGD; Karimireddy et al., arXiv:1901.09847).

Nesterov momentum is that of torch.optim.SGD(nesterov=True, dampening=0): momentum = m * momentum +
g; step = g + m * momentum, with momentum zero at the start. Plain averaging makes the new weights
the average of the clients' weights (McMahan et al., FedAvg, arXiv:1602.05629): step = average with
a learning rate of exactly one.

Full weights (docs/adr/0045). Where clients send u itself instead of a difference, plain averaging
is

    Theta_next = (sum_i weight_i * u_i + (1 / scale - sum_i weight_i) * Theta) * scale

in float64, rounded to fp32 once. It is the formula above with one rounding instead of four: with
one client the result is u to the bit. The second summand is the share that staleness discounts
leave to the current weights; without stale clients it is zero.

Buffers (the statistics of batch norm, constants) do not descend. The next version has the weighted
mean of those that clients have sent, which lies between theirs: with momentum, a rate or a coding
step, a variance could become negative (docs/adr/0142).

All functions work in place on C-contiguous float32 vectors of one length, so that the caller
controls memory. Every operation rounds to fp32 once; there is no fused multiply-add.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from attrs import frozen

from fsl_async.store.errors import NotFinite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from fsl_async.store.model.manifest import Manifest

    Values = NDArray[np.float32]

SHORT_ROUND_STEPS = 5.0
"""Steps of a round at which "growing" has a momentum of at most a half (docs/adr/0107)."""

ROUNDING = 1e-9
"""Relative; above the error of adding thousands of float64 weights, below any discount."""


@frozen
class OuterStep:
    """The numbers of one outer step. They are recorded, so a version can be made again.

    version: the one that the step leads to (1, 2, ...).
    """

    learning_rate: float
    momentum: float
    version: int = 0


class OuterOptimizer:
    """An outer optimizer: turns a round's average into a change of the weights.

    Its vectors are float32, of the model's size, and zeros at first; the store keeps, saves and
    recovers them. A step must depend on its arguments alone, because recovery repeats it, and it
    runs in several threads at once, each with other values.
    """

    name: ClassVar[str]
    vectors: tuple[str, ...] = ()

    def __init__(self, learning_rate: float = 0.7, momentum: float = 0.9) -> None:
        self.learning_rate, self.momentum = learning_rate, momentum

    def numbers(self, version: int, fade: float, steps: float) -> OuterStep:
        """Return the numbers of the outer step to `version` (1, 2, ...).

        fade: 1, and over the last part of a planned run linearly to 0 at its end. steps: of a
        client in the round, in the mean.
        """
        del fade, steps
        return OuterStep(self.learning_rate, self.momentum, version)

    def step(
        self, average: Values, state: Mapping[str, Values], numbers: OuterStep
    ) -> NDArray[np.float32]:
        """Return the change of the weights: float32, of the shape of `average`.

        average: of the pseudo-gradients, base minus trained, of some coordinates; may be changed
        and returned. state: the optimizer's vectors by name, of the same coordinates; to be changed
        in place.
        """
        raise NotImplementedError


class Average(OuterOptimizer):
    """Adds the mean delta itself; ignores its settings."""

    name = "average"

    def numbers(self, version: int, fade: float, steps: float) -> OuterStep:
        """See `OuterOptimizer.numbers`."""
        return OuterStep(1.0, 0.0, version)

    def step(
        self, average: Values, state: Mapping[str, Values], numbers: OuterStep
    ) -> NDArray[np.float32]:
        """See `OuterOptimizer.step`."""
        return np.negative(average, out=average)


class Nesterov(OuterOptimizer):
    """SGD with Nesterov momentum as torch.optim.SGD has it; plain SGD with a momentum of 0."""

    name = "nesterov"

    def __init__(self, learning_rate: float = 0.7, momentum: float = 0.9) -> None:
        super().__init__(learning_rate, momentum)
        self.vectors = ("momentum",) if momentum else ()

    def step(
        self, average: Values, state: Mapping[str, Values], numbers: OuterStep
    ) -> NDArray[np.float32]:
        """See `OuterOptimizer.step`."""
        if self.vectors:
            momentum, factor = state["momentum"], np.float32(numbers.momentum)
            np.multiply(momentum, factor, out=momentum)
            np.add(momentum, average, out=momentum)
            np.add(average, factor * momentum, out=average)
        return np.multiply(average, np.float32(-numbers.learning_rate), out=average)


class Growing(Nesterov):
    """Nesterov momentum that grows from averaging to `momentum` and fades out as a run ends.

    mu = min(momentum * fade, (version - 1) / (version + 9), s^2 / (s^2 + 25)) with s = steps, and
    the rate 1 - mu / 1.9; `learning_rate` is ignored. So the first version and the last one of a
    planned run are plain averages, and rounds of few steps, whose averages are mostly noise, have
    little momentum that would add it up. Why the rate: with a constant momentum mu, a step of rate
    r moves the weights by r (1 + mu) times the average at once, which must not exceed the average
    where clients converge within a round; 1 - mu / 1.9 is close to 1 / (1 + mu).
    """

    name = "growing"

    def numbers(self, version: int, fade: float, steps: float) -> OuterStep:
        """See `OuterOptimizer.numbers`."""
        momentum = min(
            self.momentum * fade,
            (version - 1) / (version + 9),
            steps**2 / (steps**2 + SHORT_ROUND_STEPS**2),
        )
        return OuterStep(1.0 - momentum / 1.9, momentum, version)


OPTIMIZERS: dict[str, type[OuterOptimizer]] = {
    one.name: one for one in (Growing, Nesterov, Average)
}


def mean_share(version: int) -> float:
    """Return the share by which the mean of versions moves to `version` >= 1: 4 / (version + 3).

    Version i then has a weight of about 4 i^3 / n^4 in the mean of n versions: half of the weight
    is on the last 16 %, and nine tenths on the last 44 % (polynomial-decay averaging, Shamir &
    Zhang, arXiv:1212.1824, with eta = 3).
    """
    return 4.0 / (version + 3.0)


def add_to_mean(
    mean: NDArray[np.float32],
    weights: NDArray[np.float32],
    share: float,
    *,
    room: NDArray[np.float32] | None = None,
) -> None:
    """Move `mean` towards `weights` by `share`, in place. room: scratch of the same shape."""
    part = np.subtract(weights, mean, out=room)
    np.multiply(part, np.float32(share), out=part)
    np.add(mean, part, out=mean)


def average_full(
    total: NDArray[np.float64], weights: NDArray[np.float32], member_weight: float, scale: float
) -> None:
    """Set `weights` to the average of full weights, in place.

    total: sum of weight_i * u_i, read only. member_weight: sum of weight_i. scale: that of the
    commit.
    """
    left = 1.0 / scale - member_weight
    if abs(left) <= ROUNDING * member_weight:
        # A division is exact where all clients have the same value, or where the mean is half way
        # between two fp32 numbers.
        np.divide(total, member_weight, out=weights, casting="same_kind")
    else:
        kept = np.multiply(weights, left, dtype=np.float64)
        kept += total
        np.multiply(kept, scale, out=weights, casting="same_kind")


def squared_norm(values: NDArray[np.float32]) -> float:
    """Return the sum of squares; not finite exactly when a value is not finite.

    Summed in fp32 by rows of 1,024 and then in double precision, which is exact to about 1e-7;
    where squares leave the range of fp32, all in double precision.
    """
    rows = len(values) // _ROW * _ROW
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        # Rows: a long dot product wakes the threads of its BLAS for 30 us of work, and they spin.
        parts = values[:rows].reshape(-1, _ROW)
        squares = parts[:, None, :] @ parts[:, :, None]  # np.vecdot, which NumPy 1 lacks
        found = float(np.add.reduce(squares, axis=None, dtype=np.float64))
        if rows < len(values):
            found += _squared_norm_wide(values[rows:])
        if found < _LEAST_SQUARE or not math.isfinite(found):
            # The square of the largest fp32 value is far below the largest double.
            found = _squared_norm_wide(values)
    return found


_ROW = 1024
_LEAST_SQUARE = 1e-20
"""Below it, squares of single values may have been rounded to zero."""


def _squared_norm_wide(values: NDArray[np.float32]) -> float:
    wide = values.astype(np.float64)
    return float(np.einsum("i,i->", wide, wide))


def check_finite(
    manifest: Manifest, index: int, norm_squared: float, weights: NDArray[np.float32]
) -> None:
    """Raise NotFinite if chunk `index` of a version's change or weights is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        # A sum is three times as fast as looking at each value, and finite only if all are.
        is_finite = math.isfinite(np.add.reduce(weights)) or np.isfinite(weights).all()
    if not (is_finite and math.isfinite(norm_squared)):
        start, _ = manifest.chunk_range(index)
        raise NotFinite(
            f"the outer step is not finite in tensor {manifest.tensor_at(start)!r} or after it"
        )
