"""A simulated client: the production client around a training function in a thread of its own.

Machine, shell, session, exchange and `Training` are those of production. Replaced are the link, the
clock and the worker thread, and where the training thread waits (`baton`). A step of the training
function is one event of the virtual clock: its thread sleeps in `fed.step` until the step is over.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
from torch import nn

import fsl_transport as tp
from fsl_async.config.load import from_wire
from fsl_async.config.settings import Config
from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.config.site_tuning import SiteTuning
from fsl_async.config.transport_settings import transport_settings
from fsl_async.errors import RefusedError, TaskError
from fsl_async.keys.folder import KeysFolder
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.fed_base import ClientContext
from fsl_async.learn.client.orders import Orders, RunFinishedError
from fsl_async.learn.client.ports import Vector
from fsl_async.learn.client.script_values import NOT_GIVEN, Metrics, Whole
from fsl_async.learn.client.training import Training
from fsl_async.learn.models.adapters import Adapters
from fsl_async.learn.models.exchanged import View
from fsl_async.learn.user_code import Task
from fsl_async.nodes.client.client_node import configure_exchange
from fsl_async.nodes.client.joining import context_of
from fsl_async.nodes.client.parts import ClientOptions, Membership
from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.wire import Welcome
from fsl_async.roles.machine import Event, Finish, TrainingEnded
from fsl_async.roles.sync.client import ClientMachine, ClientRules
from fsl_async.roles.sync.events import Attached
from fsl_async.tools.sim.training import VirtualWorker
from fsl_async.tools.sim.world import ProcessClock
from fsl_async.tools.simulate.baton import Changed, RandomStates, TrainingThread

if TYPE_CHECKING:
    import threading

SERVER = "ps"
JOB_S = 0.001
"""Virtual seconds of a job of the codec, or of the store."""
ATTEND_S = 3600.0
_ALL = SitePolicy(frozenset(KINDS))


@attrs.frozen(kw_only=True)
class ClientSite:
    """The parts that all clients of a simulation share."""

    task: Task
    config: Config
    """As given: without what the kind of run implies."""
    clients: int
    step_seconds: float | None
    seed: int
    folder: Path
    network: tp.MemNetwork
    states: RandomStates
    log: Callable[[str, str], None]
    """Takes a client's name and a line."""
    attached: Callable[[int], None]
    """Takes the number of values of a model. Raises FslError if there is no room for it."""
    finished: Callable[[str, BaseException | None], None]
    """Takes the name of a client that has ended by itself, and the error that ended it."""
    owners: weakref.WeakKeyDictionary[nn.Module, object] = attrs.field(
        factory=weakref.WeakKeyDictionary
    )


class NoJournal:
    """Keeps nothing."""

    def event(self, _event: Any, _now: float, _cause: int | None = None) -> int:
        """Keep nothing."""
        return 0

    effect = event


class OwnedTraining(Training):
    """Training that refuses a module which another client trains: clients share a process here."""

    owners: weakref.WeakKeyDictionary[nn.Module, object]

    def attach(self, module: nn.Module, exchange: Sequence[str] | View | None = None) -> None:
        """See `Training.attach`. Raises TaskError for a module of another client."""
        if self.owners.setdefault(module, self) is not self:
            raise TaskError(
                "fed.attach: another client trains the same module object; simulated clients share"
                " one process, so build the model inside of the training function"
            )
        super().attach(module, exchange)


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
        self, client: SimulatedClient, seconds: float | None, rate: float, lag_s: float
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

    def begin(self) -> None:
        """The next step begins."""
        self._from_s = self._thread.worked_s
        if not self._orders.is_late:
            self._begun = self._clock.time()


class SimulatedFed(Fed):
    """A `Fed` whose steps take virtual time."""

    def __init__(self, training: Training, context: ClientContext, time: StepTime) -> None:
        super().__init__(training, context)
        self._time = time

    def attach(self, model: nn.Module, *, exchange: Sequence[str] | None = None) -> None:
        """See `Fed.attach`."""
        super().attach(model, exchange=exchange)
        self._time.begin()

    def _attach_adapters(self, model: nn.Module, adapters: Adapters) -> None:
        super()._attach_adapters(model, adapters)
        self._time.begin()

    def step(self, *, tokens: Whole = NOT_GIVEN, metrics: Metrics | None = None) -> bool:
        """See `Fed.step`."""
        self._time.end()
        goes_on = super().step(tokens=tokens, metrics=metrics)
        self._time.begin()
        return goes_on

    def end_round(
        self, *, samples: Whole, metrics: Metrics | None = None, scalars: Vector | None = None
    ) -> bool:
        """See `Fed.end_round`. A round of zeroth order lasts `tune.zo_steps` steps, others one."""
        self._time.end(1 if scalars is None else int(self.config["tune"]["zo_steps"]))
        goes_on = super().end_round(samples=samples, metrics=metrics, scalars=scalars)
        self._time.begin()
        return goes_on


class SimulatedClient:
    """One process of a client, from its launch to its end or to `kill`.

    number: of the client, from 0; rate: its speed.
    """

    def __init__(
        self,
        site: ClientSite,
        clock: ProcessClock,
        name: str,
        incarnation: int,
        *,
        number: int,
        rate: float,
    ) -> None:
        self.name = name
        self._site = site
        self.clock = clock
        self._number = number
        self._rate = rate
        self._member: Membership | None = None
        self._time: StepTime | None = None
        self.changed = Changed(clock)
        self.orders = LateOrders(cast("threading.Condition", self.changed))
        self._exchange = Exchange(self.orders, on_event=self._post)
        self.training = OwnedTraining(self.orders, self._exchange, self._now)
        self.training.owners = site.owners
        chance = random.Random(f"{site.seed}/{name}/{incarnation}")  # noqa: S311 - not for secrets
        self.machine = ClientMachine(ClientRules(), name, incarnation)
        self._shell = ClientShell(
            self.machine,
            self._exchange,
            lambda take: self._dialer(take, incarnation, chance),
            worker=VirtualWorker(clock, lambda: JOB_S),
            scheduler=clock,
            journal=NoJournal(),
            say=lambda note: site.log(name, note.text) if note.level != "info" else None,
            finished=self._finished,
            welcomed=self._welcomed,
            end_training=lambda _: self._exchange.stop(),
            announced=self.training.clock.announced,
        )
        seed = f"{site.seed}/{name}/{incarnation}/training"
        self.thread = TrainingThread(clock, site.states, self._train, self._thread_ended, seed)
        self.changed.thread = self.thread

    def start(self) -> None:
        """Dial, and start the training thread."""
        self._shell.dial()
        self.thread.start()

    def kill(self) -> None:
        """End it as kill -9 does."""
        self.clock.alive = False
        self._site.network.kill(self.name)
        self.thread.kill()

    # --- the scheduler's thread ---

    def _dialer(
        self, take: Callable[[tp.TransportEvent], None], incarnation: int, chance: random.Random
    ) -> tp.DialerEndpoint:
        self._endpoint = endpoint = tp.DialerEndpoint(
            self._site.network.dialer(self.name, SERVER),
            self.clock,
            tp.TransportSettings(),  # until the welcome brings the run's
            take,
            self.name,
            incarnation=incarnation,
            rng=chance,
            beat_payload=lambda _: self.training.meter.report(),
        )
        return endpoint

    def _welcomed(self, welcome: Welcome) -> None:
        config = from_wire(welcome.config)
        configure_exchange(self._exchange, config)
        self._exchange.pool.threads = 1
        self._endpoint.adopt(transport_settings(config))
        self.machine.rules = ClientRules(drain_cap_s=config.transfer.drain_cap_s)
        if self._member is None:
            self._member = Membership(welcome, config)
            self.changed.notify_all()

    def _finished(self, effect: Finish) -> None:
        failed = RefusedError(effect.reason) if effect.exit_code else None
        self.clock.call_at(self.clock.time(), self._site.finished, self.name, failed)

    def _thread_ended(self, error: BaseException | None) -> None:
        if error is not None:
            self._site.finished(self.name, error)

    # --- the training thread ---

    def _post(self, event: Event) -> None:
        if isinstance(event, Attached):
            self._site.attached(event.values)
        self.clock.call_at(self.clock.time(), self._shell.node.feed, event)

    def _train(self) -> None:
        training = self.training
        with contextlib.suppress(RunFinishedError):
            self.changed.wait_for(lambda: self._member is not None or training.stopped)
            if self._member is not None:
                self._time = self._step_time(self._member.config)
                context = self._context(self._member)
                self._site.task(SimulatedFed(training, context, self._time))
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
        return StepTime(self, self._site.step_seconds, self._rate, lag_s)

    def _context(self, member: Membership) -> ClientContext:
        site, config = self._site, self._site.config
        options = ClientOptions(
            f"fsl://{SERVER}",
            self.name,
            data=config.data.path or None,
            tuning=SiteTuning(base=config.tune.base),
            keys=KeysFolder(site.folder / self.name),
            policy=_ALL,
        )
        context = context_of(options, member, lambda line: site.log(self.name, line))
        # All clients find the same data here, so each has its part also where the kind of run
        # implies that sites have data of their own.
        tables: dict[str, Mapping[str, Any]] = dict(context.config)
        tables["data"] = {**tables["data"], "sharding": config.data.sharding}
        part = (member.welcome.shard, member.welcome.shards)
        index, count = part if part[1] else (self._number, site.clients)
        return attrs.evolve(context, config=tables, shard_index=index, shard_count=count)
