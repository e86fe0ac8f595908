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

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

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
    Move,
    Moved,
    Orders,
    RebaseOrder,
    RoundOrder,
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
        self._known = set(weights.trained_alone())
        self._weights_there = dict(self._identities())
        self._integers = _integers(weights.module)
        """A mark for each buffer, by name; it changes when the buffer is replaced or written to."""

    def lines(self) -> list[str]:
        """Return one line about each change since the last call."""
        lines = []
        added = [name for name in self._weights.trained_alone() if name not in self._known]
        self._known.update(added)
        if added:
            lines.append(
                f"{_some(added)} trains here and is not exchanged: it was frozen, or not in the"
                " model, at fed.attach, and the tensors of a run are fixed by its first version;"
                " start a new run with the final model"
            )
        now = dict(self._identities())
        replaced = [name for name, one in self._weights_there.items() if now.get(name, one) != one]
        self._weights_there = now
        if replaced:
            lines.append(
                f"{_some(replaced)} was replaced by another tensor after fed.attach: an optimizer"
                " that was made before does not train it, and its new values are sent as work"
            )
        changed = [
            name
            for name, one in self._weights.module.named_buffers()
            if name in self._integers and self._integers[name] != _mark(one)
        ]
        for name in changed:
            del self._integers[name]
        if changed:
            lines.append(
                f"{_some(changed)} has changed since fed.attach and stays this client's own:"
                " integers are not averaged; keep it as floating point if it should be"
            )
        return lines

    def _identities(self) -> Iterator[tuple[str, int]]:
        """Weights that train, by name, and what tells each object from another."""
        for name, weight in self._weights.module.named_parameters():
            if weight.requires_grad:
                yield plain_name(name), id(weight)


def _integers(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Marks of persistent buffers of integers and truth values, but for counters of batch norm."""
    listed = held_state(module)
    counters = {
        id(part.num_batches_tracked) for part in module.modules() if isinstance(part, _NormBase)
    }
    return {
        name: _mark(one)
        for name, one in module.named_buffers()
        if name in listed and id(one) not in counters
        if not (one.is_floating_point() or one.is_complex())
    }


def _mark(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), tensor._version  # noqa: SLF001


def _some(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]}{more}"


class Training:
    """Carries out orders on a torch module. For the training thread, but for two properties.

    now: seconds of a monotonic clock.
    """

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
        self.facts: dict[str, float] = {}
        """Of every delta; see `fsl_async.roles.sync.delta.FACTS`."""
        self.more_facts: Callable[[], Mapping[str, float]] = dict
        """Gives those that change, when a delta is made."""
        self.position: Callable[[], Mapping[str, float]] = dict
        """Gives the position in the data, when a delta is made."""
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
        self.is_at_version = False
        """Whether the model has a version's weights for a while, and not its own."""
        self._exchange = exchange
        self._weights: ModelWeights | None = None
        self._norms: SpectralNorms | None = None
        self._first_buffers = np.empty(0, np.float32)
        """Of the version that the model was moved onto first, for `local`."""
        self._changes: ModelChanges | None = None
        self._round: RoundOrder | None = None  # the one that is trained
        self._reported_from = -1  # the step of the snapshot whose pace was reported last

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

        exchange: as in `ModelWeights`.

        Raises TaskError (nothing to exchange, not finite, a second model with other tensors),
        RefusedError (the parameter server does not accept this model), RunFinishedError (stopped
        while waiting).
        """
        if self._weights is not None:
            self._replace(self._weights, module, exchange)
            return
        weights = self._weights_of(module, exchange)
        own = self._exchange.free_vector(weights.layout.values)
        if not weights.copy_out(own):
            position = int(np.flatnonzero(~np.isfinite(own))[0])
            raise TaskError(
                "the model has NaN or infinite values at fed.attach, first in"
                f" {weights.layout.tensor_at(position)}: check its initialization; a constant such"
                " as a mask of -inf may be a buffer with persistent=False"
            )
        self._hold(weights)
        self.orders.attached()
        self._exchange.attach(weights.manifest, own)
        while self.version == NO_VERSION:
            self.orders.wait_for_first()
            self.attend()
        if self.round_steps:
            self.next_round()

    def _weights_of(self, module: nn.Module, exchange: Sequence[str] | View | None) -> ModelWeights:
        return ModelWeights(
            module, exchange, buffers=self.buffers, checks_frozen=self.checks_frozen
        )

    def _replace(
        self, old: ModelWeights, module: nn.Module, exchange: Sequence[str] | View | None
    ) -> None:
        """Go on with another module of the same tensors, which gets the weights of the old one."""
        new = self._weights_of(module, exchange)
        check_same(new, old)
        if new.module is old.module:
            new.restore(old.saved())
        else:
            vector = np.empty(old.layout.values, np.float32)
            old.copy_out(vector)
            new.copy_in(vector)
        self._hold(new)

    def _hold(self, weights: ModelWeights) -> None:
        self._weights = weights
        self._changes = ModelChanges(weights)
        self._norms = SpectralNorms(weights.module, weights.layout)
        self._norms.keep()

    def attend(self) -> bool:
        """Carry out orders. Returns False once stopped. Raises TaskError without a model.

        After a snapshot that holds training it waits for more, until it is resumed or stopped.
        """
        if self._weights is None:
            raise TaskError("fed.step came before fed.attach(model): attach the model first")
        while (order := self.orders.take()) is not None:
            match order:
                case RebaseOrder(discard):
                    self._exchange.rebase(self._move, discard=discard)
                case SnapshotOrder(sequence, hold):
                    self._snapshot(sequence, hold=hold)
                case RoundOrder(sequence):  # a training function without rounds: one step
                    self._snapshot(sequence, hold=True)
        return not self.orders.stopped

    def keep_pace(self) -> None:
        """Report that the steps of the pace are trained, once after each snapshot."""
        steps, meter = self.orders.pace_steps, self.meter
        if not steps or meter.unsent_steps < steps:
            return
        since = meter.steps - meter.unsent_steps
        if since != self._reported_from:
            self._reported_from = since
            self._exchange.reach_pace()

    def send(self) -> None:
        """Ask to send what was trained. Raises TaskError without a model."""
        if self._weights is None:
            raise TaskError("fed.send came before fed.attach(model): attach the model first")
        self._exchange.reach_pace()

    @contextmanager
    def at_version(self) -> Iterator[int]:
        """Within it the model has the weights of the newest version that is here, exactly.

        Yields its number; NO_VERSION where none is, and the weights are then as they were.
        """
        if self._weights is None:
            raise TaskError("fed.at_version needs the model: call fed.attach(model) first")
        weights = self._weights
        own = weights.saved()
        self.is_at_version = True
        try:
            yield self._exchange.read_base(weights.copy_in)
        finally:
            weights.restore(own)
            self.is_at_version = False

    def expect_rounds(self) -> None:
        """The training function asks for rounds by `next_round`. Call it before `attach`."""
        self.orders.by_rounds = True

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
        if order is not None and scalars is not None:
            self._put_scalars(order.sequence, scalars)
        elif order is not None:
            self._snapshot(order.sequence, hold=True)
        return self.attend()

    def attend_round(self) -> bool:
        """Carry out orders after a step of a round of `round_steps`. False once stopped.

        At the end of the round it waits for the next one, so that no step is made from a version
        that is replaced meanwhile.
        """
        if self._round is None or self.meter.unsent_steps < self.round_steps:
            return self.attend()
        return self.end_round() and self.next_round() is not None

    @property
    def is_due(self) -> bool:
        """Whether the last step of a round of `round_steps` is done."""
        return bool(self.round_steps) and self.meter.unsent_steps >= self.round_steps

    def attend_for(self, seconds: float) -> None:
        """Carry out the next order within `seconds`, after the training function has returned."""
        self.orders.by_rounds = False
        if self._round is not None:  # it came back in the middle of a round: half of one is no use
            self.meter.forget()
            self.end_round()
        elif self.orders.wait(seconds):
            self.attend()

    def _snapshot(self, sequence: int, *, hold: bool) -> None:
        begun = self.now()
        assert self._weights is not None
        snapshot = self._exchange.free_vector(self._weights.manifest.values)
        finite = self._weights.copy_out(snapshot)
        assert self._norms is not None
        assert self._changes is not None
        if self.buffers == "average" and self._weights.copies_plain:
            self._norms.write_to(snapshot)
        elif self.buffers == "local" and self._weights.copies_plain:
            snapshot[self._weights.layout.weights :] = self._first_buffers
        for line in self._changes.lines():
            self.log(line)
        tokens, steps, metrics = self.meter.take()
        if not finite:
            # Sent all the same: the parameter server quarantines it, where an operator can look at
            # it.
            metrics["nonfinite"] = 1.0
        metrics["snapshot_s"] = self.now() - begun
        self.orders.hold(hold)  # before the answer, which may bring the resume
        facts = {**self.facts, **self.more_facts(), **self.position()}
        work = Work(tokens, steps, metrics, finite, facts)
        self._exchange.put_snapshot(sequence, snapshot, work)

    def _put_scalars(self, sequence: int, scalars: Vector) -> None:
        tokens, steps, metrics = self.meter.take()
        finite = bool(np.isfinite(scalars).all())
        if not finite:
            metrics["nonfinite"] = 1.0  # as in `_snapshot`
        facts = {**self.facts, ORDER: 0.0}
        work = Work(tokens, steps, metrics, finite, facts, scalars)
        self.orders.hold(True)  # before the answer, which may bring the resume
        self._exchange.put_snapshot(sequence, None, work)

    def _is_finite(self, weights: ModelWeights) -> bool:
        return weights.is_finite()

    def _move(self, move: Move) -> Moved:
        assert self._weights is not None
        moved = Moved()
        # NaN - NaN is NaN: weights that are not finite cannot be moved by a difference.
        if move.how == "take" or not self._is_finite(self._weights):
            if self.joined_at == NO_VERSION:
                self._weights.copy_in(move.base)
            else:
                self._weights.take(move.base)
            moved = Moved(taken=True, dropped_tokens=self.meter.unsent_tokens)
            self.meter.forget()
        elif move.how == "move":
            self._weights.rebase(move.base, move.reference)
        if self._norms is not None and self.buffers == "average" and move.how != "stay":
            self._norms.restore()
        if self.joined_at == NO_VERSION:
            self.joined_at = move.version
            self._first_buffers = move.base[self._weights.layout.weights :].copy()
        self.version = move.version
        self.on_version(move.version)
        return moved
