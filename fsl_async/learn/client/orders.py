"""Orders to a training thread of the same process. Imports neither torch nor NumPy.

Any thread asks and never waits. The training thread carries orders out between two steps,
and waits here where training is held.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from fsl_async.errors import ExitCode, RefusedError, TaskError
from fsl_async.learn.client.ports import Order, RoundOrder, SnapshotOrder


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
        # All that fed.step reads when nothing is asked. True until a model is attached, so that a
        # step before that reaches `Training.attend`, which complains.
        self.attention = True
        self.stopped = False
        self.by_rounds = False
        self.pace_steps = 0
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
        """End the wait for the first order with RefusedError."""
        with self._changed:
            self._refusal = (code, text)
            self._changed.notify_all()

    # --- training thread ---

    def asked(self) -> bool:
        """Whether something is asked, or training has ended."""
        return self.attention

    def attached(self) -> None:
        """There is a model: from here on attention means that something is asked."""
        with self._changed:
            self.attention = self.stopped or bool(self._orders)

    def wait_for_first(self) -> None:
        """Wait until something is asked. Raises RefusedError, and RunFinishedError once stopped."""
        with self._changed:
            self._wait_for(lambda: self.attention or self._refusal is not None)
            self.check_refusal()
            if self.stopped and not self._orders:
                raise RunFinishedError("the run ended before this client got its weights")

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

    def check_refusal(self) -> None:
        """Raise RefusedError where the parameter server has refused this model."""
        if self._refusal is not None:
            raise RefusedError(self._refusal[1], self._refusal[0])

    def _wait_for(self, holds: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait at most `seconds` until something holds, which the orders decide."""
        self._changed.wait_for(holds, seconds)

    def _next_order(self) -> Order:
        return self._orders.popleft()
