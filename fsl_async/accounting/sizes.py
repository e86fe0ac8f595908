"""Bytes that values take in each number format, and the two ways of counting them. Pure.

`payload` is exact: codes and block scales before the entropy stage, without frame heads (28 bytes,
and 16 for each 131,072 values) and socket overhead. `coded` estimates the size after the entropy
stage. With fp32 and bf16 the payload is 4 and 2 bytes a value, so that a run's ledger can be
compared with it to the byte.

Source of the estimates, all of a transformer: `python benchmarks/cut_bits.py` (rows in
benchmarks/results/cut_bits.jsonl) for activations, their gradients and weights, means over three
cuts; docs/BENCHMARKS.md, "Quality at equal tokens", for deltas, means of up and down (e5m2 and
uniform activations are taken to be like deltas with steps of 0.088). After a ReLU many values are
zero and take less.

A `ModelShapes` has the numbers of a cut model that its bytes and memory depend on.

An `Account` sums a node's bytes over all its incarnations, from the notes "traffic" of its journal.
Each process counts from zero, so its last note has its sums. Directions are seen from the clients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self, TypeAlias

from attrs import astuple, field, frozen, mutable


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


class Category(StrEnum):
    """The categories of traffic; a run's ledger has the same names."""

    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    LABELS = "labels"
    AUXILIARY = "auxiliary"
    CLIENT_MODEL = "client model"
    FULL_MODEL = "full model"
    ADAPTERS = "adapters"
    SCALARS = "scalars"


class Direction(StrEnum):
    """From (up) or to (down) the client."""

    UP = "up"
    DOWN = "down"


RUN_VALUES = 128
"""Values that share one scale."""


class Kind(StrEnum):
    """Kinds of values; the compression ratio depends on the kind."""

    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    DELTA = "delta"


@frozen
class WireFormat:
    """A number format, in bits: of a code, of the scale of a run (at most), and coded by kind.

    coded_bits: estimated bits a value after the entropy stage.
    """

    name: str
    code_bits: int
    scale_bits: int
    coded_bits: Mapping[Kind, float]

    def payload(self, values: int) -> int:
        """Bytes before the entropy stage."""
        runs = -(-values // RUN_VALUES) if self.scale_bits else 0
        return -(-(values * self.code_bits + runs * self.scale_bits) // 8)

    def coded(self, values: int, kind: Kind) -> int:
        """Estimated bytes after the entropy stage."""
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
        WireFormat("uniform", 8, 10, _bits(5.6, 5.65, 5.6, 2.2)),
    )
}


@frozen
class Size(Summed):
    """Exact payload and estimated coded size, in bytes."""

    payload: int = 0
    coded: int = 0

    def times(self, number: int) -> Size:
        """The size of `number` of them."""
        return Size(self.payload * number, self.coded * number)


@frozen
class OurAccounting:
    """Counts everything, labels and the first download included.

    Activations, gradients and deltas are in `format`, weights in fp32.
    """

    format: WireFormat

    def values(self, number: int, kind: Kind) -> Size:
        """Activations, gradients or deltas, in the chosen format."""
        return Size(self.format.payload(number), self.format.coded(number, kind))

    def weights(self, part: Part) -> Size:
        """In lossless fp32: averages of rounded models would drift."""
        lossless = FORMATS["fp32"]
        return Size(lossless.payload(part.values), lossless.coded(part.values, Kind.WEIGHTS))

    def plain(self, number: int) -> Size:
        """Bytes that are not coded: labels."""
        return Size(number, number)

    def initial(self, part: Part) -> Size:
        """The first download of a part, which is like any other."""
        return self.weights(part)


@frozen
class PublishedAccounting:
    """Counts as FSL-SAGE's figures do: fp32 without coding, integer counters at 8 bytes.

    Labels and the first download count nothing.
    """

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
        """The first download was not counted."""
        return Size()


Accounting: TypeAlias = OurAccounting | PublishedAccounting
"""A way of counting what crosses the wire."""


_KINDS = ("payload", "coded", "sockets")


@mutable
class Account:
    """Sums of one node. Apply the journal's lines in order; `as_dict` has the result."""

    _before: dict[str, Counter[str]] = field(factory=lambda: {kind: Counter() for kind in _KINDS})
    _now: dict[str, dict[str, int]] = field(factory=dict)
    # Squares of relative errors, times payload.
    _lost: dict[str, float] = field(factory=dict)
    _of: Counter[str] = field(factory=Counter)
    _error: dict[str, float] = field(factory=dict)

    def apply(self, line: Mapping[str, Any]) -> None:
        """Apply one line of the journal; a malformed one changes nothing."""
        if line.get("type") == "node_started":
            self._end_incarnation()
        elif line.get("type") == "traffic":
            try:
                now = {kind: {k: int(v) for k, v in line[kind].items()} for kind in _KINDS}
                error = {k: float(v) for k, v in (line.get("error") or {}).items()}
            except (KeyError, TypeError, ValueError, AttributeError):
                return
            self._now, self._error = now, error

    def _end_incarnation(self) -> None:
        for kind, sums in self._now.items():
            self._before[kind].update(sums)
        payload = self._now.get("payload", {})
        for name, error in self._error.items():
            lost = error * error * payload.get(name, 0)
            self._lost[name] = self._lost.get(name, 0.0) + lost
            self._of[name] += payload.get(name, 0)
        self._now, self._error = {}, {}

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return payload, coded and socket bytes and the coding error, by "category direction".

        Socket bytes are by direction only.
        """
        found: dict[str, dict[str, Any]] = {}
        for kind in _KINDS:
            sums = self._before[kind] + Counter(self._now.get(kind, {}))
            found[kind] = {name: sums[name] for name in sorted(sums)}
        payload = self._now.get("payload", {})
        found["error"] = {}
        for name in sorted({*self._lost, *self._error}):
            own = payload.get(name, 0)
            lost = self._lost.get(name, 0.0) + self._error.get(name, 0.0) ** 2 * own
            found["error"][name] = float(f"{math.sqrt(lost / max(self._of[name] + own, 1)):.4g}")
        return found


def account_lines(node: str, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table of bytes; none for a node that has moved no bytes."""
    if not found["payload"] and not found["sockets"]:
        return []
    lines = [f"{f'bytes of the {node}':34}{'payload':>16}{'coded':>16}{'coding error':>15}"]
    for name, size in found["payload"].items():
        error = found["error"].get(name)
        shown = "" if error is None else "none" if error == 0 else f"{error:.2%}"
        lines.append(f"  {name:32}{size:>16,}{found['coded'].get(name, 0):>16,}{shown:>15}")
    for direction in ("up", "down"):
        label = f"sockets {direction}"
        lines.append(f"  {label:32}{'':16}{found['sockets'].get(direction, 0):>16,}")
    return lines
