"""What bytes and memory depend on a cut model through: how many values each half has, keeps and passes on. Pure."""

from __future__ import annotations

from attrs import frozen


@frozen
class Part:
    """A piece of a model, in values.

    `parameters` are trained; `buffers` are exchanged but not trained (running means); `counters` are 64-bit integers that our
    wire leaves out and published figures count; `activations` is what a sample leaves behind for the backward pass; `frozen` weights are
    held and neither trained nor exchanged (LoRA).
    """

    parameters: int = 0
    buffers: int = 0
    counters: int = 0
    activations: int = 0
    frozen: int = 0

    def __add__(self, other: Part) -> Part:
        return Part(
            self.parameters + other.parameters,
            self.buffers + other.buffers,
            self.counters + other.counters,
            self.activations + other.activations,
            self.frozen + other.frozen,
        )

    @property
    def values(self) -> int:
        """What is sent when the piece is: parameters and buffers, fp32."""
        return self.parameters + self.buffers


@frozen
class ModelShapes:
    """A model cut in two, and in three for labels that stay at home.

    client, server: the halves, as most methods have them; `whole` is the model in one piece (with tied weights less than the sum).
    auxiliary: the small model that stands in for the server's half at the client.
    tail: what of the server's half moves to the client when labels stay there (U-shaped), less what the client has already.
    cut_values, tail_values: values that one sample sends over the first and the second cut.
    label_bytes: what one sample's labels take on the wire.
    """

    name: str
    cut: str
    client: Part
    server: Part
    whole: Part
    auxiliary: Part
    tail: Part
    cut_values: int
    tail_values: int
    label_bytes: int


def label_width(classes: int) -> int:
    """Bytes of one label: the smallest unsigned integer (1, 2 or 4 bytes) that holds every class."""
    return 1 if classes <= 1 << 8 else 2 if classes <= 1 << 16 else 4
