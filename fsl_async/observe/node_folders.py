"""Finds the journals of a run directory, and its ledger."""

import os
import socket
import time
from pathlib import Path

from fsl_async.errors import RunDirError
from fsl_async.observe.clients import NodeState
from fsl_async.observe.journal import JOURNAL
from fsl_async.observe.ledger_audit import LEDGER
from fsl_async.observe.run_state import PS, SPLIT_SERVER

MAX_NODES = 32


def run_dir_of(path: Path) -> Path:
    """The run directory that `path` is, or the one whose journal it is. Raises RunDirError."""
    if path.is_file():
        if path.name == JOURNAL:
            return path.parent
        raise RunDirError(
            f"{path} is a file: give the run directory that the server named, or the {JOURNAL}"
            " in it"
        )
    if not path.exists():
        raise RunDirError(
            f"{path}: no such directory; give the run directory that the server named"
        )
    return path


def with_ledger(run_dir: Path) -> Path:
    """The parameter server's directory: `run_dir`, or its folder in it. Raises RunDirError."""
    for folder in (run_dir, run_dir / PS):
        if (folder / LEDGER).is_file():
            return folder
    raise RunDirError(f"{run_dir} has no ledger: give a parameter server's run directory")


def find_nodes(run_dir: Path) -> list[Path]:
    """Folders with journals: `run_dir`, or those in it (groups, a split server, a relay).

    Raises RunDirError where there is none.
    """
    if (run_dir / JOURNAL).is_file():
        beside = run_dir / SPLIT_SERVER
        return [run_dir, beside] if (beside / JOURNAL).is_file() else [run_dir]
    found = sorted(one for one in run_dir.iterdir() if (one / JOURNAL).is_file())
    if not found:
        raise _objection(run_dir)
    return found[:MAX_NODES]


def servers_of(run_dir: Path) -> list[Path]:
    """Folders with the journals of one run: the parameter server's first, where there are two.

    Raises RunDirError where there is none, or those of several runs.
    """
    found = find_nodes(run_dir)
    servers = [one for one in found if one == run_dir or one.name in {PS, SPLIT_SERVER}]
    if not servers:
        raise _objection(run_dir)
    return servers


def _objection(run_dir: Path) -> RunDirError:
    places = (JOURNAL, f"{PS}/{JOURNAL}", f"{SPLIT_SERVER}/{JOURNAL}")
    inside = sorted(
        one.name for one in run_dir.iterdir() if any((one / place).is_file() for place in places)
    )
    if not inside:
        return RunDirError(f"{run_dir} has no {JOURNAL}: it is not the run directory of a server")
    return RunDirError(
        f"{run_dir} has no {JOURNAL}, but run directories in it: give one of"
        f" {', '.join(inside[:8])}"
    )


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
