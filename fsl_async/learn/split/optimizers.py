"""Optimizers of model parts.

They are built from a few numbers, stepped with explicit gradients, and saved as named tensors.

All of them work value by value, with no norm over the whole model, so two parts with an optimizer
each move as the uncut model with one would. That is what makes SplitFed V1 equal to FedAvg.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor, nn

from fsl_async.learn.client.schedule import Schedule
from fsl_async.learn.split.smashed import ModelPartMisused

_CONSTANT = Schedule("constant", warmup_steps=0)


@attrs.frozen(slots=True)
class Rates:
    """A rate by round and step, the same at a client and at the split server.

    rounds: of the whole run, 0 if that is not planned: then only the warm-up changes the rate.
    decays_from: share of the rounds after which "wsd" falls.
    """

    schedule: Schedule = _CONSTANT
    rounds: int = 0
    decays_from: float = 1.0

    def factor(self, round_: int, steps: int) -> float:
        """Return the rate of a step of round `round_` as a share of its peak.

        steps: of this optimizer before.
        """
        progress = min(1.0, round_ / self.rounds) if self.rounds else None
        return self.schedule.factor(progress, self.decays_from, steps=steps, late=False)


@attrs.frozen(slots=True)
class OptimizerSpec:
    """Adam adds weight decay to the gradient (as published for FSL-SAGE); AdamW decays weights.

    SGD may have momentum.
    """

    name: Literal["sgd", "adam", "adamw"] = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    rates: Rates = Rates()

    def build(self, weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over `weights`."""
        rate, decay = self.learning_rate, self.weight_decay
        if self.name == "sgd":
            return torch.optim.SGD(weights, lr=rate, momentum=self.momentum, weight_decay=decay)
        kind = torch.optim.Adam if self.name == "adam" else torch.optim.AdamW
        return kind(weights, lr=rate, betas=self.betas, weight_decay=decay)


class Optimizer:
    """A torch optimizer over named weights; one without weights does nothing."""

    def __init__(self, spec: OptimizerSpec, weights: Mapping[str, nn.Parameter]) -> None:
        self.weights = dict(weights)
        self.round = 0
        """Round of the next step, which decides its rate."""
        self.steps = 0
        """Steps so far, for the warm-up."""
        self._spec = spec
        self._torch = spec.build(self.weights.values()) if self.weights else None

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Move the weights; one gradient per weight, in their order.

        None leaves a weight alone, as torch does.
        """
        if self._torch is None:
            return
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            weight.grad = gradient
        rate = self._spec.learning_rate * self._spec.rates.factor(self.round, self.steps)
        self.steps += 1
        for group in self._torch.param_groups:
            group["lr"] = rate
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return moments and counters by "weight/key", on the CPU; empty before the first step."""
        if self._torch is None:
            return {}
        return {
            f"{name}/{key}": value.detach().cpu()
            for name, weight in self.weights.items()
            for key, value in self._torch.state[weight].items()
            if isinstance(value, Tensor)
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave.

        Raises ModelPartMisused for a weight that is not here or of another shape.
        """
        if self._torch is None:
            if state:
                raise ModelPartMisused("an optimizer without weights cannot take up a state")
            return
        self._torch.state.clear()
        for text, value in state.items():
            name, _, key = text.rpartition("/")
            weight = self.weights.get(name)
            if weight is None or (value.dim() and value.shape != weight.shape):
                raise ModelPartMisused(
                    f"the saved optimizer has {text!r}, which does not fit this part"
                )
            # counters stay on the CPU, where torch reads them without waiting for a GPU
            moved = value.clone() if not value.dim() else value.to(weight.device, copy=True)
            self._torch.state[weight][key] = moved
