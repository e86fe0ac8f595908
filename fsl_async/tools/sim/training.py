"""Training on the virtual clock: a few real values, which each step changes by a known amount.

`VirtualTraining` stands for a client's training thread. It answers the orders of the production
`Exchange` at step boundaries and moves its values as a model's weights are moved, so that work
which is lost, doubled or applied to another base shows in the values. `VirtualWorker` stands for a
worker thread.
"""

import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from attrs import Factory, define, field, frozen, mutable

from fsl_async.files.memory_files import Killed
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.ports import (
    Move,
    Moved,
    Order,
    RebaseOrder,
    RoundOrder,
    ScoreOrder,
    SnapshotOrder,
    TrainingPort,
    Vector,
    Work,
)
from fsl_async.roles.machine import Event, TrainingEnded
from fsl_async.roles.sync.progress import RunPosition
from fsl_async.store.errors import LearnError
from fsl_async.store.model.manifest import Manifest
from fsl_async.tools.sim.settings import STEP_S
from fsl_async.tools.sim.world import ProcessClock
from fsl_codecs import decode, is_seeds
from fsl_transport import Scheduler

T = TypeVar("T")
MANIFEST = Manifest.from_shapes([("weights", (6,))], buffers=[("buffers", (2,))])
"""Two chunks: one of weights, one of buffers."""
TOKENS_PER_STEP = 4096
TOLERANCE = 0.25
"""By how much of a step's work a delta may differ from its steps: fp32 rounds each rebase."""


@frozen
class Launch:
    """A client's process, as its training needs it. feed: takes the events of training."""

    name: str
    incarnation: int
    clock: ProcessClock
    feed: Callable[[Event], None]
    chance: random.Random

    def step_s(self) -> float:
        """Return the seconds of a step of this process, by chance."""
        return self.chance.uniform(0.5, 1.5) * STEP_S


@define
class Sent:
    """The deltas that one incarnation of a client has made, by sequence; it outlives the process.

    unit: the change of a weight in a step.
    """

    unit: float
    frames: dict[int, dict[int, bytes]] = field(factory=dict)
    """The frames of a delta, by index, as they were sent."""
    expected: dict[int, Vector] = field(factory=dict)
    """The weights of a delta by its steps, and by what coding has kept of the ones before; rounding
    makes it differ a little."""
    unsent: npt.NDArray[np.float64] = field(factory=lambda: np.zeros(0))
    """Trained and not sent, float64 (weights,), by the steps and by the frames of deltas from
    `first` on. Empty: not known."""
    first: int = 0
    largest: float = 0.0
    """The largest root mean square of such weights: what coding left of it may wait later on."""


class WatchedExchange(Exchange):
    """An exchange that keeps the frames of each delta as they were sent."""

    def __init__(
        self, training: TrainingPort, on_event: Callable[[Event], None], sent: Sent
    ) -> None:
        super().__init__(training, on_event=on_event)
        self._sent = sent

    def unsent(self, values: Vector) -> Vector | None:
        """Return r - theta of the weights, where no delta is being coded."""
        reference, manifest = self._reference, self.manifest
        if reference is None or manifest is None or any(d.missing for d in self._deltas.values()):
            return None
        return reference[: manifest.weights] - values[: manifest.weights]

    def drop_delta(self, sequence: int) -> None:
        """See `Exchange.drop_delta`. What is not coded is lost."""
        delta = self._deltas.get(sequence)
        if delta is not None and delta.missing:
            self._sent.unsent = np.zeros(0)
        super().drop_delta(sequence)

    def _coded(self, sequence: int, index: int) -> bytes | None:
        delta, sent = self._deltas.get(sequence), self._sent
        is_new = delta is not None and delta.coded[index] is None
        frame = super()._coded(sequence, index)
        if frame is None:
            return None
        frames, manifest = sent.frames.setdefault(sequence, {}), self.manifest
        assert manifest is not None
        if is_new and sequence >= sent.first and len(sent.unsent):
            start, stop = manifest.chunk_range(index)
            if start < manifest.weights and not is_seeds(frame):
                sent.unsent[start:stop] -= decode(frame)
        assert frame == frames.setdefault(index, frame), "a delta is coded once"
        return frame


class Trainer:
    """The training side of a client's process."""

    exchange: Exchange
    """The client's exchange, which gives the orders."""

    @property
    def is_held(self) -> bool:
        """Whether training waits in a step."""
        return False

    def announced(self, position: RunPosition) -> None:
        """Take the position of the run, with each version."""

    def begin(self, chance: random.Random) -> None:
        """Begin to train, when the client has dialed."""

    def report(self) -> dict[str, Any]:
        """Return what a heartbeat reports."""
        return {}

    def stop(self) -> None:
        """End training at the next step."""

    def end(self) -> None:
        """End it as kill -9 does. Planned calls of its process do not happen."""


class VirtualTraining(Trainer):
    """Trains a model of a few values, one step every `step_s` of virtual time.

    Step k adds `unit` to weight k modulo their number. own_pace: gives the steps after which its
    task asks to send.
    """

    exchange_type: type[WatchedExchange] = WatchedExchange

    def __init__(
        self,
        clock: Scheduler,
        on_event: Callable[[Event], None],
        *,
        step_s: float,
        initial: Vector,
        unit: float,
        manifest: Manifest = MANIFEST,
        own_pace: Callable[[], int] | None = None,
    ) -> None:
        self.values = initial.astype(np.float32)
        self.own_manifest = manifest
        self.unit = unit
        self.sent = Sent(unit)
        self.exchange: WatchedExchange = self.exchange_type(self, on_event, self.sent)
        self.sent_steps = 0
        """Steps that are in some delta."""
        self.refused: str | None = None
        self._clock = clock
        self._on_event = on_event
        self._step_s = step_s
        self._started_at: float | None = None
        self._held_at: float | None = None
        self._over = False
        self._applied = 0  # steps that are in the values
        self._settled = 0  # steps in a delta, or dropped
        self._asked: set[Order] = set()
        self._pace_steps = 0
        self._pace_number = 0
        self._own_pace = own_pace

    def begin(self, chance: random.Random) -> None:
        """Attach the model, after the seconds that a process needs to build it."""
        self._clock.call_at(self._clock.time() + chance.uniform(2.0, 15.0), self.attach)

    def report(self) -> dict[str, Any]:
        """See `Trainer`."""
        return {"step": self.steps}

    # --- what was trained ---

    @property
    def steps(self) -> int:
        """Steps trained in this incarnation."""
        if self._started_at is None:
            return 0
        now = self._clock.time() if self._held_at is None else self._held_at
        return int((now - self._started_at) / self._step_s + 1e-9)

    @property
    def is_held(self) -> bool:
        """Whether training waits in a step."""
        return self._held_at is not None

    @property
    def unsent_tokens(self) -> int:
        """Tokens trained since the last snapshot."""
        return (self.steps - self._settled) * TOKENS_PER_STEP

    @property
    def sent_tokens(self) -> int:
        """Tokens of this incarnation that are in some snapshot."""
        return self.sent_steps * TOKENS_PER_STEP

    def work(self, begin: int, end: int) -> Vector:
        """Return the change of the weights in steps `begin` to `end`, without the last."""
        place = np.arange(self.own_manifest.weights)
        size = len(place)
        counts = (end - place + size - 1) // size - (begin - place + size - 1) // size
        return np.float32(self.unit) * counts.astype(np.float32)

    def _train(self) -> None:
        """Bring the values up to the present step."""
        weights = self.own_manifest.weights
        self.values[:weights] += self.work(self._applied, self.steps)
        self._applied = self.steps

    # --- a TrainingPort ---

    def attach(self) -> None:
        """Attach the model, as the training function does when it has built it."""
        self.exchange.attach(self.own_manifest, self.values.copy())

    def ask(self, order: Order) -> None:
        """Carry out an order at the next step; a snapshot only once."""
        if isinstance(order, RebaseOrder):
            self._at_next_step(lambda: self._rebase(order))
        elif not isinstance(order, ScoreOrder) and order not in self._asked:
            self._asked.add(order)
            self._begin(order)

    def _begin(self, order: SnapshotOrder | RoundOrder) -> None:
        hold = isinstance(order, RoundOrder) or order.hold
        self._at_next_step(lambda: self._snapshot(order, hold=hold))

    def count_steps(self, steps: int) -> None:
        """Report so many steps after each snapshot."""
        self._pace_steps = steps
        self._await_pace()

    def resume(self) -> None:
        """Train on after a hold."""
        if self._held_at is not None and not self._over:
            assert self._started_at is not None
            self._started_at += self._clock.time() - self._held_at
            self._held_at = None
            self._await_pace()

    def stop(self) -> None:
        """End training at the next step."""
        self._at_next_step(self._end)

    def refuse(self, code: str, text: str) -> None:
        """Record that the parameter server refuses this client."""
        self.refused = text

    # --- at steps ---

    def _at_next_step(self, action: Callable[[], None]) -> None:
        now = self._clock.time()
        if self._started_at is None or self._held_at is not None:
            self._clock.call_at(now, action)
            return
        self._clock.call_at(self._started_at + (self.steps + 1) * self._step_s, action)

    def _snapshot(self, order: SnapshotOrder | RoundOrder, *, hold: bool) -> None:
        self._asked.discard(order)
        if hold and self._held_at is None:
            self._held_at = self._clock.time()
        self._train()
        begin, self._settled = self._settled, self.steps
        steps = self._settled - begin
        self.sent_steps += steps
        expected = self._owed(-self.work(begin, self._settled))
        self.sent.expected[order.sequence] = expected
        self.sent.largest = max(self.sent.largest, float(np.sqrt(np.mean(expected**2))))
        self._await_pace()
        self._put(order.sequence, Work(steps * TOKENS_PER_STEP, steps, {}, finite=True))

    def _owed(self, trained: Vector) -> Vector:
        """Return what the next delta must hold: what was trained, and what coding has kept.

        Sent and kept must be all that was trained, which is asserted.
        """
        sent, found = self.sent, self.exchange.unsent(self.values)
        if not len(sent.unsent):
            sent.unsent = trained.astype(np.float64) if found is None else found.astype(np.float64)
            return trained
        sent.unsent += trained
        if found is not None:
            assert np.abs(found - sent.unsent).max() <= TOLERANCE * self.unit, "work is lost"
            sent.unsent = found.astype(np.float64)
        return sent.unsent.astype(np.float32)

    def _put(self, sequence: int, work: Work) -> None:
        """Give the exchange a snapshot of the values."""
        self.values[self.own_manifest.weights :] = self.unit
        taken = self.exchange.free_vector(len(self.values))
        taken[:] = self.values
        self.exchange.put_snapshot(sequence, taken, work)

    def _rebase(self, order: RebaseOrder) -> None:
        self._train()
        self.exchange.rebase(self._move, discard=order.discard)

    def _move(self, move: Move) -> Moved:
        dropped = 0
        if move.how == "take":
            self.values[:] = move.base
            dropped, self._settled = self.unsent_tokens, self.steps
            self.sent.unsent = np.zeros(self.own_manifest.weights)
            self.sent.first = max(self.sent.expected, default=0) + 1
        elif move.how == "move":
            self.values[:] = move.base + (self.values - move.reference)
        if self._started_at is None:
            self._started_at = self._clock.time()
            self._await_pace()
        return Moved(move.how == "take", dropped)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            if self._held_at is None:
                self._held_at = self._clock.time()
            self._on_event(TrainingEnded(None))

    # --- pace ---

    def _await_pace(self) -> None:
        """Plan the report of the steps of the pace, instead of the one planned before."""
        self._pace_number += 1
        steps = self._own_pace() if self._own_pace is not None else self._pace_steps
        if not steps or self._started_at is None or self._held_at is not None:
            return
        at = max(self._clock.time(), self._started_at + (self._settled + steps) * self._step_s)
        self._clock.call_at(at, self._report_pace, self._pace_number)

    def _report_pace(self, number: int) -> None:
        if number == self._pace_number and self._held_at is None:
            self.exchange.reach_pace()


@mutable
class VirtualWorker:
    """A worker on the virtual clock: jobs take `cost_s` each, one after another, and run at their
    end. Results are reported `report_s()` later. killed: called when a job ends the process.
    failures: the exceptions of a job that are reported; others end the simulation.
    """

    clock: Scheduler
    cost_s: Callable[[], float]
    report_s: Callable[[], float] = field(default=lambda: 0.0)
    killed: Callable[[], None] = field(default=lambda: None)
    failures: type[Exception] = LearnError
    _free_at: float = Factory(lambda: 0.0)
    _closed: bool = False

    def submit(
        self, job: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]
    ) -> None:
        """Queue a job."""
        self._free_at = max(self._free_at, self.clock.time()) + self.cost_s()
        self.clock.call_at(self._free_at, self._run, job, done, failed)

    def _run(
        self, job: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]
    ) -> None:
        if self._closed:
            return
        try:
            result = job()
        except self.failures as error:
            self._report(failed, error)
        except Killed:
            self.killed()
        else:
            self._report(done, result)

    def _report(self, take: Callable[[T], None], result: T) -> None:
        late_s = self.report_s()
        if late_s:
            self.clock.call_at(self.clock.time() + late_s, take, result)
        else:
            take(result)

    def close(self) -> None:
        """Drop the queued jobs."""
        self._closed = True
