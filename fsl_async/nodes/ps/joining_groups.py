"""Makes the shell of global rounds of a parameter server, and its link to the coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import fsl_transport as tp
from fsl_async.errors import AddressError, ConfigError, RunDirError
from fsl_async.keys.dialling import HandshakeReports, curve_for
from fsl_async.nodes.ps.groups import GroupsShell
from fsl_async.roles.machine import Note
from fsl_transport.zmq.link import ZmqDialer

if TYPE_CHECKING:
    from fsl_async.config.address import Address
    from fsl_async.config.settings import Config
    from fsl_async.keys.folder import KeysFolder
    from fsl_async.nodes.ps.shell import ParameterServerShell
    from fsl_async.observe.journal import JournalWriter
    from fsl_async.roles.groups.events import GroupsRecovered

ROLE = "group"
"""The role of a parameter server in its hello to the coordinator."""


def check_history(config: Config, version: int, state: GroupsRecovered) -> None:
    """Raise RunDirError for a run directory whose past does not fit its place in the roster."""
    name = config.run.name
    if config.leads:
        if state.round >= 0 and state.decided is None:
            raise RunDirError(
                f"groups.roster: {name} is the first name now, and another server decided the"
                f" global weights {state.round} that it holds: put that one first again"
            )
        if state.decided is not None and state.decided.round < state.round:
            raise RunDirError(
                f"the ledger of {name} lacks the decision of global weights {state.round} that it"
                " holds: restore the newest one"
            )
    elif version >= 0 and state.round < 0:
        raise RunDirError(
            f"this run directory has a run without groups, at version {version}, which global"
            f" weights of {config.groups.coordinator} would replace: give a new --run-dir, or put"
            f" {name} first in groups.roster"
        )


def check_keys(servers: Mapping[str, Address], *, has_keys: bool) -> None:
    """Raise ConfigError where some parameter servers would encrypt, and others not."""
    for name, place in servers.items():
        if has_keys and not place.key:
            raise ConfigError(
                f"groups.roster: {name} has no key, and this parameter server encrypts: add"
                " ?key=... to its address (there, `fsl-node keys pub` prints it)",
                "groups.roster",
            )
        if place.key and not has_keys:
            raise ConfigError(
                f"groups.roster: {name} has a key, and this parameter server runs without"
                " encryption: make keys for it with `fsl-node keys new`, or remove all keys",
                "groups.roster",
            )


def join_groups(
    shell: ParameterServerShell,
    config: Config,
    *,
    writer: JournalWriter,
    keys: KeysFolder | None,
) -> GroupsShell | None:
    """Make the shell take part in global rounds; None without a roster. Raises FslError."""
    if not config.groups.is_on:
        return None
    groups, name, loop = config.groups, config.run.name, asyncio.get_running_loop()
    check_history(config, shell.store.version, shell.store.groups.state)
    check_keys(groups.servers, has_keys=keys is not None)
    dialer: Callable[[Callable[[tp.TransportEvent], None]], tp.DialerEndpoint] | None = None
    if not config.leads:
        place = groups.servers[groups.coordinator]
        settings = config.transport()
        curve = None if keys is None or not place.key else curve_for(place, keys)
        reports = HandshakeReports(
            place,
            curve.pair.public if curve is not None else "",
            name,
            scheduler=loop,
            journal=writer,
            log=lambda line: shell.say(Note(line, "warning")),
            is_reserved=True,
        )
        try:
            link = ZmqDialer(place.tcp, name, settings, curve, reports)
        except tp.LocalError as error:
            raise AddressError(f"groups.roster: {error}") from None

        def dialer(take: Callable[[tp.TransportEvent], None]) -> tp.DialerEndpoint:
            return tp.DialerEndpoint(
                link, loop, settings, take, name, incarnation=time.time_ns(), role=ROLE
            )

    shell.groups = GroupsShell(config, shell, dialer)
    return shell.groups
