"""The journals of a run, read as they grow.

A journal's newest segment begins with the sum of those before it, the course over time included, so
all is there after at most a segment (8 MiB, some seconds). It is read in turns, between which pages
are served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attrs import asdict

from fsl_async.errors import RunDirError
from fsl_async.observe.evaluations import Evaluation, kept
from fsl_async.observe.history import Course, History
from fsl_async.observe.journal import JOURNAL, JournalReader
from fsl_async.observe.ledger_audit import LEDGER, Audit, audit_run
from fsl_async.observe.node_folders import find_nodes
from fsl_async.observe.run_state import CLIENT, PS, SPLIT_SERVER, RunState
from fsl_async.observe.split_audit import SplitAudit, audit_split_dir

AUDIT_EVERY_S = 10.0
AUDIT_MOST_BYTES = 100_000_000
"""Of a ledger and of acknowledged keys: an audit takes nearly as much memory."""
_LINES_A_TURN = 2000
"""Lines that are applied before other work gets its turn: some 50 ms."""


class WatchedNode:
    """One journal with its state and history."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.course = Course()
        self.revision = 0
        """Counts changes of anything that is shown."""
        self.is_loading = True
        """Whether the newest segment has not been read to its end yet."""
        self.audit: dict[str, Any] = {}
        self.evaluations: list[Evaluation] = []
        self._reader = JournalReader(folder / JOURNAL)
        self._lines: Iterator[dict[str, Any]] | None = None

    @property
    def state(self) -> RunState:
        """The node as it is now."""
        return self.course.state

    @property
    def history(self) -> History:
        """Its course over time."""
        return self.course.history

    @property
    def role(self) -> str:
        """Of the process that writes the journal."""
        return self.state.node.role

    def read(self, at_most: int = _LINES_A_TURN) -> bool:
        """Take new lines; returns whether there may be more."""
        if self._lines is None:
            self._lines = self._reader.read()
        taken = 0
        try:
            for line in self._lines:
                self.course.apply(line)
                taken += 1
                if taken >= at_most:
                    break
            else:
                self._lines = None
        except OSError:  # its folder is being moved or removed: what is known stays
            self._lines = None
        self.revision += taken > 0
        self.is_loading = self.is_loading and self._lines is not None
        return self._lines is not None

    def read_all(self) -> None:
        """Take all lines that are there."""
        while self.read():
            pass

    # --- files beside the journal; slow, for another thread ---

    def look(self) -> tuple[dict[str, Any], list[Evaluation]]:
        """Audit, and evaluations that `fsl-node evaluate` left."""
        audit = _AUDITS.get(self.role)
        if audit is None or (self.role == PS and not (self.folder / LEDGER).is_file()):
            return {}, kept(self.folder)
        size = sum(_size(self.folder / name) for name in (LEDGER, "journal.acknowledged"))
        if size > AUDIT_MOST_BYTES:
            return {"skipped": size}, kept(self.folder)
        try:
            found = audit(self.folder)
            complaints = found.complaints()
        except (OSError, KeyError, TypeError, ValueError) as error:
            return {"problems": [f"the ledger cannot be read: {error}"]}, kept(self.folder)
        words = {"complaints": complaints, "clean": not complaints}
        return asdict(found) | words, kept(self.folder)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


_AUDITS: dict[str, Callable[[Path], Audit | SplitAudit]] = {
    PS: audit_run,
    SPLIT_SERVER: audit_split_dir,
}


def watch(run_dir: Path) -> list[WatchedNode]:
    """The nodes of a run, the first lines of their newest segments read. Raises RunDirError."""
    nodes = [WatchedNode(folder) for folder in find_nodes(run_dir)]
    for node in nodes:
        node.read()
    if len(nodes) > 1:  # clients' own journals beside that of their server
        nodes = [node for node in nodes if node.role != CLIENT] or nodes
    if not any(node.history.lines for node in nodes):
        raise RunDirError(f"{nodes[0].folder / JOURNAL} has no line yet; is the server starting?")
    return nodes
