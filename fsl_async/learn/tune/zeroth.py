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

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import TaskError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.tune.directions import add_steps
from fsl_async.store.seed_step import Directions
from fsl_codecs import direction_keys

Loss = Callable[[Tensor, object], float]
"""The mean loss over a batch at a vector of weights, float32 (values,). It must be the same for the
same batch: dropout off, no statistics updated."""


def measure_round(
    fed: Fed,
    weights: ModelWeights,
    loss: Callable[[Any], float],
    batches: Iterable[object],
    *,
    number: int,
) -> NDArray[np.float32]:
    """Measure the scalars of round `number`, as the run's [tune] table says: float32 (K, P).

    For `fed.end_round`. weights: of the attached model. loss: of a batch at the model's present
    weights; called without gradients, with the model in evaluation mode. batches: K, tune.zo_steps.
    Raises TaskError for weights that are not fp32.
    """
    tune = TuneConfig(**fed.config["tune"])
    directions = Directions(fed.seed, tune.zo_steps, tune.zo_probes, tune.zo_rate)
    with probing(weights) as (base, put):

        def at(vector: Tensor, batch: object) -> float:
            put(vector)
            return loss(batch)

        return probe_round(at, base, batches, directions, number=number, mu=tune.zo_mu)


def probe_round(
    loss: Loss,
    weights: Tensor,
    batches: Iterable[object],
    directions: Directions,
    *,
    number: int,
    mu: float,
) -> NDArray[np.float32]:
    """Return the scalars of round `number`: float32 (K, P).

    weights: the round's base, float32 (values,); it is only read. batches: at least K. mu: the
    distance of a probe from the weights.
    """
    steps, probes = directions.steps, directions.probes
    keys = direction_keys(directions.seed, number, 1, steps, probes).reshape(steps, probes, 1, 2)
    scalars = np.zeros((steps, probes), np.float32)
    distance = np.float32(mu)
    local, probed = weights, torch.empty_like(weights)

    def at(k: int, p: int, step: np.float32, batch: object) -> float:
        probed.copy_(local)
        add_steps(probed, keys[k, p], np.array([step], np.float32))
        return loss(probed, batch)

    for k, batch in zip(range(steps), batches, strict=False):
        for p in range(probes):
            difference = at(k, p, distance, batch) - at(k, p, -distance, batch)
            scalars[k, p] = difference / (2 * float(distance))
        if k + 1 < steps:
            local = weights.clone() if local is weights else local
            step = directions.step(number, scalars[k])
            add_steps(local, keys[k, :, 0], step.scalars.ravel())
    return scalars


@contextmanager
def probing(weights: ModelWeights) -> Iterator[tuple[Tensor, Callable[[Tensor], None]]]:
    """Yield a copy of a model's weights, float32 (values,), and a function that sets them.

    Both are on the model's device. At the end the model has the weights of before, to the bit, and
    its modes of before; in between all of it is in evaluation mode, without gradients. Raises
    TaskError for weights that are not fp32.
    """
    pieces = list(weights.pieces())
    if any(piece.dtype != torch.float32 for piece, _, _ in pieces):
        raise TaskError("zeroth order needs fp32 weights where it trains: steps vanish in others")
    base = torch.empty(weights.layout.values, device=pieces[0][0].device)
    with torch.no_grad():
        for piece, start, stop in pieces:
            base[start:stop].view(piece.shape).copy_(piece)

    def put(vector: Tensor) -> None:
        with torch.no_grad():
            for piece, start, stop in pieces:
                piece.copy_(vector[start:stop].view(piece.shape))

    modes = [(module, module.training) for module in weights.module.modules()]
    weights.module.eval()
    try:
        with torch.no_grad():
            yield base, put
    finally:
        put(base)
        for module, mode in modes:
            module.training = mode
