"""Tuned models in this process: scores of a run's versions, and training without a network.

The records of all sites, and those that versions are scored on, are tokenized here. Imports torch.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import attrs
import numpy as np
import torch
from attrs import frozen

from fsl_async.config.load import to_wire
from fsl_async.config.settings import Config
from fsl_async.config.site_policy import SiteChoices
from fsl_async.errors import UsageError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.context import ClientContext, choose_device
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.client.pretrain import autocast
from fsl_async.learn.models.forward import drawing
from fsl_async.learn.tune.base import load_base
from fsl_async.learn.tune.objectives import objective_of
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.site import tokenized
from fsl_async.learn.tune.task import GradientSteps
from fsl_async.learn.tune.tokens import Tokenized
from fsl_async.tools.compare.choices import Run
from fsl_async.tools.compare.outcome import Outcome, Point, Score
from fsl_async.tools.compare.runner import Comparison, Scorer, words_of
from fsl_async.tools.compare.tune import CENTRAL, LOCAL, POOLED, TuningChoices
from fsl_async.tools.demo.scenario import Stage
from fsl_async.tools.versions import load_last

_SOURCES = itertools.count(-1, -1)
"""Numbers of joined data; those of a file are not negative."""


@frozen(eq=False)
class SiteRecords:
    """trained: what each site trains on. held: what all versions are scored on."""

    trained: tuple[Tokenized, ...]
    held: Tokenized

    @property
    def all_trained(self) -> Tokenized:
        """What all sites together train on."""
        return joined(self.trained)


def load_records(choices: TuningChoices) -> SiteRecords:
    """Read the records of a comparison, as `read_sites`."""
    config = choices.run(choices.methods[0]).config
    return read_sites(config, choices.base, choices.data, choices.held_out, choices.columns)


def read_sites(
    config: Config, base: str, paths: Sequence[str], held_out: str = "", columns: str = ""
) -> SiteRecords:
    """Read and tokenize a file for each site once, as the sites will.

    held_out: a file of records to score on; "": what the sites hold out, together.
    Raises, in one line, ConfigError and DataError, before anything is started.
    """
    tune, every = config.tune, [*paths, *filter(None, [held_out])]
    # Records of a wrong kind are an error before the model is loaded.
    opened = [Records(path, tune.objective, tune.label_names, columns=columns) for path in every]
    loaded = load_base(base, tune.objective, labels=tune.label_names)
    found = [tokenized(one, loaded, tune) for one in opened]
    sites = [one.split(config.data.holdout) for one in found[: len(paths)]]
    held = found[len(sites) :] or [part for _, part in sites if part is not None]
    if not held:
        raise UsageError("no record is held out: give --eval FILE, or --set data.holdout=0.1")
    return SiteRecords(tuple(mine for mine, _ in sites), joined(held))


def joined(parts: Sequence[Tokenized]) -> Tokenized:
    """All samples of the parts, which are of one objective and one tokenizer."""
    first = parts[0]
    ends = [0, *itertools.accumulate(len(one.ids) for one in parts)]
    samples = [0, *itertools.accumulate((len(one.starts) - 1) // one.width for one in parts)]
    starts = [one.starts[:-1] + end for one, end in zip(parts, ends, strict=False)]
    labels = [one.labels for one in parts if one.labels is not None]
    return attrs.evolve(
        first,
        ids=np.concatenate([one.ids for one in parts]),
        trained=np.concatenate([one.trained for one in parts]),
        starts=np.concatenate([*starts, np.array(ends[-1:], np.int64)]),
        labels=np.concatenate(labels) if labels else None,
        rows=np.concatenate([one.rows + at for one, at in zip(parts, samples, strict=False)]),
        source=next(_SOURCES),
    )


class TunedModel:
    """The base model with a run's adapters, all of the run's rank, in a `LocalFed`.

    held: what it is scored on. steps, layers: of training; the blocks whose adapters train.
    """

    def __init__(  # noqa: PLR0917 - what a site is given
        self,
        config: Config,
        base: str,
        name: str,
        held: Tokenized,
        steps: int | None = None,
        layers: str = "",
    ) -> None:
        self._config, self._held = config, held
        tune = config.tune
        device = choose_device(config.train.device)
        if config.train.threads:
            torch.set_num_threads(config.train.threads)
        loaded = load_base(
            base,
            tune.objective,
            labels=tune.label_names,
            seed=config.run.seed,
            device=device,
            bf16=device.type == "cuda",
        )
        context = ClientContext(
            name,
            seed=config.run.seed,
            device=device,
            config=to_wire(config),
            log=lambda _: None,
            site=SiteChoices(layers=layers),
        )
        self._fed = LocalFed(context, steps=steps)
        self._model = self._fed.lora(loaded.model, heads=loaded.drawn)
        adapters = self._fed.adapters
        assert adapters is not None
        self._objective = objective_of(tune)
        self._weights = ModelWeights(self._model, adapters.view)

    def __call__(self, run_dir: Path) -> Score:
        """Score the newest version in `run_dir`. Raises RunDirError."""
        load_last(run_dir, self._weights)
        return self.score()

    def score(self) -> Score:
        """Metrics of the model as it is."""
        with autocast(self._fed.device):
            found = self._objective.evaluate(self._model, self._held)
        return Score(found.get("eval_accuracy"), found["eval_loss"])

    def train(self, data: Tokenized, stage: Stage) -> float:
        """Train as the built-in task does, to the end of the model's steps; returns the seconds.

        The order of the samples follows from the seed and the model's name. Raises the stopper's
        error.
        """
        fed, batch_size = self._fed, self._config.train.batch
        steps = GradientSteps(fed, self._model, self._objective)
        begun = time.monotonic()
        with drawing(fed.device, fed.seed, fed.client_name):
            for batch in data.shuffled(batch_size, seed=fed.seed, name=fed.client_name):
                stage.check()
                count, _ = steps.step(batch)
                if not fed.step(tokens=count):
                    break
        return time.monotonic() - begun


class TuningComparison(Comparison):
    """Plays rules of federated LoRA, and trains without a network. records: None: read now."""

    choices: TuningChoices

    def __init__(self, choices: TuningChoices, records: SiteRecords | None = None) -> None:
        super().__init__(choices)
        self.records = records or load_records(choices)

    def check(self) -> None:
        """Build all models once."""
        for method in self.choices.methods:
            config = self.choices.run(method).config
            TunedModel(config, self.choices.base, method, self.records.held)

    def scorer(self, run: Run) -> Scorer:
        """Return what scores versions on the held-out records."""
        return TunedModel(run.config, self.choices.base, "scores", self.records.held)

    def alone(self, stage: Stage) -> Iterator[Outcome]:
        """Train on all records in one process, then each site alone."""
        yield self.pooled(stage)
        yield self.local(stage)

    def pooled(self, stage: Stage) -> Outcome:
        """Train one process on all records, as many steps as all sites make."""
        steps = self.choices.steps * len(self.choices.data)
        found = self._train(f"{POOLED}:", POOLED, self.records.all_trained, steps, stage)
        return self._outcome(POOLED, [found])

    def local(self, stage: Stage) -> Outcome:
        """Train each site alone, as many steps as it makes in a run; the mean over sites."""
        sites = zip(self.choices.names, self.records.trained, strict=True)
        steps = self.choices.steps
        found = [self._train(f"{LOCAL}: {name}", name, data, steps, stage) for name, data in sites]
        return self._outcome(LOCAL, found)

    def _train(
        self, label: str, name: str, data: Tokenized, steps: int, stage: Stage
    ) -> tuple[Score, float]:
        """Train from the base model; return the score and the seconds."""
        choices = self.choices
        config = choices.run(CENTRAL).config
        held, layers = self.records.held, choices.layers
        tuned = TunedModel(config, choices.base, name, held, steps, layers)
        seconds, score = tuned.train(data, stage), tuned.score()
        stage.say(f"{label} {steps} steps, {words_of(score)}, {seconds:,.1f} s")
        return score, seconds

    def _outcome(self, method: str, found: Sequence[tuple[Score, float]]) -> Outcome:
        choices, scores = self.choices, [score for score, _ in found]
        known = [score.accuracy for score in scores if score.accuracy is not None]
        end = Point(
            round=choices.rounds,
            accuracy=fmean(known) if known else None,
            loss=fmean(score.loss for score in scores),
            # Sites alone would train at the same time, each on its own machine.
            seconds=round(max(seconds for _, seconds in found), 3),
        )
        return Outcome(
            method=method,
            seed=choices.seed,
            ranks=choices.run(CENTRAL).ranks,
            points=(end,),
            by_loss=choices.by_loss,
            target=choices.target,
            parts=tuple(scores) if method == LOCAL else (),
        )
