"""Rewards of answers that the model itself has given."""

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fsl_async.learn.models.adapters import adapters_off
from fsl_async.learn.tune.objectives.base import Outcome, Sums, Tuning, token_logps
from fsl_async.learn.tune.tokens import TokenBatch

CLIP = 0.2
"""How far the probability of a token may move, as a share, before it gives no more gradient."""
MOST_RATIO = 4.0
"""The largest ratio of probabilities that counts against a bad answer (Prime Intellect,
arXiv:2505.07291): without it one token that has become likely outweighs a batch."""
EPSILON = 1e-4


@attrs.frozen(slots=True, eq=False)
class AnswerBatch(TokenBatch):
    """Prompts with answers, of which the answers' tokens are trained.

    advantages: float32 (sequences,). metrics: of the batch, such as its mean reward.
    logps: float32 (tokens of all answers,), of the model that gave them; None: it is this model, as
    it is now.
    """

    advantages: npt.NDArray[np.float32]
    metrics: dict[str, float]
    logps: npt.NDArray[np.float32] | None = None


def advantages_of(rewards: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return how much better each answer is than its group. rewards: float32 (prompts, group).

    (r - mean) / (standard deviation + 1e-4), with n - 1; 0 in a group of equal rewards.
    """
    spread = rewards.std(1, ddof=1, keepdims=True)
    made = (rewards - rewards.mean(1, keepdims=True)) / (spread + EPSILON)
    return np.where(spread > 0, made, 0).astype(np.float32)


class Grpo(Tuning):
    """Group relative policy optimization (Shao et al., arXiv:2402.03300), without a critic.

    A token's loss is -min(ratio A, clip(ratio) A) + kl (exp(d) - d - 1), with the advantage A of
    its answer, the ratio of its probability to that when it was drawn, and d the base's
    log-probability less the model's. An answer's loss is the mean over its tokens.

    limit: nats that an answer may be from the base, in the mean of a batch. Above it advantages
    shrink, to none at twice the limit; 0: no limit.
    """

    is_exact = True  # what is trained is what has drawn the answers
    uses_base = True

    def __init__(self, kl: float, limit: float) -> None:
        self._kl, self._limit = kl, limit

    def sums(self, model: nn.Module, batch: TokenBatch) -> Sums:
        """Loss of each answer, which counts as one."""
        return self._sums(model, batch)[0]

    def loss(self, model: nn.Module, batch: TokenBatch) -> Outcome:
        """Mean loss of the answers. kl: nats from the base, the mean of the answers."""
        assert isinstance(batch, AnswerBatch)
        (losses, _, _), kl = self._sums(model, batch)
        loss = losses.mean()
        return Outcome(loss, len(losses), {"loss": loss.item(), "kl": kl, **batch.metrics})

    def _sums(self, model: nn.Module, batch: TokenBatch) -> tuple[Sums, float]:
        assert isinstance(batch, AnswerBatch)
        logps, places, counts = token_logps(model, batch)
        with torch.no_grad(), adapters_off(model):
            base = token_logps(model, batch)[0]
        drawn = logps.detach() if batch.logps is None else torch.from_numpy(batch.logps)
        kl = float((logps.detach() - base).sum()) / len(counts)
        shown = 1.0 if not self._limit else min(1.0, max(0.0, 2 - kl / self._limit))
        advantages = torch.from_numpy(batch.advantages).to(logps.device)[places] * shown
        ratios = torch.exp(logps - drawn.to(logps.device))
        behind = base - logps
        tokens = self._kl * (torch.exp(behind) - behind - 1) - clipped(ratios, advantages)
        sums = torch.zeros(len(counts), device=logps.device).index_add(0, places, tokens)
        return Sums(sums / counts, torch.ones_like(counts), None), kl


def clipped(ratios: Tensor, advantages: Tensor) -> Tensor:
    """Return min(ratio A, clip(ratio) A); where A < 0 no ratio counts as above MOST_RATIO."""
    bounded = torch.where(advantages < 0, ratios.clamp(max=MOST_RATIO), ratios)
    return torch.minimum(bounded * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
