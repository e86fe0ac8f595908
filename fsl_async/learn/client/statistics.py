"""Repairs buffers that follow from the weights, where the weights have come from a merge.

Spectral norm (Miyato et al., arXiv:1802.05957) divides a weight by its largest singular value,
which it computes from two unit vectors, kept as buffers. The mean of unit vectors is shorter than
one, and the value computed from it too small. So each client makes them anew from every version's
weights, by power iteration, and sends these with its next delta: they are the same at all clients,
so their mean has length one, and to first order in the change of the weights they are those of the
next version too. Training goes on with vectors of its own.

Batch norm (Ioffe & Szegedy, arXiv:1502.03167) keeps means and variances of its inputs. Their mean
over clients lies between theirs, but is not that of the merged weights: `recalibrate` measures it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.spectral_norm import SpectralNorm

from fsl_async.errors import TaskError
from fsl_async.learn.client.ports import Vector
from fsl_async.learn.client.shards import full_of, plain_name
from fsl_async.store.model.manifest import Manifest

ITERATIONS = 15
"""As many as torch makes for a new layer."""


class SpectralNorms:
    """The unit vectors of a model's spectral norms, as they are at the version it was moved onto.

    layout: of the exchanged vector; vectors that are not in it are left alone.
    """

    def __init__(self, module: nn.Module, layout: Manifest) -> None:
        self._module = module
        self._buffers = {one.name: one for one in layout.tensors if one.is_buffer}
        self._of_version: dict[str, Tensor] = {}

    def keep(self) -> None:
        """Take those that the model has: its weights are a version."""
        self._of_version = {
            name: unit.detach().to("cpu", torch.float32, copy=True)
            for _, units in self._layers()
            for name, unit in units.items()
        }

    def restore(self) -> None:
        """Make them anew from the model's weights, which are those of a version."""
        with torch.no_grad():
            for matrix, units in self._layers():
                weight, (u, v) = full_of(matrix), units.values()
                for _ in range(ITERATIONS):
                    u.copy_(functional.normalize(weight @ v.to(weight.dtype), dim=0))
                    v.copy_(functional.normalize(weight.T @ u.to(weight.dtype), dim=0))
        self.keep()

    def write_to(self, snapshot: Vector) -> None:
        """Set them in a copy of the weights, fp32 (layout.values,)."""
        for name, unit in self._of_version.items():
            spec = self._buffers[name]
            snapshot[spec.offset : spec.offset + spec.values] = unit.numpy()

    def _layers(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """For each layer its weight as a matrix, and u and v by name."""
        for prefix, part in self._module.named_modules():
            for matrix, stem, owner, names in _found(part):
                units = {
                    plain_name(f"{prefix}.{stem}{name}".lstrip(".")): getattr(owner, name)
                    for name in names
                }
                if all(name in self._buffers for name in units):
                    yield matrix, units


def _found(part: nn.Module) -> Iterator[tuple[Tensor, str, nn.Module, tuple[str, str]]]:
    """Spectral norms of one module: matrix, path to the owner of u and v, owner, their names."""
    for name, steps in getattr(part, "parametrizations", {}).items():
        first = steps[0]
        if type(first).__name__ == "_SpectralNorm" and hasattr(first, "_u"):
            matrix = first._reshape_weight_to_matrix(steps.original.detach())  # noqa: SLF001
            yield matrix, f"parametrizations.{name}.0.", first, ("_u", "_v")
    for hook in part._forward_pre_hooks.values():  # noqa: SLF001
        if isinstance(hook, SpectralNorm):
            matrix = hook.reshape_weight_to_matrix(getattr(part, f"{hook.name}_orig").detach())
            yield matrix, "", part, (f"{hook.name}_u", f"{hook.name}_v")


def recalibrate(model: nn.Module, batches: Iterable[Any]) -> int:
    """Measure the statistics of batch norm anew on the model's present weights, in place.

        with fed.at_version():
            fed.recalibrate(model, ten_batches)
            accuracy = evaluate(model)

    A version has the mean of its clients' statistics, which are not quite those of the merged
    weights: with new ones it is a few points better while training moves fast (docs/adr/0142).
    Returns the number of batches.

    Each batch is given to the model as in training: a mapping as arguments by name, of a tuple or
    list the first element, anything else as the only argument. Statistics become the mean over the
    batches, each of which counts the same. Nothing is trained, and the mode of each module is as
    before. Raises TaskError for a model without batch norm, and where there are no batches.
    """
    norms = [
        part
        for part in model.modules()
        if isinstance(part, _NormBase)
        and part.track_running_stats
        and part.running_mean is not None
    ]
    if not norms:
        raise TaskError("recalibrate: the model has no batch norm, so no statistics to measure")
    count = 0
    with _measuring(model, norms), torch.no_grad():
        for batch in batches:
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(batch[0] if isinstance(batch, tuple | list) else batch)
            count += 1
        if not count:
            raise TaskError("recalibrate: there are no batches to measure with")
    return count


@contextmanager
def _measuring(model: nn.Module, norms: list[_NormBase]) -> Iterator[None]:
    """Within it the norms average over batches; an error leaves their statistics as they were."""
    modes = {part: part.training for part in model.modules()}
    momenta = [part.momentum for part in norms]
    before = [{name: one.clone() for name, one in part.named_buffers()} for part in norms]
    model.train()
    for part in norms:
        part.reset_running_stats()
        part.momentum = None
    try:
        yield
    except BaseException:
        for part, buffers in zip(norms, before, strict=True):
            part.load_state_dict(buffers, strict=False)
        raise
    finally:
        for part, momentum, buffers in zip(norms, momenta, before, strict=True):
            part.momentum = momentum
            if part.num_batches_tracked is not None:
                part.num_batches_tracked.copy_(buffers["num_batches_tracked"])
        for module, mode in modes.items():
            module.training = mode
