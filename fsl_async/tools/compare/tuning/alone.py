"""Training without a network: one process on all records, or a site on its own. Imports torch."""

from __future__ import annotations

import time

from fsl_async.learn.models.forward import drawing
from fsl_async.learn.tune.steps import GradientSteps
from fsl_async.learn.tune.tokens import Tokenized
from fsl_async.process.stopper import Stopper
from fsl_async.tools.compare.tuning.scores import TunedModel


def train_alone(tuned: TunedModel, data: Tokenized, *, stop: Stopper) -> float:
    """Train as the built-in task does, to the end of the model's steps; returns the seconds.

    The order of the samples follows from the seed and the model's name. Raises the stopper's error.
    """
    fed, train = tuned.fed, tuned.config.train
    steps = GradientSteps(fed, tuned.model, tuned.objective)
    begun = time.monotonic()
    with drawing(fed.device, fed.seed, fed.client_name):
        for batch in data.shuffled(train.batch, seed=fed.seed, name=fed.client_name):
            if stop.requested:
                raise stop.error(f"the comparison was ended by {stop.reason}")
            count, _ = steps.step(batch)
            if not fed.step(tokens=count):
                break
    return time.monotonic() - begun
