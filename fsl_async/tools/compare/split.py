"""Runs that compare methods of split learning, and their scores: the joined model on held-out data.

Every node builds its parts from the configuration alone, so all methods begin with the same
weights, and a client draws the same batches under every method.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from fsl_async.config.load import parse_override
from fsl_async.config.rules import is_own
from fsl_async.config.settings import Config
from fsl_async.errors import UsageError
from fsl_async.learn.data.facts import facts_of
from fsl_async.roles.split.methods import METHODS, method_of
from fsl_async.tools.compare import server
from fsl_async.tools.compare.choices import (
    SPLIT_DEFAULTS,
    SPLIT_ROWS,
    SPLIT_SETTINGS,
    Choices,
    Run,
    words_of,
)
from fsl_async.tools.compare.outcome import Score
from fsl_async.tools.compare.runner import Comparison, Scorer

if TYPE_CHECKING:
    from torch import Tensor

MODELS = ("small-cnn", "resnet18")
GPT = "gpt-"


@frozen(kw_only=True)
class SplitChoices(Choices):
    """A comparison of methods of split learning.

    data: one path, divided among clients. model: "" is that of a preset, else small-cnn. alpha: of
    a Dirichlet partition of images; 0: IID.
    """

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "run.rounds": "--rounds",
        "run.seed": "--seed or --seeds",
        "sync.clients": "--clients",
        "data.path": "--data",
        "data.alpha": "--alpha",
        "model.preset": "--model",
        "model.family": "--model",
        "split.method": "--methods",
        **SPLIT_SETTINGS,
    }
    ROWS = SPLIT_ROWS

    model: str = ""
    clients: int = 4
    alpha: float = 0.0
    target_accuracy: float = 0.5

    def __attrs_post_init__(self) -> None:
        if len(self.data) != 1:
            raise UsageError("--data: give one; methods of split learning divide it among clients")
        known = (*MODELS, "")
        if not (self.model in known or self.model.startswith(GPT) or is_own(self.model)):
            raise UsageError(
                f"--model {self.model[:80]!r} is unknown; known: {', '.join(MODELS)},"
                " for text gpt-0.5m, gpt-1m, ..., and your own FILE.py:FUNCTION"
            )
        if not str(self.settings.get("train.learning_rate", 1)).strip("0."):
            raise UsageError("--learning-rate: above 0, at most 10")
        self.check_target()

    @property
    def names(self) -> tuple[str, ...]:
        """The clients, in the order of their shards."""
        return tuple(f"client-{number}" for number in range(1, self.clients + 1))

    def run(self, method: str) -> Run:
        """Return the run of a method. Where clients take turns, each turn makes a version.

        Raises UsageError and ConfigError in one line.
        """
        turns = self.clients if METHODS[method].sequential else 1
        usual: dict[str, Any] = {"model.family": MODELS[0], **SPLIT_DEFAULTS}
        wanted: dict[str, Any] = {
            "run.name": f"compare-{method}",
            "run.rounds": self.rounds * turns,
            "sync.clients": self.clients,
            "sync.min_clients": self.clients,
            "data.path": self.data[0],
            "split.method": method,
            "train.device": "cpu",
        }
        if self.model.startswith(GPT):
            wanted |= {"model.family": "gpt", "model.preset": self.model.removeprefix(GPT)}
        elif self.model:
            wanted["model.family"] = self.model
        if self.alpha:
            self._check_partition()
            usual["data.partition"] = "dirichlet"
            wanted["data.alpha"] = self.alpha
        own = {"model": self.model, "auxiliary": self.settings.get("split.auxiliary", "")}
        code = {name: value for name, value in own.items() if is_own(value)}
        client = words_of({"data": self.data[0], **code})
        return Run(
            method=method,
            sets=self.all_sets(usual, wanted),
            clients=dict.fromkeys(self.names, client),
            turns=turns,
        )

    def _check_partition(self) -> None:
        given = dict(map(parse_override, self.sets))
        partition = given.get("data.partition", "dirichlet")
        if not str(partition).startswith("dirichlet"):
            raise UsageError(
                f"--alpha: data.partition = {partition} has no shares; leave one of them out"
            )

    def used(self, run: Run) -> dict[str, Any]:
        """Return all choices by name, for rows; settings with the values that the run has."""
        model = run.config.model
        shown = f"{GPT}{model.preset}" if model.family == "gpt" else model.family
        return {**super().used(run), "model": shown}


class SplitComparison(Comparison):
    """Plays methods of split learning."""

    def check(self) -> None:
        """Build the parts of each method, and open the data, once."""
        from fsl_async.learn.split import task

        for method in self.choices.methods:
            config = self.choices.run(method).config
            SplitScorer(config)
            task.open_samples(config, facts_of(config), (0, len(self.choices.names)))

    def scorer(self, run: Run) -> Scorer:
        """Return what scores the joined model."""
        return SplitScorer(run.config)


class SplitScorer:
    """Scores versions of a run: X_c of the parameter server and x_s of the split server.

    Replicas (SplitFed V1) are averaged for it with the shares of the version's own average.
    """

    def __init__(self, config: Config, limit: int = 1 << 12) -> None:
        """limit: of held-out samples."""
        from torch import nn

        from fsl_async.learn.client.buffers import ModelWeights
        from fsl_async.learn.split import build, task

        self._parts = parts = build.build_parts(config, at_client=False)
        method = method_of(config.split)
        self._has_server = config.split.has_server
        options = build.client_options(config)
        part = build.client_part(method, parts.model, options, parts.auxiliary)
        kept = {name: part.part(name) for name in method.averaged}
        self._client = ModelWeights(kept["client"] if len(kept) == 1 else nn.ModuleDict(kept))
        self._batches = list(task.held_out(config, facts_of(config), limit))

    def __call__(self, run_dir: Path, kept: Mapping[str, Tensor] | None = None) -> Score:
        """Score the newest version in `run_dir`. Raises RunDirError.

        kept: x_s of a checkpoint, by name; None: the weights that wait for their score.
        """
        import torch

        from fsl_async.learn.split import weights
        from fsl_async.tools.versions import load_last

        torch.set_num_threads(1)
        record = load_last(run_dir / server.PS if self._has_server else run_dir, self._client)
        part = self._parts.model.server
        if part is not None and kept is not None:
            weights.load_named(part, "server/", kept)
        elif part is not None and self._has_server:
            of_all, found = server.read_weights(run_dir)
            shares = {
                one.key.client: float(one.delta.tokens)
                for one in record.merged
                if one.key.client in found
            }
            vectors = [found[name] for name in shares]
            average = weights.average(vectors, list(shares.values())) if shares else of_all
            weights.load(part, average)
        score = weights.evaluate(self._parts.model, self._batches)
        return Score(score.accuracy, score.loss)
