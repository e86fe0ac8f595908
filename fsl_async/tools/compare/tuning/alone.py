"""Training without a network: one process on all records, or a site on its own. Imports torch."""

from __future__ import annotations

import math
import time

from torch import nn

from fsl_async.config.settings import Config
from fsl_async.learn.client.pretrain import autocast
from fsl_async.learn.models.forward import drawing
from fsl_async.learn.tune.tokens import Tokenized
from fsl_async.process.stopper import Stopper
from fsl_async.tools.compare.tuning.scores import Score, TunedModel


def train_alone(
    config: Config, base: str, name: str, data: Tokenized, steps: int, *, stop: Stopper
) -> tuple[TunedModel, float]:
    """Train `steps` steps as the built-in task does; returns the model, and the seconds of it.

    name: what the order of the samples follows from, with the seed. Raises the stopper's error.
    """
    tuned = TunedModel(config, base, name, steps=steps)
    fed, model = tuned.fed, tuned.model
    optimizer = fed.optimizer(model)
    scheduler = fed.scheduler(optimizer)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    model.train()
    begun = time.monotonic()
    with drawing(fed.device, fed.seed, name):
        for batch in data.shuffled(config.train.batch, seed=fed.seed, name=name):
            if stop.requested:
                raise stop.error(f"the comparison was ended by {stop.reason}")
            with autocast(fed.device):
                loss, count, _ = tuned.objective.loss(model, batch)
            if count:
                loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(weights, config.train.clip_norm or math.inf)
            if math.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if not fed.step(tokens=count):
                break
    return tuned, time.monotonic() - begun


def score_alone(  # noqa: PLR0917 - those of train_alone
    config: Config,
    base: str,
    name: str,
    data: Tokenized,
    held: Tokenized,
    steps: int,
    *,
    stop: Stopper,
) -> tuple[Score, float]:
    """Train as `train_alone` does; returns the score of the end, and the seconds of training."""
    tuned, seconds = train_alone(config, base, name, data, steps, stop=stop)
    return tuned.score(held), seconds
