"""Zeroth order: a round's projected gradients from losses alone. Pure functions on weights.

MeZO (Malladi et al., arXiv:2305.17333) with the rounds of DeComFL (Li et al., arXiv:2405.15861),
and central differences:

    g[k,p] = (L(w + mu z[k,p]) - L(w - mu z[k,p])) / (2 mu)
    w <- w + z[k,p] s,   s = fp32(-rate * g[k,p] / P)

The P probes of a step are measured from the same w, and then w moves along each in order. There are
K local steps, each on a batch of its own; the first is from the round's base. Both perturbed copies
are computed from w: adding and subtracting in place leaves rounding errors, and a client that
probed would hold other weights than one that did not. The caller's weights are never written, and
the steps of a round end with it: the next version replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from fsl_async.learn.tune.directions import Place, Weights, add_to, moved
from fsl_async.store.seed_step import Directions
from fsl_codecs import direction_keys

Loss = Callable[[Weights, object], float]
"""The mean loss over a batch for these weights. The same batch must give the same loss again:
dropout off, no statistics updated."""


def probe_round(
    loss: Loss,
    weights: Weights,
    places: Sequence[Place],
    batches: Iterable[object],
    directions: Directions,
    *,
    number: int,
    mu: float,
) -> NDArray[np.float32]:
    """Return the scalars of round `number`: float32 (K, P).

    weights: of the round's base, float32; they are only read. batches: at least K. mu: the distance
    of a probe.
    """
    steps, probes = directions.steps, directions.probes
    keys = direction_keys(directions.seed, number, 1, steps, probes).reshape(steps, probes, 2)
    scalars = np.zeros((steps, probes), np.float32)
    distance = float(np.float32(mu))
    local = weights
    for k, batch in zip(range(steps), batches, strict=False):
        for p, key in enumerate(keys[k].tolist()):
            above = loss(moved(local, places, key, distance), batch)
            below = loss(moved(local, places, key, -distance), batch)
            scalars[k, p] = (above - below) / (2 * distance)
        if k + 1 < steps:
            if local is weights:
                local = {place.name: weights[place.name].detach().clone() for place in places}
            step = directions.step(number, scalars[k]).scalars[0]
            add_to(local, places, keys[k].tolist(), step.tolist())
    return scalars


def loss_of(
    module: nn.Module,
    compute: Callable[[nn.Module, object], Tensor],
    *,
    rest: Weights | None = None,
) -> Loss:
    """Return a loss for `probe_round` that runs `module` with other weights, in evaluation mode.

    compute: returns the mean loss of a batch, a tensor of one value, given a module to call. rest:
    weights that take the place of the module's and are not probed.
    """

    def loss(weights: Weights, batch: object) -> float:
        was_training = module.training
        module.eval()
        try:
            with torch.inference_mode():
                called = _With(module, {**(rest or {}), **weights})
                return float(compute(called, batch))
        finally:
            module.train(was_training)

    return loss


class _With(nn.Module):
    """A module called with other weights."""

    def __init__(self, module: nn.Module, weights: Weights) -> None:
        super().__init__()
        self._module = [module]  # in a list: it is no child
        self._weights = dict(weights)

    def forward(self, *arguments: object, **named: object) -> object:
        return functional_call(self._module[0], self._weights, arguments, named)
