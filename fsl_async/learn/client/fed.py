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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import attrs
import numpy as np
from torch import nn

from fsl_async.config.presets import DECAY_SHARES
from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.config.site_policy import DELTAS
from fsl_async.errors import TaskError
from fsl_async.learn.client import script_values
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.fed_base import ClientContext, FedBase, SplitPort
from fsl_async.learn.client.ports import (
    Move,
    Moved,
    Orders,
    RebaseOrder,
    RunFinishedError,
    Vector,
    Work,
)
from fsl_async.learn.client.script_values import NOT_GIVEN, Metrics, Whole, numbers
from fsl_async.learn.client.training import Training
from fsl_async.learn.models.adapters import Adapters, View
from fsl_async.learn.models.hf import check_causal
from fsl_async.learn.models.saving import save_as_base
from fsl_async.roles.machine import Event
from fsl_async.roles.sync.delta import EPSILON, FACTS, ORDER, RANK
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.adapters import FedIT, HetLoRA, adapter_rule_named

if TYPE_CHECKING:
    from fsl_async.learn.split.remote import SplitTraining


class Fed(FedBase):
    """A client's view of a run. Used by the training thread, but for `status`."""

    def __init__(
        self,
        training: Training,
        context: ClientContext,
        session: SplitPort | None = None,
    ) -> None:
        super().__init__(training, context)
        self._process = os.getpid()
        training.buffers = self.settings.exchange.buffers
        if not self.rank:
            training.log = self.log
        self.meter = training.meter
        self.changed = threading.Condition()
        """Where split learning waits."""
        self._session = session
        self._rounds: SplitTraining | None = None
        self._refusal = ""  # why `step` cannot train
        self.evaluates_in_time = False
        """Of built-in tasks: end without the last evaluation where this process was asked to."""

    @property
    def _training(self) -> Training:
        if os.getpid() != self._process:  # it has neither the threads nor the sockets
            raise TaskError(
                "fed belongs to the process that joined, and this one was forked from it: train and"
                " exchange weights there; workers may read data, fed.running and fed.version"
            )
        return self._own_training

    def attach(self, model: nn.Module, *, exchange: Sequence[str] | None = None) -> None:
        """Hand the model over and wait until its weights are the run's: received, or its own.

        What trains (`requires_grad`) and floating point persistent buffers are exchanged, or what
        `exchange` names: patterns such as ["encoder.*", "*.bias"], the same at every client.
        Parameters that are neither exchanged nor trained must be the same at every client; what
        trains and is not exchanged stays this client's own. Later changes of `requires_grad` change
        nothing of that, and are said in the log; see `fsl_async.learn.client.buffers`. A second
        call goes on with another module of the same tensors. Build the optimizer before or after,
        as you like: weights change in place.

        Raises NotAllowedError where this site lets LoRA adapters out and the model
        has other tensors, RefusedError where the run trains another model (its text names the first
        tensor that differs), TaskError for a model that cannot be exchanged and for a run that
        merges its own adapters (`lora`), ConfigError in a run that tunes for a language model that
        is not causal, RunFinishedError where the run ended meanwhile.
        """
        self._check_weights(model, exchange)
        tune = self.settings.tune
        if tune.method == "lora" and tune.rule != FedIT.name:
            raise TaskError(
                f"fed.attach: tune.rule = {tune.rule} merges the run's own adapters: give the base"
                " model to fed.lora"
            )
        if tune.is_on:
            check_causal(model, self.log)
            self._expect_rounds()
            self._training.checks_frozen = tune.base_check == "values"
        self._training.attach(model, exchange)

    def lora(
        self, model: nn.Module, *, heads: Sequence[str] = (), site_rank: int | None = None
    ) -> nn.Module:
        """Give a base model the run's adapters and hand it over, instead of `attach`.

            model = fed.lora(AutoModelForCausalLM.from_pretrained(folder))

        By [tune] of the run and this client's --rank and --layers. The model is changed in place,
        frozen but for adapters and full modules, and returned; only these are exchanged. Both are
        kept in fp32: compute with a base in bf16 under torch.autocast. heads: names of weights that
        are new in it and train whole, beside those that `heads_of` finds, such as a classifier's.
        site_rank: instead of --rank.

        Raises ConfigError (nothing to adapt, a language model that is not causal), TaskError (a
        rank that the run cannot have), and what `attach` raises.
        """
        check_causal(model, self.log)
        tune = self.settings.tune
        rule = adapter_rule_named(tune.rule)
        site = self._context.site
        if site_rank is not None:
            site = attrs.evolve(site, rank=site_rank)
        if self.is_zeroth:
            self._check_zeroth(tune)
            site = attrs.evolve(site, rank=0)  # a probe costs the same whatever the rank
        rank = site.rank_in(tune, unequal=rule.unequal_ranks)
        if self.ranks > 1 and rule.trains_a(0) != rule.trains_a(1):
            raise TaskError(
                f"tune.rule = {tune.rule} trains factors in turn, and the ranks of a client add up"
                " gradients of fixed weights: use another rule, or one process"
            )
        self.adapters = Adapters(
            model,
            tune,
            rule,
            seed=self.seed,
            heads=heads,
            site_rank=rank,
            layers=site.layers,
        )
        if self.adapters.left_out:
            self.log(self.adapters.left_out)
        save_as_base(self.adapters)
        self._attach_adapters(model, self.adapters)
        return model

    @property
    def is_zeroth(self) -> bool:
        """Whether this site measures losses alone, and sends scalars (`fed.end_round`)."""
        return self._context.site.is_zeroth(self.settings.tune)

    def _check_zeroth(self, tune: TuneConfig) -> None:
        """Raise TaskError where the run cannot use a site of zeroth order."""
        if self.settings.sync.trigger == "clock":
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

    def _expect_rounds(self) -> None:
        """Have `step` train rounds of `tune.steps` steps, where the run has rounds."""
        if self.is_zeroth:
            self._refusal = (
                "fed.step: this task trains by gradients, and its site measures losses only"
                " (--order zeroth, or tune.method = zeroth): leave out --task, or send scalars by"
                " fed.rounds and fed.end_round"
            )
        elif self.settings.tune.is_private:
            self._refusal = (
                "fed.step: this run trains privately (tune.dp_epsilon), and this task adds no"
                " noise: leave out --task"
            )
        if self.settings.sync.trigger in {"auto", "clock", "buffer"}:
            return
        self._training.expect_rounds()
        if not self.is_zeroth:
            self._training.round_steps = self.settings.tune.steps

    def _attach_adapters(self, model: nn.Module, adapters: Adapters) -> None:
        training, view = self._training, adapters.view
        if not self.is_zeroth:  # else no weights leave but those that the first version begins with
            self._check_weights(model, view)
        training.facts = {
            RANK: float(adapters.site_rank),
            ORDER: 0.0 if self.is_zeroth else 1.0,
        }
        training.on_version = self._new_version
        self._expect_rounds()
        training.attach(model, view)

    def _new_version(self, version: int) -> None:
        """The model was moved onto a version: adapters train what their rule trains from it."""
        adapters = self.adapters
        if adapters is None:
            return
        adapters.begin_version(version)
        if adapters.rule.changes_basis:
            for optimizer in filter(None, (found() for found in self._tracked)):
                optimizer.state.clear()

    def add_facts(self, facts: Callable[[], Mapping[str, float]]) -> None:
        """Report numbers with every delta, whatever the site's policy for metrics.

        facts: gives them when a delta is made; of those in `fsl_async.roles.sync.delta.FACTS`. A
        private run needs the epsilon spent, as `fsl_async.learn.tune.privacy` counts it. It and
        the step that makes a delta raise TaskError for other names or values that are no numbers.
        """
        checked = script_values.facts("fed.add_facts", facts, FACTS)
        if EPSILON in checked():
            self._refusal = ""
        self._training.more_facts = checked

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
        training: "SplitTraining",
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

    def begin_batch(self) -> None:
        """Take the begin of a batch of split learning, which in a simulation costs time."""

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
        number = self._training.next_round()  # a client waits from its first round on
        while number is not None:
            if self._rounds is not None:
                self._rounds.begin_round(number)
            yield number
            # In a loop that did not end its round, what it waits for now is no step.
            self.meter.step_dropped()
            with self.meter.waiting():
                number = self._training.next_round()

    def end_round(
        self,
        *,
        samples: Whole,
        metrics: Metrics | None = None,
        scalars: Vector | None = None,
    ) -> bool:
        """The round is done; on return the weights are its version's. False once the run has ended.

        samples: trained in it; the weight of this client in the average. scalars: of a round of
        zeroth order, its projected gradients, float32 (K, P), which are sent instead of weights.
        Raises TaskError for values of other kinds, as `step` does.
        """
        if scalars is not None and not hasattr(scalars, "dtype"):
            raise TaskError("fed.end_round: scalars are a NumPy array, float32")
        if self._rounds is not None:
            self._rounds.end_round()
        if self._training.stopped:
            return False
        self.meter.count(samples, metrics, "fed.end_round", "samples")
        with self.meter.waiting():
            return self._training.end_round(scalars)

    def step(self, *, tokens: Whole = NOT_GIVEN, metrics: Metrics | None = None) -> bool:
        """A training step is done; the only point where weights may be exchanged.

        tokens: trained in this step on this client, or samples: the weight of its work in a merge.
        Any whole number: int, np.int64, a tensor of one element; a step without it counts 1.
        metrics: numbers to report, such as {"loss": loss}; tensors of one element are detached.
        Returns False once the run has ended; then leave all loops. Takes microseconds unless the
        run asks something of the model. Raises TaskError for values of other kinds, where this
        site measures losses only, or has to add noise and does not.
        """
        if self._refusal:
            raise TaskError(self._refusal)
        if self._training.is_at_version:
            raise TaskError(
                "fed.step inside of `with fed.at_version()`: the model has the version's weights"
                " there; call it after the block"
            )
        self.meter.step_ended()
        self.meter.count(self._counted(tokens), metrics)
        training = self._training
        training.keep_pace()
        if training.orders.asked() or training.is_due:
            if training.round_steps:
                with self.meter.waiting():
                    goes_on = training.attend_round()
            else:
                goes_on = training.attend()
            if not goes_on:
                return self._ended()
        self.meter.step_begins()
        return True

    def send(self) -> None:
        """Send what was trained since the last delta, as soon as that one has arrived.

        For runs in which clients send by themselves (`sync.trigger = buffer`), above all with
        `sync.pace = own`. Weights are copied in a step that follows; returns at once. Raises
        TaskError where the parameter server calls.
        """
        trigger = self.settings.sync.trigger
        if trigger != "buffer":
            raise TaskError(
                f"fed.send: this run has sync.trigger = {trigger}, where the parameter server"
                " decides when progress is sent: start it with sync.trigger = buffer"
            )
        self._training.send()

    def at_version(self) -> AbstractContextManager[int]:
        """Evaluate the run's version instead of this client's own weights.

            with fed.at_version() as version:
                loss = evaluate(model)
            fed.step(..., metrics={"eval_loss": loss, "eval_version": version})

        Within the block the model has the weights of the newest version here, exactly; afterwards
        its own again. Takes a copy of the weights on the CPU. The number is -1, and the weights are
        this client's own, in the rare case that no version is complete here.

        Raises RunFinishedError in a built-in task that was asked to end: the time left is short.
        """
        if self.evaluates_in_time and not self.running and self.is_leaving():
            raise RunFinishedError("no version is evaluated, because this client was asked to end")
        return self._training.at_version()

    def status(self) -> dict[str, float]:
        """Step, version, tokens, tokens_per_s, the running mean of each metric. For any thread."""
        return {"version": self.version, **self.meter.report()}


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
        """Do nothing: there is no one to send to."""

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

    def _expect_rounds(self) -> None:
        """Do nothing: no one calls for rounds, and nothing that is trained leaves this process."""

    def rounds(self) -> Iterator[int]:
        """Raise TaskError: no one calls for rounds."""
        raise TaskError("fed.rounds: no run calls for rounds here, where a task trains alone")

    def step(self, *, tokens: Whole = NOT_GIVEN, metrics: Metrics | None = None) -> bool:
        """Count a step; False once the steps or the time are used up."""
        if not self.running:
            return self._ended()
        goes_on = super().step(tokens=tokens, metrics=metrics)
        self.history.append((self.meter.steps, numbers("fed.step: metrics", metrics or {})))
        out_of_steps = self._last_step is not None and self.meter.steps >= self._last_step
        passed_s = time.monotonic() - self._begun_at
        if out_of_steps or (self._seconds is not None and passed_s >= self._seconds):
            self.stop()
            return self._ended()
        return goes_on

    def send(self) -> None:
        """Do nothing: there is no one to send to. Raises TaskError before `attach`."""
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
