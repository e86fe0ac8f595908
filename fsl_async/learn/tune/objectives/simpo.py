"""Preferences between two answers, without a base."""

from torch import nn
from torch.nn import functional

from fsl_async.learn.tune.objectives.base import Sums, Tuning, completion_logps, of_samples
from fsl_async.learn.tune.tokens import TokenBatch


class Simpo(Tuning):
    """Simple preference optimization (Meng et al., arXiv:2405.14734).

    With mean log-probabilities of a completion's tokens a sample's loss is
    -log sigmoid(beta (chosen - rejected) - gamma).
    """

    def __init__(self, beta: float, gamma: float) -> None:
        self._beta, self._gamma = beta, gamma

    def sums(self, model: nn.Module, batch: TokenBatch) -> Sums:
        """Loss of each sample, which counts as one."""
        logps, counts = completion_logps(model, batch)
        means = logps / counts
        margins = means[0::2] - means[1::2]
        return of_samples(-functional.logsigmoid(self._beta * margins - self._gamma), margins)
