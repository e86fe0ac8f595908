"""The numbers of a cut model that its bytes and memory depend on. Pure."""

from __future__ import annotations

from typing import Self

from attrs import astuple, frozen


@frozen
class Summed:
    """Adds attrs objects of one class up, number by number."""

    def __add__(self, other: Self) -> Self:
        pairs = zip(astuple(self, recurse=False), astuple(other, recurse=False), strict=True)
        return type(self)(*(one + another for one, another in pairs))


@frozen
class Part(Summed):
    """A part of a model, in values.

    parameters: trained.
    buffers: exchanged, not trained (running means).
    counters: 64-bit integers; published figures count them, our wire leaves them out.
    activations: kept per sample for the backward pass.
    frozen: held, neither trained nor exchanged (LoRA).
    """

    parameters: int = 0
    buffers: int = 0
    counters: int = 0
    activations: int = 0
    frozen: int = 0

    @property
    def values(self) -> int:
        """Values that are exchanged: parameters and buffers."""
        return self.parameters + self.buffers


@frozen
class ModelShapes:
    """A model cut in two, and in three for labels that stay at home.

    client, server: the two parts that most methods have.
    whole: the model in one piece; with tied weights less than their sum.
    auxiliary: the client's small model that replaces the split server's part.
    tail: what moves from the split server to the client when labels stay there (U-shaped), without
        what the client has already.
    cut_values, tail_values: values of one sample at the first and the second cut.
    label_bytes: bytes of one sample's labels on the wire.
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
    """Bytes of one label: 1, 2 or 4, the fewest that hold every class."""
    return 1 if classes <= 1 << 8 else 2 if classes <= 1 << 16 else 4
