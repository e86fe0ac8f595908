"""Defines what an objective of fine-tuning is, and the log-probabilities that several share.

An objective gives the loss of each sample as a sum over what counts in it: trained tokens, or the
sample itself. `loss` divides by their number, so every token of a batch weighs the same, in long
samples and in short ones. A client's work is weighted by that number too.

Models are called as those of transformers: input_ids and attention_mask to .logits.
"""

# ruff: noqa: N806 - shapes are suffixes

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fsl_async.learn.models.adapters import adapters_off
from fsl_async.learn.models.forward import evaluating
from fsl_async.learn.tune.tokens import UNTRAINED, Ints, TokenBatch, Tokenized

EVALUATED_BATCH = 8


class Sums(NamedTuple):
    """Of each sample of a batch: the summed loss, fp32 (B,), and what it counts, int64 (B,).

    hits: 1 where the sample is right (labels and preferences; 0.5 for a tie), fp32 (B,); else None.
    """

    losses: Tensor
    counts: Tensor
    hits: Tensor | None


class Outcome(NamedTuple):
    """Mean loss, differentiable; trained tokens (lm) or samples; metrics."""

    loss: Tensor
    weight: int
    metrics: dict[str, float]


class Tuning(ABC):
    """An objective."""

    is_exact: ClassVar[bool] = False
    """Whether it trains in evaluation mode: without dropout."""
    uses_base: ClassVar[bool] = False
    """Whether it also asks the model with its adapters off."""

    @abstractmethod
    def sums(self, model: nn.Module, batch: TokenBatch) -> Sums:
        """Loss of each sample; gradients by sample serve privacy and zeroth order."""

    def loss(self, model: nn.Module, batch: TokenBatch) -> Outcome:
        """Mean loss of a batch, in the model's present mode."""
        losses, counts, hits = self.sums(model, batch)
        weight = int(counts.sum())
        loss = losses.sum() / max(1, weight)
        metrics = {"loss": loss.item()}
        if hits is not None:
            metrics["accuracy"] = hits.mean().item()
        return Outcome(loss, weight, metrics)

    def evaluate(
        self, model: nn.Module, data: Tokenized, *, size: int = EVALUATED_BATCH
    ) -> dict[str, float]:
        """Metrics over all samples, in evaluation mode, without gradients; `size` at a time.

        eval_loss: nats a trained token (lm), else the mean of the samples' losses. eval_accuracy:
        share of samples with the right label, or with the better answer ahead.
        """
        total, count, right = 0.0, 0, 0.0
        has_hits = False
        with torch.no_grad(), evaluating(model):
            for batch in data.batches(size):
                losses, counts, hits = self.sums(model, batch)
                total += float(losses.double().sum())
                count += int(counts.sum())
                has_hits = hits is not None
                right += 0.0 if hits is None else float(hits.sum())
        found = {"eval_loss": total / max(1, count)}
        if has_hits:
            found["eval_accuracy"] = right / max(1, count)
        return found


def of_samples(losses: Tensor, margins: Tensor) -> Sums:
    """Return the sums of samples that count as one, and are right where a margin is positive."""
    hits = (margins.detach().sign() + 1) / 2
    return Sums(losses, torch.ones_like(losses, dtype=torch.int64), hits)


class BaseLogps:
    """Log-probabilities of whole completions by the base: the model with its adapters off.

    They are computed once for each sequence, when it is first met, and kept.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], float] = {}

    def of(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """Return them, fp32 (sequences,)."""
        width = len(batch.ids) // max(1, len(batch.rows))
        rows = ((batch.source, row) for row in batch.rows.tolist())
        keys = [(*row, place) for row in rows for place in range(width)]
        if any(key not in self._known for key in keys):
            for key, logp in zip(keys, base_logps(model, batch).tolist(), strict=True):
                # What is known stays: in another batch padding may round it differently.
                self._known.setdefault(key, logp)
        return torch.tensor([self._known[key] for key in keys], dtype=torch.float32)


def base_logps(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Summed log-probability of each completion by the base, fp32 (sequences,)."""
    with torch.no_grad(), evaluating(model), adapters_off(model):
        return completion_logps(model, batch)[0]


def completion_logps(
    model: nn.Module, batch: TokenBatch, labels: Ints | None = None
) -> tuple[Tensor, Tensor]:
    """Summed log-probability of the trained tokens of each sequence, fp32, and their number.

    Both (sequences,). labels: int64 (sequences, tokens), instead of the batch's.
    """
    logps, places, counts = token_logps(model, batch, labels)
    sums = torch.zeros(len(counts), dtype=logps.dtype, device=logps.device)
    return sums.index_add(0, places, logps), counts


def token_logps(
    model: nn.Module, batch: TokenBatch, labels: Ints | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each trained token, fp32 (N,); its sequence, (N,); tokens of each, (S,).

    Only the logits of trained tokens are converted to fp32.
    """
    logits_STV = logits_of(model, batch, use_cache=False)
    given = batch.labels if labels is None else labels
    labels_ST = torch.from_numpy(given).to(logits_STV.device)[:, 1:]
    sequence_N, place_N = (labels_ST != UNTRAINED).nonzero(as_tuple=True)
    losses_N = functional.cross_entropy(
        logits_STV[sequence_N, place_N].float(),
        labels_ST[sequence_N, place_N],
        reduction="none",
    )
    return -losses_N, sequence_N, (labels_ST != UNTRAINED).sum(1)


def logits_of(model: nn.Module, batch: TokenBatch, **more: Any) -> Tensor:
    """The model's logits of a batch."""
    device = next(model.parameters()).device
    ids, mask = (torch.from_numpy(each).to(device) for each in (batch.ids, batch.mask))
    found: Tensor = model(input_ids=ids, attention_mask=mask, **more).logits
    return found
