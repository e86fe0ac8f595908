"""Derives from the configuration what split learning needs. Pure.

That is: rules for the machines, the split server's address, and settings that a method implies.
"""

from __future__ import annotations

from typing import Any

import attrs

from fsl_async.config.address import parse_announced, parse_listen
from fsl_async.config.settings import Config
from fsl_async.config.tune_rules import with_zeroth
from fsl_async.errors import ConfigError
from fsl_async.roles.split.methods import Method, SplitRules, method_of


def split_rules(config: Config) -> SplitRules:
    """Return the rules of the machines of the split server and its clients."""
    split = config.split
    return SplitRules(
        method=split.method,
        lockstep=split.mode == "lockstep",
        labels_at_home=split.labels_at_home,
        upload_every=split.upload_every,
        align_every=split.align_every,
        in_flight=split.in_flight,
        checkpoint_every=split.checkpoint_every,
        max_stale_rounds=split.max_stale_rounds,
        reoffer_s=min(5.0, config.session.expire_after_s),
        drain_s=max(2 * config.session.heartbeat_every_s, 5.0),
        alone_s=split.alone_s,
    )


def split_method(config: Config) -> Method:
    """Return the run's method. Needs `config.split.is_on`."""
    return method_of(split_rules(config))


def with_split_server(config: Config, key: str = "") -> Config:
    """Add the address of a split server in another process, from `split.listen`.

    key: this parameter server's public key; empty where it does not encrypt. Raises ConfigError
    where the split server listens at any free port, and where clients would come here encrypted and
    go there unencrypted.
    """
    split = config.split
    if not split.has_server:
        return config
    if split.server:
        address = parse_announced(split.server)
        if key and not address.key and not address.is_loopback and not config.listen.insecure:
            raise ConfigError(
                f"split.server: {split.server} has no key, so clients would reach the split server"
                " unencrypted; give the address that it prints, fsl://...?key=...",
                "split.server",
            )
        return config
    if parse_listen(split.listen).port == 0:
        raise ConfigError(
            "split.server is empty: say where clients reach the split server, which prints its"
            " address when it starts",
            "split.server",
        )
    at = split.listen if not key else attrs.evolve(parse_listen(split.listen), key=key).fsl
    return attrs.evolve(config, split=attrs.evolve(split, server=at))


def with_implied(config: Config) -> Config:
    """Add the settings that a method implies for the parameter server: trigger and plain average.

    Raises ConfigError where sync.trigger is set to another value, and for a model of split learning
    without a method.
    """
    config = with_zeroth(config)
    if not config.split.is_on:
        if config.model.family != "gpt" and not config.train.task:
            raise ConfigError(
                f"model.family = {config.model.family} needs a split.method: the built-in task of"
                " pretraining trains gpt",
                "model.family",
            )
        return config
    wanted = split_method(config).trigger
    if config.sync.trigger not in {"clock", wanted}:
        raise ConfigError(
            f"sync.trigger is {config.sync.trigger}, and split.method = {config.split.method}"
            f" in mode {config.split.mode} needs {wanted}: leave it out",
            "sync.trigger",
        )
    trigger: Any = wanted
    codec = attrs.evolve(config.codec, up=config.split.models, down=config.split.models)
    made: Config = attrs.evolve(
        config,
        sync=attrs.evolve(config.sync, trigger=trigger),
        outer=attrs.evolve(config.outer, optimizer="average"),
        codec=codec,
    )
    return made
