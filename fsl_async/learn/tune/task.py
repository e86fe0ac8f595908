"""The built-in task of fine-tuning. It uses the public fed API only: copy it.

Each site has a base model, the same everywhere, and records of its own. Inside a round: AdamW on
the adapters and full modules, gradients clipped to norm 1; rates follow the run's progress.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.learn.client.fed import FedBase
from fsl_async.learn.client.held_out import HeldOut
from fsl_async.learn.client.pretrain import autocast
from fsl_async.learn.data.corpus import HELD_OUT_SHARE
from fsl_async.learn.tune.base import Base, load_base
from fsl_async.learn.tune.objectives import Tuning, objective_of
from fsl_async.learn.tune.privacy import Privacy
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.tokens import TokenBatch, Tokenized, tokenize

EVALUATED_SAMPLES = 256
"""Held-out samples on which versions are measured during training."""


def train(fed: FedBase) -> None:
    """Train until the run ends, then report the metrics of the last version on held-out records."""
    tune = TuneConfig(**fed.config.get("tune", {}))
    settings: dict[str, Any] = {"batch": 16, "threads": 0, "clip_norm": 1.0, "evaluate_share": 0.0}
    settings |= fed.config.get("train", {})
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    site = Site(fed, tune)
    fed.log(site.data.summary)
    model = site.model
    objective = objective_of(tune, site.without_adapters)
    optimizer = fed.optimizer(model)
    scheduler = fed.scheduler(optimizer)
    held_out = HeldOut(
        fed, lambda: site.measure(objective, EVALUATED_SAMPLES), settings["evaluate_share"]
    )
    if site.held is None:
        held_out.never()
    model.train()
    if tune.is_private:
        _train_privately(fed, site, objective, optimizer, held_out)
        _report(fed, site, objective)
        return
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    for batch in site.batches(int(settings["batch"])):
        with autocast(fed.device):
            loss, count, metrics = objective.loss(model, batch)
        if count:
            loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(trained, settings["clip_norm"] or math.inf)
        is_skipped = not bool(torch.isfinite(norm))
        if not is_skipped:
            optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        metrics |= {"skipped": is_skipped, **site.shares, **held_out.due()}
        if not fed.step(tokens=count, metrics=metrics):
            break
    _report(fed, site, objective)


def _report(fed: FedBase, site: Site, objective: Tuning) -> None:
    """Log the metrics of the newest version on held-out records."""
    if site.held is not None:
        with fed.at_version() as version:
            found = site.measure(objective)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        fed.log(f"{shown} on {len(site.held):,} held-out samples, version {version}")


def _train_privately(
    fed: FedBase,
    site: Site,
    objective: Tuning,
    optimizer: torch.optim.Optimizer,
    held_out: HeldOut,
) -> None:
    """Train within the site's privacy budget; see `fsl_async.learn.tune.privacy`.

    Each record's loss is a mean over what counts in it, and each step weighs as the batch that is
    expected, since how many records were drawn is not covered by the budget.
    """
    privacy = Privacy.of(fed, site.model, len(site.mine))
    scheduler = fed.scheduler(optimizer)
    for rows in privacy.batches():
        metrics = {}
        if len(rows):
            with autocast(fed.device):
                losses, counts, _ = objective.sums(site.model, site.mine.batch(rows))
            means = losses / counts
            privacy.accumulate(means)
            metrics["loss"] = means.mean().item()
        privacy.noise()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if not fed.step(tokens=privacy.batch, metrics={**metrics, **held_out.due()}):
            break


class Site:
    """The site's model, with the run's adapters and weights, and its records.

    Raises ConfigError and DataError, each in one line.
    """

    def __init__(self, fed: FedBase, tune: TuneConfig) -> None:
        self._fed = fed
        path = fed.config["data"]["path"]
        # Records of a wrong kind are an error before the model is loaded.
        records = Records(path, tune.objective, tune.label_names)
        base = load_base(
            tune.base,
            tune.objective,
            labels=tune.label_names,
            seed=fed.seed,
            device=fed.device,
            bf16=fed.device.type == "cuda",
        )
        self.data = _tokenized(records, base, tune)
        holdout = float(fed.config.get("data", {}).get("holdout", HELD_OUT_SHARE))
        self.mine, self.held = self.data.split(holdout)
        self.model = fed.lora(base.model, heads=base.drawn)
        self.shares: dict[str, float] = {}
        if tune.objective == "classify":
            counts = self.mine.label_counts(len(tune.label_names))
            self.shares = {
                f"share_{name}": count / len(self.mine)
                for name, count in zip(tune.label_names, counts, strict=True)
            }

    def without_adapters(self, _: nn.Module) -> AbstractContextManager[Any]:
        """The base alone, for dpo's reference."""
        assert self._fed.adapters is not None
        return self._fed.adapters.disabled()

    def batches(self, size: int) -> Iterator[TokenBatch]:
        """Batches of this site until the run ends."""
        fed = self._fed
        # A client that comes back does not begin with the same samples again.
        start = max(fed.version, 0) * int(fed.config.get("tune", {}).get("steps", 1))
        drawn = self.mine.shuffled(size, seed=fed.seed, name=fed.client_name, start=start)
        while fed.running:
            yield next(drawn)

    def measure(self, objective: Tuning, most: int | None = None) -> dict[str, float]:
        """Metrics of the model as it is, on held-out samples."""
        assert self.held is not None
        held = self.held
        if most is not None and len(held) > most:
            held = held.select([place * len(held) // most for place in range(most)])
        with autocast(self._fed.device):
            found = objective.evaluate(self.model, held)
        return {name: value for name, value in found.items() if "share" not in name}


def _tokenized(records: Records, base: Base, tune: TuneConfig) -> Tokenized:
    context = min(tune.context, base.context) if base.context else tune.context
    return tokenize(
        records,
        base.tokenizer,
        tune.objective,
        context=context,
        trained_on=tune.trained_on,
        labels=tune.label_names,
    )
