"""Preferences between two answers and the likelihood of the better one, in one loss."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fsl_async.learn.tune.objectives.base import Sums, Tuning, of_samples, token_logps
from fsl_async.learn.tune.tokens import UNTRAINED, TokenBatch


class Orpo(Tuning):
    """Odds ratio preference optimization (Hong et al., arXiv:2403.07691).

    With mean log-probabilities of a completion's tokens, and odds(p) = p / (1 - p), a sample's loss
    is -log sigmoid(log odds(chosen) - log odds(rejected)) times beta, and the mean loss of a token
    of prompt and chosen completion, as the authors' program has it; tokens of a batch weigh the
    same.
    """

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def sums(self, model: nn.Module, batch: TokenBatch) -> Sums:
        """Loss of each sample, which counts as one."""
        every = np.where(batch.mask == 1, batch.ids, UNTRAINED)
        logps, places, _ = token_logps(model, batch, every)
        is_trained = torch.from_numpy(batch.labels[:, 1:][every[:, 1:] != UNTRAINED] != UNTRAINED)
        is_trained = is_trained.to(logps.device)
        sequences = len(batch.ids)
        whole = _sums(logps, places, sequences)
        answers = _sums(logps[is_trained], places[is_trained], sequences)
        counts = _sums(torch.ones_like(logps)[is_trained], places[is_trained], sequences)
        means = answers / counts
        odds = means - torch.log1p(-torch.exp(means))
        margins = odds[0::2] - odds[1::2]
        tokens = int((every[0::2, 1:] != UNTRAINED).sum())
        likelihood = -whole[0::2] * (len(margins) / tokens)
        return of_samples(likelihood - self._beta * functional.logsigmoid(margins), margins)


def _sums(values: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, places, values)
