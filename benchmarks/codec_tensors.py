"""Tensors as training makes them, from a run of seconds.

The built-in GPT, with GELU instead of squared ReLU because that is what most models have, learns
the source of Python's standard library. No vector is a small tensor repeated: each further pass
over the model comes from a later moment of the training, with fresh text, until the vector is full.

    weights                 of the whole model, every few steps
    pseudo_gradients        weights some tens of steps ago minus weights now: what a client sends
    gradients               of one batch, every few steps
    activations             the residual stream behind each block
    gelu                    what comes out of the activation function of each block
    activation_gradients    of the residual stream behind each block
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from fsl_async.errors import UsageError
from fsl_async.learn.client import pretrain
from fsl_async.learn.client.optimizers import build_optimizer
from fsl_async.learn.client.schedule import Schedule
from fsl_async.learn.data.corpus import windows
from fsl_async.learn.models.gpt import GPT, PRESETS, Block
from fsl_async.roles.phrasing import figure
from fsl_codecs import new_vector

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

NAMES = (
    "weights",
    "pseudo_gradients",
    "gradients",
    "activations",
    "gelu",
    "activation_gradients",
)
_SHUFFLED_RUN = 4096


@frozen
class TrainingSettings:
    """The short run.

    A pass over the model is taken every `steps_between` steps, a pseudo-gradient over
    `steps_of_delta`.
    """

    preset: str = "1m"
    steps_before: int = 60
    steps_between: int = 3
    steps_of_delta: int = 30
    batch: int = 2
    learning_rate: float = 1e-3
    seed: int = 0


class Filling:
    """A vector (values,) that is filled with what comes, and takes no more when it is full."""

    def __init__(self, values: int) -> None:
        self.vector: Vector = new_vector(values)
        self.filled = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing more is needed."""
        return self.filled == self.vector.size

    def add(self, tensor: torch.Tensor) -> None:
        """Append what there is room for."""
        if self.is_full:
            return
        values = tensor.detach().float().flatten().numpy()[: self.vector.size - self.filled]
        self.vector[self.filled : self.filled + values.size] = values
        self.filled += values.size


def trained_tensors(
    values: int, settings: TrainingSettings, progress: Callable[[str], None]
) -> dict[str, Vector]:
    """Train, and return a vector (values,) of each kind in NAMES."""
    fillings = {name: Filling(values) for name in NAMES}
    model = GPT(PRESETS[settings.preset], seed=settings.seed)
    corpus = pretrain.open_corpus({}, model.config.context)
    train = {"optimizer": "adamw", "learning_rate": settings.learning_rate}
    optimizer = build_optimizer(model, train)
    schedule = Schedule("constant")
    batches = windows(
        corpus, corpus.train, batch=settings.batch, seed=settings.seed, name="bench codec"
    )
    step = 0

    def learn() -> None:
        nonlocal step
        for group in optimizer.param_groups:
            warmed = schedule.factor(None, 1.0, steps=step, late=False)
            group["lr"] = settings.learning_rate * warmed
        optimizer.zero_grad()
        loss = model.loss(torch.from_numpy(next(batches)).long())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            progress(f"training: step {step}, loss {figure(loss.item(), 2)}")

    for block in model.blocks:
        assert isinstance(block, Block)
        block.activation = torch.nn.GELU()
    for _ in range(max(0, settings.steps_before - settings.steps_of_delta)):
        learn()
    before: deque[torch.Tensor] = deque()
    for _ in range(settings.steps_of_delta // settings.steps_between):
        before.append(_flat(model))
        for _ in range(settings.steps_between):
            learn()
    _listen(model, fillings)
    while not all(filling.is_full for filling in fillings.values()):
        now = _flat(model)
        before.append(now)
        fillings["weights"].add(now)
        fillings["pseudo_gradients"].add(before.popleft() - now)
        for _ in range(settings.steps_between):
            learn()
        fillings["gradients"].add(_flat_gradients(model))
    return {name: filling.vector for name, filling in fillings.items()}


def read_values(path: Path, at_most: int) -> Vector:
    """Return the finite values (n,), n <= at_most, of the first floating-point tensors of a file.

    Raises UsageError for a file that is not in the safetensors format.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UsageError("--tensors needs safetensors: pip install 'fsl-async[bench]'") from None
    found = Filling(at_most)
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and not found.is_full:
                    found.add(tensor)
    except SafetensorError as error:
        raise UsageError(f"--tensors {path}: not a safetensors file ({error})") from None
    values = found.vector[: found.filled]
    values = values[np.isfinite(values)]
    if not values.size:
        raise UsageError(f"--tensors {path}: no floating-point values in it")
    return values


def spread_out(values: Vector, wanted: int, seed: int = 0) -> Vector:
    """A vector (wanted,) from a shorter one (n,).

    Each further pass takes its runs of 4096 values in another order.
    """
    rng = np.random.default_rng(seed)
    passes = [values[:wanted]]
    filled = passes[0].size
    starts = np.arange(0, values.size, _SHUFFLED_RUN)
    while filled < wanted:
        for start in rng.permutation(starts):
            run = values[start : start + _SHUFFLED_RUN][: wanted - filled]
            passes.append(run)
            filled += run.size
    return np.concatenate(passes, out=new_vector(wanted))


def _flat_gradients(model: GPT) -> torch.Tensor:
    gradients = (weight.grad for weight in model.parameters())
    return torch.cat([one.flatten() for one in gradients if one is not None])


def _flat(model: GPT) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def _listen(model: GPT, fillings: dict[str, Filling]) -> None:
    """Take activations and their gradients from now on."""

    def behind_block(_: object, __: object, output: torch.Tensor) -> None:
        fillings["activations"].add(output)
        output.register_hook(fillings["activation_gradients"].add)  # type: ignore[no-untyped-call]

    def behind_gelu(_: object, __: object, output: torch.Tensor) -> None:
        fillings["gelu"].add(output)

    for block in model.blocks:
        assert isinstance(block, Block)
        block.register_forward_hook(behind_block)
        assert isinstance(block.activation, torch.nn.Module)
        block.activation.register_forward_hook(behind_gelu)
