"""The journals of a run, read as they grow. Older segments are read in the background.

A journal's newest segment begins with the sum of those before it, so the present state is there
after at most a segment (8 MiB, some seconds); it is read in turns, between which pages are served.
The course of older ones (`History`) costs minutes for a journal of 1 GB: then a thread reads them
from the oldest on, skips lines that do not change a history, and hands over all that it made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attrs import asdict

from fsl_async.errors import RunDirError
from fsl_async.observe import segments
from fsl_async.observe.evaluations import Evaluation, kept
from fsl_async.observe.history import LINES, History
from fsl_async.observe.journal import JOURNAL, JournalReader
from fsl_async.observe.ledger_audit import LEDGER, audit_run
from fsl_async.observe.run_state import CLIENT, PS, SPLIT_SERVER, RunState
from fsl_async.observe.split_audit import audit_split_dir

MAX_NODES = 32
AUDIT_EVERY_S = 10.0
AUDIT_MOST_BYTES = 100_000_000
"""Of a ledger and of acknowledged keys: an audit takes nearly as much memory."""
_LINES_A_TURN = 2000
"""Lines that are applied before other work gets its turn: some 50 ms."""
_HAVING = tuple(word.encode() for word in LINES)
_HEARTBEAT = "heartbeat_received"
_REST_EVERY, _REST_S = 2000, 0.002
"""The background thread rests after so many lines: the page must not wait for it."""


def find_nodes(run_dir: Path) -> list[Path]:
    """Folders with journals: `run_dir`, or those in it (groups, a split server, a relay).

    Raises RunDirError where there is none.
    """
    if (run_dir / JOURNAL).is_file():
        beside = run_dir / SPLIT_SERVER
        return [run_dir, beside] if (beside / JOURNAL).is_file() else [run_dir]
    found = sorted(one for one in run_dir.iterdir() if (one / JOURNAL).is_file())
    if not found:
        raise RunDirError(f"{run_dir} has no {JOURNAL}: it is not the run directory of a server")
    return found[:MAX_NODES]


class WatchedNode:
    """One journal with its state and history. Used by one thread, but for `_load`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state, self.history = RunState(), History()
        self.epoch = 0
        """Counts exchanges of the history: one of older segments too, or of a replaced file."""
        self.revision = 0
        """Counts changes of anything that is shown."""
        self.loading: float | None = None
        """Part of the older segments that is read, 0 before those; None: no more to read."""
        self.audit: dict[str, Any] = {}
        self.evaluations: list[Evaluation] = []
        self._reader = JournalReader(folder / JOURNAL)
        self._is_new = True
        """Whether the newest segment has not been read to its end yet."""
        self._first_n: object = None
        self._lines: Iterator[dict[str, Any]] | None = None
        self._loaded: tuple[JournalReader, RunState, History] | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def role(self) -> str:
        """Of the process that writes the journal."""
        return self.state.node.role

    def read(self, at_most: int = _LINES_A_TURN) -> bool:
        """Take new lines; returns whether there may be more. Never waits for the thread."""
        if self._loaded is not None:
            self._reader, self.state, self.history = self._loaded
            self._loaded, self._lines, self.loading = None, None, None
            self.epoch += 1
            self.revision += 1
        if self._lines is None:
            self._lines = self._reader.read()
        taken = 0
        try:
            for line in self._lines:
                if self._first_n is None:
                    self._first_n = line.get("n", -1)
                self.state.apply(line)
                self.history.apply(line, self.state)
                taken += 1
                if taken >= at_most:
                    break
            else:
                self._lines = None
        except OSError:  # its folder is being moved or removed: what is known stays
            self._lines = None
        self.revision += taken > 0
        if self._lines is None and self._is_new:
            self._is_new = False
            self._load_older()
        elif self._is_new:
            self.loading = 0.0
        return self._lines is not None

    def read_all(self) -> None:
        """Take all lines that are there."""
        while self.read():
            pass

    # --- older segments ---

    def _load_older(self) -> None:
        """Begin to read older segments, if there are any."""
        self.loading = None
        path = self.folder / JOURNAL
        try:
            older, about = segments.oldest(path), path.stat()
        except OSError:
            return
        if older is None or older == (about.st_dev, about.st_ino):
            return
        self.loading = 0.0
        self._thread = threading.Thread(target=self._load, name="history", daemon=True)
        self._thread.start()

    def _load(self) -> None:
        reader = JournalReader(self.folder / JOURNAL, _HAVING)
        state, history = RunState(), History()
        first_n = self._first_n if isinstance(self._first_n, int) else 0
        try:
            for count, line in enumerate(reader.read_all()):
                if self._stopping.is_set():
                    return
                n = line.get("n")
                if reader.having and isinstance(n, int) and n >= first_n:
                    reader.having = ()  # from here on the state must be whole
                state.apply(line)
                history.apply(line, state)
                if reader.having and line.get("type") == _HEARTBEAT:
                    # Only a heartbeat tells that a client hangs no more.
                    hangs = any(client.hangs for client in state.clients.values())
                    reader.having = (*_HAVING, _HEARTBEAT.encode()) if hangs else _HAVING
                if count % _REST_EVERY == 0:
                    time.sleep(_REST_S)
                    done = n / first_n if isinstance(n, int) and first_n else 1.0
                    done = min(1.0, round(done, 2))
                    self.revision += done != self.loading
                    self.loading = done
        except OSError:
            self.loading = None
            return
        reader.having = ()
        self._loaded = (reader, state, history)

    def close(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

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
        except (OSError, KeyError, TypeError, ValueError) as error:
            return {"problems": [f"the ledger cannot be read: {error}"]}, kept(self.folder)
        return found, kept(self.folder)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _audit_ps(folder: Path) -> dict[str, Any]:
    found = audit_run(folder)
    return asdict(found) | {"complaints": found.complaints(), "clean": found.is_clean}


def _audit_split(folder: Path) -> dict[str, Any]:
    found = asdict(audit_split_dir(folder))
    return found | {"complaints": list(found["problems"]), "clean": not found["problems"]}


_AUDITS: dict[str, Callable[[Path], dict[str, Any]]] = {
    PS: _audit_ps,
    SPLIT_SERVER: _audit_split,
}


def watch(run_dir: Path) -> list[WatchedNode]:
    """The nodes of a run, the first lines of their newest segments read. Raises RunDirError."""
    nodes = [WatchedNode(folder) for folder in find_nodes(run_dir)]
    for node in nodes:
        node.read()
    if len(nodes) > 1:  # clients' own journals beside that of their server
        servers = [node for node in nodes if node.role != CLIENT] or nodes
        for node in nodes:
            if node not in servers:
                node.close()
        nodes = servers
    if not any(node.history.lines for node in nodes):
        raise RunDirError(f"{nodes[0].folder / JOURNAL} has no line yet; is the server starting?")
    return nodes
