"""The training side of a simulated client: a user's training function in a thread of its own.

`Training`, exchange and `Fed` are those of production. Replaced is where the training thread waits
(`training_thread`). A step of the training function is one event of the virtual clock: its thread
sleeps in `fed.step` until the step is over.
"""

from __future__ import annotations

import contextlib
import functools
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from attrs import evolve, field, frozen
from torch import nn

from fsl_async.config.load import from_wire
from fsl_async.config.rules import is_own
from fsl_async.config.settings import Config
from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.errors import TaskError
from fsl_async.keys.folder import KeysFolder
from fsl_async.learn.client.context import ClientContext, SplitPort
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.ports import Orders, RunFinishedError, Vector
from fsl_async.learn.client.script_values import NOT_GIVEN, Metrics, Whole
from fsl_async.learn.client.training import Training
from fsl_async.learn.models.adapters import View
from fsl_async.learn.user_code import Task
from fsl_async.nodes.client.joining import context_of
from fsl_async.nodes.client.parts import ClientOptions, Membership
from fsl_async.nodes.wire import Welcome
from fsl_async.roles.machine import Event, TrainingEnded
from fsl_async.roles.sync.events import Attached
from fsl_async.roles.sync.progress import RunPosition
from fsl_async.tools.sim.residents import Residents
from fsl_async.tools.sim.simulation import SERVER_NAME
from fsl_async.tools.sim.training import Launch, Trainer
from fsl_async.tools.sim.training_thread import Changed, RandomStates, TrainingThread

if TYPE_CHECKING:
    import threading

ATTEND_S = 3600.0
_ALL = SitePolicy(frozenset(KINDS))


@frozen(kw_only=True)
class TaskRun:
    """What the clients of a simulated run share.

    config: without what it implies. folder: for files of clients. attached: takes the values of a
    model that a client attaches. say: takes a client's name and a line. ended: takes its name, and
    the error that ended its function, or None.
    """

    task: Task
    config: Config
    clients: int
    step_seconds: float | None
    folder: Path
    residents: Residents
    attached: Callable[[int], None]
    say: Callable[[str, str], None]
    ended: Callable[[str, BaseException | None], None]
    states: RandomStates = field(factory=RandomStates)
    owners: weakref.WeakKeyDictionary[nn.Module, object] = field(factory=weakref.WeakKeyDictionary)
    """Module -> the training that it belongs to."""


class OwnedTraining(Training):
    """Training that refuses a module which another client trains: clients share a process here."""

    run: TaskRun
    time: StepTime
    """Its first step begins when the model has the run's weights."""

    def attach(self, module: nn.Module, exchange: Sequence[str] | View | None = None) -> None:
        """See `Training.attach`. Raises TaskError for a module of another client."""
        if self.run.owners.setdefault(module, self) is not self:
            raise TaskError(
                "fed.attach: another client trains the same module object; simulated clients share"
                " one process, so build the model inside of the training function"
            )
        self.run.residents.attached(module)
        super().attach(module, exchange)
        self.time.begin()


class LateOrders(Orders):
    """Orders of which a step that has ended before they came sees none."""

    is_late = False
    """Whether the step that ends now has ended earlier in virtual time."""

    def asked(self) -> bool:
        """Whether something is asked that this step can carry out."""
        return self.attention and not self.is_late


class StepTime:
    """The virtual time of steps.

    Where the cost of a step is known, and nothing depends on when it is computed, training lags
    behind: its thread pauses until an order comes, or for `lag_s`, and then computes the steps that
    have ended meanwhile in one go. The step in which the order came is the first to see it.

    seconds: of a step; None: as long as it took here. lag_s: 0: each step by itself.
    """

    def __init__(
        self, client: TaskTraining, seconds: float | None, rate: float, lag_s: float
    ) -> None:
        self._thread, self._orders, self._changed = client.thread, client.orders, client.changed
        self._clock = client.clock
        self._seconds, self._rate, self._lag_s = seconds, rate, lag_s
        self._from_s = self._thread.worked_s
        self._begun = self._clock.time()

    def now(self) -> float:
        """Return the virtual time of the training thread."""
        return self._begun if self._orders.is_late else self._clock.time()

    def end(self, steps: int = 1) -> None:
        """Return when `steps` steps that end here are over in virtual time."""
        if self._seconds is None:
            self._thread.sleep((self._thread.worked_s - self._from_s) / self._rate)
            return
        over = self._begun + steps * self._seconds / self._rate
        while not self._orders.attention and self._lag_s and self._clock.time() < over:
            self._changed.pause(max(over, self._clock.time() + self._lag_s))
        now = self._clock.time()
        self._orders.is_late = bool(self._lag_s) and now > over
        if now < over:
            self._thread.sleep(over - now)
        self._begun = over

    def pass_batch(self) -> None:
        """Return when the next batch is over in virtual time: it is computed at its end.

        Where the cost is not known, return when the batch before is over.
        """
        worked_s = self._thread.worked_s
        seconds = worked_s - self._from_s if self._seconds is None else self._seconds
        self._from_s = worked_s
        self._thread.sleep(seconds / self._rate)

    def begin(self) -> None:
        """The next step begins."""
        self._from_s = self._thread.worked_s
        if not self._orders.is_late:
            self._begun = self._clock.time()


class SimulatedFed(Fed):
    """A `Fed` whose steps take virtual time."""

    def __init__(
        self,
        training: Training,
        context: ClientContext,
        time: StepTime,
        *,
        changed: Changed,
        session: SplitPort | None,
    ) -> None:
        super().__init__(training, context, session)
        self.changed = cast("threading.Condition", changed)
        self._time = time

    def begin_batch(self) -> None:
        """See `Fed.begin_batch`."""
        self._time.pass_batch()

    def step(self, *, tokens: Whole = NOT_GIVEN, metrics: Metrics | None = None) -> bool:
        """See `Fed.step`."""
        self._time.end()
        goes_on = super().step(tokens=tokens, metrics=metrics)
        self._time.begin()
        return goes_on

    def end_round(
        self, *, samples: Whole, metrics: Metrics | None = None, scalars: Vector | None = None
    ) -> bool:
        """See `Fed.end_round`. A round of zeroth order lasts `tune.zo_steps` steps, one of split
        learning its batches, others one step.
        """
        if self._rounds is None:
            self._time.end(1 if scalars is None else int(self.config["tune"]["zo_steps"]))
        goes_on = super().end_round(samples=samples, metrics=metrics, scalars=scalars)
        self._time.begin()
        return goes_on


class TaskTraining(Trainer):
    """The training side of a client's process: the user's function in a thread of its own.

    number: of the client, from 0; rate: its speed.
    """

    def __init__(self, run: TaskRun, launch: Launch, *, number: int, rate: float) -> None:
        self.name, self.clock = name, clock = launch.name, launch.clock
        self._run, self._feed = run, launch.feed
        self._number, self._rate = number, rate
        self._member: Membership | None = None
        self.opens_session: Callable[[Any, dict[str, str]], None] | None = None
        """Opens the session with the split server, if the run has one; `on_split` feeds it."""
        self.on_split: Callable[[Event], None] = lambda _: None
        self._time: StepTime | None = None
        self.changed = Changed(clock)
        self.orders = LateOrders(cast("threading.Condition", self.changed))
        self.exchange = Exchange(self.orders, on_event=self._post)
        self.training = OwnedTraining(self.orders, self.exchange, self._now)
        self.training.run = run
        entered = functools.partial(run.residents.enter, name)
        seed = f"{run.config.run.seed}/{name}/{launch.incarnation}/training"
        self.thread = TrainingThread(
            clock, run.states, self._train, self._ended, seed, entered=entered
        )
        self.changed.thread = self.thread

    # --- a Trainer; the scheduler's thread ---

    @property
    def steps(self) -> int:
        """Steps trained in this incarnation."""
        return self.training.meter.steps

    def begin(self, chance: random.Random) -> None:
        """Start the training thread; it waits for the welcome."""
        self.thread.start()

    def announced(self, position: RunPosition) -> None:
        """See `Trainer`."""
        self.training.clock.announced(position)

    def report(self) -> dict[str, Any]:
        """See `Trainer`."""
        return self.training.meter.report()

    def stop(self) -> None:
        """See `Trainer`."""
        self.exchange.stop()

    def end(self) -> None:
        """See `Trainer`."""
        self.thread.kill()
        self._run.residents.forget(self.name)

    def welcomed(self, welcome: Welcome) -> None:
        """Take the first welcome, with the settings of the run."""
        if self._member is None:
            self._member = Membership(welcome, from_wire(welcome.config))
            self.changed.notify_all()

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            self._run.ended(self.name, error)

    # --- the training thread ---

    def _post(self, event: Event) -> None:
        if isinstance(event, Attached):
            self._run.attached(event.values)
        self.clock.call_at(self.clock.time(), self._feed, event)
        if isinstance(event, TrainingEnded):
            self.post_split(event)

    def open_split(self, training: Any, architecture: dict[str, str]) -> None:
        """See `SplitPort.open_split`."""
        assert self.opens_session is not None, "a client without a session opens none"
        self.clock.call_at(self.clock.time(), self.opens_session, training, architecture)

    def post_split(self, event: Event) -> None:
        """See `SplitPort.post_split`."""
        self.clock.call_at(self.clock.time(), self.on_split, event)

    def _train(self) -> None:
        training = self.training
        with contextlib.suppress(RunFinishedError):
            self.changed.wait_for(lambda: self._member is not None or training.stopped)
            if self._member is not None:
                self._time = training.time = self._step_time(self._member.config)
                fed = SimulatedFed(
                    training,
                    self._context(self._member),
                    self._time,
                    changed=self.changed,
                    session=None if self.opens_session is None else self,
                )
                self._run.task(fed)
        self.orders.is_late = False
        training.meter.step_ended()
        self._post(TrainingEnded(None))
        while True:  # the last weights are still to be copied; `_finished` ends the thread
            training.attend_for(ATTEND_S)

    def _now(self) -> float:
        return self.clock.time() if self._time is None else self._time.now()

    def _step_time(self, config: Config) -> StepTime:
        """Return the time of steps. Where clients are not called by the clock, steps are counted
        as they are made.
        """
        by_clock = config.sync.trigger == "clock" and not config.tune.is_on
        lag_s = config.session.heartbeat_every_s if by_clock else 0.0
        return StepTime(self, self._run.step_seconds, self._rate, lag_s)

    def _context(self, member: Membership) -> ClientContext:
        run, config = self._run, self._run.config
        # The user's own models, which each site of a real run is given.
        family, auxiliary = config.model.family, config.split.auxiliary
        options = ClientOptions(
            f"fsl://{SERVER_NAME}",
            self.name,
            data=config.data.path or None,
            base=config.tune.base,
            model=family if is_own(family) else "",
            auxiliary=auxiliary if is_own(auxiliary) else "",
            keys=KeysFolder(run.folder / self.name),
            policy=_ALL,
        )
        context = context_of(options, member, functools.partial(run.say, self.name))
        # All clients find the same data here, so each has its part also where the kind of run
        # implies that sites have data of their own.
        tables: dict[str, Mapping[str, Any]] = dict(context.config)
        tables["data"] = {**tables["data"], "sharding": config.data.sharding}
        part = (member.welcome.shard, member.welcome.shards)
        index, count = part if part[1] else (self._number, run.clients)
        return evolve(context, config=tables, shard_index=index, shard_count=count)
