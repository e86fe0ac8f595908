"""Inner optimizers: Muon for the matrices of hidden layers with AdamW for the rest, or AdamW alone.

Muon (Jordan et al., 2024) steps along the orthogonalized momentum of a matrix. It
averages gradients before it normalizes them, where AdamW divides by the noise of a client's small
batches; so the mean of several clients' changes loses less with it (MuLoCo, arXiv:2505.23725).

Peak learning rates, where the run sets none (docs/adr/0107):
    Muon   0.007 for any width. An orthogonalized step of this rate changes a matrix by
           sqrt(max(1, rows / columns)) times the rate in spectral norm, whatever its size.
    AdamW  0.008 sqrt(64 / width) beside Muon, for embeddings, heads and vectors, and
           0.003 sqrt(64 / width) alone; width is the smaller side of the largest hidden matrix.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fsl_async.errors import TaskError

BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95
MUON_RATE = 0.007
BESIDE_MUON_RATE, ADAMW_RATE, RATE_WIDTH = 8e-3, 3e-3, 64

OUTSIDE = re.compile(r"embed|(^|\.)(wte|wpe|classifier|score|(\w+_)?head)(\.|$)")
"""Names of matrices that are an embedding or a head: AdamW steps these."""


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) for 2-D weights.

    The steps of torch.optim.Muon to the bit, also with versions of torch before 2.9, which lack it.
    """

    def __init__(self, params: Any, *, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step every weight that has a gradient. closure: evaluates the loss again, once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, momentum = float(group["lr"]), group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                mean = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update = _orthogonalized(weight.grad.lerp(mean, momentum))
                rows, columns = weight.shape
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(update, alpha=-rate * math.sqrt(max(1, rows / columns)))
        return loss


def _orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps in bf16 that bring all singular values close to 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    found = matrix.bfloat16()
    is_tall = matrix.shape[0] > matrix.shape[1]
    if is_tall:
        found = found.T
    found.div_(found.norm().clamp(min=1e-7))
    for _ in range(5):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer; schedulers and loops see the groups of both."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        # The groups are the dictionaries of the two, so a rate that is set here is theirs.
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group once it is built: which of the two should step it, and at what rate?

        Raises TaskError.
        """
        if getattr(self, "_built", False):
            raise TaskError(
                "MuonAdamW takes no further groups: unfreeze the weights before"
                " fed.optimizer(model), or build it again"
            )
        super().add_param_group(param_group)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by its two parts: the groups are theirs."""
        return MuonAdamW, self.parts

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step both. closure: evaluates the loss again, once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of both, in order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def build_optimizer(
    model: nn.Module,
    train: Mapping[str, Any],
    *,
    is_matrix: Callable[[str, nn.Parameter], bool] | None = None,
) -> torch.optim.Optimizer:
    """Build the inner optimizer over the weights of `model` that train.

    train: the table [train] of a run's configuration, or a part of it: optimizer ("muon" or
    "adamw"), learning_rate (AdamW's), muon_rate, weight_decay; a rate of 0 or none is by the rule
    above. is_matrix: whether Muon steps a weight, by name; by default those that `hidden_matrices`
    finds. Weights with fewer than two dimensions do not decay: it would shrink the signal of norms.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    hidden = hidden_matrices(model) if is_matrix is None else set()
    chosen = {
        name
        for name, weight in weights.items()
        if weight.dim() == 2
        and weight.is_floating_point()
        and (name in hidden if is_matrix is None else is_matrix(name, weight))
    }
    decay = float(train.get("weight_decay", 0.1))
    if train.get("optimizer", "muon") == "adamw":
        chosen = set()
    adamw_rate = float(train.get("learning_rate", 0.0)) or adamw_rate_of(
        (weights[name] for name in hidden_matrices(model) & set(weights)),
        beside_muon=bool(chosen),
    )
    left = [weight for name, weight in weights.items() if name not in chosen]
    others: list[dict[str, Any]] = [
        {"params": [weight for weight in left if weight.dim() > 1], "weight_decay": decay},
        {"params": [weight for weight in left if weight.dim() <= 1], "weight_decay": 0.0},
    ]
    others = [group for group in others if group["params"]]
    if not chosen:
        return torch.optim.AdamW(others, lr=adamw_rate, betas=BETAS)
    matrices = [weight for name, weight in weights.items() if name in chosen]
    muon_rate = float(train.get("muon_rate", 0.0)) or MUON_RATE
    muon = Muon(matrices, lr=muon_rate, weight_decay=decay, momentum=MUON_MOMENTUM)
    if not others:
        return muon
    return MuonAdamW(muon, torch.optim.AdamW(others, lr=adamw_rate, betas=BETAS))


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the 2-D parameters that are neither embeddings nor heads.

    Embeddings are the weights of nn.Embedding, also where another module shares them, and what has
    a name like `OUTSIDE`.
    """
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name
        for name, weight in model.named_parameters()
        if weight.dim() == 2 and id(weight) not in embedded and not OUTSIDE.search(name.lower())
    }


def adamw_rate_of(matrices: Iterable[nn.Parameter], *, beside_muon: bool) -> float:
    """AdamW's learning rate for a model with these hidden matrices, by the rule above."""
    width = max((min(weight.shape) for weight in matrices), default=RATE_WIDTH)
    rate = BESIDE_MUON_RATE if beside_muon else ADAMW_RATE
    return rate * math.sqrt(RATE_WIDTH / width)
