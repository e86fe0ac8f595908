"""Reads the aggregation rule from a run's configuration, and checks that it can work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsl_async.config.rules import is_own
from fsl_async.errors import ConfigError
from fsl_async.nodes.ps.own_rules import own_rule
from fsl_async.roles.sync.ps_state import Merging
from fsl_async.roles.sync.weighting import weighting_named
from fsl_async.store.rules.adapters import adapter_rule_named
from fsl_async.store.rules.aggregation import RULES
from fsl_async.store.rules.air import Air
from fsl_async.store.rules.outer import OPTIMIZERS

if TYPE_CHECKING:
    from fsl_async.config.settings import Config
    from fsl_async.roles.sync.weighting import Weighting
    from fsl_async.store.rules.adapters import AdapterRule
    from fsl_async.store.rules.aggregation import Rule
    from fsl_async.store.rules.air import Channel
    from fsl_async.store.rules.outer import OuterOptimizer


def rule_of(config: Config) -> Rule:
    """The aggregation rule of a run. ConfigError: it is the operator's own and cannot be used."""
    name = config.outer.aggregation
    byzantine = config.outer.byzantine
    if not is_own(name):
        return RULES[name](byzantine)
    made: type[Rule] = own_rule("outer.aggregation", name, byzantine)
    return made(byzantine)


def adapter_rule_of(config: Config) -> AdapterRule | None:
    """How adapters are merged; None where the run has none. ConfigError as for `rule_of`."""
    tune = config.tune
    if tune.method != "lora":
        return None
    if not tune.merge:
        return adapter_rule_named(tune.rule)
    made: type[AdapterRule] = own_rule("tune.merge", tune.merge)
    return made()


def optimizer_of(config: Config) -> OuterOptimizer:
    """The outer optimizer of a run. ConfigError as for `rule_of`."""
    name, outer = config.outer.optimizer, config.outer
    numbers = outer.learning_rate, outer.momentum
    made: type[OuterOptimizer] = OPTIMIZERS.get(name) or own_rule("outer.optimizer", name, *numbers)
    return made(*numbers)


def channel_of(config: Config) -> Channel | None:
    """Return the channel that adds up the deltas, or None. Raises ConfigError as `rule_of` does."""
    name = config.outer.channel
    if name == "none":
        return None
    made: type[Channel] = Air if name == "air" else own_rule("outer.channel", name)
    return made(config.air)


def weighting_of(config: Config) -> Weighting:
    """The weighting of deltas: robust rules weigh all clients equally, "latest" their mean steps.

    See `fsl_async.store.rules.aggregation`. "auto": full weights and adapters are averaged over the
    data, as in FedAvg; other changes grow with their steps already.
    """
    name: str = config.sync.weighting
    if rule_of(config).reuses:
        name = "latest-tuned" if config.tune.is_on else "latest"
    elif rule_of(config).by_rows:
        name = "uniform"
    elif name == "auto":
        by_data = config.split.sends_whole or config.tune.is_on
        name = "tokens" if by_data else "batch"
    return weighting_named(name)


def merging_of(config: Config) -> Merging:
    """Return the facts about the run's rules for the machine. ConfigError as for `rule_of`."""
    rule, adapters = rule_of(config), adapter_rule_of(config)
    return Merging(
        least_clients=rule.least,
        reuses=rule.reuses,
        compares=rule.by_rows or config.tune.secure,  # masked deltas have no norm
        clips_values=adapters is not None and adapters.merges_products,
    )


def check_aggregation(config: Config) -> None:
    """Raise ConfigError, in one line, if the run has too few clients for its aggregation rule."""
    sync, rule = config.sync, rule_of(config)
    adapter_rule_of(config)
    if sync.trigger == "buffer" and sync.buffer_size < rule.least:
        raise ConfigError(
            f"sync.buffer: outer.aggregation = {rule.name} needs deltas of {rule.least} clients,"
            f" and {sync.buffer_size} make a version: set sync.buffer to {rule.least} or more",
            "sync.buffer",
        )
    if sync.clients < rule.least:
        raise ConfigError(
            f"outer.aggregation: {rule.name} against {rule.byzantine} clients that may send"
            f" anything needs {rule.least} clients, sync.clients is {sync.clients}; have more, or"
            " lower outer.byzantine",
            "outer.aggregation",
        )
