"""Preferences between two answers, held back by the base."""

from torch import nn
from torch.nn import functional

from fsl_async.learn.tune.objectives.base import (
    BaseLogps,
    Sums,
    Tuning,
    completion_logps,
    of_samples,
)
from fsl_async.learn.tune.tokens import TokenBatch


class Dpo(Tuning):
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290).

    With log-probabilities of whole completions, and of the base in brackets, a sample's loss is
    -log sigmoid(beta (chosen - [chosen] - rejected + [rejected])).
    """

    uses_base = True

    def __init__(self, beta: float) -> None:
        self._beta = beta
        self._base = BaseLogps()

    def sums(self, model: nn.Module, batch: TokenBatch) -> Sums:
        """Loss of each sample, which counts as one."""
        base = self._base.of(model, batch)
        logps, _ = completion_logps(model, batch)
        ratios = logps - base.to(logps.device)
        margins = ratios[0::2] - ratios[1::2]
        return of_samples(-functional.logsigmoid(self._beta * margins), margins)
