"""Checks what fits into this process's limit of open files, raised as far as possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from fsl_async.config.settings import Config
from fsl_async.config.transport_settings import MAX_CONNECTIONS
from fsl_async.errors import ConfigError, UsageError
from fsl_async.nodes.capacity import Capacity, capacity_of
from fsl_transport.zmq.admission import descriptors, in_use

P = ParamSpec("P")

CLIENT_FILES = 48
"""22 for a client's loop and link, 12 for a link to a split server, the rest for its task. libzmq
aborts the process where it gets none."""


def check_client_files() -> None:
    """Raise UsageError, with the limit needed, if a client does not fit."""
    files, needed = descriptors(), in_use() + CLIENT_FILES
    if files < needed:
        raise UsageError(
            f"{files} open files are allowed, too few for a client: raise the limit to {needed}"
            f" (ulimit -n {needed}) or more"
        )


def capacity_here(config: Config, *, trains: bool = False, listeners: int = 1) -> Capacity:
    """The capacity of one of `listeners` in this process. trains: it will load PyTorch."""
    return capacity_of(
        config, descriptors(), in_use(), MAX_CONNECTIONS, trains=trains, listeners=listeners
    )


def check_open_files(config: Config, *, trains: bool = False, listeners: int = 1) -> Capacity:
    """The same. Raises ConfigError, with the limit needed, if the planned clients do not fit."""
    found = capacity_here(config, trains=trains, listeners=listeners)
    if not found.is_enough:
        raise ConfigError(found.refusal, "sync.clients")
    return found


def and_capacity(
    announce: Callable[P, None],
    capacity: Capacity,
    log: Callable[[str], None],
    record: Callable[..., None] | None,
) -> Callable[P, None]:
    """Return `announce`, followed by a record of how many clients fit.

    If planned clients get fewer connections than they may open, people are told, unless programs
    read `record`.
    """

    def announced(*arguments: P.args, **named: P.kwargs) -> None:
        announce(*arguments, **named)
        if record is not None:
            record("capacity", **capacity.facts)
        elif not capacity.is_ample:
            log(capacity.text)

    return announced
