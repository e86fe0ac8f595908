"""Bytes of a node: payload by category and direction, and what its links handed to the sockets; and what coding lost of what it sent.

Categories and directions are those of the planner, seen from the client. `payload` counts values in their number format before
the entropy stage, as the planner does; `coded` is what the streams carried. What is sent again is counted again. `error` is the root mean square
of what rounding to the number format changed, in parts of that of the values, over all values that this node has coded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import fsl_transport as tp
from fsl_async.accounting.categories import Category, Direction
from fsl_async.accounting.sizes import FORMATS
from fsl_codecs import info


class Tensor(Protocol):
    """A tensor of a manifest."""

    @property
    def name(self) -> str:
        """Its name in the model."""

    @property
    def shape(self) -> Sequence[int]:
        """Its sizes."""

    @property
    def offset(self) -> int:
        """Where it begins in the flat vector, in values."""


class Manifest(Protocol):
    """What is needed of `fsl_async.store.manifest.Manifest`."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """In the order of the flat vector."""

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Start and stop of a chunk in the flat vector."""


class Traffic:
    """Counters of one node."""

    def __init__(self) -> None:
        self.payload: Counter[tuple[str, str]] = Counter()
        self.coded: Counter[tuple[str, str]] = Counter()
        self.sockets: Counter[str] = Counter()
        self._squares: dict[tuple[str, str], tuple[float, float]] = {}

    def values(
        self, category: Category, direction: Direction, number_format: str, values: int, coded: int
    ) -> None:
        """Count a frame of values."""
        self.payload[category, direction] += FORMATS[number_format].payload(values)
        self.coded[category, direction] += coded

    def weights(
        self, method: str, manifest: Manifest, direction: Direction, index: int, frame: bytes
    ) -> None:
        """Count a chunk of weights between a client and the parameter server by what it is of.

        An auxiliary model that is averaged with the client-side one (CSE-FSL) is told apart by its tensors' names.
        """
        start, stop = manifest.chunk_range(index)
        auxiliary = 0
        category = Category.FULL_MODEL
        if method not in {"none", "fedavg"}:
            category = Category.CLIENT_MODEL
            auxiliary = sum(
                max(0, min(stop, spec.offset + math.prod(spec.shape)) - max(start, spec.offset))
                for spec in manifest.tensors
                if spec.name.startswith("auxiliary.")
            )
        coded = round(len(frame) * auxiliary / max(stop - start, 1))
        number_format = info(frame).format
        own = stop - start - auxiliary
        self.values(category, direction, number_format, own, len(frame) - coded)
        if auxiliary:
            self.values(Category.AUXILIARY, direction, number_format, auxiliary, coded)

    def plain(self, category: Category, direction: Direction, size: int) -> None:
        """Count bytes that no codec touches."""
        self.payload[category, direction] += size
        self.coded[category, direction] += size

    def lost(
        self, category: Category, direction: Direction, error_square: float, value_square: float
    ) -> None:
        """Count what coding a frame has changed: sums of squares, of the differences and of the values."""
        errors, values = self._squares.get((category, direction), (0.0, 0.0))
        self._squares[category, direction] = errors + error_square, values + value_square

    def errors(self) -> dict[str, float]:
        """All errors, by "category direction"."""
        return {
            " ".join(key): float(f"{math.sqrt(errors / values):.4g}")
            for key, (errors, values) in sorted(self._squares.items())
            if values
        }

    def as_dict(self) -> dict[str, Any]:
        """For summaries and journals: "activations up" -> bytes."""
        return {
            "payload": {" ".join(key): size for key, size in sorted(self.payload.items())},
            "coded": {" ".join(key): size for key, size in sorted(self.coded.items())},
            "sockets": dict(self.sockets),
            "error": self.errors(),
        }


class CountedLink:
    """A link whose bytes are counted on their way, heads and control included."""

    def __init__(self, link: Any, traffic: Traffic, *, at_client: bool) -> None:
        self._link = link
        self._sockets = traffic.sockets
        self._out, self._in = ("up", "down") if at_client else ("down", "up")

    def send(self, peer: str, lane: tp.Lane, frames: Sequence[tp.Buffer], *rest: Any) -> None:
        """Count and pass on."""
        self._sockets[self._out] += sum(len(frame) for frame in frames)
        self._link.send(peer, lane, frames, *rest)

    def set_receiver(self, receive: Callable[..., None]) -> None:
        """Count what comes before it is handed over."""

        def counted(peer: str, lane: tp.Lane, frames: Sequence[tp.Buffer], *rest: Any) -> None:
            self._sockets[self._in] += sum(len(frame) for frame in frames)
            receive(peer, lane, frames, *rest)

        self._link.set_receiver(counted)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the link's own."""
        return getattr(self._link, name)
