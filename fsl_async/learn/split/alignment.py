"""FSL-SAGE's alignment (Nair et al., ICML 2025, arXiv:2505.23182).

It teaches a client's auxiliary model the split server's gradients.

Over the client's newest smashed batches Z with labels Y, minimize over x_a

    sum || d loss(f_a(Z; x_a), Y) / dZ  -  d loss(f_s(Z; x_s), Y) / dZ ||^2

by differentiating the first gradient once more (double backward). The targets are computed anew at
the start of each alignment, with the x_s of that moment, and stay fixed during it.

Scale. The loss is a mean, so a gradient shrinks as its batch grows. Targets and estimates are taken
over the very same minibatches with the very same loss, so both have the same scale whatever the
sizes, also in a last, smaller minibatch, and labels that are IGNORED count in neither. Published:
targets over one batch of the whole buffer, minibatches as large; then both agree.

Minibatches are consecutive samples in order of arrival, the same in every pass: alignment draws no
random numbers (docs/adr/0022).
"""

from collections import deque
from collections.abc import Mapping

import attrs
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from fsl_async.learn.client.ports import Vector
from fsl_async.learn.models.forward import call, untouched
from fsl_async.learn.split import weights
from fsl_async.learn.split.model_parts import AlignSettings, Optimizer, ServerPart
from fsl_async.learn.split.smashed import ModelPartMisused, Smashed, joined


class Alignment:
    """One client's auxiliary model at the split server.

    It has the optimizer of that model, and the client's newest smashed samples.
    """

    def __init__(self, auxiliary: nn.Module, settings: AlignSettings) -> None:
        self.auxiliary = auxiliary
        self.settings = settings
        self._optimizer = Optimizer(settings.optimizer, weights.parameter_tensors(auxiliary))
        self._buffer: deque[Smashed] = deque()
        self.samples = 0

    def remember(self, smashed: Smashed) -> None:
        """Keep a batch; of the oldest, forget what exceeds `buffer_samples`.

        The tensors are kept, not copied, unless cut.
        """
        if smashed.labels is None:
            raise ModelPartMisused("activations without labels cannot be aligned to")
        self._buffer.append(smashed)
        self.samples += smashed.samples
        while (extra := self.samples - self.settings.buffer_samples) > 0:
            oldest = self._buffer.popleft()
            self.samples -= oldest.samples
            if extra < oldest.samples:
                kept = oldest.part(extra, oldest.samples)
                kept = attrs.evolve(kept, values=kept.values.clone())  # a view would hold it all
                self._buffer.appendleft(kept)
                self.samples += kept.samples

    def align(self, server: ServerPart) -> list[float]:
        """Move the auxiliary model towards the split server's gradients. Nothing of the split
        server moves.

        Returns the squared error of each pass, before it, summed over the buffer.
        Raises ValueError where batch norm has nothing but one sample: as at a client's first
        upload, if that is its last batch too.
        """
        batches = self._minibatches(server)
        errors = []
        # Attention's fast kernels have no second derivative; the plain one has.
        with sdpa_kernel(SDPBackend.MATH):
            targets = [server.gradient_at(batch) for batch in batches]
            for _ in range(self.settings.passes if batches else 0):
                found = [
                    self._pull(server, batch, target)
                    for batch, target in zip(batches, targets, strict=True)
                ]
                errors.append(sum(found))
        return errors

    def export(self) -> Vector:
        """The auxiliary model's flat fp32 weights, as they go to the client."""
        return weights.export(self.auxiliary)

    def load(self, vector: Vector) -> None:
        """Set the auxiliary model's weights."""
        weights.load(self.auxiliary, vector)

    def state(self) -> dict[str, Tensor]:
        """Return everything as named tensors on the CPU, to be read before anything changes them.

        Bounded by the model, its moments and `buffer_samples`.
        """
        found = weights.named_state(self.auxiliary, "auxiliary/")
        found |= weights.prefixed("optimizer/", self._optimizer.state())
        for number, kept in enumerate(self._buffer):
            for name, value in attrs.asdict(kept, recurse=False).items():
                if value is not None:
                    found[f"buffer/{number}/{name}"] = value.detach().cpu()
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`."""
        weights.load_named(self.auxiliary, "auxiliary/", state)
        self._optimizer.load(weights.under("optimizer/", state))
        device = weights.device_of(self.auxiliary)
        self._buffer.clear()
        self.samples = 0
        while (at := f"buffer/{len(self._buffer)}/") + "values" in state:
            kept = Smashed(state[at + "values"], state[at + "labels"], state.get(at + "lengths"))
            self._buffer.append(kept.to(device))
            self.samples += kept.samples

    def _minibatches(self, server: ServerPart) -> list[Smashed]:
        """The buffer in pieces.

        Where there is batch norm a single sample that is left over joins the piece before it:
        nothing can be normalized by one.
        """
        size = self.settings.minibatch_samples
        groups: list[list[Smashed]] = [[]]
        space = size
        for kept in self._buffer:
            start = 0
            while start < kept.samples:
                if not space:
                    groups.append([])
                    space = size
                taken = kept.part(start, start + space)
                groups[-1].append(taken)
                start, space = start + taken.samples, space - taken.samples
        if len(groups) > 1 and space == size - 1 and _normalizes(self.auxiliary, server.model):
            rest = groups.pop()
            groups[-1] += rest
        return [joined(group).to(server.device) for group in groups if group]

    def _pull(self, server: ServerPart, batch: Smashed, target: Tensor) -> float:
        """One optimizer step on one minibatch; returns the squared error before it."""
        given = batch.values.detach().requires_grad_()
        if batch.labels is None:
            raise ModelPartMisused("activations without labels cannot be aligned to")
        with untouched(self.auxiliary):
            loss = server.loss(call(self.auxiliary, given, batch.lengths), batch.labels)
        (estimate,) = torch.autograd.grad(loss, given, create_graph=True)
        error = (estimate - target).square().sum()
        own = list(self._optimizer.weights.values())
        found = torch.autograd.grad(error, own, allow_unused=True)
        self._optimizer.step(list(found))
        return error.item()


def _normalizes(*modules: nn.Module) -> bool:
    return any(isinstance(part, _BatchNorm) for module in modules for part in module.modules())
