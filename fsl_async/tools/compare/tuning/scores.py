"""Models of a run in this process, and their metrics on held-out records. Imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from fsl_async.config.load import to_wire
from fsl_async.config.settings import Config
from fsl_async.config.site_tuning import SiteTuning
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.fed_base import ClientContext, choose_device
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.client.pretrain import autocast
from fsl_async.learn.tune.base import load_base
from fsl_async.learn.tune.objectives import objective_of
from fsl_async.learn.tune.tokens import Tokenized
from fsl_async.tools.evaluation import load_last


class Score(NamedTuple):
    """accuracy: share of right labels, or of positive margins (dpo); None with lm.

    loss: nats a trained token (lm) or a sample. samples: on how many it was measured.
    """

    accuracy: float | None
    loss: float
    samples: int


class TunedModel:
    """The base model with a run's adapters, all of the run's rank, in a `LocalFed`.

    steps, layers: of training; the blocks whose adapters train.
    """

    def __init__(
        self, config: Config, base: str, name: str, *, steps: int | None = None, layers: str = ""
    ) -> None:
        self.config = config
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
            tuning=SiteTuning(layers=layers),
        )
        self.fed = LocalFed(context, steps=steps)
        self.model = self.fed.lora(loaded.model, heads=loaded.drawn)
        assert self.fed.adapters is not None
        self.adapters = self.fed.adapters
        self.objective = objective_of(tune)

    def score(self, held: Tokenized) -> Score:
        """Metrics of the model as it is."""
        with autocast(self.fed.device):
            found = self.objective.evaluate(self.model, held)
        return Score(found.get("eval_accuracy"), found["eval_loss"], len(held))


class Scorer:
    """Scores versions of a run. config: the run's."""

    def __init__(self, config: Config, base: str, held: Tokenized) -> None:
        self._tuned = TunedModel(config, base, "scores")
        self._weights = ModelWeights(self._tuned.model, self._tuned.adapters.view)
        self._held = held

    def __call__(self, run_dir: Path) -> Score:
        """Score the newest version in `run_dir`. Raises RunDirError."""
        load_last(run_dir, self._weights)
        return self._tuned.score(self._held)
