"""Checks the settings of runs whose clients send by themselves (`sync.trigger = buffer`). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from fsl_async.errors import ConfigError

if TYPE_CHECKING:
    from fsl_async.config.settings import Config

MOST_MOMENTUM = 0.5
"""Of an outer optimizer that moves it with every version, where a version is of few deltas."""


def check_asynchronous(config: Config) -> None:
    """Raise ConfigError, in one line, for settings that do not go together."""
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


def without_growing(config: Config) -> Config:
    """Let "growing" momentum stand for none where a version is of a part of the clients.

    It moves with every version, as that of nesterov.
    """
    is_partial = _is_partial(config) or config.outer.aggregation == "latest"
    if config.outer.optimizer != "growing" or not is_partial:
        return config
    made: Config = attrs.evolve(config, outer=attrs.evolve(config.outer, optimizer="average"))
    return made
