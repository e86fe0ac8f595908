"""A network that is looked through but not touched: what a module does while gradients pass it for somebody else's sake.

Alignment differentiates through the server's half and through the auxiliary model. In training mode that would move the
running statistics of batch norm, and dropout would put noise of its own on every target. In evaluation mode batch norm would use
other statistics than in the training step whose gradient is wanted. So: dropout is off, batch norm normalises
by the batch as in training, and no statistic moves (docs/adr/0020).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def untouched(*modules: nn.Module) -> Iterator[None]:
    """Within it the modules behave as said above; afterwards every submodule has its mode back."""
    parts = [part for module in modules for part in module.modules()]
    modes = [(part, part.training) for part in parts]
    tracking = [(part, part.track_running_stats) for part in parts if isinstance(part, _BatchNorm)]
    try:
        for module in modules:
            module.eval()
        for norm, _ in tracking:
            norm.training = True  # by the batch ...
            norm.track_running_stats = False  # ... and without a trace
        yield
    finally:
        for part, mode in modes:
            part.training = mode
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
