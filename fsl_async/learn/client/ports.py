"""The interface between the two sides of a client: flat fp32 vectors and small values.

The training side (`training`) has the model: it copies weights into a vector, and moves the model
onto another one. The exchange side (`exchange`) has the vectors: it codes deltas and decodes
versions. The training side knows nothing of codecs and streams, the exchange side nothing of torch,
and each calls the other through one of the protocols below. So the training side can live in
other processes, with the vectors in shared memory (`Exchange(allocate=...)`).

`Orders` passes them to a training thread of the same process: any thread asks and never waits. The
training thread carries orders out between two steps, and waits here where training is held.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from fsl_async.errors import ExitCode, RefusedError, TaskError
from fsl_async.roles.messages import Message
from fsl_async.roles.sync.messages import Rollout
from fsl_async.store.model.manifest import Manifest

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


@frozen
class Harm:
    """The least that hurts, as shares of the loss: `guard.evaluator_alone`, `_left_out`."""

    alone: float
    left_out: float


LossAt = Callable[[Vector], float]


@frozen
class ScoreOrder:
    """Score deltas. answer: does it, with a function that measures a vector, and with what hurts
    where a version is a mean of deltas (`EvaluatorExchange`).
    """

    answer: Callable[[LossAt, Harm | None], None]


Order = SnapshotOrder | RoundOrder | RebaseOrder | ScoreOrder


class TrainingPort(Protocol):
    """The training side, as the exchange side calls it, from any thread. No call waits."""

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
    """The work between two snapshots; finite: whether all weights of the second one are."""

    tokens: int
    steps: int
    metrics: dict[str, float]
    finite: bool
    facts: dict[str, float] = field(factory=dict)
    """See `fsl_async.roles.sync.delta.FACTS`."""
    scalars: Vector | None = None
    """The projected gradients of a round of zeroth order, float32 (K, P): they are the delta."""


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
    """The exchange side, as the training side calls it, from the training thread."""

    def free_vector(self, values: int) -> Vector:
        """A vector that nothing else refers to, with any content."""

    def attach(self, manifest: Manifest, own: Vector) -> None:
        """Exchange a model of this manifest, whose first weights are `own`."""

    def put_snapshot(self, sequence: int, snapshot: Vector | None, work: Work) -> None:
        """Take a snapshot for delta `sequence`; from here on only its coding writes the vector.

        None: the delta is `work.scalars`, and the model goes back to the base with the next
        version. Raises TaskError where the run has no such scalars.
        """

    def reach_pace(self) -> None:
        """Report that progress is to be sent: its steps are trained, or the task asks for it."""

    def rebase(self, move: Callable[[Move], Moved], *, discard: bool) -> None:
        """Call `move` once while nothing writes the base, and not if the base is incomplete."""

    def read_base(self, read: Callable[[Vector], None]) -> int:
        """Call `read` with the base; returns its version, NO_VERSION where it is incomplete."""


class RunFinishedError(TaskError):
    """The run ended before this client got its weights, or training went on after its end."""

    default_code = ExitCode.DONE


class Orders:
    """A `TrainingPort` on one side, the queue of the training thread on the other.

    by_rounds: the training function waits for rounds (`take_round`), so `take` leaves them alone.
    pace_steps: report so many steps after each snapshot; 0: do not. changed: where the training
    thread waits. `gang.orders.RankOrders` waits for its node instead.
    """

    def __init__(self, changed: threading.Condition | None = None) -> None:
        self.attention = False
        """Whether something is asked, or training has ended: all that fed.step reads of it."""
        self.stopped = False
        self.by_rounds = False
        self.pace_steps = 0
        self.rollouts: deque[Rollout] = deque()
        """Answers of clients that roll out, which came since they were last taken."""
        self.say: Callable[[Message], None] = lambda _: None
        """Sends the parameter server a message, which may be lost."""
        self._changed = changed or threading.Condition()
        self._orders: deque[Order] = deque()
        self._refusal: tuple[str, str] | None = None
        self._holding = False

    # --- any thread ---

    def ask(self, order: Order) -> None:
        """Have the training thread carry out an order at its next step; a snapshot only once."""
        with self._changed:
            if isinstance(order, SnapshotOrder) and order in self._orders:
                return
            self._orders.append(order)
            self.attention = True
            self._changed.notify_all()

    def resume(self) -> None:
        """Let training go on after an order that held it; harmless when none does."""
        with self._changed:
            self._holding = False
            self._changed.notify_all()

    def count_steps(self, steps: int) -> None:
        """Have the training thread report so many steps after each snapshot; 0: not."""
        self.pace_steps = steps  # one word, so that the training thread reads a whole one

    def stop(self) -> None:
        """End training at the next step; what was asked before is still carried out."""
        with self._changed:
            self.stopped = self.attention = True
            self._changed.notify_all()

    def refuse(self, code: str, text: str) -> None:
        """End training; a wait for the first order ends with RefusedError."""
        self._refusal = (code, text)
        self.stop()

    # --- training thread ---

    def asked(self) -> bool:
        """Whether something is asked, or training has ended."""
        return self.attention

    def wait(self, seconds: float | None = None, *, or_stop: bool = False) -> bool:
        """Wait at most `seconds` for an order; or_stop: or the stop. Whether there is an order."""
        with self._changed:
            self._wait_for(lambda: bool(self._orders) or (or_stop and self.stopped), seconds)
            return bool(self._orders)

    def take(self) -> Order | None:
        """The next order, or None; leaves a round to `take_round`. Waits while training is held."""
        with self._changed:
            self._wait_for(lambda: bool(self._orders) or self.stopped or not self._holding)
            if not self._orders or self._round_is_next:
                self.attention = self.stopped
                return None
            return self._next_order()

    def take_round(self) -> RoundOrder | None:
        """The next order if that is a round."""
        with self._changed:
            if not self._round_is_next:
                return None
            order = self._next_order()
            assert isinstance(order, RoundOrder)
            return order

    def hold(self, hold: bool) -> None:
        """Wait in `take` from here on until `resume` or `stop`; False: do not."""
        with self._changed:
            self._holding = hold

    @property
    def _round_is_next(self) -> bool:
        return self.by_rounds and bool(self._orders) and isinstance(self._orders[0], RoundOrder)

    def check_goes_on(self) -> None:
        """Raise RefusedError where the model was refused, RunFinishedError where the run ended."""
        if self._refusal is not None:
            raise RefusedError(self._refusal[1], self._refusal[0])
        if self.stopped and not self._orders:
            raise RunFinishedError("the run ended before this client got its weights")

    def _wait_for(self, holds: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait at most `seconds` until something holds, which the orders decide."""
        self._changed.wait_for(holds, seconds)

    def _next_order(self) -> Order:
        return self._orders.popleft()
