"""Checks the addresses of a run's servers: its split server's, and those of groups. Pure."""

from __future__ import annotations

import ipaddress

import attrs

from fsl_async.config.address import parse_announced, parse_listen
from fsl_async.config.settings import Config
from fsl_async.errors import ConfigError


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


def groups_host(config: Config) -> str:
    """The IP address at which the reduction listens. Raises ConfigError."""
    if config.groups.bind:
        return config.groups.bind
    host = parse_listen(config.listen.address).host
    host = "127.0.0.1" if host == "localhost" else host
    try:
        is_one = not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_one = False
    if not is_one:
        raise ConfigError(
            f"groups.bind: listen.address has no IP address of its own ({host}); set groups.bind to"
            " the address of this machine in the network of the other parameter servers",
            "groups.bind",
        )
    return host


def check_groups(config: Config) -> None:
    """Raise ConfigError, in one line, if this run cannot have groups as it is configured."""
    groups, name = config.groups, config.run.name
    if not groups.is_on:
        return
    servers = groups.servers
    if name not in servers:
        raise ConfigError(
            f"run.name: {name} is not in groups.roster ({', '.join(servers)}); say which one this"
            " is with --name",
            "run.name",
        )
    if groups.hold_s <= groups.grace_s:
        raise ConfigError(
            f"groups.hold_s: must be above groups.grace_s, {groups.grace_s:g} s, or every global"
            " round comes too late",
            "groups.hold_s",
        )
    host = groups_host(config)
    address = ipaddress.ip_address(host)
    if address.is_global and not groups.insecure:
        raise ConfigError(
            f"groups.bind: {host} is a public address, and a reduction is neither encrypted nor"
            " authenticated: bind an address of a VPN or VPC, or accept it with groups.insecure",
            "groups.bind",
        )
