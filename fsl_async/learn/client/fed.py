"""A training function's view of a run: attach a model, draw its data, report each step.

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
arXiv:2311.08105). `local_fed.LocalFed` is the same without a network: a task runs under either and
cannot tell.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.data import get_worker_info

from fsl_async.config.exposure import exposure_line, exposure_of
from fsl_async.config.settings_tuning import PRODUCT_RULES
from fsl_async.config.site_policy import DELTAS, EMBEDDINGS
from fsl_async.errors import TaskError
from fsl_async.learn.client import script_values, statistics
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.context import ClientContext, SplitPort, SplitRounds
from fsl_async.learn.client.items import PartSampler, Positions
from fsl_async.learn.client.optimizers import build_optimizer
from fsl_async.learn.client.ports import Harm, RunFinishedError, Vector
from fsl_async.learn.client.schedule import Schedule
from fsl_async.learn.client.script_values import NOT_GIVEN, Metrics, Whole
from fsl_async.learn.client.training import Training
from fsl_async.learn.data.corpus import Corpus, windows
from fsl_async.learn.models.adapters import Adapters, View
from fsl_async.learn.models.hf import check_causal
from fsl_async.learn.models.own_head import SUFFIX, load_head, save_head
from fsl_async.learn.models.saving import save_as_base
from fsl_async.roles.machine import Event
from fsl_async.roles.sync.delta import EPSILON, FACTS, ORDER, RANK
from fsl_async.store.rules.adapters import FedIT, HetLoRA, adapter_rule_named

ADAPTER_RATE = 1e-3
"""AdamW's learning rate of adapters where the run sets none."""
QUIET_STEPS = 3
"""How often step may be called after the end, without a line: a loop may finish what it began."""
TOLERATED_STEPS = 100
"""How often, before that ends a loop that never looks. In a loop around one that is left, each of
its epochs makes a step; code after both loops still runs."""


class Fed:
    """A client's view of a run. Used by the training thread, but for `status`.

    client_name: str; seed: int, the run's; device: torch.device; config: the run's tables, such as
    config["train"]["batch"]; settings: `config`, checked, with attributes instead of keys; log:
    takes a line for the journal; policy: what may leave this site; rank, ranks: this process of
    those that train one model together, 0 and 1 where it is alone; part: see `ClientContext.part`;
    is_leaving(): whether this process was asked to end, so that nothing long should begin.
    reward: the file of this site's reward function, or "".
    position_in(check), keep_position(function): see `items.Positions`, for data of your own.
    """

    def __init__(
        self,
        training: Training,
        context: ClientContext,
        session: SplitPort | None = None,
    ) -> None:
        self._own_training = training
        self._context = context
        self.client_name = context.client_name
        self.seed = context.seed
        self.device = context.device
        self.config, self.settings = context.config, context.settings
        self.log = context.log
        self.rank, self.ranks, self.part = context.rank, context.ranks, context.part
        self.policy = context.policy
        self.privacy_folder, self.states_file = context.privacy_folder, context.states_file
        self.is_leaving = context.is_leaving
        self.reward = context.site.reward
        self.adapters: Adapters | None = None
        """The run's LoRA adapters in the attached model; None until `lora` is called."""
        self.meter = training.meter
        self.changed = threading.Condition()
        """Where split learning waits."""
        self.evaluates_in_time = False
        """Whether `at_version` ends a built-in task once this process was asked to end."""
        self._process = os.getpid()
        self._session = session
        self._rounds: SplitRounds | None = None
        self._refusal = ""  # why `step` cannot train
        self._tracked: list[weakref.ref[torch.optim.Optimizer]] = []
        self._steps_after_end = 0
        self._counts_steps = False
        self._positions = Positions(context, training)
        self.position_in = self._positions.position_in
        self.keep_position = self._positions.keep_position
        training.buffers = self.settings.exchange.buffers
        if not self.rank:
            training.log = self.log

    @property
    def _training(self) -> Training:
        if os.getpid() != self._process:  # it has neither the threads nor the sockets
            raise TaskError(
                "fed belongs to the process that joined, and this one was forked from it: train and"
                " exchange weights there; workers may read data, fed.running and fed.version"
            )
        return self._own_training

    @property
    def running(self) -> bool:
        """False once the run has ended."""
        return not self._own_training.stopped

    @property
    def version(self) -> int:
        """The version of the run that the model was last moved onto; -1 before attach."""
        return self._own_training.version

    def status(self) -> dict[str, float]:
        """Step, version, tokens, tokens_per_s, the running mean of each metric. For any thread."""
        return {"version": self.version, **self.meter.report()}

    # --- the model ---

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
        tune, site = self.settings.tune, self._context.site
        rule = adapter_rule_named(tune.rule)
        if site_rank is not None:
            site = attrs.evolve(site, rank=site_rank)
        if self.is_zeroth:
            self._check_zeroth()
            site = attrs.evolve(site, rank=0)  # a probe costs the same whatever the rank
        rank = site.rank_in(tune, unequal=rule.unequal_ranks)
        if self.ranks > 1 and rule.trains_a(0) != rule.trains_a(1):
            raise TaskError(
                f"tune.rule = {tune.rule} trains factors in turn, and the ranks of a client add up"
                " gradients of fixed weights: use another rule, or one process"
            )
        self.adapters = adapters = Adapters(
            model, tune, rule, seed=self.seed, heads=heads, site_rank=rank, layers=site.layers
        )
        if adapters.left_out:
            self.log(adapters.left_out)
        if adapters.at_home and (kept := self._head_file) is not None and kept.is_file():
            load_head(model, adapters.at_home, kept)
            self.log(f"goes on with the head of this site, {kept}")
        save_as_base(adapters)
        if not self.is_zeroth:  # else no weights leave but those that the first version begins with
            self._check_weights(model, adapters.view)
        self._check_exposure(model)
        facts = {RANK: float(adapters.site_rank), ORDER: 0.0 if self.is_zeroth else 1.0}
        self._training.facts["adapters"] = lambda: facts
        self._training.on_version = self._begin_version
        self._expect_rounds()
        self._training.attach(model, adapters.view)
        return model

    @property
    def is_zeroth(self) -> bool:
        """Whether this site measures losses alone, and sends scalars (`fed.end_round`)."""
        return self._context.site.is_zeroth(self.settings.tune)

    def _check_zeroth(self) -> None:
        """Raise TaskError where the run cannot use a site of zeroth order."""
        tune, why = self.settings.tune, ""
        if self.settings.sync.trigger == "clock":
            why = (
                "this run syncs by the clock, and steps of zeroth order are made by rounds; it"
                " needs --set sync.trigger=rounds"
            )
        elif tune.is_private:
            why = (
                "this run trains privately (tune.dp_epsilon), and what is computed from losses gets"
                " no noise; leave --order out"
            )
        elif tune.method == "lora" and tune.rule == HetLoRA.name:
            why = (
                "tune.rule = hetlora weighs sites by the norm of their products, which are noise"
                " here; the run needs another rule"
            )
        if why:
            raise TaskError(f"--order zeroth: {why}")

    def _expect_rounds(self) -> None:
        """Have `step` train rounds of `tune.steps` steps, where the run has rounds."""
        if self._context.site.evaluates:
            self._refusal = "fed.step: an evaluator (--evaluate) trains nothing"
            return
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
        if self.settings.sync.trigger not in {"auto", "clock", "buffer"}:
            self._training.expect_rounds(0 if self.is_zeroth else self.settings.tune.steps)

    def _begin_version(self, version: int) -> None:
        """Train what the adapters' rule trains from the version that the model was moved onto."""
        assert self.adapters is not None
        self.adapters.begin_version(version)
        if self.adapters.at_home and not self.rank and self._head_file is not None:
            save_head(self.adapters.model, self.adapters.at_home, self._head_file)
        if self.adapters.rule.changes_basis:
            for optimizer in filter(None, (found() for found in self._tracked)):
                optimizer.state.clear()

    @property
    def _head_file(self) -> Path | None:
        states = self.states_file
        return None if states is None else states.with_suffix(SUFFIX)

    def _check_weights(
        self, model: nn.Module, exchange: Sequence[str] | View | None = None
    ) -> None:
        """Raise NotAllowedError where a site that lets out adapters only would send others."""
        if self.policy.lets(DELTAS, masked=self.settings.tune.secure):
            return
        for one in ModelWeights(model, exchange).layout.tensors:
            if not set(one.name.split(".")) & {"lora_A", "lora_B", "patch"}:
                what = f"this task exchanges {one.name}, which is no LoRA adapter: it"
                self.policy.require({DELTAS: "the parameter server"}, what)

    def _check_exposure(self, model: nn.Module) -> None:
        """Say what the run's settings expose; raise NotAllowedError for words that may not leave.

        A secure sum still has the words of all sites together. An evaluator sends no update.
        """
        if self._context.site.evaluates:
            return
        trains_embedding = _trains_embedding(model)
        if trains_embedding and not self.is_zeroth:
            what = "this run trains the embedding, whose rows tell the words of the records: it"
            self.policy.require({EMBEDDINGS: "the parameter server"}, what)
        tune, is_zeroth = self.settings.tune, self.is_zeroth
        found = exposure_of(tune, is_zeroth=is_zeroth, trains_embedding=trains_embedding)
        self.log(exposure_line(found))

    def add_facts(self, facts: Callable[[], Mapping[str, float]]) -> None:
        """Report numbers with every delta, whatever the site's policy for metrics.

        facts: gives them when a delta is made; of those in `fsl_async.roles.sync.delta.FACTS`. A
        private run needs the epsilon spent, as `fsl_async.learn.tune.privacy` counts it. It and
        the step that makes a delta raise TaskError for other names or values that are no numbers.
        """
        checked = script_values.facts("fed.add_facts", facts, FACTS)
        if EPSILON in checked():
            self._refusal = ""
        self._training.facts["task"] = checked

    # --- rounds, and split learning ---

    def evaluate_deltas(self, loss: Callable[[], float]) -> None:
        """Score the deltas of each round until the run ends, as its evaluator (--evaluate).

            fed.attach(model)                     # or fed.lora(base)
            fed.evaluate_deltas(lambda: measure(model, probe))

        loss: of the model as it is, on records of this site; lower is better. It is called twice
        for each delta, and twice more; where one is left out, once more for each of the others.
        Raises TaskError at a client that is no evaluator.
        """
        if not self._context.site.evaluates:
            raise TaskError("fed.evaluate_deltas: start this client with --evaluate")
        training, tune, guard = self._training, self.settings.tune, self.settings.guard
        if not (tune.merge or (tune.is_on and tune.rule in PRODUCT_RULES)):
            training.harm = Harm(guard.evaluator_alone, guard.evaluator_left_out)
        training.loss = loss
        while self.running:
            training.orders.wait(or_stop=True)
            training.attend()

    def attach_rounds(
        self,
        model: nn.Module,
        training: SplitRounds,
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

    # --- steps, and versions ---

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
        if tokens is NOT_GIVEN:
            tokens = 1
            if not self._counts_steps:
                self._counts_steps = True
                self.log(
                    "fed.step without tokens: each step counts as 1; where clients have batches of"
                    " different sizes, give tokens=, the tokens or samples of the step"
                )
        self.meter.count(tokens, metrics)
        if not self._training.step():
            return self._ended()
        self.meter.step_begins()
        return True

    def _ended(self) -> bool:
        """Return False for step; raises RunFinishedError for a loop that never looks at it."""
        self._steps_after_end += 1
        if self._steps_after_end == QUIET_STEPS + 1:
            self.log(
                "the run has ended, and training goes on without it: leave every loop when fed.step"
                " returns False; in an outer loop, `if not fed.running: break`"
            )
        if self._steps_after_end > TOLERATED_STEPS:
            raise RunFinishedError(
                f"the run has ended, and fed.step has returned False {TOLERATED_STEPS} times: this"
                " script ends here, because its loop does not"
            )
        return False

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

    recalibrate = staticmethod(statistics.recalibrate)
    """See `fsl_async.learn.client.statistics.recalibrate`."""

    # --- optimizers, and the run's progress ---

    @property
    def progress(self) -> float | None:
        """Share of the run that is done, 0 to 1, the same at all clients; None without an end.

        By what ends the run first: `run.tokens`, `run.rounds` or `run.seconds`. Between versions it
        goes on at the run's pace.
        """
        return self._own_training.clock.progress

    @property
    def decays_from(self) -> float:
        """Progress at which learning rates begin to fall."""
        return self._own_training.clock.decays_from

    @property
    def rate_factor(self) -> float:
        """The learning rate as a share of its peak, by the run's progress and `train.schedule`.

        It rises from 0 over this client's first steps: `train.warmup_steps` at the start of the
        run, 20 for a client that joins later. See `fsl_async.learn.client.schedule`.
        """
        return Schedule.of(self.config.get("train", {})).factor(
            self.progress,
            self.decays_from,
            steps=self.meter.steps,
            late=self._own_training.joined_at > 0,
        )

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

    def track(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the state of your own optimizer at versions that change the adapters' basis.

        Moments describe the basis before. `fed.optimizer` makes one that is tracked already.
        """
        self._tracked.append(weakref.ref(optimizer))

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """A scheduler that multiplies the rates of `optimizer` by `rate_factor`.

        Call its step() after that of the optimizer. It follows the run and counts no steps, so
        there is nothing in it to save.
        """
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: self.rate_factor)

    # --- data ---

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

        data as a `datasets.Dataset` or `IterableDataset` of Hugging Face: its items, each once per
        epoch.

        Items of either kind go on, after a relaunch, after the last item that the client's last
        acknowledged delta has trained; of several data sets only of the one given first. What is
        given is a torch IterableDataset too: workers of a DataLoader around it, or around one of
        yours that iterates it, divide the part. See docs/DATA.md.

        Raises DataError for text that is missing or too short, TaskError for an empty part.
        """
        if not isinstance(data, Corpus | str | os.PathLike):
            return self._positions.items(data)
        if not isinstance(data, Corpus):
            if context is None:
                raise TaskError("fed.shard needs context= (bytes a model sees) with a path")
            data = Corpus.open(data, context=context, held_out=self.settings.data.holdout)
        span, size = data.shard(*self.part), batch or self.settings.train.batch
        name, worker = self.client_name, get_worker_info()
        if worker is not None:  # of a DataLoader: each draws windows of its own
            name = f"{name}/{worker.id}"
        start = max(self.version, 0)
        drawn = windows(data, span, batch=size, seed=self.seed, name=name, start=start)

        def endless() -> Iterator[torch.Tensor]:
            while self.running:
                yield torch.from_numpy(next(drawn)).to(self.device).long()

        return endless()

    def sampler(self, data: Sized, *, shuffle: bool = True, whole: bool = False) -> PartSampler:
        """A sampler of this client's own part of `data`, for a DataLoader.

            loader = DataLoader(data, batch_size=32, sampler=fed.sampler(data), num_workers=4)
            while fed.running:
                for batch in loader:                 # an epoch of this client's part
                    ...
                    if not fed.step(tokens=len(batch)):
                        break

        As `torch.utils.data.DistributedSampler`, by `fed.part`. It counts epochs by itself, and
        goes on after a relaunch as `shard` does: after the last batch that the last acknowledged
        delta has trained, whatever workers have read ahead. shuffle: anew in each epoch, by the
        run's seed. whole: all of `data` is this client's. Raises TaskError for an empty part.
        """
        return self._positions.sampler(data, shuffle=shuffle, whole=whole)


def _trains_embedding(model: nn.Module) -> bool:
    """Whether the rows of the model's token embedding train, one for each token."""
    found = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(found, "weight", None)
    return bool(weight is not None and weight.requires_grad)
