"""The next token, over trained tokens."""

from torch import nn

from fsl_async.learn.tune.objectives.base import Sums, Tuning, completion_logps
from fsl_async.learn.tune.tokens import TokenBatch


class Lm(Tuning):
    """Cross entropy of the next token, over trained tokens."""

    def sums(self, model: nn.Module, batch: TokenBatch) -> Sums:
        """Loss of each sample; it counts its trained tokens."""
        logps, counts = completion_logps(model, batch)
        return Sums(-logps, counts, None)
