"""A number for an answer, learned from preferences."""

from torch import nn
from torch.nn import functional

from fsl_async.learn.tune.objectives.base import Sums, Tuning, logits_of, of_samples
from fsl_async.learn.tune.tokens import TokenBatch


class Reward(Tuning):
    """A reward model (Bradley and Terry 1952; Ouyang et al., arXiv:2203.02155).

    The model has a head with one output, read at the last token. A sample's loss is
    -log sigmoid(chosen - rejected).
    """

    def sums(self, model: nn.Module, batch: TokenBatch) -> Sums:
        """Loss of each sample, which counts as one."""
        rewards = logits_of(model, batch).float()[:, 0]
        margins = rewards[0::2] - rewards[1::2]
        return of_samples(-functional.logsigmoid(margins), margins)
