"""Bytes that values take, and the two ways to keep accounts. Pure.

`payload` is exact: the values' codes and block scales before the entropy stage, without frame heads (28 bytes and 16 for each
131,072 values) and without what sockets add. `coded` is an estimate of what is left of it after the entropy stage. With fp32 and bf16 the payload
is 4 and 2 bytes a value, so that a run's ledger can be compared with it to the byte.

Where the estimates come from: `python benchmarks/cut_bits.py` (rows in benchmarks/results/cut_bits.jsonl) for activations, their
gradients and weights (means over three cuts), and the rows of docs/BENCHMARKS.md, "Quality at equal tokens", for deltas (means of up and
down; e5m2 and uniform deltas are taken for activations). All are of a transformer. Behind a ReLU many values are zero and take less.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from attrs import frozen

from fsl_async.accounting.shapes import Part

RUN_VALUES = 128
"""Values that share a scale."""


class Kind(StrEnum):
    """What values are; how well they compress depends on it."""

    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    DELTA = "delta"


@frozen
class WireFormat:
    """A number format: bits of a code, bits of a run's scale at most, and estimated bits a value once coded, by kind."""

    name: str
    code_bits: int
    scale_bits: int
    coded_bits: Mapping[Kind, float]

    def payload(self, values: int) -> int:
        """Bytes before the entropy stage."""
        runs = -(-values // RUN_VALUES) if self.scale_bits else 0
        return -(-(values * self.code_bits + runs * self.scale_bits) // 8)

    def coded(self, values: int, kind: Kind) -> int:
        """Estimated bytes after it."""
        return round(values * self.coded_bits[kind] / 8)


def _bits(activations: float, gradients: float, weights: float, delta: float) -> dict[Kind, float]:
    return dict(zip(Kind, (activations, gradients, weights, delta), strict=True))


FORMATS: Mapping[str, WireFormat] = {
    one.name: one
    for one in (
        WireFormat("fp32", 32, 0, _bits(26.7, 27.3, 26.8, 25.9)),
        WireFormat("bf16", 16, 0, _bits(10.7, 11.3, 10.8, 10.75)),
        WireFormat("e4m3", 8, 8, _bits(6.65, 6.8, 6.6, 6.65)),
        WireFormat("e5m2", 8, 8, _bits(5.65, 5.8, 5.6, 5.65)),
        WireFormat("uniform", 8, 10, _bits(5.6, 5.65, 5.6, 5.6)),
    )
}


@frozen
class Size:
    """Exact payload and estimated coded size, in bytes."""

    payload: int = 0
    coded: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.payload + other.payload, self.coded + other.coded)

    def times(self, number: int) -> Size:
        """As many of them."""
        return Size(self.payload * number, self.coded * number)


class Accounting(Protocol):
    """How things that cross the wire are counted."""

    def values(self, number: int, kind: Kind) -> Size:
        """Activations, gradients or deltas."""

    def weights(self, part: Part) -> Size:
        """A whole piece of a model."""

    def plain(self, number: int) -> Size:
        """Bytes that no codec touches: labels."""

    def initial(self, part: Part) -> Size:
        """The first download of a piece of a model."""


@frozen
class OurAccounting:
    """Everything that crosses is counted: labels, and the first download. What crosses the cut, and deltas, go in `format`; whole models in fp32."""

    format: WireFormat

    def values(self, number: int, kind: Kind) -> Size:
        """In the chosen format."""
        return Size(self.format.payload(number), self.format.coded(number, kind))

    def weights(self, part: Part) -> Size:
        """Lossless: averages of rounded models would drift."""
        lossless = FORMATS["fp32"]
        return Size(lossless.payload(part.values), lossless.coded(part.values, Kind.WEIGHTS))

    def plain(self, number: int) -> Size:
        """As they are."""
        return Size(number, number)

    def initial(self, part: Part) -> Size:
        """Like any other model."""
        return self.weights(part)


@frozen
class PublishedAccounting:
    """As FSL-SAGE's figures were made: fp32 without coding, integer counters of a model at 8 bytes, labels and the first download at 0."""

    def values(self, number: int, kind: Kind) -> Size:
        """4 bytes a value."""
        return Size(4 * number, 4 * number)

    def weights(self, part: Part) -> Size:
        """Parameters and buffers at 4 bytes, counters at 8."""
        size = 4 * part.values + 8 * part.counters
        return Size(size, size)

    def plain(self, number: int) -> Size:
        """Labels were not counted."""
        return Size()

    def initial(self, part: Part) -> Size:
        """Nor was the first download."""
        return Size()
