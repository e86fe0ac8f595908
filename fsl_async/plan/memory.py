"""Estimates what a client must hold to train its part, and to train the whole model. Pure.

All values are fp32:
  * weights: 4 bytes for each parameter and buffer that the client holds;
  * gradients: 4 bytes for each trained parameter; optimizer: 8 more, Adam's two moments;
  * activations: 4 bytes for each value that a batch keeps for the backward pass
    (`Part.activations`); with the split methods also the tensors at the cut, sent and received.
An auxiliary model that the split server aligns (FSL-SAGE) is frozen at the client, but gradients
pass through it: its weights and activations count, its gradients and moments do not. Left out,
because they depend on the library and the device: temporary buffers, fragmentation, the framework
itself (some hundred megabytes with CUDA), and in pretraining the synchronization's own vectors in
host memory.
"""

from __future__ import annotations

from attrs import frozen

from fsl_async.accounting.sizes import ModelShapes, Part, Summed
from fsl_async.roles.split.methods import Method

_VALUE_BYTES = 4
_ADAM_BYTES = 8


@frozen
class Memory(Summed):
    """Estimated bytes by purpose. The names are keys of `plan --json`."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """The sum of all four."""
        return self.weights + self.gradients + self.optimizer + self.activations


def trained(part: Part, batch: int) -> Memory:
    """Memory of a part that is trained on batches of `batch` samples."""
    return Memory(
        weights=_VALUE_BYTES * (part.values + part.frozen),
        gradients=_VALUE_BYTES * part.parameters,
        optimizer=_ADAM_BYTES * part.parameters,
        activations=_VALUE_BYTES * batch * part.activations,
    )


def frozen_part(part: Part, batch: int) -> Memory:
    """Memory of a part that only passes gradients on."""
    return Memory(
        weights=_VALUE_BYTES * (part.values + part.frozen),
        activations=_VALUE_BYTES * batch * part.activations,
    )


def whole_model_memory(shapes: ModelShapes, batch: int) -> Memory:
    """Memory of training the whole model in one process."""
    return trained(shapes.whole, batch)


def client_memory(method: Method, shapes: ModelShapes, batch: int) -> Memory:
    """Memory of one client of `method`."""
    if not method.has_server:
        return whole_model_memory(shapes, batch)
    crossing = Memory(activations=2 * _VALUE_BYTES * batch * shapes.cut_values)
    found = trained(shapes.client, batch) + crossing
    if method.legs > 1:
        second = Memory(activations=2 * _VALUE_BYTES * batch * shapes.tail_values)
        found += trained(shapes.tail, batch) + second
    if method.auxiliary == "trained":
        found += trained(shapes.auxiliary, batch)
    if method.auxiliary == "aligned":
        found += frozen_part(shapes.auxiliary, batch)
    return found
