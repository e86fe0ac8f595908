"""Answers that were found good or bad, one by one."""

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from fsl_async.errors import DataError
from fsl_async.learn.models.forward import evaluating
from fsl_async.learn.tune.objectives.base import (
    BaseLogps,
    Sums,
    Tuning,
    base_logps,
    completion_logps,
    of_samples,
)
from fsl_async.learn.tune.tokens import UNTRAINED, TokenBatch


class Kto(Tuning):
    """Kahneman-Tversky optimization (Ethayarajh et al., arXiv:2402.01306).

    With r the log-probability of a whole completion less the base's, a sample's loss is
    1 - sigmoid(beta (r - kl)) where it is good, 1 - sigmoid(beta (kl - r)) where it is bad. kl is
    one number of a batch, never of several sites: the mean of r over prompts with the completion of
    the sample before, at least 0, without a gradient.
    """

    uses_base = True

    def __init__(self, beta: float) -> None:
        self._beta = beta
        self._base = BaseLogps()

    def sums(self, model: nn.Module, batch: TokenBatch) -> Sums:
        """Loss of each sample, which counts as one. Raises DataError for a batch of one."""
        if len(batch.rows) < 2:
            raise DataError("kto compares a prompt with another's completion: train.batch >= 2")
        base, kl = self._base.of(model, batch), self._kl(model, batch)
        logps, _ = completion_logps(model, batch)
        ratios = logps - base.to(logps.device)
        assert batch.goods is not None
        signs = torch.from_numpy(batch.goods).to(ratios.device) * 2.0 - 1.0
        margins = signs * (ratios - kl.to(ratios.device))
        return of_samples(1 - torch.sigmoid(self._beta * margins), margins)

    def _kl(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        mixed = mismatched(batch)
        with torch.no_grad(), evaluating(model):
            logps, _ = completion_logps(model, mixed)
        return (logps - base_logps(model, mixed).to(logps.device)).mean().clamp(min=0)


def mismatched(batch: TokenBatch) -> TokenBatch:
    """Return the batch with each prompt before the completion of the sample before it."""
    parts = []
    for ids, mask, labels in zip(batch.ids, batch.mask, batch.labels, strict=True):
        length, first = int(mask.sum()), int(np.argmax(labels != UNTRAINED))
        parts.append((ids[:first], ids[first:length]))
    rows = [
        (prompt, parts[number - 1][1]) for number, (prompt, _) in enumerate(parts)
    ]  # the first has the last one's
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = np.full((len(rows), width), batch.ids.flat[0], np.int64)
    mask, labels = np.zeros_like(ids), np.full_like(ids, UNTRAINED)
    for number, (prompt, answer) in enumerate(rows):
        stop = len(prompt) + len(answer)
        ids[number, :stop] = np.concatenate([prompt, answer])
        mask[number, :stop] = 1
        labels[number, len(prompt) : stop] = answer
    return attrs.evolve(batch, ids=ids, mask=mask, labels=labels)
