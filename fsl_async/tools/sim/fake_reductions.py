"""A reduction between groups, replaced: it adds up the members' files, and answers by chance.

As with gloo, one reduction can succeed at one member and fail at another one. A member that is
killed early makes it fail at all others; one that is killed near the end, at some. Two members that
are parted wait for their timeout. Addresses of ranks travel as in production: each helper gives its
own one, and waits for those of the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
from attrs import field, mutable

from fsl_async.files.memory_files import Killed, MemoryFiles
from fsl_async.learn.client.ports import Vector
from fsl_async.nodes.ps.reduction_process import ReductionJob, ReductionProcess
from fsl_async.tools.sim.settings import FaultProfile
from fsl_async.tools.sim.world import ProcessClock

START_S = (3.0, 10.0)
"""From the start of a helper until it has imported torch."""
REDUCTION_S = (5.0, 60.0)
ADDRESSES_S = 60.0
"""How long a helper waits for the addresses of the others."""
NEAR_END = 0.8
"""Share of a reduction after which a killed member does not stop all others."""


@mutable
class _Reduction:
    """One attempt. here: name of a member -> its helper, connected."""

    world: int
    here: dict[str, FakeHelper] = field(factory=dict)
    begun_at: float = -1.0
    ends_at: float = -1.0
    outcomes: set[bool] = field(factory=set)
    """Whether it ended well, at members at which it has ended."""


class FakeReductions:
    """All reductions of a simulation.

    parted: pairs of names that cannot reach each other. mixed: reductions that ended well at some
    members only.
    """

    def __init__(self, chance: random.Random, profile: FaultProfile) -> None:
        self.chance = chance
        self.profile = profile
        self.parted: set[frozenset[str]] = set()
        self.is_calm = False
        self.mixed = 0
        self._reductions: dict[int, _Reduction] = {}

    def connected(self, helper: FakeHelper, job: ReductionJob) -> None:
        """A helper has all addresses. The last one begins the reduction."""
        reduction = self._reductions.setdefault(job.attempt, _Reduction(len(job.weights)))
        reduction.here[helper.name] = helper
        if len(reduction.here) == reduction.world:
            self._reduce(job.attempt, reduction)

    def _reduce(self, attempt: int, reduction: _Reduction) -> None:
        helpers = [reduction.here[name] for name in sorted(reduction.here)]
        jobs = [helper.taken_job for helper in helpers]
        agreed = {(job.weights, job.piece_values) for job in jobs}
        assert len(agreed) == 1, "all members reduce the same view"
        now, chance = helpers[0].clock.time(), self.chance
        reduction.begun_at, reduction.ends_at = now, now + chance.uniform(*REDUCTION_S)
        names = set(reduction.here)
        if any(pair <= names for pair in self.parted):
            for helper, job in zip(helpers, jobs, strict=True):
                self._answer(helper, attempt, now + job.timeout_s, None)
            return
        # The sum as `nodes.reduction_helper` computes it, in the order of ranks.
        parts = {helper.taken_job.rank: helper.gained() for helper in helpers}
        result = np.zeros_like(parts[0])
        for rank in sorted(parts):
            result = result + parts[rank]
        fails = not self.is_calm and chance.random() < self.profile.reduction_fails
        differs = not self.is_calm and chance.random() < self.profile.reduction_differs
        for helper in helpers:
            total = None if fails and chance.random() < 0.5 else result
            if total is not None and differs and helper is helpers[-1]:
                total = result + np.float32(1.0)
            self._answer(helper, attempt, reduction.ends_at + chance.uniform(0.0, 2.0), total)

    def _answer(self, helper: FakeHelper, attempt: int, when: float, total: Vector | None) -> None:
        helper.clock.call_at(when, self._answered, helper, attempt, total)

    def _answered(self, helper: FakeHelper, attempt: int, total: Vector | None) -> None:
        if not helper.is_in(attempt):
            return
        reduction, is_ok = self._reductions[attempt], total is not None
        self.mixed += reduction.outcomes == {not is_ok}
        reduction.outcomes.add(is_ok)
        helper.end(total)
        if not any(one.is_in(attempt) for one in reduction.here.values()):
            self._reductions.pop(attempt, None)

    def left(self, helper: FakeHelper, attempt: int) -> None:
        """A helper is killed in a reduction: the others get an error, sooner or later."""
        reduction = self._reductions.get(attempt)
        if reduction is None or reduction.here.pop(helper.name, None) is None:
            return
        now = helper.clock.time()
        length_s = reduction.ends_at - reduction.begun_at
        is_late = 0 < reduction.begun_at <= now - NEAR_END * length_s
        for name in sorted(reduction.here):
            if is_late and self.chance.random() < 0.5:
                continue  # it has the bytes that it needs
            other = reduction.here[name]
            self._answer(other, attempt, now + self.chance.uniform(0.1, 3.0), None)
        if not reduction.here:
            del self._reductions[attempt]


class FakeHelper(ReductionProcess):
    """`ReductionProcess` without a process."""

    def __init__(
        self,
        reductions: FakeReductions,
        name: str,
        clock: ProcessClock,
        files: MemoryFiles,
        killed: Callable[[], None],
        *callbacks: Callable[..., None],
    ) -> None:
        """callbacks: on_address, on_done, on_failed."""
        super().__init__(*callbacks)
        self.name, self.clock = name, clock
        self._files, self._killed = files, killed
        self.job: ReductionJob | None = None
        self._reductions = reductions
        self._ready_at: float | None = None
        self._others: set[str] = set()
        self._is_open = False

    def is_in(self, attempt: int) -> bool:
        """Whether this reduction is under way."""
        return self.job is not None and self.job.attempt == attempt

    def start(self) -> None:
        """Start the helper, if it does not run."""
        if self._ready_at is None:
            self._ready_at = self.clock.time() + self._reductions.chance.uniform(*START_S)

    def reduce(self, job: ReductionJob) -> None:
        """Begin a reduction."""
        self.start()
        self.kill()
        assert self._ready_at is not None
        self.job, self._is_open = job, False
        self._others.clear()
        self.clock.call_at(max(self._ready_at, self.clock.time() + 0.05), self._open, job)
        deadline = max(self._ready_at, self.clock.time()) + max(ADDRESSES_S, job.timeout_s)
        self.clock.call_at(deadline, self._gave_up, job)

    def _open(self, job: ReductionJob) -> None:
        if self.job is job:
            self._is_open = True
            self._on_address(job.attempt, f"rank-{job.rank}", b"an address")
            self._connect(job)

    def _gave_up(self, job: ReductionJob) -> None:
        if self.job is job and len(self._others) + 1 < len(job.weights):
            self.job = None
            self._on_failed(job.attempt, "no address from other members")

    def address(self, key: str, blob: bytes) -> None:
        """Take the address of another rank. Before a reduction it is lost."""
        if self.job is not None:
            self._others.add(key)
            self._connect(self.job)

    def _connect(self, job: ReductionJob) -> None:
        if self._is_open and len(self._others) + 1 == len(job.weights):
            self._is_open = False
            self._reductions.connected(self, job)

    @property
    def taken_job(self) -> ReductionJob:
        """The job of the reduction in which it takes part."""
        assert self.job is not None, "it takes part"
        return self.job

    def gained(self) -> Vector:
        """Return this member's part of the sum: what its group gained, with its weight."""
        job = self.taken_job
        gained = (self._read(job.base) - self._read(job.cut)) * np.float32(job.weights[job.rank])
        return gained if job.residual is None else gained - self._read(job.residual)

    def _read(self, path: Path) -> Vector:
        job = self.taken_job
        content = self._files.read_whole(path, job.skip + 4 * job.values)
        return np.frombuffer(content[job.skip :], "<f4")

    def end(self, total: Vector | None) -> None:
        """Write and report the sum; None: an error."""
        job, self.job = self.taken_job, None
        if total is None:
            self._on_failed(job.attempt, "connection reset by peer")
            return
        try:
            head = self._files.read_whole(job.base, job.skip + 4 * job.values)[: job.skip]
            self._files.write_whole(job.out, head + total.astype("<f4").tobytes())
        except Killed:
            self._killed()
        except OSError as error:
            self._on_failed(job.attempt, str(error))
        else:
            self._on_done(job.attempt)

    def kill(self) -> None:
        """End the reduction."""
        job, self.job = self.job, None
        if job is not None:
            self._reductions.left(self, job.attempt)

    async def aclose(self) -> None:
        """End the helper."""
        self.kill()
