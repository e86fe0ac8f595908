"""Relaunches clients that died, and records the members of the run across restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import fsl_transport as tp
from fsl_async.cluster.relauncher import FILE as MEMBERS
from fsl_async.cluster.relauncher import MembersFile, MembersKeeper, Relauncher
from fsl_async.cluster.restarts import Launching
from fsl_async.observe.table import Reporter
from fsl_async.roles.machine import Note
from fsl_async.roles.sync.ps import ParameterServerMachine

LAUNCHED = "launched.log"


def known_members(run_dir: Path, log: Callable[[str], None]) -> frozenset[str]:
    """The members of the run when the last parameter server ended; none if they cannot be read.

    Raises RunDirError when the file was altered.
    """
    file = MembersFile(run_dir / MEMBERS)
    try:
        return file.read()
    except OSError as error:
        log(
            f"{file.path} cannot be read ({error.strerror}):"
            " clients that died meanwhile are not relaunched"
        )
        return frozenset()


def relauncher_of(
    launching: Launching,
    machine: ParameterServerMachine,
    journal: Reporter,
    run_dir: Path,
    address: str,
) -> Relauncher:
    """A relauncher that reports to the journal and to people."""
    loop = asyncio.get_running_loop()

    def tell(what: str, client: str, text: str) -> None:
        journal.note("relaunch", loop.time(), what=what, client=client, text=text)
        journal.say(Note(text, "warning" if what in {"failed", "gave up"} else "info"))

    def wanted() -> bool:
        return not (machine.ended or machine.end.asked)

    def trouble(error: OSError) -> None:
        text = (
            f"{file.path} could not be written ({error.strerror}): after a restart the parameter"
            " server will not relaunch clients that died meanwhile"
        )
        journal.say(Note(text, "warning"))

    file = MembersFile(run_dir / MEMBERS)
    return Relauncher(
        loop,
        launching,
        address,
        tell,
        wanted=wanted,
        log_path=run_dir / LAUNCHED,
        keeper=MembersKeeper(file, trouble),
    )


def watched(
    handle: Callable[[tp.TransportEvent], None], relauncher: Relauncher
) -> Callable[[tp.TransportEvent], None]:
    """Return `handle` with reports of sessions to `relauncher`."""

    def on_transport(event: tp.TransportEvent) -> None:
        handle(event)
        if isinstance(event, tp.PeerUp):
            relauncher.seen(event.peer)
        elif isinstance(event, tp.PeerDown):
            relauncher.left(event.peer, event.reason, event.text)

    return on_transport
