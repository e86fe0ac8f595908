"""What the two sides of a client pass each other: flat fp32 vectors and small values.

The training side (`training`) has the model: it copies weights into a vector, and moves the model
onto another one. The exchange side (`exchange`) has the vectors: it codes deltas and decodes
versions. The training side knows nothing of codecs and streams, the exchange side nothing of torch,
and each calls the other through one of the protocols below. So the training side can live in
other processes, with the vectors in shared memory (`Exchange(allocate=...)`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from fsl_async.store.manifest import Manifest

Vector = npt.NDArray[np.float32]
"""The exchanged weights of a model, float32 (manifest.values,), on the CPU."""

NO_VERSION = -1


@frozen
class SnapshotOrder:
    """Copy the weights for delta `sequence`. hold: train no further until `resume` or `stop`."""

    sequence: int
    hold: bool = False


@frozen
class RoundOrder:
    """Train round `number`, then copy the weights for delta `sequence` and train no further."""

    sequence: int
    number: int


@frozen
class RebaseOrder:
    """Move onto the newest base. discard: drop what was trained since the last snapshot."""

    discard: bool


Order = SnapshotOrder | RoundOrder | RebaseOrder


class TrainingPort(Protocol):
    """What the exchange side calls, from any thread. None of it waits."""

    def ask(self, order: Order) -> None:
        """Have the training thread carry out an order at its next step."""

    def resume(self) -> None:
        """Let training go on after an order that held it; harmless when none does."""

    def count_steps(self, steps: int) -> None:
        """Call `ExchangePort.reach_pace` so many steps after each snapshot; 0: do not."""

    def stop(self) -> None:
        """End training at the next step; what was asked before is still carried out."""

    def refuse(self, code: str, text: str) -> None:
        """End `attach` with RefusedError: the parameter server does not accept this model."""


@frozen
class Work:
    """What was trained between two snapshots; finite: whether all weights of the second one are."""

    tokens: int
    steps: int
    metrics: dict[str, float]
    finite: bool
    facts: dict[str, float] = field(factory=dict)
    """See `fsl_async.roles.sync.delta.FACTS`."""
    scalars: Vector | None = None
    """Of a round of zeroth order: its projected gradients, float32 (K, P), which are the delta."""


@frozen
class Move:
    """How to get the model onto `version`, with theta the model's weights.

    "take"   theta <- base
    "move"   theta <- base + (theta - reference); where theta is not finite, as "take"
    "stay"   nothing; where theta is not finite, as "take"
    """

    version: int
    how: Literal["take", "move", "stay"]
    base: Vector
    reference: Vector


@frozen
class Moved:
    """taken: theta is the base as it is. dropped_tokens: of the work that was lost by that."""

    taken: bool = False
    dropped_tokens: int = 0


class ExchangePort(Protocol):
    """What the training side calls, from the training thread."""

    def free_vector(self, values: int) -> Vector:
        """A vector that nothing else refers to, with any content."""

    def attach(self, manifest: Manifest, own: Vector) -> None:
        """Exchange a model of this manifest, whose first weights are `own`."""

    def put_snapshot(self, sequence: int, snapshot: Vector | None, work: Work) -> None:
        """Take a snapshot for delta `sequence`; from here on nothing writes the vector.

        None: the delta is `work.scalars`, and the model goes back to the base with the next
        version. Raises TaskError where the run has no such scalars.
        """

    def reach_pace(self) -> None:
        """Report that progress is to be sent: its steps are trained, or the task asks for it."""

    def rebase(self, move: Callable[[Move], Moved], *, discard: bool) -> None:
        """Call `move` once while nothing writes the base, and not if the base is incomplete."""

    def read_base(self, read: Callable[[Vector], None]) -> int:
        """Call `read` with the base; returns its version, NO_VERSION where it is incomplete."""
