"""What a client must hold to train its part, against training the whole model. Pure; an estimate.

The rule, all in fp32:
  * weights: 4 bytes for each parameter and buffer of what runs at the client;
  * gradients: 4 bytes for each trained parameter; optimiser: 8 more, Adam's two moments;
  * activations: 4 bytes for each value that a batch leaves behind for the backward pass (`Part.activations`), and for the split methods
    the tensors at the cut, going out and coming back.
FSL-SAGE's auxiliary model is frozen at the client, but gradients go through it: its weights and activations count, not its gradients and
moments. Left out, because it depends on the library and the device: temporary buffers, fragmentation, the framework itself (some hundred megabytes
with CUDA), and in pretraining the synchronisation's own vectors in host memory.
"""

from __future__ import annotations

from attrs import frozen

from fsl_async.accounting.shapes import ModelShapes, Part

_VALUE_BYTES = 4
_ADAM_BYTES = 8


@frozen
class Memory:
    """Estimated bytes by what they are for."""

    weights: int = 0
    gradients: int = 0
    optimiser: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimiser + self.activations

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimiser + other.optimiser,
            self.activations + other.activations,
        )


def trained(part: Part, batch: int) -> Memory:
    """Of a piece that is trained on batches of that size."""
    return Memory(
        weights=_VALUE_BYTES * (part.values + part.frozen),
        gradients=_VALUE_BYTES * part.parameters,
        optimiser=_ADAM_BYTES * part.parameters,
        activations=_VALUE_BYTES * batch * part.activations,
    )


def frozen_part(part: Part, batch: int) -> Memory:
    """Of a piece that gradients only go through."""
    return Memory(
        weights=_VALUE_BYTES * (part.values + part.frozen),
        activations=_VALUE_BYTES * batch * part.activations,
    )


def whole_model(shapes: ModelShapes, batch: int) -> Memory:
    """Of training without a server."""
    return trained(shapes.whole, batch)


def client_memory(method: str, shapes: ModelShapes, batch: int) -> Memory:
    """Of one client of that method."""
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
