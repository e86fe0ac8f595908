"""Estimates what a client must hold to train its part, and to train the whole model. Pure.

All values are fp32:
  * weights: 4 bytes for each parameter and buffer that the client holds;
  * gradients: 4 bytes for each trained parameter; optimizer: 8 more, Adam's two moments;
  * activations: 4 bytes for each value that a batch keeps for the backward pass
    (`Part.activations`); with the split methods also the tensors at the cut, sent and received.
FSL-SAGE's auxiliary model is frozen at the client, but gradients pass through it: its weights and
activations count, its gradients and moments do not. Left out, because they depend on the library
and the device: temporary buffers, fragmentation, the framework itself (some hundred megabytes with
CUDA), and in pretraining the synchronization's own vectors in host memory.
"""

from __future__ import annotations

from attrs import frozen

from fsl_async.accounting.shapes import ModelShapes, Part

_VALUE_BYTES = 4
_ADAM_BYTES = 8


@frozen
class Memory:
    """Estimated bytes by purpose. The names are keys of `plan --json`."""

    weights: int = 0
    gradients: int = 0
    optimiser: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """The sum of all four."""
        return self.weights + self.gradients + self.optimiser + self.activations

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimiser + other.optimiser,
            self.activations + other.activations,
        )


def trained(part: Part, batch: int) -> Memory:
    """Memory of a part that is trained on batches of `batch` samples."""
    return Memory(
        weights=_VALUE_BYTES * (part.values + part.frozen),
        gradients=_VALUE_BYTES * part.parameters,
        optimiser=_ADAM_BYTES * part.parameters,
        activations=_VALUE_BYTES * batch * part.activations,
    )


def frozen_part(part: Part, batch: int) -> Memory:
    """Memory of a part that only passes gradients on."""
    return Memory(
        weights=_VALUE_BYTES * (part.values + part.frozen),
        activations=_VALUE_BYTES * batch * part.activations,
    )


def whole_model(shapes: ModelShapes, batch: int) -> Memory:
    """Memory of training the whole model in one process."""
    return trained(shapes.whole, batch)


def client_memory(method: str, shapes: ModelShapes, batch: int) -> Memory:
    """Memory of one client of `method`."""
    if method in {"pretrain", "fedavg"}:
        return whole_model(shapes, batch)
    crossing = Memory(activations=2 * _VALUE_BYTES * batch * shapes.cut_values)
    own = trained(shapes.client, batch) + crossing
    if method == "sl-u":
        second = Memory(activations=2 * _VALUE_BYTES * batch * shapes.tail_values)
        return own + trained(shapes.tail, batch) + second
    if method == "cse-fsl":
        return own + trained(shapes.auxiliary, batch)
    if method == "fsl-sage":
        return own + frozen_part(shapes.auxiliary, batch)
    return own
