"""Makes the delta that a site would send, by the run's own model, optimizer, rule and codec."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from attrs import evolve, frozen
from numpy.typing import NDArray
from torch import Tensor, nn

from fsl_async.config.load import to_wire
from fsl_async.config.settings import Config
from fsl_async.config.settings_tuning import PRIVATE_RULES
from fsl_async.config.site_policy import SiteChoices
from fsl_async.errors import DataError
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.models.forward import drawing, evaluating
from fsl_async.learn.tune.base import load_base
from fsl_async.learn.tune.objectives import objective_of
from fsl_async.learn.tune.privacy import Privacy, Spent, noise_for
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.site import tokenized
from fsl_async.learn.tune.task import GradientSteps
from fsl_async.learn.tune.tokens import TokenBatch, Tokenized
from fsl_async.tools.compare.alone import joined
from fsl_codecs import decode, encode

Weights = dict[str, Tensor]
"""Trained weights, or their changes, by the model's names."""
COPIES, OTHER_CODES = (1, 4, 16), 1000
WARM_STEPS, WARM_BATCH = 10, 4
"""Steps before the round that is attacked, where factor A trains: in a run's first step it has no
gradient yet."""


@frozen(kw_only=True)
class Shape:
    """How a round trains. steps, batch: as of the run. sgd: plain steps instead of the run's.

    private: by `tune.dp_epsilon`.
    """

    steps: int
    batch: int
    sgd: bool = False
    private: bool = False


@frozen
class Codes:
    """Planted texts, how often each is in the data, and others of the same form that are not."""

    copies: tuple[int, ...]
    each: Tokenized
    others: Tokenized


@frozen
class SentDelta:
    """The changes that a server gets, decoded, and what they were before: `trained`.

    batches: those that made them.
    """

    changes: Weights
    trained: Weights
    batches: tuple[TokenBatch, ...]

    @property
    def records(self) -> list[list[int]]:
        """The tokens of each record, without padding."""
        return [
            ids[mask > 0].tolist()
            for batch in self.batches
            for ids, mask in zip(batch.ids, batch.mask, strict=True)
        ]


class SiteRounds:
    """The site's model at a version of which factor B is not zero, and its records.

    records: at most so many are used. A fifth of them, or more by `data.holdout`, are no members.
    Raises ConfigError and DataError in one line.
    """

    def __init__(
        self, config: Config, base: str, data: str, *, columns: str, layers: str, records: int
    ) -> None:
        tune = config.tune
        # Records of a wrong kind are an error before the model is loaded.
        found = Records(data, tune.objective, tune.label_names, columns=columns)
        self.base = load_base(
            base,
            tune.objective,
            labels=tune.label_names,
            seed=config.run.seed,
            device=torch.device("cpu"),
        )
        everything = tokenized(found, self.base, tune)
        if len(everything) < 4:
            raise DataError(
                f"{data}: {len(everything)} records are too few to audit: give at least 4"
            )
        order = np.random.default_rng(config.run.seed).permutation(len(everything))[:records]
        mine, held = everything.select(order).split(max(config.data.holdout, 0.2))
        assert held is not None
        self.mine: Tokenized = mine
        self.held: Tokenized = held
        self.config = config
        context = ClientContext(
            "audit",
            seed=config.run.seed,
            device=torch.device("cpu"),
            config=to_wire(config),
            log=lambda _: None,
            site=SiteChoices(layers=layers),
        )
        self._fed = LocalFed(context)
        self.model: nn.Module = self._fed.lora(self.base.model, heads=self.base.drawn)
        self._objective = objective_of(tune)
        self._trained = {
            name: weight for name, weight in self.model.named_parameters() if weight.requires_grad
        }
        self.first = self._copy()
        """The weights of version 0."""
        count = 0 if tune.rule in PRIVATE_RULES else WARM_STEPS
        warm = [self._batch(number, WARM_BATCH, from_end=True) for number in range(count)]
        with drawing(self._fed.device, self._fed.seed, "audit", "warm"):
            self._train(warm)
        self.version = self._copy()
        """The weights that every round begins with."""

    def send(self, shape: Shape) -> SentDelta:
        """Train a round from the version; the model has the version's weights again afterwards."""
        batches = [self._batch(number, shape.batch) for number in range(shape.steps)]
        with drawing(self._fed.device, self._fed.seed, "audit"):
            if shape.private:
                batches = self._train_privately(shape.steps)
            elif shape.sgd:
                self._train_plainly(batches)
            else:
                self._train(batches)
        changes = {name: now - self.version[name] for name, now in self._copy().items()}
        self.set(self.version)
        return SentDelta(self.coded(changes), changes, tuple(batches))

    def coded(self, changes: Weights, step: float = 0.0) -> Weights:
        """Return the changes as a server decodes them.

        step: of uniform, in root mean squares; 0: as the run codes.
        """
        codec = self.config.codec
        if step:
            codec = evolve(codec, up="uniform", up_step=step)
        flat = torch.cat([change.reshape(-1) for change in changes.values()])
        decoded = torch.from_numpy(
            np.array(decode(encode(flat.numpy(), codec.spec_up)), np.float32)
        )
        parts = torch.split(decoded, [change.numel() for change in changes.values()])
        named = zip(changes.items(), parts, strict=True)
        return {name: part.view_as(change) for (name, change), part in named}

    def bound(self) -> tuple[float, float, float] | None:
        """The epsilon of all rounds, the noise and the sample rate; None without private training.

        Raises ConfigError and PrivacyError.
        """
        tune, run = self.config.tune, self.config.run
        if not tune.dp_epsilon:
            return None
        batch = min(self.config.train.batch, len(self.mine))
        plan = Spent(
            run=run.name,
            client="audit",
            epsilon=tune.dp_epsilon,
            delta=tune.dp_delta,
            sample_rate=batch / len(self.mine),
            steps=run.rounds * tune.steps,
        )
        return tune.dp_epsilon, noise_for(plan), plan.sample_rate

    def codes(self) -> Codes:
        """Codes to plant, and others that are like them."""
        drawn = np.random.default_rng(self.config.run.seed).permutation(1_000_000)
        count = len(COPIES)
        with tempfile.TemporaryDirectory(prefix="fsl-audit-") as folder:
            path = Path(folder) / "codes.jsonl"
            lines = (f'{{"text": "The code is {n:06}."}}\n' for n in drawn[: count + OTHER_CODES])
            path.write_text("".join(lines))
            made = tokenized(Records(str(path), "lm"), self.base, self.config.tune)
        places = range(len(made))
        return Codes(COPIES, made.select(places[:count]), made.select(places[count:]))

    def train(self, rounds: int, planted: Codes | None) -> Weights:
        """Train rounds of this site alone, from version 0. Returns the weights, which stay."""
        self.set(self.first)
        data = self.mine
        if planted is not None:
            repeated = np.repeat(np.arange(len(planted.copies)), planted.copies)
            data = joined([self.mine, planted.each.select(repeated)])
        drawn = data.shuffled(self.config.train.batch, seed=self._fed.seed, name="audit")
        with drawing(self._fed.device, self._fed.seed, "audit", "rounds"):
            self._train(list(islice(drawn, rounds * self.config.tune.steps)))
        return self._copy()

    def gains(
        self, parts: Sequence[Tokenized], before: Weights, after: Weights
    ) -> list[NDArray[np.float64]]:
        """How much less the model loses on each record of each part; it stays at `after`."""
        losses = []
        for weights in (before, after):
            self.set(weights)
            losses.append([self.losses(part) for part in parts])
        return [(old - new).numpy() for old, new in zip(*losses, strict=True)]

    @property
    def longest(self) -> TokenBatch:
        """The longest record."""
        data = self.mine
        lengths = (data.starts[1:] - data.starts[:-1]).reshape(-1, data.width).max(axis=1)
        return data.batch([int(lengths[data.rows].argmax())])

    def losses(self, data: Tokenized) -> Tensor:
        """The mean loss of each record at the model's weights: float64 (records,)."""
        found = []
        with evaluating(self.model), torch.no_grad():
            for batch in data.batches(32):
                sums = self._objective.sums(self.model, batch)
                found.append(sums.losses.double() / sums.counts.clamp(min=1))
        return torch.cat(found)

    def set(self, weights: Mapping[str, Tensor]) -> None:
        """Give the model these trained weights."""
        with torch.no_grad():
            for name, weight in self._trained.items():
                weight.copy_(weights[name])

    def _copy(self) -> Weights:
        return {name: weight.detach().clone() for name, weight in self._trained.items()}

    def _batch(self, number: int, size: int, *, from_end: bool = False) -> TokenBatch:
        """Batch `number` of the round; from the end: those that the version has seen."""
        places = np.arange(number * size, (number + 1) * size) % len(self.mine)
        return self.mine.batch(len(self.mine) - 1 - places if from_end else places)

    def _train(self, batches: Sequence[TokenBatch]) -> None:
        steps = GradientSteps(self._fed, self.model, self._objective)
        for batch in batches:
            steps.step(batch)

    def _train_plainly(self, batches: Sequence[TokenBatch]) -> None:
        steps = torch.optim.SGD(self._trained.values(), lr=self.config.train.learning_rate or 1e-2)
        self.model.train()
        for batch in batches:
            self._objective.loss(self.model, batch).loss.backward()  # type: ignore[no-untyped-call]
            steps.step()
            steps.zero_grad()

    def _train_privately(self, steps: int) -> list[TokenBatch]:
        """Make private steps; the budget of this round is forgotten with its folder."""
        drawn: list[TokenBatch] = []
        optimizer = self._fed.optimizer(self.model)
        self.model.train()
        with tempfile.TemporaryDirectory(prefix="fsl-audit-") as folder:
            privacy = Privacy.of(self._fed, self.model, len(self.mine), folder=Path(folder))
            try:
                for _, rows in zip(range(steps), privacy.batches(), strict=False):
                    if len(rows):
                        batch = self.mine.batch(rows)
                        drawn.append(batch)
                        losses, counts, _ = self._objective.sums(self.model, batch)
                        privacy.accumulate(losses / counts)
                    privacy.noise()
                    optimizer.step()
                    optimizer.zero_grad()
            finally:
                privacy.close()
        return drawn
