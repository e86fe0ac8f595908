"""The `fed` of a task that trains alone: the same calls without a run."""

import time
from collections.abc import Callable, Iterator

import numpy as np
from torch import nn

from fsl_async.config.presets import DECAY_SHARES
from fsl_async.errors import TaskError
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.ports import Move, Moved, Orders, RebaseOrder, Vector, Work
from fsl_async.learn.client.script_values import NOT_GIVEN, Metrics, Whole, numbers
from fsl_async.learn.client.training import Training
from fsl_async.store.model.manifest import Manifest


class _Alone:
    """The `ExchangePort` of a process alone: its own first weights are version 0, the only one."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def free_vector(self, values: int) -> Vector:
        return np.empty(values, np.float32)

    def attach(self, manifest: Manifest, own: Vector) -> None:
        self._orders.ask(RebaseOrder(discard=False))

    def put_snapshot(self, sequence: int, snapshot: Vector | None, work: Work) -> None:
        """Do nothing: a task that trains alone sends no snapshots."""

    def reach_pace(self) -> None:
        """Do nothing: without a run nothing is sent."""

    def rebase(self, move: Callable[[Move], Moved], *, discard: bool) -> None:
        none = np.empty(0, np.float32)
        move(Move(0, "stay", none, none))

    def read_base(self, read: Callable[[Vector], None]) -> int:
        return 0  # alone, the version is what was trained so far


class LocalFed(Fed):
    """The same API for one process alone: a baseline to compare with, and a way to try a task out.

    Ends after `steps` steps or `seconds` seconds, whichever comes first (None: no limit). `history`
    keeps (step, metrics) of every step.
    """

    def __init__(
        self, context: ClientContext, *, steps: int | None = None, seconds: float | None = None
    ) -> None:
        orders = Orders()
        super().__init__(Training(orders, _Alone(orders)), context)
        self.history: list[tuple[int, dict[str, float]]] = []
        self._orders = orders
        self._last_step = steps
        self._seconds = seconds
        self._begun_at = time.monotonic()

    @property
    def model(self) -> nn.Module | None:
        """The attached model; None before `attach`."""
        return self._training.module

    def _check_exposure(self, model: nn.Module) -> None:
        """Do nothing: nothing leaves this process."""

    def _expect_rounds(self) -> None:
        """Do nothing: without a run there are no rounds, and no weights leave this process."""

    def rounds(self) -> Iterator[int]:
        """Raise TaskError: without a run there are no rounds."""
        raise TaskError("fed.rounds: no run calls for rounds here, where a task trains alone")

    def step(self, *, tokens: Whole = NOT_GIVEN, metrics: Metrics | None = None) -> bool:
        """Count a step; False once the steps or the time are used up."""
        if not self.running:
            return self._ended()
        goes_on = super().step(tokens=tokens, metrics=metrics)
        self.history.append((self.meter.steps, numbers("fed.step: metrics", metrics or {})))
        if self.progress == 1.0:
            self.stop()
            return self._ended()
        return goes_on

    def send(self) -> None:
        """Do nothing without a run. Raises TaskError before `attach`."""
        self._training.send()

    def stop(self) -> None:
        """End the run at the next step. For any thread."""
        self._orders.stop()

    @property
    def progress(self) -> float | None:
        """The share of the steps or of the time that is used up; None without either limit."""
        parts = []
        if self._last_step is not None:
            parts.append(self.meter.steps / max(1, self._last_step))
        if self._seconds is not None:
            parts.append((time.monotonic() - self._begun_at) / max(self._seconds, 1e-9))
        return min(1.0, max(parts)) if parts else None

    @property
    def decays_from(self) -> float:
        """Progress at which learning rates begin to fall, by `train.decay_share`."""
        train = self.settings.train
        return 1.0 - (train.decay_share or DECAY_SHARES[train.optimizer])
