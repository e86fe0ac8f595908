"""What a tracker has not got yet: nothing twice after a restart, nothing lost by an error of it.

`Feed` reads a node's journal for trackers and for Prometheus.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from fsl_async.observe.clients import NodeState
from fsl_async.observe.evaluations import EVALUATIONS, Evaluation, kept, newest
from fsl_async.observe.journal import JOURNAL, JournalReader
from fsl_async.observe.run_state import CLIENT, SPLIT_SERVER
from fsl_async.roles.names import NAME
from fsl_async.tools.trackers.catalog import (
    Point,
    Points,
    Reading,
    evaluated,
    newest_of_each,
    prefix_of,
)

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


RETRY_S = 30.0
BATCH = 500
"""Values that are handed over at once; MLflow's server takes 1000."""
MAX_WAITING = 10_000
"""Points that wait for a tracker that fails; the oldest are dropped beyond."""


class Tracker(Protocol):
    """Keeps series of points. Its methods raise what its library raises."""

    name: str
    """As a person calls it."""
    where: str
    """Where its points are to be found, for people."""

    def written(self) -> dict[str, int]:
        """The last step of each series that it has of this run. Called once, before `log`."""
        ...

    def log(self, point: Point) -> None:
        """Add the point. When it returns the point is safe from an end of this process."""
        ...

    def close(self) -> None:
        """End in good order."""
        ...


class Outbox:
    """The points on their way to one tracker. In a series steps rise: others are left out."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.lost = 0
        self._marks = tracker.written()
        self._waiting: deque[Point] = deque()
        self._retry_at = 0.0

    def last_step(self, prefix: str) -> int:
        """The newest step of a series that begins so, or of one without a prefix; -1: none."""
        split = prefix_of(SPLIT_SERVER)
        of_node = (
            step for name, step in self._marks.items() if name.startswith(split) == bool(prefix)
        )
        return max(of_node, default=-1)

    @property
    def waiting(self) -> int:
        """Points that are not written."""
        return len(self._waiting)

    def put(self, point: Point) -> None:
        """Take a point; of its values those that are new."""
        values = {
            name: value
            for name, value in point.values.items()
            if point.step > self._marks.get(name, -1)
        }
        self._marks |= dict.fromkeys(values, point.step)
        items = list(values.items())
        for at in range(0, len(items), BATCH):
            self._waiting.append(Point(point.step, point.t, dict(items[at : at + BATCH])))
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self.lost += 1

    def send(self, now: float) -> str:
        """Write what waits. Returns what is wrong, for people, or nothing. now: any clock's s."""
        if not self._waiting or now < self._retry_at:
            return ""
        try:
            while self._waiting:
                self.tracker.log(self._waiting[0])
                self._waiting.popleft()
        except Exception as error:  # noqa: BLE001 - a tracker's library may raise anything
            self._retry_at = now + RETRY_S
            lost = f", {self.lost} dropped" if self.lost else ""
            return (
                f"{self.tracker.name} takes no points ({type(error).__name__}: {error});"
                f" {len(self._waiting)} wait{lost}, next attempt in {RETRY_S:g} s"
            )
        return ""

    def close(self, now: float) -> str:
        """Write what waits, and end. Returns what is wrong, or nothing."""
        self._retry_at = 0.0
        problem = self.send(now)
        try:
            self.tracker.close()
        except Exception as error:  # noqa: BLE001
            problem = problem or f"{self.tracker.name}: {type(error).__name__}: {error}"
        return problem
