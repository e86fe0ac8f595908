"""Steps by gradients on the weights of a tuned model that train."""

from __future__ import annotations

import math

import torch
from torch import nn

from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.pretrain import autocast
from fsl_async.learn.tune.objectives import Tuning
from fsl_async.learn.tune.tokens import TokenBatch


class GradientSteps:
    """The run's optimizer and schedule on a model that `fed` has. One call a step."""

    def __init__(self, fed: Fed, model: nn.Module, objective: Tuning) -> None:
        self._fed, self._model, self._objective = fed, model.train(), objective
        self._optimizer = fed.optimizer(model)
        self._scheduler = fed.scheduler(self._optimizer)
        groups = self._optimizer.param_groups
        self._trained = [weight for group in groups for weight in group["params"]]
        clip_norm = float(fed.config.get("train", {}).get("clip_norm", 1.0))
        self._clip_norm = clip_norm or math.inf

    def step(self, batch: TokenBatch) -> tuple[int, dict[str, float]]:
        """Make a step; returns what the batch counts, and metrics.

        A batch whose gradients are not finite changes nothing.
        """
        with autocast(self._fed.device):
            loss, count, metrics = self._objective.loss(self._model, batch)
        if count:
            loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._trained, self._clip_norm)
        is_skipped = not bool(torch.isfinite(norm))
        if not is_skipped:
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._scheduler.step()
        return count, {**metrics, "skipped": float(is_skipped)}
