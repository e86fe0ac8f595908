"""What a parameter server does for clients that died: has them launched again, and remembers which belong to its run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import fsl_transport as tp
from fsl_async.cluster.launch_file import Launching
from fsl_async.cluster.members_file import FILE as MEMBERS
from fsl_async.cluster.members_file import MembersFile, MembersKeeper
from fsl_async.cluster.relauncher import Relauncher
from fsl_async.observe.reporter import Reporter
from fsl_async.roles.machine import Note
from fsl_async.roles.sync.ps import ParameterServerMachine

LAUNCHED = "launched.log"


def known_members(run_dir: Path, log: Callable[[str], None]) -> frozenset[str]:
    """The clients that belonged to the run when the last parameter server ended; none where that cannot be read.

    Raises RunDirError when the file was altered.
    """
    file = MembersFile(run_dir / MEMBERS)
    try:
        return file.read()
    except OSError as error:
        log(
            f"{file.path} cannot be read ({error.strerror}): clients that died meanwhile are not asked for"
        )
        return frozenset()


def relauncher_of(
    launching: Launching,
    machine: ParameterServerMachine,
    journal: Reporter,
    run_dir: Path,
    address: str,
) -> Relauncher:
    """A relauncher that writes what it does into the journal, and tells people."""
    loop = asyncio.get_running_loop()

    def tell(what: str, client: str, text: str) -> None:
        journal.note("relaunch", loop.time(), what=what, client=client)
        journal.say(Note(text, "warning" if what in {"failed", "gave up"} else "info"))

    def wanted() -> bool:
        return not (machine.ended or machine.end.asked)

    def trouble(error: OSError) -> None:
        text = f"{file.path} could not be written ({error.strerror}): a server that is started again does not know whom to ask for"
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
    """Show `relauncher` which sessions begin and end, on their way to the machine."""

    def on_transport(event: tp.TransportEvent) -> None:
        handle(event)
        if isinstance(event, tp.PeerUp):
            relauncher.seen(event.peer)
        elif isinstance(event, tp.PeerDown):
            relauncher.left(event.peer, event.reason, event.text)

    return on_transport
