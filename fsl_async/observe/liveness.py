"""Whether the process that writes a journal is alive, as far as can be known from here."""

from __future__ import annotations

import os
import socket
import time

from fsl_async.observe.run import NodeState

SILENT_S = 60.0
"""A process that has written nothing for so long may be gone."""


def alive_words(node: NodeState, now: float, goes_on_from: str) -> str:
    """Whether the process is alive, as far as can be known from here."""
    age = max(0.0, now - node.last_t)
    if node.ended_at is not None:
        ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(node.ended_at))
        return f"ended at {ended}: {node.ending}"
    here = node.host == socket.gethostname() and node.pid > 0
    if here and not _exists(node.pid):
        return (
            f"gone without a last word (process {node.pid} was killed?); start it again, it goes"
            f" on from {goes_on_from}"
        )
    which = f"process {node.pid} on {'this machine' if here else node.host}" if node.pid else "it"
    if here or age < SILENT_S:
        return f"running, {which}, last line of the journal {age:.0f} s ago"
    return f"silent for {age:.0f} s ({which}): look there whether it still runs"


def is_gone(node: NodeState, now: float) -> bool:
    """Whether the process has ended, or was killed here and not started again for SILENT_S."""
    if node.ended_at is not None:
        return True
    here = node.host == socket.gethostname() and node.pid > 0
    return here and now - node.last_t > SILENT_S and not _exists(node.pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
