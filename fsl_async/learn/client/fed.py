"""What a training function sees of the run: attach a model, draw its data, report each step.

    def train(fed):
        model = build().to(fed.device)
        fed.attach(model)                         # from here on the weights are the run's
        optimizer = fed.optimizer(model)          # or your own
        scheduler = fed.scheduler(optimizer)      # rates follow the run's progress
        for batch in fed.shard(data):             # ends by itself when the run does
            loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
            scheduler.step()
            fed.step(tokens=batch.numel(), metrics={"loss": loss.item()})

Runs by rounds (`sync.trigger` other than "clock"), and split learning:

    training = fsl_async.learn.split.task.begin(fed)    # instead of attach
    for number in fed.rounds():                         # waits for a call; ends with the run
        for inputs, labels in batches(number):
            training.train_batch(inputs, labels)
        fed.end_round(samples=n)                        # returns when the next version is here

Weights change inside `attach`, `step` and `end_round` and nowhere else, in place, so the optimizer
keeps its state over a rebase: its moments stay local and are never averaged (DiLoCo,
arXiv:2311.08105). `LocalFed` is the same without a network: a task runs under either and cannot
tell.
"""

import os
import random
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, SupportsFloat, TypeVar

import attrs
import torch
from torch import nn

from fsl_async.config.presets import DECAY_SHARES
from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.config.site_policy import DELTAS, SitePolicy
from fsl_async.config.site_tuning import SiteTuning
from fsl_async.errors import TaskError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.meter import Meter
from fsl_async.learn.client.optimizers import build_optimizer
from fsl_async.learn.client.orders import RunFinishedError
from fsl_async.learn.client.ports import Vector
from fsl_async.learn.client.schedule import Schedule
from fsl_async.learn.client.training import Training
from fsl_async.learn.data.corpus import HELD_OUT_SHARE, Corpus, windows
from fsl_async.learn.models.adapters import Adapters, AdapterSpec
from fsl_async.learn.models.exchanged import View
from fsl_async.roles.machine import Event
from fsl_async.roles.sync.delta import ORDER, RANK
from fsl_async.store.adapters import adapter_rule_named
from fsl_async.store.adapters.fedit import FedIT
from fsl_async.store.adapters.hetlora import HetLoRA

T = TypeVar("T")
ADAPTER_RATE = 1e-3
"""AdamW's learning rate of adapters where the run sets none."""
TOLERATED_STEPS = 3
"""How often step may be called after the end before that counts as a loop that never looks."""


def choose_device(text: str) -> torch.device:
    """Read `train.device`; "auto" is the first CUDA device if there is one. Raises TaskError."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise TaskError(
            f"train.device {text!r} cannot be used: {reason} (use --set train.device=auto)"
        ) from error
    return device


@attrs.frozen
class ClientContext:
    """Of a training function: its name, share of the data, device, and the run's configuration."""

    client_name: str
    seed: int = 0
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    config: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    shard_index: int = 0
    shard_count: int = 1
    log: Callable[[str], None] = print
    policy: SitePolicy = attrs.field(factory=SitePolicy)
    """What may leave this site."""
    tuning: SiteTuning = attrs.field(factory=SiteTuning)
    """This site's choices where the run tunes a base model."""
    privacy_folder: Path | None = None
    """Where private training keeps what it has spent (`fsl_async.learn.tune.budget`)."""


class RoundTraining(Protocol):
    """What trains the batches of a round (`fsl_async.learn.split.remote.SplitTraining`)."""

    waited_s: float
    """Seconds that the training thread has waited in it for the network."""

    def begin_round(self, number: int) -> None:
        """The next batch is the first of this round."""

    def end_round(self) -> int:
        """Finish what is open; returns the samples trained in the round."""


class SplitPort(Protocol):
    """A client's session with the split server (`fsl_async.nodes.client.node.ClientRuntime`).

    For the training thread.
    """

    def open_split(self, training: Any, architecture: dict[str, str]) -> None:
        """Open it, once; what comes is handed to `training`."""

    def post_split(self, event: Event) -> None:
        """Give its machine an event; nothing happens before it is opened."""


class FedBase:
    """What Fed and LocalFed have in common.

    client_name: str; seed: int, the run's; device: torch.device; config: the run's tables, such as
    config["train"]["batch"]; log: takes a line for the journal; policy: what may leave this site.
    """

    def __init__(self, context: ClientContext) -> None:
        self.client_name = context.client_name
        self.seed = context.seed
        self.device = context.device
        self.config = context.config
        self.log = context.log
        self.policy = context.policy
        self.privacy_folder = context.privacy_folder
        self.adapters: Adapters | None = None
        """Of the model, after `lora`."""
        self._context = context
        self._tracked: list[weakref.ref[torch.optim.Optimizer]] = []
        self._steps_after_end = 0

    @property
    def running(self) -> bool:
        """False once the run has ended."""
        raise NotImplementedError

    @property
    def version(self) -> int:
        """The version of the run that the model was last moved onto; -1 before attach."""
        raise NotImplementedError

    @property
    def part(self) -> tuple[int, int]:
        """The part of the data that is this client's, of how many; (0, 1) for local sharding."""
        if self.config.get("data", {}).get("sharding") == "local":
            return 0, 1
        return self._context.shard_index, self._context.shard_count

    def attach(self, model: nn.Module, *, exchange: Sequence[str] | None = None) -> None:
        """Hand the model over; on return its weights are the run's."""
        raise NotImplementedError

    def lora(
        self, model: nn.Module, *, heads: Sequence[str] = (), site_rank: int | None = None
    ) -> nn.Module:
        """Give a base model the run's adapters and hand it over, instead of `attach`.

            model = fed.lora(AutoModelForCausalLM.from_pretrained(folder))

        By [tune] of the run and this client's --rank and --layers. The model is changed in place,
        frozen but for adapters and full modules, and returned; only these are exchanged. heads:
        names of weights that are new in it, such as a classifier's, and train whole. site_rank:
        instead of --rank.

        Raises ConfigError (nothing to adapt), TaskError (a rank that the run cannot have), and what
        `attach` raises.
        """
        tune = TuneConfig(**self.config.get("tune", {}))
        rule = adapter_rule_named(tune.rule)
        site = self._context.tuning
        if site_rank is not None:
            site = attrs.evolve(site, rank=site_rank)
        if self.is_zeroth:
            self._check_zeroth(tune)
            site = attrs.evolve(site, rank=0)  # a probe costs the same whatever the rank
        spec = AdapterSpec.of(
            tune,
            seed=self.seed,
            heads=heads,
            site_rank=site.rank_in(tune, unequal=rule.unequal_ranks),
            layers=site.layers,
        )
        self.adapters = Adapters(model, spec, rule)
        self._attach_adapters(model, self.adapters)
        return model

    @property
    def is_zeroth(self) -> bool:
        """Whether this site measures losses alone, and sends scalars (`fed.end_round`)."""
        return self._context.tuning.is_zeroth(TuneConfig(**self.config.get("tune", {})))

    def _check_zeroth(self, tune: TuneConfig) -> None:
        """Raise TaskError where the run cannot use a site of zeroth order."""
        if self.config.get("sync", {}).get("trigger") == "clock":
            raise TaskError(
                "--order zeroth: this run syncs by the clock, and steps of zeroth order are made by"
                " rounds; it needs --set sync.trigger=rounds"
            )
        if tune.is_private:
            raise TaskError(
                "--order zeroth: this run trains privately (tune.dp_epsilon), and what is computed"
                " from losses gets no noise; leave --order out"
            )
        if tune.method == "lora" and tune.rule == HetLoRA.name:
            raise TaskError(
                "--order zeroth: tune.rule = hetlora weighs sites by the norm of their products,"
                " which are noise here; the run needs another rule"
            )

    def _attach_adapters(self, model: nn.Module, adapters: Adapters) -> None:
        """Hand over a model with adapters."""
        raise NotImplementedError

    def add_facts(self, facts: Callable[[], Mapping[str, float]]) -> None:
        """Report numbers with every delta, whatever the site's policy for metrics.

        facts: gives them when a delta is made; of those in `fsl_async.roles.sync.delta.FACTS`.
        """

    def track(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the state of your own optimizer at versions that change the adapters' basis.

        Moments describe the basis before. `fed.optimizer` makes one that is tracked already.
        """
        self._tracked.append(weakref.ref(optimizer))

    def _new_version(self, version: int) -> None:
        """The model was moved onto a version: adapters train what their rule trains from it."""
        adapters = self.adapters
        if adapters is None:
            return
        adapters.begin_version(version)
        if adapters.changes_basis:
            for optimizer in filter(None, (found() for found in self._tracked)):
                optimizer.state.clear()

    def step(self, *, tokens: int = 0, metrics: Mapping[str, SupportsFloat] | None = None) -> bool:
        """A training step is done; the only point where weights may be exchanged."""
        raise NotImplementedError

    @property
    def progress(self) -> float | None:
        """Share of the run that is done, 0 to 1, the same at all clients; None without an end.

        By what ends the run first: `run.tokens`, `run.rounds` or `run.seconds`. Between versions it
        goes on at the run's pace.
        """
        raise NotImplementedError

    @property
    def decays_from(self) -> float:
        """Progress at which learning rates begin to fall."""
        raise NotImplementedError

    def at_version(self) -> AbstractContextManager[int]:
        """Evaluate the run's version instead of this client's own weights.

            with fed.at_version() as version:
                loss = evaluate(model)
            fed.step(..., metrics={"eval_loss": loss, "eval_version": version})

        Within the block the model has the weights of the newest version here, exactly; afterwards
        its own again. Takes a copy of the weights on the CPU. The number is -1, and the weights are
        this client's own, in the rare case that no version is complete here.
        """
        raise NotImplementedError

    def status(self) -> dict[str, float]:
        """Step, version, tokens, tokens_per_s, the running mean of each metric. For any thread."""
        raise NotImplementedError

    @property
    def rate_factor(self) -> float:
        """The learning rate as a share of its peak, by the run's progress and `train.schedule`.

        It rises from 0 over this client's first steps: `train.warmup_steps` at the start of the
        run, `train.rewarm_steps` for a client that joins later. See
        `fsl_async.learn.client.schedule`.
        """
        steps, late = self._since_attach()
        schedule = Schedule.of(self.config.get("train", {}))
        return schedule.factor(self.progress, self.decays_from, steps=steps, late=late)

    def _since_attach(self) -> tuple[int, bool]:
        """Steps since the model was attached, and whether that was after version 0."""
        raise NotImplementedError

    def optimizer(
        self,
        model: nn.Module,
        *,
        is_matrix: Callable[[str, nn.Parameter], bool] | None = None,
        **train: Any,
    ) -> torch.optim.Optimizer:
        """The run's inner optimizer over the weights of `model` that train.

        By [train] of the run: Muon for the matrices of hidden layers and AdamW for the rest, or
        AdamW alone, as always for adapters. train: values to use instead, such as
        learning_rate=3e-4, optimizer="adamw". is_matrix: whether Muon steps a weight, by its name;
        by default `fsl_async.learn.client.optimizers.hidden_matrices`.
        """
        settings = {**self.config.get("train", {}), **train}
        if self.adapters is None:
            return build_optimizer(model, settings, is_matrix=is_matrix)
        rate = float(settings.get("learning_rate", 0.0)) or ADAPTER_RATE
        # Factors are of low rank by themselves; decay would pull a frozen tail and B apart.
        optimizer = torch.optim.AdamW(self.adapters.trained(), lr=rate, weight_decay=0.0)
        self.track(optimizer)
        return optimizer

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """A scheduler that multiplies the rates of `optimizer` by `rate_factor`.

        Call its step() after that of the optimizer. It follows the run and counts no steps, so
        there is nothing in it to save.
        """
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: self.rate_factor)

    def shard(
        self,
        data: str | os.PathLike[str] | Corpus | Sequence[Any],
        *,
        batch: int | None = None,
        context: int | None = None,
    ) -> Iterator[Any]:
        """Draw from this client's own part of `data`, in an order by the seed, until the run ends.

        data as a path or a Corpus: text. Gives random windows, int64 (batch, context + 1) on
        `device`; `batch` is train.batch unless given, `context` is needed for a path.

        data as any sequence (len() and [i]: a list, a torch Dataset, batches made before): gives
        its items, each once per epoch. Item i belongs to client i modulo the number of shards, so
        that sorted data is dealt out evenly. With data.sharding = "local" all of `data` is this
        client's.

        Raises DataError for text that is missing or too short, TaskError for an empty part.
        """
        mine = self.part
        settings = self.config.get("data", {})
        start = max(self.version, 0)
        if isinstance(data, Corpus | str | os.PathLike):
            if not isinstance(data, Corpus):
                if context is None:
                    raise TaskError("fed.shard needs context= (bytes a model sees) with a path")
                held_out = float(settings.get("holdout", HELD_OUT_SHARE))
                data = Corpus.open(data, context=context, held_out=held_out)
            size = batch or int(self.config.get("train", {}).get("batch", 1))
            return self._text(data, mine, size, start)
        return self._items(data, mine, start)

    def _text(
        self, corpus: Corpus, mine: tuple[int, int], batch: int, start: int
    ) -> Iterator[torch.Tensor]:
        span = corpus.shard(*mine)
        name = self.client_name
        drawn = windows(corpus, span, batch=batch, seed=self.seed, name=name, start=start)

        def endless() -> Iterator[torch.Tensor]:
            while self.running:
                yield torch.from_numpy(next(drawn)).to(self.device).long()

        return endless()

    def _items(self, data: Sequence[Any], mine: tuple[int, int], start: int) -> Iterator[Any]:
        index, count = mine
        order = list(range(index, len(data), count))
        if not order:
            raise TaskError(
                f"fed.shard: {len(data)} items leave none for part {index} of {count}: give more"
                " items"
            )
        # Text seeds go through SHA-512 in the standard library: the same on every machine.
        seed = f"{self.seed}/{self.client_name}/{index}/{count}/{start}"
        chance = random.Random(seed)  # noqa: S311

        def endless() -> Iterator[Any]:
            while True:
                chance.shuffle(order)
                for item in order:
                    if not self.running:
                        return
                    yield data[item]

        return endless()

    def _ended(self) -> bool:
        """Return False for step; raises RunFinishedError for a loop that never looks at it."""
        self._steps_after_end += 1
        if self._steps_after_end > TOLERATED_STEPS:
            raise RunFinishedError(
                f"the run has ended, and fed.step has returned False {TOLERATED_STEPS} times:"
                " leave the loop when it does"
            )
        return False


class Fed(FedBase):
    """A client's view of a run. Used by the training thread, but for `status`."""

    def __init__(
        self,
        training: Training,
        context: ClientContext,
        session: SplitPort | None = None,
    ) -> None:
        super().__init__(context)
        self._training = training
        self.meter = training.meter
        self._session = session
        self._rounds: RoundTraining | None = None
        self._has_scalars = False  # this site sends scalars, which `step` cannot make
        self._waited_s = 0.0

    @property
    def running(self) -> bool:
        """False once the run has ended."""
        return not self._training.stopped

    @property
    def version(self) -> int:
        """The version of the run that the model was last moved onto; -1 before attach."""
        return self._training.version

    def attach(self, model: nn.Module, *, exchange: Sequence[str] | None = None) -> None:
        """Hand the model over and wait until its weights are the run's: received, or its own.

        What trains (`requires_grad`) and floating point persistent buffers are exchanged, or what
        `exchange` names: patterns such as ["encoder.*", "*.bias"], the same at every client.
        Parameters that are neither exchanged nor trained must be the same at every client; what
        trains and is not exchanged stays this client's own. Later changes of `requires_grad` change
        nothing of that; see `fsl_async.learn.client.buffers`. Build the optimizer before or after,
        as you
        like: weights change in place.

        Raises NotAllowedError where this site lets LoRA adapters out and the model
        has other tensors, RefusedError where the run trains another model (its text names the first
        tensor that differs), TaskError for a model that cannot be exchanged and for a run that
        merges its own adapters (`lora`), RunFinishedError where the run ended meanwhile.
        """
        self._check_weights(model, exchange)
        tune = TuneConfig(**self.config.get("tune", {}))
        if tune.method == "lora" and tune.rule != FedIT.name:
            raise TaskError(
                f"fed.attach: tune.rule = {tune.rule} merges the run's own adapters: give the base"
                " model to fed.lora"
            )
        if tune.is_on:
            self._expect_rounds()
        self._training.attach(model, exchange)

    def _expect_rounds(self) -> None:
        """Have `step` train rounds of `tune.steps` steps, where the run has rounds."""
        self._has_scalars = self.is_zeroth
        if self.config.get("sync", {}).get("trigger", "clock") == "clock":
            return
        self._training.expect_rounds()
        if not self._has_scalars:
            self._training.round_steps = int(self.config["tune"]["steps"])

    def _attach_adapters(self, model: nn.Module, adapters: Adapters) -> None:
        training, view = self._training, adapters.view
        if not self.is_zeroth:  # else no weights leave but those that the first version begins with
            self._check_weights(model, view)
        training.facts = {
            RANK: float(adapters.spec.site_rank),
            ORDER: 0.0 if self.is_zeroth else 1.0,
        }
        training.on_version = self._new_version
        self._expect_rounds()
        training.attach(model, view)

    def add_facts(self, facts: Callable[[], Mapping[str, float]]) -> None:
        """Report numbers with every delta, whatever the site's policy for metrics."""
        self._training.more_facts = facts

    def _check_weights(
        self, model: nn.Module, exchange: Sequence[str] | View | None = None
    ) -> None:
        """Raise NotAllowedError where a site that lets out adapters only would send others."""
        policy = self.policy
        if policy.lets(DELTAS):
            return
        tensors = ModelWeights(model, exchange).layout.tensors
        others = [
            one.name
            for one in tensors
            if not set(one.name.split(".")) & {"lora_A", "lora_B", "patch"}
        ]
        if others:
            what = f"this task exchanges {others[0]}, which is no LoRA adapter: it"
            policy.require({DELTAS: "the parameter server"}, what)

    def attach_rounds(
        self,
        model: nn.Module,
        training: RoundTraining,
        architecture: Mapping[str, str] | None = None,
    ) -> None:
        """Hand `model` over, which `training` trains by rounds; wait for the run's weights.

        architecture: in split learning, what must be the same at the split server, by name, in the
        order of comparison; the session with it is opened. None: there is no split server.
        Raises as `attach` does, and TaskError for a second call.
        """
        if self._rounds is not None:
            raise TaskError("a split model was attached twice: one to a client")
        if architecture is not None and self._session is None:
            raise TaskError("this client can open no session with a split server")
        self._rounds = training
        self._check_weights(model)
        self._training.expect_rounds()
        if architecture is not None and self._session is not None:
            self._session.open_split(training, dict(architecture))
        self._training.attach(model)

    def post_split(self, event: Event) -> None:
        """Give the session with the split server an event of the training thread."""
        if self._session is not None:
            self._session.post_split(event)

    def rounds(self) -> Iterator[int]:
        """The rounds that this client is called to train, until the run ends.

        Raises TaskError where `step` trains them.
        """
        if self._training.round_steps:
            raise TaskError(
                "fed.rounds: in this run fed.step trains the rounds, tune.steps steps each: call it"
                " after each step, until it returns False"
            )
        self._training.expect_rounds()
        while (number := self._timed(self._training.next_round)) is not None:
            if self._rounds is not None:
                self._rounds.begin_round(number)
            yield number
            # In a loop that did not end its round, what it waits for now is no step.
            self.meter.step_dropped()

    def end_round(
        self,
        *,
        samples: int,
        metrics: Mapping[str, SupportsFloat] | None = None,
        scalars: Vector | None = None,
    ) -> bool:
        """The round is done; on return the weights are its version's. False once the run has ended.

        samples: trained in it; the weight of this client in the average. scalars: of a round of
        zeroth order, its projected gradients, float32 (K, P), which are sent instead of weights.
        """
        if self._rounds is not None:
            self._rounds.end_round()
        if self._training.stopped:
            return False
        self.meter.count(samples, metrics)
        return self._timed(lambda: self._training.end_round(scalars))

    @property
    def waited_s(self) -> float:
        """How long training has waited for answers, calls and versions in a run by rounds."""
        return self._waited_s + (self._rounds.waited_s if self._rounds is not None else 0.0)

    def _timed(self, wait: Callable[[], T]) -> T:
        begun = time.monotonic()
        try:
            return wait()
        finally:
            self._waited_s += time.monotonic() - begun

    def step(self, *, tokens: int = 0, metrics: Mapping[str, SupportsFloat] | None = None) -> bool:
        """A training step is done; the only point where weights may be exchanged.

        tokens: trained in this step on this client; the weight of its work in a merge.
        metrics: numbers to report, such as {"loss": 2.3}.
        Returns False once the run has ended; then leave the loop. Takes microseconds unless the
        run asks something of the model. Raises TaskError where this site measures losses only.
        """
        if self._has_scalars:
            raise TaskError(
                "fed.step: this task trains by gradients, and its site measures losses only"
                " (--order zeroth, or tune.method = zeroth): leave out --task, or send scalars by"
                " fed.rounds and fed.end_round"
            )
        self.meter.step_ended()
        self.meter.count(tokens, metrics)
        training = self._training
        if training.orders.attention or training.is_due:
            goes_on = training.attend_round() if training.round_steps else training.attend()
            if not goes_on:
                return self._ended()
        self.meter.step_begins()
        return True

    @property
    def progress(self) -> float | None:
        """Share of the run that is done, 0 to 1, the same at all clients; None without an end."""
        return self._training.clock.progress

    @property
    def decays_from(self) -> float:
        """Progress at which learning rates begin to fall."""
        return self._training.clock.decays_from

    def _since_attach(self) -> tuple[int, bool]:
        return self.meter.steps, self._training.joined_at > 0

    def at_version(self) -> AbstractContextManager[int]:
        """Within it the model has the weights of the newest version that is here, exactly."""
        return self._training.at_version()

    def status(self) -> dict[str, float]:
        """Step, version, tokens, tokens_per_s, the running mean of each metric. For any thread."""
        return {"version": self._training.version, **self.meter.report()}


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
        """Keep the model, for the caller of the task. Raises TaskError as `Fed.attach` does."""
        if self.model is not None:
            raise TaskError("fed.attach was called twice: attach one model, once")
        ModelWeights(model, exchange)
        self.model = model

    def _attach_adapters(self, model: nn.Module, adapters: Adapters) -> None:
        if self.model is not None:
            raise TaskError("fed.lora was called twice: attach one model, once")
        ModelWeights(model, adapters.view)
        self.model = model

    def step(self, *, tokens: int = 0, metrics: Mapping[str, SupportsFloat] | None = None) -> bool:
        """Count a step; False once the steps or the time are used up."""
        if self.model is None:
            raise TaskError("fed.step came before fed.attach(model): attach the model first")
        if not self._running:
            return self._ended()
        self._meter.count(tokens, metrics)
        given = {name: float(value) for name, value in (metrics or {}).items()}
        self.history.append((self._meter.steps, given))
        out_of_steps = self._last_step is not None and self._meter.steps >= self._last_step
        passed_s = time.monotonic() - self._begun_at
        out_of_time = self._seconds is not None and passed_s >= self._seconds
        if out_of_steps or out_of_time:
            self._running = False
            return self._ended()
        return True

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
