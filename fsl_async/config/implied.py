"""Adds the settings that the kind of a run implies. Pure."""

from __future__ import annotations

from typing import Any

import attrs

from fsl_async.config.rules import LANGUAGE_FAMILIES
from fsl_async.config.settings import Config
from fsl_async.config.settings_tuning import PRIVATE_RULES
from fsl_async.config.split_rules import split_method
from fsl_async.errors import ConfigError

MOST_MOMENTUM = 0.5
"""The largest outer momentum in a run whose versions are made of few deltas each."""


def with_implied(config: Config) -> Config:
    """Add the settings that a method implies for the parameter server: trigger and plain average.

    Raises ConfigError where sync.trigger is set to another value, for a model of split learning
    without a method, for split learning and fine-tuning in one run, and for a private run whose
    budget cannot be kept.
    """
    _check_private(config)
    _check_asynchronous(config)
    if config.tune.is_on:
        return _tuning(config)
    if not config.split.is_on:
        if config.model.family != "gpt" and not config.train.task:
            raise ConfigError(
                f"model.family = {config.model.family} needs a split.method: the built-in task of"
                " pretraining trains gpt",
                "model.family",
            )
        return _without_growing(_triggered(config, "clock"))
    _check_split(config)
    wanted = split_method(config).trigger
    if config.sync.trigger not in {"auto", wanted}:
        raise ConfigError(
            f"sync.trigger is {config.sync.trigger}, and split.method = {config.split.method}"
            f" in mode {config.split.mode} needs {wanted}: leave it out",
            "sync.trigger",
        )
    codec = attrs.evolve(config.codec, up=config.split.models, down=config.split.models)
    made: Config = attrs.evolve(
        _triggered(config, wanted),
        outer=attrs.evolve(config.outer, optimizer="average"),
        codec=codec,
    )
    return made


def _triggered(config: Config, usual: str) -> Config:
    """Let the trigger "auto" stand for `usual`."""
    if config.sync.trigger != "auto":
        return config
    trigger: Any = usual
    made: Config = attrs.evolve(config, sync=attrs.evolve(config.sync, trigger=trigger))
    return made


def _check_split(config: Config) -> None:
    """Raise ConfigError for settings of split learning that contradict one another."""
    split, data = config.split, config.data
    if split.schedule != "constant" and not config.run.rounds:
        raise ConfigError(
            f"split.schedule = {split.schedule} goes by the rounds of the run: set run.rounds",
            "run.rounds",
        )
    if (data.flip or data.crop) and config.model.family in LANGUAGE_FAMILIES:
        raise ConfigError(
            f"data.flip and data.crop are for images, and model.family = {config.model.family}"
            " trains on text",
            "data.flip" if data.flip else "data.crop",
        )


def _check_private(config: Config) -> None:
    """Raise ConfigError where the run asks for private training that there is not."""
    tune = config.tune
    if not tune.is_private:
        return
    if tune.method != "lora":
        raise ConfigError(
            f"tune.dp_epsilon is set, and tune.method = {tune.method} has no private training:"
            " choose lora",
            "tune.dp_epsilon",
        )
    if tune.rule not in PRIVATE_RULES:
        raise ConfigError(
            f"tune.dp_epsilon needs tune.rule = {' or '.join(PRIVATE_RULES)}, by which sites train"
            f" one factor of an adapter, got {tune.rule}: noise on both factors is multiplied",
            "tune.rule",
        )
    if not config.run.rounds:
        raise ConfigError(
            "tune.dp_epsilon is a budget for all rounds of the run: set run.rounds", "run.rounds"
        )


def _tuning(config: Config) -> Config:
    """Adapters: the mean of sites, by rounds unless the trigger is set.

    Some rules need rounds, without stale deltas.

    "growing" momentum is for pretraining: here it stands for none. Momentum of adapters is asked
    for by outer.optimizer = nesterov.
    """
    config = _triggered(config, "rounds")
    tune, sync, outer = config.tune, config.sync, config.outer
    if config.split.is_on:
        raise ConfigError(
            "tune.method and split.method are both set: a run tunes a base model or splits one",
            "tune.method",
        )
    if outer.optimizer == "growing":
        outer = attrs.evolve(outer, optimizer="average")
    if tune.by_rounds:
        what = f"tune.rule = {tune.rule}" if tune.method == "lora" else "tune.method = zeroth"
        if tune.is_private:
            what = "tune.dp_epsilon"
        if sync.trigger != "rounds":
            raise ConfigError(
                f"sync.trigger is {sync.trigger}, and {what} needs rounds: leave it out",
                "sync.trigger",
            )
        if outer.optimizer != "average":
            raise ConfigError(
                f"outer.optimizer: {what} changes what momentum would refer to; choose average",
                "outer.optimizer",
            )
        sync = attrs.evolve(sync, max_staleness=0)
    # Every site has data of its own.
    data = attrs.evolve(config.data, sharding="local")
    made: Config = attrs.evolve(config, sync=sync, outer=outer, data=data)
    return made


def _check_asynchronous(config: Config) -> None:
    """Raise ConfigError for settings of `sync.trigger = buffer` that do not go together."""
    sync = config.sync
    if config.outer.aggregation == "latest":
        _check_latest(config)
    if sync.trigger != "buffer":
        _check_unused(config)
        return
    _check_pace(config)
    _check_momentum(config)


def _check_pace(config: Config) -> None:
    """Raise ConfigError where clients cannot send by themselves so."""
    sync = config.sync
    if sync.dylu and sync.pace == "own":
        raise ConfigError(
            "sync.dylu is not for sync.pace = own, where each task decides when it sends: leave out"
            " one of them",
            "sync.dylu",
        )
    if sync.dylu and not sync.local_steps:
        raise ConfigError(
            "sync.dylu divides sync.local_steps by speed: set sync.local_steps", "sync.dylu"
        )
    if sync.pace == "own":
        if sync.local_steps:
            raise ConfigError(
                "sync.local_steps: with sync.pace = own each task calls fed.send when it likes;"
                " leave out one of them",
                "sync.local_steps",
            )
        if not config.train.task:
            raise ConfigError(
                "sync.pace = own needs a task that calls fed.send, which the built-in one does not:"
                " set train.task = own, or sync.pace = run",
                "sync.pace",
            )
    if sync.least_s > sync.every_s:
        raise ConfigError(
            f"sync.least_s must not be above sync.every_s, {sync.every_s:g} s, after which a"
            " version is made of what there is",
            "sync.least_s",
        )


def _check_momentum(config: Config) -> None:
    """Raise ConfigError where versions of few deltas would move a momentum too often."""
    sync, outer = config.sync, config.outer
    if outer.optimizer == "nesterov" and outer.momentum > MOST_MOMENTUM and _is_partial(config):
        raise ConfigError(
            f"outer.optimizer = nesterov moves a momentum of {outer.momentum:g} with every"
            f" {sync.buffer_size} deltas of {sync.clients} clients, which diverges; choose"
            f" average, or outer.momentum <= {MOST_MOMENTUM:g}",
            "outer.optimizer",
        )


def _check_latest(config: Config) -> None:
    """Raise ConfigError where deltas cannot be used again."""
    sync, outer = config.sync, config.outer
    wrong = {
        "sync.trigger": sync.trigger != "buffer" and "choose buffer",
        "outer.optimizer": outer.optimizer == "nesterov"
        and outer.momentum
        and "choose average: momentum would add up each use",
        "sync.weighting": sync.weighting not in {"auto", "anarchic"}
        and "choose auto: a client's newest delta counts by its mean step",
        "tune.method": config.tune.is_on and "it is for pretraining: choose mean",
    }
    for key, choice in wrong.items():
        if choice:
            raise ConfigError(
                f"{key}: outer.aggregation = latest uses the deltas of earlier versions again;"
                f" {choice}",
                key,
            )


def _check_unused(config: Config) -> None:
    sync = config.sync
    unused = {
        "sync.buffer": sync.buffer,
        "sync.least_s": sync.least_s,
        "sync.local_steps": sync.local_steps,
        "sync.dylu": sync.dylu,
        "sync.pace": sync.pace != "run",
    }
    for key, is_set in unused.items():
        if is_set:
            raise ConfigError(
                f"{key} is for sync.trigger = buffer, and sync.trigger is {sync.trigger}: leave it"
                " out, or choose buffer",
                key,
            )


def _is_partial(config: Config) -> bool:
    """Whether a version may be of fewer deltas than there are clients."""
    return config.sync.trigger == "buffer" and config.sync.buffer_size < config.sync.clients


def _without_growing(config: Config) -> Config:
    """Let "growing" momentum stand for none where a version is of a part of the clients.

    It moves with every version, as that of nesterov.
    """
    is_partial = _is_partial(config) or config.outer.aggregation == "latest"
    if config.outer.optimizer != "growing" or not is_partial:
        return config
    made: Config = attrs.evolve(config, outer=attrs.evolve(config.outer, optimizer="average"))
    return made
