"""What fine-tuning minimizes: the next token, labels, or preferences.

An objective gives the loss of each sample as a sum over what counts in it: trained tokens, or the
sample itself. `loss` divides by their number, so every token of a batch weighs the same, in long
samples and in short ones. A client's work is weighted by that number too.

Models are called as those of transformers: input_ids and attention_mask to .logits.
"""

# ruff: noqa: N806 - shapes are suffixes

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fsl_async.config.settings_tuning import Objective, TuneConfig
from fsl_async.learn.models.adapters import adapters_off
from fsl_async.learn.models.forward import evaluating
from fsl_async.learn.tune.tokens import UNTRAINED, TokenBatch, Tokenized

EVALUATED_BATCH = 8


class Sums(NamedTuple):
    """Of each sample of a batch: the summed loss, fp32 (B,), and what it counts, int64 (B,).

    hits: 1 where the sample is right (classify, dpo; 0.5 for a tie), fp32 (B,); None with lm.
    """

    losses: Tensor
    counts: Tensor
    hits: Tensor | None


class Outcome(NamedTuple):
    """Mean loss, differentiable; trained tokens (lm) or samples (classify, dpo); metrics."""

    loss: Tensor
    weight: int
    metrics: dict[str, float]


class Tuning(ABC):
    """An objective."""

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

        eval_loss: nats a trained token (lm) or a sample. eval_accuracy: share of samples with the
        right label (classify) or a positive margin (dpo).
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


class Lm(Tuning):
    """Cross entropy of the next token, over trained tokens."""

    def sums(self, model: nn.Module, batch: TokenBatch) -> Sums:
        """Loss of each sample; it counts its trained tokens."""
        logps, counts = completion_logps(model, batch)
        return Sums(-logps, counts, None)


class Classify(Tuning):
    """Cross entropy of the label. labels: their names."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels

    def sums(self, model: nn.Module, batch: TokenBatch) -> Sums:
        """Loss of each sample, which counts as one."""
        logits = _logits(model, batch).float()
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


class Dpo(Tuning):
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290).

    With log-probabilities of whole completions, and of the reference in brackets, a sample's loss
    is -log sigmoid(beta (chosen - [chosen] - rejected + [rejected])).

    The reference is the model with its adapters off. Its log-probabilities are computed once for
    each sample, when it is first met, and kept.
    """

    def __init__(self, beta: float) -> None:
        self._beta = beta
        # By source of the tokens and number of the sample: [chosen] - [rejected].
        self._known: dict[tuple[int, int], float] = {}

    def sums(self, model: nn.Module, batch: TokenBatch) -> Sums:
        """Loss of each sample, which counts as one."""
        reference = self._margins(model, batch)
        logps, _ = completion_logps(model, batch)
        margins = logps[0::2] - logps[1::2] - reference.to(logps.device)
        losses = -functional.logsigmoid(self._beta * margins)
        hits = (margins.detach().sign() + 1) / 2
        return Sums(losses, torch.ones_like(losses, dtype=torch.int64), hits)

    def _margins(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        keys = [(batch.source, row) for row in batch.rows.tolist()]
        if any(key not in self._known for key in keys):
            with torch.no_grad(), evaluating(model), adapters_off(model):
                logps, _ = completion_logps(model, batch)
            for key, margin in zip(keys, (logps[0::2] - logps[1::2]).tolist(), strict=True):
                # What is known stays: in another batch padding may round it differently.
                self._known.setdefault(key, margin)
        return torch.tensor([self._known[key] for key in keys], dtype=torch.float32)


def objective_of(tune: TuneConfig) -> Tuning:
    """Return the run's objective."""
    kinds: Mapping[Objective, Callable[[], Tuning]] = {
        "lm": Lm,
        "classify": lambda: Classify(tune.label_names),
        "dpo": lambda: Dpo(tune.beta),
    }
    return kinds[tune.objective]()


def completion_logps(model: nn.Module, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Summed log-probability of the trained tokens of each sequence, fp32, and their number.

    Both (sequences,). Only the logits of trained tokens are converted to fp32.
    """
    logits_STV = _logits(model, batch, use_cache=False)
    labels_ST = torch.from_numpy(batch.labels).to(logits_STV.device)[:, 1:]
    sequence_N, place_N = (labels_ST != UNTRAINED).nonzero(as_tuple=True)
    losses_N = functional.cross_entropy(
        logits_STV[sequence_N, place_N].float(),
        labels_ST[sequence_N, place_N],
        reduction="none",
    )
    sums = torch.zeros(len(labels_ST), dtype=losses_N.dtype, device=losses_N.device)
    counts = (labels_ST != UNTRAINED).sum(1)
    return -sums.index_add(0, sequence_N, losses_N), counts


def _logits(model: nn.Module, batch: TokenBatch, **more: Any) -> Tensor:
    device = next(model.parameters()).device
    ids, mask = (torch.from_numpy(each).to(device) for each in (batch.ids, batch.mask))
    found: Tensor = model(input_ids=ids, attention_mask=mask, **more).logits
    return found
