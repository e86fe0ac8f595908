"""A training function without a network: the API of `Fed` for one process alone."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from fsl_async.config.presets import DECAY_SHARES
from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import TaskError
from fsl_async.learn.client.buffers import ModelWeights, check_same
from fsl_async.learn.client.fed_base import ClientContext, FedBase
from fsl_async.learn.client.meter import Meter
from fsl_async.learn.client.script_values import NOT_GIVEN, Metrics, Whole, numbers
from fsl_async.learn.models.adapters import Adapters


class LocalFed(FedBase):
    """The same API for one process alone: a baseline to compare with, and a way to try a task out.

    Ends after `steps` steps or `seconds` seconds, whichever comes first (None: no limit). `history`
    keeps (step, metrics) of every step.
    """

    def __init__(
        self, context: ClientContext, *, steps: int | None = None, seconds: float | None = None
    ) -> None:
        super().__init__(context)
        self.history: list[tuple[int, dict[str, float]]] = []
        self.model: nn.Module | None = None
        self._attached: ModelWeights | None = None
        self._meter = Meter()
        self._last_step = steps
        self._seconds = seconds
        self._begun_at = time.monotonic()
        self._running = True

    @property
    def running(self) -> bool:
        """False once the steps or the time are used up."""
        return self._running

    @property
    def version(self) -> int:
        """Always the initial version, once a model is attached."""
        return -1 if self.model is None else 0

    def attach(self, model: nn.Module, *, exchange: Sequence[str] | None = None) -> None:
        """Keep the model, for the caller of the task. Raises as `Fed.attach` does."""
        if TuneConfig(**self.config.get("tune", {})).is_on:
            self._check_causal(model)
        weights = ModelWeights(model, exchange)
        check_same(weights, self._attached)
        self.model, self._attached = model, weights

    def _attach_adapters(self, model: nn.Module, adapters: Adapters) -> None:
        if self.model is not None:
            raise TaskError("fed.lora was called twice: attach one model, once")
        ModelWeights(model, adapters.view)
        self.model = model

    def step(self, *, tokens: Whole = NOT_GIVEN, metrics: Metrics | None = None) -> bool:
        """Count a step; False once the steps or the time are used up."""
        if self.model is None:
            raise TaskError("fed.step came before fed.attach(model): attach the model first")
        if not self._running:
            return self._ended()
        self._meter.count(self._counted(tokens), metrics)
        self.history.append((self._meter.steps, numbers("fed.step: metrics", metrics or {})))
        out_of_steps = self._last_step is not None and self._meter.steps >= self._last_step
        passed_s = time.monotonic() - self._begun_at
        out_of_time = self._seconds is not None and passed_s >= self._seconds
        if out_of_steps or out_of_time:
            self._running = False
            return self._ended()
        return True

    def send(self) -> None:
        """Do nothing: there is no one to send to. Raises TaskError before `attach`."""
        if self.model is None:
            raise TaskError("fed.send came before fed.attach(model): attach the model first")

    def stop(self) -> None:
        """End the run at the next step. For any thread."""
        self._last_step = 0

    @property
    def progress(self) -> float | None:
        """The share of the steps or of the time that is used up; None without either limit."""
        parts = []
        if self._last_step is not None:
            parts.append(self._meter.steps / max(1, self._last_step))
        if self._seconds is not None:
            parts.append((time.monotonic() - self._begun_at) / max(self._seconds, 1e-9))
        return min(1.0, max(parts)) if parts else None

    @property
    def decays_from(self) -> float:
        """Progress at which learning rates begin to fall, by `train.decay_share`."""
        train = self.config.get("train", {})
        usual = DECAY_SHARES[train.get("optimizer", "muon")]
        return 1.0 - (float(train.get("decay_share", 0.0)) or usual)

    def _since_attach(self) -> tuple[int, bool]:
        return self._meter.steps, False

    def at_version(self) -> AbstractContextManager[int]:
        """Alone, the version is what was trained so far."""
        return nullcontext(0)

    def status(self) -> dict[str, float]:
        """Step, version, tokens, tokens_per_s, the running mean of each metric. For any thread."""
        return {"version": self.version, **self._meter.report()}
