"""Joins the training loops of other frameworks to a run: `fsl_async.hf`, `fsl_async.lightning`.

Such a loop owns batches, backward passes and the optimizer. It hands the model over before it makes
an optimizer, counts the batches of each optimizer step in a `Tally`, reports it with `fed.step`,
and ends when that returns False.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from fsl_async.errors import TaskError
from fsl_async.learn.client.fed import Fed

SERVER = "FSL_SERVER"
"""Environment variable with the parameter server's address."""
IGNORED = -100
"""Label of a token that is not trained, as in `torch.nn.functional.cross_entropy`."""


def address(server: str | None, fed: Fed | None, options: Mapping[str, Any]) -> str | None:
    """Return the parameter server to join; None with `fed`, which is in a run, or without either.

    Without either it prints a line. options: those for `fsl_async.join`. Raises TaskError for
    arguments that exclude each other.
    """
    if fed is not None:
        if server or options:
            raise TaskError("fed= is a client in a run already: it takes no server and no options")
        return None
    server = server or os.environ.get(SERVER)
    if not server:
        options.get("log", print)(f"trains alone: no server is given, here or in {SERVER}")
        return None
    if options.get("order") == "zeroth":
        raise TaskError(
            "order='zeroth': this script trains by gradients; a client with --order zeroth, --base"
            " and --data trains by losses"
        )
    return server


def hand_over(fed: Fed, model: nn.Module) -> None:
    """Give `model` to the run: with the run's adapters where it tunes a base, else what trains.

    A model that has adapters of its own keeps them, and they are exchanged. Raises TaskError for a
    run that such a loop cannot train, and what `fed.lora` and `fed.attach` raise.
    """
    tune = fed.settings.tune
    if tune.method == "zeroth":
        raise TaskError(
            "this run trains by losses alone (tune.method = zeroth), and this script by gradients:"
            " start a client with --base and --data instead"
        )
    if tune.is_private:
        raise TaskError(
            "this run trains privately (tune.dp_epsilon), and this script adds no noise: start a"
            " client with --base and --data instead"
        )
    if tune.method == "none":
        fed.attach(model)
    elif not any(hasattr(part, "peft_config") for part in model.modules()):
        fed.lora(model)
    elif tune.rule != "fedit":
        raise TaskError(
            f"this model has adapters of its own, and tune.rule = {tune.rule} merges those of the"
            " run: give the trainer the base model alone"
        )
    else:
        fed.attach(model)


@contextmanager
def for_optimizer(fed: Fed) -> Iterator[None]:
    """Temporarily set requires_grad on every adapter factor.

    So an optimizer that is created inside has those that train in later versions too.
    """
    weights = [] if fed.adapters is None else fed.adapters.trained()
    before = [weight.requires_grad for weight in weights]
    for weight in weights:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight, does in zip(weights, before, strict=True):
            weight.requires_grad_(does)


def keep_order(fed: Fed, loader: Any) -> bool:
    """Have a loader go on, after a relaunch, after the last batch of the last acknowledged delta.

    Its sampler becomes one of `fed.sampler`, over all of its data. False: it has no length, or a
    sampler of its own.
    """
    batches = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if type(batches) is not BatchSampler:
        return False
    shuffles = type(batches.sampler) is RandomSampler and not batches.sampler.replacement
    if not shuffles and type(batches.sampler) is not SequentialSampler:
        return False
    batches.sampler = fed.sampler(loader.dataset, shuffle=shuffles, whole=True)
    return True


def trained_in(batch: Any, *, shifts: bool = False) -> int | Tensor:
    """How much of a batch is trained: labels that are not -100, or rows.

    Rows where "labels" has one number per row, is not of integers, or is missing. shifts: the loss
    shifts the labels, so the first one of a row is never predicted. A tensor of one number where
    counting is left to a device.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, Mapping) and "shift_labels" in batch:
        labels, shifts = batch["shift_labels"], False
    if isinstance(labels, Tensor) and labels.dim() >= 2 and not labels.is_floating_point():
        return (labels[..., 1:] if shifts else labels).ne(IGNORED).sum()
    return _rows(batch) or 0


def _rows(batch: Any) -> int | None:
    """Length of the first tensor in `batch`."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return next((rows for one in batch if (rows := _rows(one)) is not None), None)
    return None


class Tally:
    """Adds up the batches of one optimizer step."""

    def __init__(self) -> None:
        self._trained: int | Tensor = 0
        self._loss: Tensor | None = None

    def add(self, trained: int | Tensor, loss: Tensor | None) -> None:
        """Count a batch. loss: its share in the loss of the step; the shares are added up.

        Tensors stay on their device until `report`, so a batch waits for none.
        """
        self._trained = self._trained + trained
        if loss is not None:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def report(self, fed: Fed) -> bool:
        """Report the step, and begin the next one. False once the run has ended."""
        trained, loss = int(self._trained), self._loss
        self._trained, self._loss = 0, None
        return fed.step(tokens=trained, metrics=None if loss is None else {"loss": float(loss)})


def check_processes(processes: int, devices: int, *, ranks: int = 1) -> None:
    """Raise TaskError for a loop whose processes are not the client's, or on several devices.

    processes: of the loop. devices: of one process that each have the weights. ranks: processes of
    which this client consists.
    """
    if processes != ranks:
        raise TaskError(
            f"this script trains as {processes} processes, and this client has {ranks}: start a"
            " Trainer by torchrun or accelerate launch, and any other loop as one process"
        )
    if devices > 1:
        raise TaskError(
            f"this script would train copies of the model on {devices} devices: a client trains on"
            " one; choose it with CUDA_VISIBLE_DEVICES=0"
        )
