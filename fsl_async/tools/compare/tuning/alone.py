"""Training without a network: one process on all records, or a site on its own. Imports torch."""

from __future__ import annotations

import math
import time

from torch import nn

from fsl_async.learn.client.pretrain import autocast
from fsl_async.learn.models.forward import drawing
from fsl_async.learn.tune.tokens import Tokenized
from fsl_async.process.stopper import Stopper
from fsl_async.tools.compare.tuning.scores import TunedModel


def train_alone(tuned: TunedModel, data: Tokenized, *, stop: Stopper) -> float:
    """Train as the built-in task does, to the end of the model's steps; returns the seconds.

    The order of the samples follows from the seed and the model's name. Raises the stopper's error.
    """
    fed, model, train = tuned.fed, tuned.model, tuned.config.train
    optimizer = fed.optimizer(model)
    scheduler = fed.scheduler(optimizer)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    model.train()
    begun = time.monotonic()
    with drawing(fed.device, fed.seed, fed.client_name):
        for batch in data.shuffled(train.batch, seed=fed.seed, name=fed.client_name):
            if stop.requested:
                raise stop.error(f"the comparison was ended by {stop.reason}")
            with autocast(fed.device):
                loss, count, _ = tuned.objective.loss(model, batch)
            if count:
                loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(weights, train.clip_norm or math.inf)
            if math.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if not fed.step(tokens=count):
                break
    return time.monotonic() - begun
