"""The half of `Fed` without a network: data, optimizers, and what a task may read."""

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from torch import nn
from torch.utils.data import get_worker_info

from fsl_async.config.load import from_tables
from fsl_async.config.settings import Config
from fsl_async.config.site_policy import SiteChoices, SitePolicy
from fsl_async.errors import TaskError
from fsl_async.learn.client import script_values
from fsl_async.learn.client.items import PartSampler, Positions
from fsl_async.learn.client.optimizers import build_optimizer
from fsl_async.learn.client.ports import RunFinishedError
from fsl_async.learn.client.schedule import Schedule
from fsl_async.learn.client.script_values import NOT_GIVEN, Whole
from fsl_async.learn.client.statistics import recalibrate
from fsl_async.learn.client.training import Training
from fsl_async.learn.data.corpus import Corpus, windows
from fsl_async.learn.data.packing import Position
from fsl_async.learn.models.adapters import Adapters
from fsl_async.roles.machine import Event
from fsl_async.roles.sync.delta import POSITION

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
    site: SiteChoices = attrs.field(factory=SiteChoices)
    """This site's choices where the run tunes a base model."""
    privacy_folder: Path | None = None
    """Where private training keeps what it has spent (`fsl_async.learn.tune.privacy`)."""
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
    """The part of `Fed` that does not exchange weights.

    client_name: str; seed: int, the run's; device: torch.device; config: the run's tables, such as
    config["train"]["batch"]; log: takes a line for the journal; policy: what may leave this site;
    rank, ranks: this process of those that train one model together, 0 and 1 where it is alone;
    is_leaving(): whether this process was asked to end, so that nothing long should begin.
    """

    def __init__(self, training: Training, context: ClientContext) -> None:
        self._own_training = training
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
        return not self._own_training.stopped

    @property
    def version(self) -> int:
        """The version of the run that the model was last moved onto; -1 before attach."""
        return self._own_training.version

    @functools.cached_property
    def settings(self) -> Config:
        """`config`, checked: with attributes instead of keys, and defaults for what it lacks."""
        return from_tables(self.config)

    @property
    def part(self) -> tuple[int, int]:
        """The part of the data that is this rank's, of how many.

        Of the client's part, which is all of the data with local sharding, a rank of several has
        its share: part * ranks + rank, of count * ranks.
        """
        index, count = self._context.shard_index, self._context.shard_count
        if self.settings.data.sharding == "local":
            index, count = 0, 1
        return index * self.ranks + self.rank, count * self.ranks

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

        position: gives it when a delta is made; see `fsl_async.roles.sync.delta.POSITION`. That
        step raises TaskError for other names, and for values that are no whole numbers.
        """
        self._own_training.position = script_values.facts(
            "fed.keep_position", position, POSITION, only_whole=True
        )

    def track(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the state of your own optimizer at versions that change the adapters' basis.

        Moments describe the basis before. `fed.optimizer` makes one that is tracked already.
        """
        self._tracked.append(weakref.ref(optimizer))

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

    @property
    def rate_factor(self) -> float:
        """The learning rate as a share of its peak, by the run's progress and `train.schedule`.

        It rises from 0 over this client's first steps: `train.warmup_steps` at the start of the
        run, 20 for a client that joins later. See `fsl_async.learn.client.schedule`.
        """
        schedule, training = Schedule.of(self.config.get("train", {})), self._own_training
        return schedule.factor(
            self.progress,
            self.decays_from,
            steps=training.meter.steps,
            late=training.joined_at > 0,
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
            data = Corpus.open(data, context=context, held_out=self.settings.data.holdout)
        return self._text(data, self.part, batch or self.settings.train.batch, max(self.version, 0))

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
