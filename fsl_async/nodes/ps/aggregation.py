"""Reads the aggregation rule from a run's configuration, and checks that it can work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsl_async.errors import ConfigError
from fsl_async.roles.sync.weighting import weighting_named
from fsl_async.store.aggregation import rule_named

if TYPE_CHECKING:
    from fsl_async.config.settings import Config
    from fsl_async.roles.sync.weighting import Weighting
    from fsl_async.store.aggregation import Rule


def rule_of(config: Config) -> Rule:
    """The aggregation rule of a run."""
    return rule_named(config.outer.aggregation, config.outer.byzantine)


def weighting_of(config: Config) -> Weighting:
    """The weighting of deltas: robust rules weigh all clients equally.

    See `fsl_async.store.aggregation.base`. "auto": full weights are averaged over the data, as in
    FedAvg; changes grow with their steps already.
    """
    name: str = config.sync.weighting
    if rule_of(config).by_rows:
        name = "uniform"
    elif name == "auto":
        is_mean = config.split.sends_whole or config.tune.method == "zeroth"
        name = "tokens" if is_mean else "batch"
    return weighting_named(name, config.sync.staleness_exponent)


def check_aggregation(config: Config) -> None:
    """Raise ConfigError, in one line, if the aggregation rule cannot work in this run."""
    outer = config.outer
    rule = rule_of(config)
    if config.split.sends_whole and (rule.by_rows or config.guard.looks_at_norms):
        what = f"outer.aggregation = {rule.name}" if rule.by_rows else "guard.clip_* and outlier_*"
        raise ConfigError(
            f"{what}: these compare differences, and clients of this run send full weights;"
            " set split.models to another format",
            "outer.aggregation",
        )
    if config.split.sends_whole and config.sync.weighting == "batch":
        raise ConfigError(
            "sync.weighting: batch adds up changes, and clients of this run send full weights;"
            " choose auto or tokens",
            "sync.weighting",
        )
    if rule.by_rows and config.sync.trigger == "sequential":
        raise ConfigError(
            f"outer.aggregation: {rule.name} compares clients, and sync.trigger = sequential merges"
            " one at a time; choose mean",
            "outer.aggregation",
        )
    if config.sync.clients < rule.least:
        raise ConfigError(
            f"outer.aggregation: {rule.name} against {outer.byzantine} clients that may send"
            f" anything needs {rule.least} clients, sync.clients is {config.sync.clients};"
            " have more, or lower outer.byzantine",
            "outer.aggregation",
        )
