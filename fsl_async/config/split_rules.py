"""Derives from the configuration what split learning needs. Pure.

That is: rules for the machines, and the split server's address.
"""

from __future__ import annotations

import attrs

from fsl_async.config.address import parse_announced, parse_listen
from fsl_async.config.settings import Config
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
