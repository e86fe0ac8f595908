"""Labels of texts."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from fsl_async.learn.tune.objectives.base import EVALUATED_BATCH, Sums, Tuning, logits_of
from fsl_async.learn.tune.tokens import TokenBatch, Tokenized


class Classify(Tuning):
    """Cross entropy of the label. labels: their names."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels

    def sums(self, model: nn.Module, batch: TokenBatch) -> Sums:
        """Loss of each sample, which counts as one."""
        logits = logits_of(model, batch).float()
        labels = torch.from_numpy(batch.labels).to(logits.device)
        losses = functional.cross_entropy(logits, labels, reduction="none")
        hits = (logits.argmax(-1) == labels).float()
        return Sums(losses, torch.ones_like(labels), hits)

    def evaluate(
        self, model: nn.Module, data: Tokenized, *, size: int = EVALUATED_BATCH
    ) -> dict[str, float]:
        """The same, and eval_share_NAME: the share of a label among the samples."""
        counts = data.label_counts(len(self._labels))
        shares = {
            f"eval_share_{name}": samples / max(1, len(data))
            for name, samples in zip(self._labels, counts, strict=True)
        }
        return super().evaluate(model, data, size=size) | shares
