"""One forward pass through a part of a model: its batch, its mode, and its random numbers.

Modes. Alignment differentiates through the split server's part and through the auxiliary model for
the sake of a third one. In training mode that would move the running statistics of batch norm, and
dropout would add noise to every target. In evaluation mode batch norm would use other statistics
than the training step whose gradient is wanted. `untouched` turns dropout off, lets batch norm
normalize by the batch as in training, and moves no statistic (docs/adr/0022).

Random numbers. Torch's dropout draws from a generator that the whole process shares, so what it
draws would depend on everything that ran before. Within `drawing` it draws from a generator seeded
by (seed, part, owner, number of the step): the masks are the same in lockstep, in free mode, and
after a restart that restores only the counter. The caller's generator is left as it was. The shared
generator belongs to the process and not to the thread, so threads of one process take turns.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsl_async.learn.data.counter import derived_seed


@attrs.frozen(slots=True, eq=False)
class Batch:
    """Inputs and labels at a client; the first dimension counts samples.

    `lengths`, int64 (B,), is for sequences padded at their end: how many positions of each are
    real.
    """

    inputs: Tensor
    labels: Tensor
    lengths: Tensor | None = None


def call(module: nn.Module, values: Tensor, lengths: Tensor | None) -> Tensor:
    """Run a part.

    Only parts that read sequences take lengths: without any, a plain nn.Sequential will do.
    """
    found: Tensor = module(values) if lengths is None else module(values, lengths)
    return found


@contextmanager
def untouched(*modules: nn.Module) -> Iterator[None]:
    """Temporarily put modules into the mode described above, and restore that of each submodule."""
    norms = [part for one in modules for part in one.modules() if isinstance(part, _BatchNorm)]
    tracking = [(norm, norm.track_running_stats) for norm in norms]
    with evaluating(*modules):
        try:
            for norm in norms:
                norm.training = True  # by the batch ...
                norm.track_running_stats = False  # ... and without a trace
            yield
        finally:
            for norm, tracks in tracking:
                norm.track_running_stats = tracks


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode within, every submodule's own mode afterwards."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for part, mode in modes:
            part.training = mode


_TURN = threading.RLock()


@contextmanager
def drawing(device: torch.device, seed: int, *parts: str | int) -> Iterator[None]:
    """Temporarily draw on the CPU and on `device` from `derived_seed(seed, *parts)`."""
    found = derived_seed(seed, *parts)
    cuda = [device] if device.type == "cuda" else []
    with _TURN, torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(found)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(found)
        yield
