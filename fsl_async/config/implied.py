"""Adds the settings that the kind of a run implies. Pure."""

from __future__ import annotations

from typing import Any

import attrs

from fsl_async.config import recipes
from fsl_async.config.settings import Config
from fsl_async.config.split_rules import split_method


def with_implied(config: Config) -> Config:
    """Add the settings that the kind of run implies: trigger, plain average, staleness, coding.

    Raises ConfigError for settings that do not go together (`fsl_async.config.recipes`).
    """
    made = _implied(config)
    recipes.check(made)
    return made


def _implied(config: Config) -> Config:
    usual, changes = "clock", dict[str, Any]()
    if config.tune.is_on:
        usual = "rounds"
        # Every site has data of its own.
        changes["data"] = attrs.evolve(config.data, sharding="local")
    elif config.split.is_on:
        usual, models = split_method(config).trigger, config.split.models
        changes["outer"] = attrs.evolve(config.outer, optimizer="average")
        changes["codec"] = attrs.evolve(config.codec, up=models, down=models)
    if config.sync.trigger == "auto":
        trigger: Any = usual
        changes["sync"] = attrs.evolve(config.sync, trigger=trigger)
    if config.tune.is_on and config.tune.by_rounds:
        sync = changes.get("sync", config.sync)
        changes["sync"] = attrs.evolve(sync, max_staleness=0)
    if config.outer.optimizer == "growing" and recipes.keeps_no_momentum(config):
        changes["outer"] = attrs.evolve(config.outer, optimizer="average")
    made: Config = attrs.evolve(config, **changes)
    return made
