"""What is common to `Fed` and `LocalFed`: data, optimizers, adapters, and what a task may read."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from torch import nn
from torch.utils.data import get_worker_info

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.config.site_policy import SitePolicy
from fsl_async.config.site_tuning import SiteTuning
from fsl_async.errors import TaskError
from fsl_async.learn.client.items import PartSampler, Positions
from fsl_async.learn.client.optimizers import build_optimizer
from fsl_async.learn.client.orders import RunFinishedError
from fsl_async.learn.client.schedule import Schedule
from fsl_async.learn.client.script_values import NOT_GIVEN, Metrics, Whole
from fsl_async.learn.client.statistics import recalibrate
from fsl_async.learn.data.corpus import HELD_OUT_SHARE, Corpus, windows
from fsl_async.learn.data.packing import Position
from fsl_async.learn.models.adapters import Adapters, AdapterSpec
from fsl_async.learn.models.causality import check_causal
from fsl_async.learn.models.saving import save_as_base
from fsl_async.roles.machine import Event
from fsl_async.store.adapters import adapter_rule_named
from fsl_async.store.adapters.hetlora import HetLoRA

ADAPTER_RATE = 1e-3
"""AdamW's learning rate of adapters where the run sets none."""
QUIET_STEPS = 3
"""How often step may be called after the end, without a line: a loop may finish what it began."""
TOLERATED_STEPS = 100
"""How often, before that ends a loop that never looks. In a loop around one that is left, each of
its epochs makes a step; code after both loops still runs."""


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
    rank: int = 0
    ranks: int = 1
    """Processes that train one model together, of which this is number `rank`."""
    log: Callable[[str], None] = print
    policy: SitePolicy = attrs.field(factory=SitePolicy)
    """What may leave this site."""
    tuning: SiteTuning = attrs.field(factory=SiteTuning)
    """This site's choices where the run tunes a base model."""
    privacy_folder: Path | None = None
    """Where private training keeps what it has spent (`fsl_async.learn.tune.budget`)."""
    position: Mapping[str, float] = attrs.field(factory=dict)
    """In the data, of this client's last acknowledged delta (`fsl_async.roles.sync.delta`)."""
    states_file: Path | None = None
    """Where states of streamed data are kept; None: nowhere."""
    is_leaving: Callable[[], bool] = lambda: False
    """Whether this process was asked to end: the time left is for the last delta."""


class SplitPort(Protocol):
    """A client's session with the split server (`fsl_async.nodes.client.node.ClientRuntime`).

    For the training thread.
    """

    def open_split(self, training: Any, architecture: dict[str, str]) -> None:
        """Open it, once; its messages go to `training`."""

    def post_split(self, event: Event) -> None:
        """Give its machine an event; nothing happens before it is opened."""


class FedBase:
    """What Fed and LocalFed have in common.

    client_name: str; seed: int, the run's; device: torch.device; config: the run's tables, such as
    config["train"]["batch"]; log: takes a line for the journal; policy: what may leave this site;
    rank, ranks: this process of those that train one model together, 0 and 1 where it is alone;
    is_leaving(): whether this process was asked to end, so that nothing long should begin.
    """

    def __init__(self, context: ClientContext) -> None:
        self.client_name = context.client_name
        self.seed = context.seed
        self.device = context.device
        self.config = context.config
        self.log = context.log
        self.rank = context.rank
        self.ranks = context.ranks
        self.policy = context.policy
        self.privacy_folder = context.privacy_folder
        self.adapters: Adapters | None = None
        """Of the model, after `lora`."""
        self.is_leaving = context.is_leaving
        self._context = context
        self._tracked: list[weakref.ref[torch.optim.Optimizer]] = []
        self._steps_after_end = 0
        self._counts_steps = False
        self._positions = Positions(self)

    def __reduce__(self) -> Any:
        raise TaskError(
            "fed cannot be given to another process: workers of a DataLoader that use it need"
            " multiprocessing_context='fork'; a loader with sampler=fed.sampler(data) needs not"
        )

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
        """The part of the data that is this rank's, of how many.

        Of the client's part, which is all of the data with local sharding, a rank of several has
        its share: part * ranks + rank, of count * ranks.
        """
        index, count = self._context.shard_index, self._context.shard_count
        if self.config.get("data", {}).get("sharding") == "local":
            index, count = 0, 1
        return index * self.ranks + self.rank, count * self.ranks

    def attach(self, model: nn.Module, *, exchange: Sequence[str] | None = None) -> None:
        """Hand the model over; on return its weights are the run's."""
        raise NotImplementedError

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
        self._check_causal(model)
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
        if self.ranks > 1 and rule.trains_a(0) != rule.trains_a(1):
            raise TaskError(
                f"tune.rule = {tune.rule} trains factors in turn, and the ranks of a client add up"
                " gradients of fixed weights: use another rule, or one process"
            )
        self.adapters = Adapters(model, spec, rule)
        if self.adapters.left_out:
            self.log(self.adapters.left_out)
        save_as_base(self.adapters)
        self._attach_adapters(model, self.adapters)
        return model

    def _check_causal(self, model: nn.Module) -> None:
        """Raise ConfigError for a causal language model that reads the tokens that come later."""
        line = check_causal(model)
        if line:
            self.log(line)

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

    def position_in(self, check: int) -> Position:
        """Where this client goes on in the data that `check` stands for.

        That is where its last acknowledged delta ended; the beginning, with a line in the log,
        where that was in other data.
        """
        found = Position.from_facts(self._context.position)
        if found is not None and found.check == check:
            return found
        if found is not None and get_worker_info() is None:
            self.log(
                "the data, their division or the tokenizer have changed since this client's last"
                " delta: it begins at the start of its part"
            )
        return Position(check=check)

    @property
    def states_file(self) -> Path | None:
        """Where states of streamed data are kept; None: nowhere."""
        return self._context.states_file

    def keep_position(self, position: Callable[[], Mapping[str, float]]) -> None:
        """Report the position in the data with every delta, so that a relaunch goes on there.

        position: gives it when a delta is made; see `fsl_async.roles.sync.delta.POSITION`.
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

    def step(self, *, tokens: Whole = NOT_GIVEN, metrics: Metrics | None = None) -> bool:
        """A training step is done; the only point where weights may be exchanged."""
        raise NotImplementedError

    def _counted(self, tokens: Whole) -> Whole:
        """The tokens of a step: 1 where the script gives none, with a line the first time."""
        if tokens is not NOT_GIVEN:
            return tokens
        if not self._counts_steps:
            self._counts_steps = True
            self.log(
                "fed.step without tokens: each step counts as 1; where clients have batches of"
                " different sizes, give tokens=, the tokens or samples of the step"
            )
        return 1

    def send(self) -> None:
        """Send what was trained since the last delta, in runs whose clients send by themselves."""
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

    def recalibrate(self, model: nn.Module, batches: Iterable[Any]) -> int:
        """Measure the statistics of batch norm anew on the model's present weights, in place.

            with fed.at_version():
                fed.recalibrate(model, ten_batches)
                accuracy = evaluate(model)

        A version has the mean of its clients' statistics, which are not quite those of the merged
        weights: with new ones it is a few points better while training moves fast
        (docs/adr/0142). See `fsl_async.learn.client.statistics.recalibrate`. Returns the number of
        batches.
        """
        return recalibrate(model, batches)

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
            held_out = float(self.config.get("data", {}).get("holdout", HELD_OUT_SHARE))
            data = Corpus.open(data, context=context, held_out=held_out)
        size = batch or int(self.config.get("train", {}).get("batch", 1))
        return self._text(data, self.part, size, max(self.version, 0))

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

    def _text(
        self, corpus: Corpus, mine: tuple[int, int], batch: int, start: int
    ) -> Iterator[torch.Tensor]:
        span = corpus.shard(*mine)
        name, worker = self.client_name, get_worker_info()
        if worker is not None:  # of a DataLoader: each draws windows of its own
            name = f"{name}/{worker.id}"
        drawn = windows(corpus, span, batch=batch, seed=self.seed, name=name, start=start)

        def endless() -> Iterator[torch.Tensor]:
            while self.running:
                yield torch.from_numpy(next(drawn)).to(self.device).long()

        return endless()

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
