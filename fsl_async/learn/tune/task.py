"""The built-in task of fine-tuning. It uses the public fed API only: copy it.

Each site has a base model, the same everywhere, and records of its own. Inside a round: AdamW on
the adapters and full modules, gradients clipped to norm 1; rates follow the run's progress. A site
of zeroth order measures losses in directions that follow from the run's seed, and sends numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn

from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.client.pretrain import autocast
from fsl_async.learn.tune.objectives.base import Tuning
from fsl_async.learn.tune.privacy import Privacy
from fsl_async.learn.tune.site import RecordSite, Site, site_of
from fsl_async.learn.tune.tokens import TokenBatch
from fsl_async.learn.tune.zeroth import KeptOutputs, measure_round
from fsl_async.roles.phrasing import figure


class GradientSteps:
    """The run's optimizer and schedule on a model that `fed` has. One call a step."""

    def __init__(self, fed: Fed, model: nn.Module, objective: Tuning) -> None:
        self._fed, self._objective = fed, objective
        self._model = model.train(not objective.is_exact)
        self._optimizer = fed.optimizer(model)
        self._scheduler = fed.scheduler(self._optimizer)
        groups = self._optimizer.param_groups
        self._trained = [weight for group in groups for weight in group["params"]]
        self._clip_norm = fed.settings.train.clip_norm or math.inf

    def step(self, batch: TokenBatch) -> tuple[int, dict[str, float]]:
        """Make a step; returns what the batch counts, and metrics.

        A batch whose gradients are not finite changes nothing.
        """
        with autocast(self._fed.device):
            loss, count, metrics = self._objective.loss(self._model, batch)
        if count:
            loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._trained, self._clip_norm)
        is_skipped = not bool(torch.isfinite(norm))
        if not is_skipped:
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._scheduler.step()
        return count, {**metrics, "skipped": float(is_skipped)}


def train(fed: Fed) -> None:
    """Train until the run ends, then report the metrics of the last version on held-out records."""
    tune, threads = fed.settings.tune, fed.settings.train.threads
    if threads:
        torch.set_num_threads(threads)
    site = site_of(fed, tune)
    fed.log(site.summary)
    if fed.is_zeroth and not isinstance(fed, LocalFed):
        _train_by_losses(fed, site)
    elif tune.is_private:
        _train_privately(fed, site)
    else:
        _train_by_gradients(fed, site)
    if site.held_out_count:
        with fed.at_version() as version:
            found = site.measure()
        shown = ", ".join(f"{name} {figure(value, 4)}" for name, value in found.items())
        fed.log(f"{shown} on {site.held_out_count:,} held-out samples, version {version}")


def _train_by_gradients(fed: Fed, site: Site) -> None:
    steps = GradientSteps(fed, site.model, site.objective)
    for batch in site.batches():
        count, metrics = steps.step(batch)
        metrics |= {**site.shares, **site.held_out.due()}
        if not fed.step(tokens=count, metrics=metrics):
            break


def _train_by_losses(fed: Fed, site: Site) -> None:
    """Measure projected gradients, round by round; see `fsl_async.learn.tune.zeroth`."""
    losses, steps = _Losses(site), site.tune.zo_steps
    assert fed.adapters is not None
    weights = ModelWeights(site.model, fed.adapters.view)
    batches = site.batches()
    for number in fed.rounds():
        drawn = list(islice(batches, steps))
        if len(drawn) < steps:
            break
        with losses.keeping(weights):
            scalars = measure_round(fed, weights, losses, drawn, number=number)
        metrics = {"loss": losses.take_mean(), **site.shares, **site.held_out.due()}
        count = sum(batch.trained for batch in drawn)
        if not fed.end_round(samples=count, metrics=metrics, scalars=scalars):
            break


class _Losses:
    """The loss of a batch at the model's weights, and the mean of those computed."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._kept: KeptOutputs | None = None
        self._batch: object = None
        self._found: list[float] = []

    @contextmanager
    def keeping(self, weights: ModelWeights) -> Iterator[None]:
        """Within it what does not depend on these weights is computed once a batch."""
        # Adapters are switched off and on, so that equal inputs do not make equal outputs.
        if self._site.objective.uses_base:
            yield
            return
        changing = (piece for piece, _, _ in weights.pieces())
        with KeptOutputs(self._site.model, changing) as self._kept:
            yield
        self._kept = None

    def __call__(self, batch: Any) -> float:
        if self._kept is not None and batch is not self._batch:
            self._kept.forget()
            self._batch = batch
        self._found.append(self._site.objective.loss(self._site.model, batch).loss.item())
        return self._found[-1]

    def take_mean(self) -> float:
        """The mean since the last time."""
        found, self._found = self._found, []
        return sum(found) / len(found)


def _train_privately(fed: Fed, site: Site) -> None:
    """Train within the site's privacy budget; see `fsl_async.learn.tune.privacy`.

    Each record's loss is a mean over what counts in it, and each step weighs as the batch that is
    expected, since how many records were drawn is not covered by the budget.
    """
    optimizer = fed.optimizer(site.model)
    scheduler = fed.scheduler(optimizer)
    site.model.train()
    assert isinstance(site, RecordSite), "a reward takes no part in a private run"
    privacy = Privacy.of(fed, site.model, len(site.mine))
    for rows in privacy.batches():
        metrics = {}
        if len(rows):
            with autocast(fed.device):
                losses, counts, _ = site.objective.sums(site.model, site.mine.batch(rows))
            means = losses / counts
            privacy.accumulate(means)
            metrics["loss"] = means.mean().item()
        privacy.noise()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if not fed.step(tokens=privacy.batch, metrics={**metrics, **site.held_out.due()}):
            break
