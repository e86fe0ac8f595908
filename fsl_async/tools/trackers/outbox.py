"""What a tracker has not got yet: nothing twice after a restart, nothing lost by an error of it."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from fsl_async.observe.run_state import SPLIT_SERVER
from fsl_async.tools.trackers.catalog import prefix_of
from fsl_async.tools.trackers.points import Point

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
