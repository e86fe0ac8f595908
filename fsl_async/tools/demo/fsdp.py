"""`fsl-node demo fsdp`: clients of several ranks each, and one rank that is killed.

The client itself stays: its node process keeps the run's weights, torchrun starts the ranks again,
and they go on from the node's memory. Linux only, as FSDP clients are: it looks at /proc.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from fsl_async.tools.demo.play import Demo

if TYPE_CHECKING:
    from fsl_async.cluster.supervisor import Supervisor

_AGENT = "fsl_async.nodes.client.gang_agent"
_MODULE = "fsl_async.nodes.client.gang_rank"
_GONE, _BACK = " is gone", " ranks are here"
"""In lines of a client's node, when a rank is lost and when all of them are here."""


class FsdpDemo(Demo):
    """Kills a rank instead of a client, and sees in the lines of its node when it is back."""

    def _kill(self, supervisor: Supervisor) -> None:
        name = self.settings.victim
        pid = supervisor.pid(name)
        ranks = [] if pid is None else ranks_of(pid)
        if not ranks:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[-1], signal.SIGKILL)
            self.played.killed_s = self._elapsed()
            self._report("killed", f"SIGKILL to a rank of {name} (process {ranks[-1]})", name)

    def _line(self, name: str, line: str) -> None:
        super()._line(name, line)
        played = self.played
        if name != self.settings.victim or played.killed_s is None:
            return
        if _GONE in line and played.detected_s is None:
            played.detected_s = self._elapsed()
        elif _BACK in line and played.caught_up_s is None:
            played.relaunched_s = played.caught_up_s = self._elapsed()
            self._report("caught up", f"the ranks of {name} train again", name)


def ranks_of(node: int) -> list[int]:
    """The processes of the ranks below a node, in the order of their start."""
    below, found = [node], []
    while below:
        pid = below.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                below += [int(child) for child in (task / "children").read_text().split()]
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if _MODULE in words and _AGENT not in words:
                found.append(pid)
    return sorted(found)
