"""What a request to end means to a parameter server: Ctrl-C ends the run, SIGTERM this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from fsl_async.errors import ExitCode, disk_words
from fsl_async.nodes.ps.shell import ParameterServerShell
from fsl_async.observe.table import Reporter
from fsl_async.process.stopper import Stopper
from fsl_async.roles.machine import DrainAsked, Finish, Note
from fsl_async.roles.sync.events import DamageRepaired, StoreFailed
from fsl_async.store.errors import StoreError


def ending(
    stop: Stopper,
    shell: ParameterServerShell,
    journal: Reporter,
    run_dir: Path,
    *,
    unsaved: Callable[[], str],
    finish: Callable[[Finish], None],
) -> Callable[[bool], None]:
    """Return the function for a request to end: Ctrl-C ends the run, SIGTERM this process.

    See docs/adr/0088. It may be called in any thread. unsaved: `Store.unsaved`.
    """
    loop = asyncio.get_running_loop()

    def end(hard: bool) -> None:
        try:
            losing = "" if hard or shell.machine.ended else unsaved()
        except StoreError as error:
            shell.node.feed(StoreFailed(str(error)))
            return
        except OSError as error:
            losing = f"it is unknown which deltas would be lost: {disk_words(error)}"
        if not (hard or stop.comes_back):
            if stop.exit_code == ExitCode.INTERRUPTED:
                text = "ends the run for all clients; SIGTERM would let it go on later"
                journal.say(Note(f"{stop.reason} {text}"))
            shell.node.feed(DrainAsked(stop.reason))
            return
        if not (hard or shell.machine.ended):
            if losing:
                shell.node.feed(DamageRepaired(f"{stop.reason}: {losing}"))
            text = (
                f"{stop.reason}: leaving; the run goes on when the parameter server is started"
                f" again in {run_dir}"
            )
            journal.say(Note(text))
        finish(Finish(stop.reason, 0))

    def asked(hard: bool) -> None:
        loop.call_soon_threadsafe(end, hard)

    return asked
