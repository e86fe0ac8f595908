"""Reads a node's journal for trackers and for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fsl_async.observe.evaluations import EVALUATIONS, Evaluation, kept, newest
from fsl_async.observe.journal import JOURNAL, JournalReader
from fsl_async.observe.run import NodeState
from fsl_async.observe.run_state import CLIENT
from fsl_async.roles.names import NAME
from fsl_async.tools.trackers.catalog import Reading, prefix_of
from fsl_async.tools.trackers.outbox import Outbox
from fsl_async.tools.trackers.points import Point, Points, evaluated, newest_of_each

SEND_EVERY = 500
"""Points that are read before they are sent: a long run is not held in memory."""


class Feed:
    """The journal in `folder`, and what it has for `outboxes`. send: hands over what they hold.

    The newest segment is enough where all trackers have the versions before it; else all segments
    that are kept are read, once.
    """

    def __init__(self, folder: Path, outboxes: Sequence[Outbox], send: Callable[[], None]) -> None:
        self.folder = folder
        self._outboxes, self._send = outboxes, send
        self._points = Points()
        self._reader = JournalReader(folder / JOURNAL)
        self._is_new = True
        self._measured_at = 0.0
        self._measured: list[Evaluation] = []

    def poll(self) -> None:
        """Take what is new in the folder, and send it. Raises OSError without a journal."""
        taken = 0
        for line in self._lines():
            points = self._points.apply(line)
            self._put(points)
            taken += len(points)
            if taken >= SEND_EVERY:
                taken = 0
                self._send()
        self._look_for_evaluations()
        self._send()

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self._is_new:
            return self._reader.read()
        self._is_new = False
        first = Points()
        for line in self._reader.read():
            first.apply(line)
            break
        self._reader = JournalReader(self.folder / JOURNAL)
        prefix = prefix_of(first.state.node.role)
        has_all = all(box.last_step(prefix) >= first.step for box in self._outboxes)
        return self._reader.read() if has_all else self._reader.read_all()

    @property
    def node(self) -> NodeState:
        """The node that writes the journal."""
        return self._points.state.node

    def reading(self, *, up: bool) -> Reading:
        """The run as it is now."""
        state = self._points.state
        found = newest(state.ps.version, state.ps.evaluations, self._measured)
        return Reading(state, up, newest_of_each(found))

    def _put(self, points: list[Point]) -> None:
        for point in points:
            for box in self._outboxes:
                box.put(point)

    def _look_for_evaluations(self) -> None:
        """What `fsl-node evaluate` has left."""
        try:
            at = (self.folder / EVALUATIONS).stat().st_mtime
        except OSError:
            return
        if at != self._measured_at:
            self._measured_at, self._measured = at, kept(self.folder)
            self._put([evaluated(one, at) for one in newest(self._points.step, self._measured)])


def run_name(node: NodeState, folder: Path) -> str:
    """A name for files and ids: the run's, at a client with its own; the folder's where the journal
    has no good one.
    """
    name = f"{node.run}-{node.name}" if node.role == CLIENT and node.run else node.run
    fits = NAME.fullmatch(name) and name.strip(".")
    return name if fits else re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name) or "run"
