"""Finds the processes of a run on this machine by their command lines in /proc. Linux only.

A process belongs to the run when its command line is that of a node: Python that runs `fsl-node` or
`-m fsl_async.cli`, not `ssh`, `timeout` or an editor with such arguments. Further it must be
- a parameter server whose --run-dir is the run's directory, or one without --run-dir (it comes from
  the configuration, or is the default) that has the run's journal open; or
- a client whose --run-dir is in the run's `clients` folder, or that dials the address at which the
  run's parameter server listens.

Process ids are reused. So a process is held by a descriptor (pidfd_open(2)), its command line is
read again afterwards, and signals go through the descriptor: they reach that process or none.

A `Link` cuts the link of a client, or makes it slow. A client is in a laboratory when its process
is in the network namespace of one of its sites, which is looked up in /proc. Elsewhere, a client
that was started behind a `Proxy` (`demo --links`) has a file RUN/links/NAME, which that proxy
follows.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from fsl_async.config import address as addresses
from fsl_async.errors import AddressError, UsageError, has_benchmarks
from fsl_async.files.files import replace_bytes
from fsl_async.observe.journal import JOURNAL, JournalReader
from fsl_async.observe.run_state import RunState

if TYPE_CHECKING:
    from netlab.laboratory import Laboratory


SERVER = "server"
_PROC = Path("/proc")
_PYTHON_VALUED = frozenset({"-X", "-W"})
"""Options of Python that take a value; with `-c` it runs no node."""

Parse = Callable[[Sequence[str]], Mapping[str, Any]]
"""From the words of a node's command line to its options by name, and "address"."""


@frozen
class Node:
    """A node's process. name: the client's, or "server" for the parameter server."""

    pid: int
    name: str
    role: str


@frozen
class Run:
    """A run. address: where its parameter server listens, "" while unknown."""

    run_dir: Path
    parse: Parse
    address: str = ""

    @classmethod
    def at(cls, run_dir: Path, parse: Parse) -> Run:
        """Read the address from the run's journal. Raises UsageError when there is no run."""
        journal = run_dir / JOURNAL
        if not journal.exists():
            raise UsageError(f"{run_dir} holds no run: there is no {JOURNAL}")
        state = RunState()
        for line in JournalReader(journal, having=(b'"node_started"', b'"so_far"')).read():
            state.apply(line)
        return cls(run_dir.resolve(), parse, state.node.address)

    def node(
        self, argv: Sequence[str], cwd: Path, writes_journal: Callable[[], bool] = lambda: False
    ) -> tuple[str, str] | None:
        """(name, role) of the node with this command line; None for any other process.

        cwd: directory in which the process started.
        writes_journal: whether it has the run's journal open; called for a parameter server
        without --run-dir.
        """
        start = _start(argv)
        if start is None:
            return None
        options = self.parse(argv[start:])
        role, run_dir = options.get("role"), options.get("run_dir")
        where = (cwd / run_dir).resolve() if run_dir else None
        if role == "ps":
            is_ours = writes_journal() if where is None else where == self.run_dir
            return (SERVER, role) if is_ours else None
        if role != "client":
            return None
        name = options.get("name") or (where.name if where else "client")
        if where is not None and where.parent == self.run_dir / "clients":
            return name, role
        return (name, role) if self._dials(options.get("address") or "") else None

    def _dials(self, given: str) -> bool:
        if not self.address or not given:
            return False
        try:
            there, server = addresses.parse(given), addresses.parse_announced(self.address)
        except AddressError:
            return False
        if there.port != server.port:
            return False
        if there.is_loopback:
            return server.is_loopback or server.is_everywhere
        return there.host == addresses.reachable_host(server.host)


def _start(argv: Sequence[str]) -> int | None:
    """Index of a node's first own argument; None when `argv` runs another program."""
    if not argv or not Path(argv[0]).name.startswith("python"):
        return None
    at = 1
    while at < len(argv) and argv[at].startswith("-"):
        if argv[at] == "-m":
            return at + 2 if argv[at + 1 : at + 2] == ["fsl_async.cli"] else None
        if argv[at] == "-c":
            return None
        at += 2 if argv[at] in _PYTHON_VALUED else 1
    return at + 1 if at < len(argv) and Path(argv[at]).name == "fsl-node" else None


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
    """The node that a process is in the run; None when it is none, gone, or another user's."""
    entry = _PROC / str(pid)
    try:
        if entry.stat().st_uid != os.getuid():
            return None
        argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        found = run.node(
            argv, (entry / "cwd").readlink(), lambda: _has_open(entry, run.run_dir / JOURNAL)
        )
        state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
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
    """Holds a process of a run: signals reach it or no process. Must be closed."""

    def __init__(self, run: Run, node: Node) -> None:
        """Raises ProcessLookupError when the process is no longer that node."""
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
        """Close the descriptor; may be called again."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


KILL, STOP, PARTITION, SLOW = KINDS = ("kill", "stop", "partition", "slow")
FOLDER = "links"
SLOW_BYTES_PER_S = 20_000.0
SLOW_RATE = "160kbit"
OPEN = "open"

Link = Callable[[str], None]
"""Changes a client's link: PARTITION lets nothing pass, SLOW little; OPEN removes the fault."""


def file_link(path: Path) -> Link:
    """The link of a proxy, controlled by a file."""
    words = {PARTITION: "cut", SLOW: f"slow {SLOW_BYTES_PER_S:g}", OPEN: "open"}

    return lambda state: replace_bytes(path, words[state].encode())


def site_link(lab: Laboratory, site: str, was: Sequence[str]) -> Link:
    """The link of a laboratory's site. was: its profile, or else its rates, before the fault."""
    words = {PARTITION: ("cut",), SLOW: (f"rate={SLOW_RATE}",), OPEN: ("heal", *was)}
    return lambda state: lab.set(site, *words[state])


def link_of(run: Run, node: Node) -> Link | None:
    """Return the client's link; None when there is none of its own."""
    path = run.run_dir / FOLDER / node.name
    if path.exists():
        return file_link(path)
    if not has_benchmarks():
        return None
    from netlab.laboratory import site_of

    found = site_of(node.pid)
    if found is None:
        return None
    lab, site = found
    state = next(one for one in lab.links.values() if site in {one.left, one.right})
    was = state.settings
    rates = [f"rate={was.rate_mbit}", f"up={was.up_mbit}", f"down={was.down_mbit}"]
    return site_link(lab, site, [state.profile] if state.profile else rates)
