"""Settings that fine-tuning implies."""

from __future__ import annotations

from typing import Any

import attrs

from fsl_async.config.settings import Config
from fsl_async.errors import ConfigError


def with_zeroth(config: Config) -> Config:
    """Add the settings that `tune.method = zeroth` implies for the parameter server.

    Rounds, since the directions of a round are common to its clients; plain averages; and only
    deltas of the newest version. Raises ConfigError where sync.trigger is another one.
    """
    if config.tune.method != "zeroth":
        return config
    if config.sync.trigger not in {"clock", "rounds"}:
        raise ConfigError(
            f"sync.trigger is {config.sync.trigger}, and tune.method = zeroth needs rounds: leave"
            " it out",
            "sync.trigger",
        )
    trigger: Any = "rounds"
    made: Config = attrs.evolve(
        config,
        sync=attrs.evolve(config.sync, trigger=trigger, max_staleness=0),
        outer=attrs.evolve(config.outer, optimizer="average"),
    )
    return made
