"""Checks that a run can have groups, and makes the rules of their machines. Pure."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from attrs import asdict

from fsl_async.config.address import parse_listen
from fsl_async.errors import ConfigError
from fsl_async.roles.ring.rules import LEAST_PIECE_VALUES, PIECE_VALUES, RingRules

if TYPE_CHECKING:
    from fsl_async.config.settings import Config


PIECE_S = 0.5


def ring_host(config: Config) -> str:
    """The IP address at which the reduction listens. Raises ConfigError."""
    if config.ring.bind:
        return config.ring.bind
    host = parse_listen(config.listen.address).host
    host = "127.0.0.1" if host == "localhost" else host
    try:
        is_one = not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_one = False
    if not is_one:
        raise ConfigError(
            f"ring.bind: listen.address has no IP address of its own ({host}); set ring.bind to the"
            " address of this machine in the network of the other parameter servers",
            "ring.bind",
        )
    return host


def check_ring(config: Config) -> None:
    """Raise ConfigError, in one line, if this run cannot have groups as it is configured."""
    ring, name = config.ring, config.run.name
    if not ring.is_on:
        return
    servers = ring.servers
    if name not in servers:
        raise ConfigError(
            f"run.name: {name} is not in ring.roster ({', '.join(servers)}); say which one this is"
            " with --name",
            "run.name",
        )
    if ring.hold_s <= ring.grace_s:
        raise ConfigError(
            f"ring.hold_s: must be above ring.grace_s, {ring.grace_s:g} s, or every global round"
            " comes too late",
            "ring.hold_s",
        )
    host = ring_host(config)
    address = ipaddress.ip_address(host)
    if address.is_global and not ring.insecure:
        raise ConfigError(
            f"ring.bind: {host} is a public address, and a reduction is neither encrypted nor"
            " authenticated: bind an address of a VPN or VPC, or accept it with ring.insecure",
            "ring.bind",
        )


def ring_rules(config: Config) -> RingRules:
    """The rules of the machines of a parameter server in a roster."""
    ring = config.ring
    return RingRules(
        config.run.name,
        tuple(ring.servers),
        0 if ring.every_s else ring.every,
        ring.every_s,
        ring.hold_s,
        ring.grace_s,
        piece_values=_piece_values(ring.bytes_per_s),
        codec=asdict(config.codec.spec_down),
    )


def _piece_values(bytes_per_s: float) -> int:
    """Values that are reduced in one call: with a limit of the rate, in about half a second."""
    wanted = int(bytes_per_s / 4 * PIECE_S) if bytes_per_s else PIECE_VALUES
    return min(max(wanted, LEAST_PIECE_VALUES), PIECE_VALUES)
