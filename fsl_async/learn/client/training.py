"""The training side of a client: the model, its snapshots and its rebases, in the training thread.

    snapshot   u = theta
    rebase     theta <- base + (theta - reference)

Which vectors these are is up to the exchange side (`exchange`), whose docstring has the arithmetic
of a run.

Precision: with fp32 weights a rebase rounds once per weight. What rounding to bf16 leaves out of a
base is no work and is not sent (`buffers`); steps below half a unit in the last place are still
lost in training itself, so keep fp32 weights and use autocast where there is memory for them.

`ModelChanges` detects what changes in a model after it was attached, and is not exchanged. The
tensors of a run are fixed by its first version. A layer that is unfrozen or added later trains at
this client alone, and integers are never averaged: the next delta logs each of them once.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fsl_async.config.settings_training import Buffers
from fsl_async.errors import TaskError
from fsl_async.learn.client.buffers import ModelWeights, check_same
from fsl_async.learn.client.meter import Meter
from fsl_async.learn.client.ports import (
    NO_VERSION,
    ExchangePort,
    Harm,
    Move,
    Moved,
    Orders,
    RebaseOrder,
    RoundOrder,
    ScoreOrder,
    SnapshotOrder,
    Vector,
    Work,
)
from fsl_async.learn.client.schedule import RunClock
from fsl_async.learn.client.shards import plain_name
from fsl_async.learn.client.statistics import SpectralNorms
from fsl_async.learn.models.adapters import View
from fsl_async.learn.models.saving import held_state
from fsl_async.roles.sync.delta import ORDER


class ModelChanges:
    """The trained parameters and integer buffers of a model when it was attached."""

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights
        self._alone = set(weights.trained_alone())
        self._trained = self._identities()
        listed, module = held_state(weights.module), weights.module
        counters = {
            id(part.num_batches_tracked) for part in module.modules() if isinstance(part, _NormBase)
        }
        self._integers = {
            name: _mark(one)
            for name, one in module.named_buffers()
            if name in listed and id(one) not in counters
            if not (one.is_floating_point() or one.is_complex())
        }
        """Marks of persistent buffers of integers and truth values, but for batch norm's counters;
        a mark changes when its buffer is replaced or written to."""

    def lines(self) -> list[str]:
        """Return one line about each kind of change since the last call."""
        added = [name for name in self._weights.trained_alone() if name not in self._alone]
        self._alone.update(added)
        before, self._trained = self._trained, self._identities()
        replaced = [name for name, one in before.items() if self._trained.get(name, one) != one]
        buffers = dict(self._weights.module.named_buffers())
        changed = [
            name
            for name, mark in self._integers.items()
            if name in buffers and mark != _mark(buffers[name])
        ]
        for name in changed:
            del self._integers[name]
        found = {
            "trains here and is not exchanged: it was frozen, or not in the model, at fed.attach,"
            " and the tensors of a run are fixed by its first version; start a new run with the"
            " final model": added,
            "was replaced by another tensor after fed.attach: an optimizer that was made before"
            " does not train it, and its new values are sent as work": replaced,
            "has changed since fed.attach and stays this client's own: integers are not averaged;"
            " keep it as floating point if it should be": changed,
        }
        return [f"{_some(names)} {what}" for what, names in found.items() if names]

    def _identities(self) -> dict[str, int]:
        """Weights that train, by name, and what tells each object from another."""
        named = self._weights.module.named_parameters()
        return {plain_name(name): id(weight) for name, weight in named if weight.requires_grad}


def _mark(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), tensor._version  # noqa: SLF001


def _some(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]}{more}"


class Training:
    """Carries out orders on a torch module. For the training thread, but for two properties.

    now: seconds of a monotonic clock.
    """

    _changes: ModelChanges
    _norms: SpectralNorms

    def __init__(
        self,
        orders: Orders,
        exchange: ExchangePort,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.orders = orders
        self.now = now
        self.meter = Meter(now)
        self.clock = RunClock(now)
        self.version = NO_VERSION  # what the model was last moved onto
        self.joined_at = NO_VERSION
        """The version that the model was moved onto first."""
        self.facts: dict[str, Callable[[], Mapping[str, float]]] = {}
        """Functions that give facts of a delta when it is made, each under a name of its own: those
        of `fsl_async.roles.sync.delta.FACTS`, and the position in the data."""
        self.round_steps = 0
        """Steps of a round in a training function that calls `fed.step` alone; 0: it asks for
        rounds, or there are none."""
        self.on_version: Callable[[int], None] = lambda _: None
        """Called when the model was moved onto a version."""
        self.buffers: Buffers = "average"
        """`exchange.buffers` of the run."""
        self.checks_frozen = True
        """Whether frozen weights must be equal at all clients, by `tune.base_check` of the run."""
        self.log: Callable[[str], None] = lambda _: None
        """Takes a line for this client's log."""
        self.loss: Callable[[], float] | None = None
        """Measures the model as it is, at an evaluator."""
        self.harm: Harm | None = None
        """At an evaluator of a run whose versions are means of deltas, which one can leave out."""
        self.is_at_version = False
        """Whether the model has a version's weights for a while, and not its own."""
        self._exchange = exchange
        self._weights: ModelWeights | None = None
        self._first_buffers = np.empty(0, np.float32)
        """Buffers of the version that the model was moved onto first, for `local`."""
        self._round: RoundOrder | None = None  # the one that is trained
        self._reported_from = -1  # the step of the snapshot whose pace was reported last

    def __reduce__(self) -> Any:
        raise TaskError(
            "fed cannot be given to another process: workers of a DataLoader that use it need"
            " multiprocessing_context='fork'; a loader with sampler=fed.sampler(data) needs not"
        )

    @property
    def stopped(self) -> bool:
        """Whether the run has ended, or this client's part in it."""
        return self.orders.stopped

    @property
    def module(self) -> nn.Module | None:
        """The attached model; None before `attach`."""
        return None if self._weights is None else self._weights.module

    def attach(self, module: nn.Module, exchange: Sequence[str] | View | None = None) -> None:
        """Take the model, and wait until its weights are a version of the run.

        exchange: as in `ModelWeights`. A second call goes on with another module of the same
        tensors, which gets the weights of the first one.

        Raises TaskError (nothing to exchange, not finite, a second model with other tensors),
        RefusedError (the parameter server does not accept this model), RunFinishedError (stopped
        while waiting).
        """
        weights, old = self._weights_of(module, exchange), self._weights
        if old is not None:
            check_same(weights, old)
            if weights.module is old.module:
                weights.restore(old.saved())
            else:
                vector = np.empty(old.layout.values, np.float32)
                old.copy_out(vector)
                weights.copy_in(vector)
            self._hold(weights)
            return
        own = self._exchange.free_vector(weights.layout.values)
        if not weights.copy_out(own):
            position = int(np.flatnonzero(~np.isfinite(own))[0])
            raise TaskError(
                "the model has NaN or infinite values at fed.attach, first in"
                f" {weights.layout.tensor_at(position)}: check its initialization; a constant such"
                " as a mask of -inf may be a buffer with persistent=False"
            )
        self._hold(weights)
        self._exchange.attach(weights.manifest, own)
        while self.version == NO_VERSION:
            self.orders.wait(or_stop=True)
            self.orders.check_goes_on()
            self.attend()
        if self.round_steps:
            self.next_round()

    def _weights_of(self, module: nn.Module, exchange: Sequence[str] | View | None) -> ModelWeights:
        return ModelWeights(
            module, exchange, buffers=self.buffers, checks_frozen=self.checks_frozen
        )

    def _hold(self, weights: ModelWeights) -> None:
        self._weights = weights
        self._changes = ModelChanges(weights)
        self._norms = SpectralNorms(weights.module, weights.layout)
        self._norms.keep()

    def _attached(self, call: str) -> ModelWeights:
        if self._weights is None:
            raise TaskError(f"{call} came before fed.attach(model): attach the model first")
        return self._weights

    def step(self) -> bool:
        """Do what is asked after a training step. Returns False once stopped.

        Reports once after each snapshot that the steps of the pace are trained. After the last
        step of a round of `round_steps` it waits for the next round, so that no step is made from a
        version that is replaced meanwhile. Raises TaskError without a model.
        """
        self._attached("fed.step")
        meter, pace = self.meter, self.orders.pace_steps
        if pace and meter.unsent_steps >= pace:
            since = meter.steps - meter.unsent_steps
            if since != self._reported_from:
                self._reported_from = since
                self._exchange.reach_pace()
        is_due = bool(self.round_steps) and meter.unsent_steps >= self.round_steps
        if not (self.orders.asked() or is_due):
            return True
        if not self.round_steps:
            return self.attend()
        with meter.waiting():
            if self._round is None or not is_due:
                return self.attend()
            return self.end_round() and self.next_round() is not None

    def attend(self) -> bool:
        """Carry out orders. Returns False once stopped. Raises TaskError without a model.

        After a snapshot that holds training it waits for more, until it is resumed or stopped.
        """
        self._attached("fed.step")
        while (order := self.orders.take()) is not None:
            match order:
                case RebaseOrder(discard):
                    self._exchange.rebase(self._move, discard=discard)
                case SnapshotOrder(sequence, hold):
                    self._snapshot(sequence, hold=hold)
                case ScoreOrder():
                    self._score(order)
                case RoundOrder(sequence):  # a training function without rounds: one step
                    self._snapshot(sequence, hold=True)
        return not self.orders.stopped

    def send(self) -> None:
        """Ask to send what was trained. Raises TaskError without a model."""
        self._attached("fed.send")
        self._exchange.reach_pace()

    @contextmanager
    def at_version(self) -> Iterator[int]:
        """Within it the model has the weights of the newest version that is here, exactly.

        Yields its number; NO_VERSION where none is, and the weights are then as they were.
        """
        weights = self._attached("fed.at_version")
        own = weights.saved()
        self.is_at_version = True
        try:
            yield self._exchange.read_base(weights.copy_in)
        finally:
            weights.restore(own)
            self.is_at_version = False

    def expect_rounds(self, steps: int = 0) -> None:
        """Train by rounds: of `steps` calls of `step`, or 0: as `next_round` gives them.

        Call it before `attach`.
        """
        self.orders.by_rounds = True
        self.round_steps = steps

    def next_round(self) -> int | None:
        """Wait for a call to train a round, and carry out orders meanwhile; None once stopped."""
        while True:
            self.orders.wait(or_stop=True)
            if self.orders.stopped:
                return None
            self._round = self.orders.take_round()
            if self._round is not None:
                return self._round.number
            self.attend()

    def end_round(self, scalars: Vector | None = None) -> bool:
        """Copy the weights for the round's delta and wait for its version; False once stopped.

        scalars: of a round of zeroth order, float32 (K, P): they are the delta, and the weights are
        not copied. Raises TaskError where the run takes no such scalars.
        """
        order, self._round = self._round, None
        if order is not None:
            self._snapshot(order.sequence, hold=True, scalars=scalars)
        return self.attend()

    def attend_for(self, seconds: float) -> None:
        """Carry out the next order within `seconds`, after the training function has returned."""
        self.orders.by_rounds = False
        if self._round is not None:  # it came back in the middle of a round: half of one is no use
            self.meter.forget()
            self.end_round()
        elif self.orders.wait(seconds):
            self.attend()

    def _snapshot(self, sequence: int, *, hold: bool, scalars: Vector | None = None) -> None:
        snapshot, measured = None, {}
        if scalars is None:
            begun = self.now()
            snapshot, finite = self._copied()
            measured = {"snapshot_s": self.now() - begun}
        else:
            finite = bool(np.isfinite(scalars).all())
        tokens, steps, metrics = self.meter.take()
        if not finite:
            # Sent all the same: the parameter server quarantines it, where an operator can look at
            # it.
            metrics["nonfinite"] = 1.0
        facts: dict[str, float] = {}
        for given in self.facts.values():
            facts |= given()
        if scalars is not None:
            facts[ORDER] = 0.0
        self.orders.hold(hold)  # before the answer, which may bring the resume
        work = Work(tokens, steps, metrics | measured, finite, facts, scalars)
        self._exchange.put_snapshot(sequence, snapshot, work)

    def _score(self, order: ScoreOrder) -> None:
        """Score deltas; the weights are then as they were."""
        weights, loss = self._attached("fed.evaluate_deltas"), self.loss

        def loss_at(vector: Vector) -> float:
            weights.copy_in(vector)
            return math.nan if loss is None else loss()

        own = weights.saved()
        try:
            order.answer(loss_at, self.harm)
        finally:
            weights.restore(own)

    def _copied(self) -> tuple[Vector, bool]:
        """A copy of the weights as they are exchanged, and whether all are finite."""
        weights = self._attached("fed.step")
        snapshot = self._exchange.free_vector(weights.manifest.values)
        finite = weights.copy_out(snapshot)
        if self.buffers == "average" and weights.copies_plain:
            self._norms.write_to(snapshot)
        elif self.buffers == "local" and weights.copies_plain:
            snapshot[weights.layout.weights :] = self._first_buffers
        for line in self._changes.lines():
            self.log(line)
        return snapshot, finite

    def _is_finite(self, weights: ModelWeights) -> bool:
        return weights.is_finite()

    def _move(self, move: Move) -> Moved:
        weights, moved = self._attached("fed.step"), Moved()
        is_first = self.joined_at == NO_VERSION
        # NaN - NaN is NaN: weights that are not finite cannot be moved by a difference.
        if move.how == "take" or not self._is_finite(weights):
            if is_first:
                weights.copy_in(move.base)
            else:
                weights.take(move.base)
            moved = Moved(taken=True, dropped_tokens=self.meter.unsent_tokens)
            self.meter.forget()
        elif move.how == "move":
            weights.rebase(move.base, move.reference)
        if self.buffers == "average" and move.how != "stay":
            self._norms.restore()
        if is_first:
            self.joined_at = move.version
            self._first_buffers = move.base[weights.layout.weights :].copy()
        self.version = move.version
        self.on_version(move.version)
        return moved
