"""The processes of a run on this machine, found by what they were told: their command lines in /proc. Linux.

A process belongs to the run when its command line is that of a node (Python that runs `fsl-node`, or `-m fsl_async.cli`; not `ssh`, `timeout` or an editor that
has a node's words behind its own) and
- it is a server whose --run-dir is the run's directory, or one without --run-dir (that is the configuration's, or the default) that has the run's journal open, or
- it is a client whose --run-dir lies in the run's `clients` folder, or which dials the address that the run's server listens at.

Process ids are used again. So a process is held by a descriptor (pidfd_open(2)), its command line is read again afterwards, and signals go through the descriptor: they reach
the process that was looked at, or none.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import frozen

from fsl_async.config import address as addresses
from fsl_async.errors import AddressError, UsageError
from fsl_async.observe.journal import JournalReader
from fsl_async.observe.segments import SO_FAR

SERVER = "server"
JOURNAL = "journal.jsonl"
_PROC = Path("/proc")
_OF_THE_INTERPRETER = frozenset({"-X", "-W"})
"""Options of Python's with a word behind them; with `-c` it runs no node."""

VALUED = frozenset({
    "--role", "--config", "--set", "--name", "--data", "--task", "--model", "--auxiliary", "--run-dir", "--from-version", "--threads",
    "--launchers", "--grace", "--listen", "--split", "--keys", "--memory", "--allow",
})  # fmt: skip
"""Options of a node with a word behind them: what is left is the address."""


@frozen
class Node:
    """A node's process. `name`: the client's, or "server"."""

    pid: int
    name: str
    role: str


@frozen
class Run:
    """A run by its directory: where its server listens, "" while that is not known."""

    run_dir: Path
    address: str = ""

    @classmethod
    def at(cls, run_dir: Path) -> Run:
        """Read where its server listens. Raises UsageError when there is no run."""
        journal = run_dir / JOURNAL
        if not journal.exists():
            raise UsageError(f"{run_dir} holds no run: there is no {JOURNAL}")
        address = ""
        for line in JournalReader(journal, having=(b'"node_started"', b'"so_far"')).read():
            if line.get("type") == SO_FAR:
                address = str(line.get("state", {}).get("address", ""))
            elif line.get("type") == "node_started" and line.get("role") == "ps":
                address = str(line.get("address", ""))
        return cls(run_dir.resolve(), address)

    def node(
        self, words: Sequence[str], cwd: Path, writes_journal: Callable[[], bool] = lambda: False
    ) -> tuple[str, str] | None:
        """(name, role) of the node with this command line, started in `cwd`; None for any other process.

        writes_journal: whether it has the run's journal open; asked of a server that was not told where the run is kept.
        """
        told = _arguments(words)
        if told is None:
            return None
        role, place = told.get("--role", ""), told.get("--run-dir")
        where = (cwd / place).resolve() if place else None
        if role == "ps":
            is_ours = writes_journal() if where is None else where == self.run_dir
            return (SERVER, role) if is_ours else None
        if role != "client":
            return None
        name = told.get("--name", where.name if where else "client")
        if where is not None and where.parent == self.run_dir / "clients":
            return name, role
        return (name, role) if self._dials(told.get("address", "")) else None

    def _dials(self, given: str) -> bool:
        if not self.address or not given:
            return False
        try:
            there, server = addresses.parse(given), addresses.parse_told(self.address)
        except AddressError:
            return False
        if there.port != server.port:
            return False
        if there.is_loopback:
            return server.is_loopback or server.is_everywhere
        return there.host == addresses.reachable_host(server.host)


def _start(words: Sequence[str]) -> int | None:
    """Where a node's own options begin; None when these words run something else."""
    if not words or not Path(words[0]).name.startswith("python"):
        return None
    at = 1
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "-m":
            return at + 2 if words[at + 1 : at + 2] == ["fsl_async.cli"] else None
        if words[at] == "-c":
            return None
        at += 2 if words[at] in _OF_THE_INTERPRETER else 1
    return at + 1 if at < len(words) and Path(words[at]).name == "fsl-node" else None


def _arguments(words: Sequence[str]) -> dict[str, str] | None:
    """A node's options by name, and "address"; None when the words are not a node's."""
    start = _start(words)
    if start is None:
        return None
    found: dict[str, str] = {}
    rest = iter(words[start:])
    for word in rest:
        name, _, value = word.partition("=")
        if name in VALUED:
            found[name] = value or next(rest, "")
        elif not word.startswith("-"):
            found["address"] = word
    return found


def nodes(run: Run) -> list[Node]:
    """All processes of a run that this user may signal, by name."""
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            node = look(run, int(entry.name))
            if node is not None:
                found.append(node)
    return sorted(found, key=lambda node: (node.name, node.pid))


def look(run: Run, pid: int) -> Node | None:
    """What a process is in the run; None when it is nothing, gone, or somebody else's."""
    place = _PROC / str(pid)
    try:
        if place.stat().st_uid != os.getuid():
            return None
        words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        found = run.node(
            words, (place / "cwd").readlink(), lambda: _has_open(place, run.run_dir / JOURNAL)
        )
        state = (place / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
    return None if found is None or state == "Z" else Node(pid, *found)


def _has_open(process: Path, path: Path) -> bool:
    wanted = path.stat()
    for entry in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.path.samestat(entry.stat(), wanted):
                return True
    return False


class Held:
    """A process of a run that is held: whatever happens, signals reach it or nobody. Close it."""

    def __init__(self, run: Run, node: Node) -> None:
        """Raises ProcessLookupError when the process is not that node any more."""
        self.node = node
        self._descriptor = os.pidfd_open(node.pid)
        if look(run, node.pid) != node:
            self.close()
            raise ProcessLookupError(node.pid)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; False when the process is gone."""
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Let go of it; harmless when that is done."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
