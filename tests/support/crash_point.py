"""Crash points: where a process dies, how they are counted, and what unwinds when it dies."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from attrs import frozen

import fsl_transport as tp
from fsl_async.files.memory_files import Killed
from fsl_async.roles import machine
from fsl_async.roles.groups import effects as effects_groups
from fsl_async.roles.machine import Effect
from fsl_async.roles.split import effects as effects_split
from fsl_async.roles.sync import effects
from fsl_async.tools.sim.training import VirtualWorker


class Scheduler(tp.VirtualScheduler):
    """A scheduler that goes on after a process has died in a call."""

    __slots__ = ()

    def run_until(self, when):
        """Run on after every death."""
        while True:
            try:
                super().run_until(when)
            except Killed:
                continue
            return


@frozen
class Point:
    """A place where a process dies at the `nth` time."""

    role: str
    name: str
    stage: str
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.role}:{self.stage}:{self.name}:{self.nth}"


class Points:
    """Counts how often each point is passed, and kills at the one that is armed."""

    def __init__(self, armed: Point | None) -> None:
        self.armed = armed
        self.passed: Counter[tuple[str, str, str]] = Counter()
        self.fired = False
        self.doing = ""

    def reach(self, role: str, name: str, stage: str, kill: Callable[[], None]) -> None:
        """Count a passed point; kill if it is the armed one."""
        place = role, name, stage
        self.passed[place] += 1
        if not self.fired and self.armed == Point(*place, self.passed[place]):
            self.fired = True
            kill()
            raise Killed(str(self.armed))

    def watch(
        self, node: Any, role: str, kill: Callable[[], None], only: frozenset[str] = frozenset()
    ) -> None:
        """Put points around the effects of a node. only: tags of these; empty: all."""
        execute = node._execute

        def run(effect: Effect, number: int) -> None:
            name = effect.tag
            if only and name not in only:
                execute(effect, number)
                return
            self.reach(role, name, "before", kill)
            self.doing = name
            try:
                execute(effect, number)
            finally:
                self.doing = ""
            self.reach(role, name, "after", kill)

        node._execute = run

    def all(self) -> list[Point]:
        """Return every point that was passed, once for each time."""
        return [
            Point(*place, nth)
            for place, times in sorted(self.passed.items())
            for nth in range(1, times + 1)
        ]


class WatchedWorker(VirtualWorker):
    """A worker with a crash point after every job; jobs of no effect have the name "transport".

    faults: of the disk that the jobs use, in several threads. A kill in another thread gives no
    error here.
    """

    def __init__(self, clock, cost_s, points, role, kill, *, faults=None):
        super().__init__(clock, cost_s)
        self.points, self.role, self.kill, self.faults = points, role, kill, faults

    def submit(self, job, done, failed):
        """Submit a job as the virtual worker does, and pass the point after it."""
        name = self.points.doing or "transport"

        def watched():
            try:
                result = job()
            finally:
                if self.faults is not None and self.faults.dead:
                    raise Killed("killed")
            self.points.reach(self.role, name, "job", self.kill)
            return result

        super().submit(watched, done, failed)


OF_GROUPS = frozenset({effects_groups.TakeCut.tag, effects_groups.Adopt.tag})
"""Effects of a parameter server that only one in a roster has."""
IN_MEMORY = {
    "ps": {effects.SendDelta.tag},
    "client": {effects.ReceiveDelta.tag, effects.ScoreDeltas.tag, effects.TakeRollout.tag},
}
"""Role -> effects around evaluators and rollouts, which write nothing: kills of evaluators are
simulated only (`unit_tools/sim/test_evaluator_simulation.py`)."""
EFFECTS = {
    found
    for module in (machine, effects, effects_groups, effects_split)
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, Effect) and found is not Effect
}


def carried_out(shell: type) -> set[str]:
    """Return the tags of the effects that a shell carries out, by the table in its source."""
    # attrs writes `__init__` of some shells.
    made = getattr(shell, "__attrs_post_init__", shell.__init__)
    names = set(re.findall(r"\b([A-Z]\w+):", inspect.getsource(made)))
    return {effect.tag for effect in EFFECTS if effect.__name__ in names}
