"""A reduction between groups, replaced: it adds up the members' files, and answers by chance.

As with gloo, one reduction can succeed at one member and fail at another one. A member that is
killed early makes it fail at all others; one that is killed near the end, at some. Two members that
are parted wait for their timeout. Addresses of ranks travel as in production: each helper gives its
own one, and waits for those of the others.

`GroupsInvariants` checks the global rounds of all groups:

- One digest per global round, for ever; rounds and attempts go up, and no attempt decides twice.
- A token of a group is in at most one decided round: the cuts of a group follow one another.
- The global weights are those before and what the cuts of the round gained, to the bit.
- A group that adopts global weights holds these and what it merged that is in no round, to the bit.

After an orderly end: all groups have the newest global weights, and each token up to a group's last
cut is in exactly one decided round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, mutable

from fsl_async.files.memory_files import Killed, MemoryFiles
from fsl_async.learn.client.ports import Vector
from fsl_async.nodes.ps.reduction_process import ReductionJob, ReductionProcess
from fsl_async.roles.groups import effects as do
from fsl_async.roles.groups.events import Cut
from fsl_async.roles.groups.messages import View
from fsl_async.store.book.groups_book import Adoption
from fsl_async.store.disk.chunk_files import digest_of
from fsl_async.tools.sim.invariants import Lineage
from fsl_async.tools.sim.world import FaultProfile
from fsl_codecs import CodecSpec, decode, encode

if TYPE_CHECKING:
    from pathlib import Path

    from fsl_async.tools.sim.world import ProcessClock


@mutable
class GroupsInvariants:
    """The decided rounds so far. lineages: of all groups, by name."""

    violated: Callable[[str], None]
    lineages: Mapping[str, Lineage]
    codec: CodecSpec
    decisions: list[do.KeepDecision] = field(factory=list)
    """The decided global rounds."""
    weights: list[Vector] = field(factory=list)
    """The global weights of each round."""
    counted: dict[str, int] = field(factory=dict)
    """Group -> its tokens, from the first one, that are in decided rounds or in G_0."""
    _views: dict[int, View] = field(factory=dict)
    """By attempt."""
    _deciding: dict[int, do.KeepDecision] = field(factory=dict)
    """By attempt: decisions that the coordinator writes to its ledger."""
    _cuts: dict[str, Cut] = field(factory=dict)
    """Group -> its newest cut."""
    _adopted: dict[str, int] = field(factory=dict)
    """Group -> the round of the global weights that it holds."""
    _lost: Vector | None = None
    """The part of the global weights that coding has lost so far."""

    def reduces(self, view: View) -> None:
        """Take the view of an attempt."""
        self._views[view.attempt] = view

    def offers(self, name: str, cut: Cut) -> None:
        """Take the cut of a group."""
        self._cuts[name] = cut

    def decides(self, effect: do.KeepDecision) -> None:
        """Take a decision that the coordinator is about to write."""
        self._deciding[effect.attempt] = effect

    def begun(self, name: str) -> None:
        """Take G_0, once it is there: version 0 of the coordinator's group."""
        lineage = self.lineages[name]
        if lineage.weights and not self.weights:
            self.weights.append(lineage.weights[0])
            self.counted[name], self._adopted[name] = 0, 0

    def decided(self, attempt: int) -> None:
        """Take a decision of the coordinator: its line is in the ledger."""
        effect = self._deciding.pop(attempt, None)
        if effect is None:
            return
        number = effect.round
        if number != len(self.weights):
            self.violated(f"global round {number} is decided after {len(self.weights) - 1}")
        if any(one.attempt >= attempt for one in self.decisions):
            self.violated(f"attempt {attempt} decides after a later one, or twice")
        if len(effect.contributors) < 2:
            self.violated(f"global round {number} has {len(effect.contributors)} contributors")
        for name, (begin, end) in effect.contributors.items():
            if begin != self.counted.get(name, 0):
                text = f"{name}: tokens from {begin} follow {self.counted.get(name, 0)}"
                self.violated(f"{text} in global round {number}")
            self.counted[name] = end
        self._add(effect, self._views[attempt])
        self.decisions.append(effect)

    def _add(self, made: do.KeepDecision, view: View) -> None:
        """Make the global weights of a round again, with and without what coding lost before."""
        base, size = self.weights[-1], self._weights
        total = np.zeros_like(base)
        for rank, share in enumerate(view.members):
            lineage, cut = self.lineages[share.name], self._cuts[share.name]
            part = (base - lineage.weights[cut.version]) * np.float32(share.weight)
            if rank == 0 and self._lost is not None:
                part = part - self._lost
            total = total + part
        change = -total
        sent = np.concatenate([decode(encode(change[:size], self.codec)), change[size:]])
        self._lost = change - sent
        weights = base + sent
        self.weights.append(weights)
        if digest_of(weights, weights=size) != made.digest:
            self.violated(f"global weights {made.round} are not what the cuts gained")

    @property
    def _weights(self) -> int:
        return next(iter(self.lineages.values())).manifest.weights

    def adopts(self, name: str, adoption: Adoption) -> Vector:
        """Return what a group must hold that makes a version of global weights."""
        if adoption.round >= len(self.weights):
            self.violated(f"{name} adopts global weights {adoption.round}, which are not decided")
            return self.weights[-1]
        lineage, new = self.lineages[name], self.weights[adoption.round]
        reference = None
        cut = self._cuts.get(name)
        if name in self._adopted:
            reference = self.weights[self._adopted[name]]
            if adoption.counted:
                assert cut is not None, "a cut that was counted was offered"
                reference = lineage.weights[cut.version]
        self._adopted[name] = adoption.round
        if reference is None or np.array_equal(reference, lineage.weights[-1]):
            return new
        size = self._weights
        gained = lineage.weights[-1][:size] - reference[:size]
        return np.concatenate([new[:size] + gained, new[size:]])

    def ended(self) -> None:
        """Check after the end of all groups: the last global weights have what they merged."""
        for name, lineage in self.lineages.items():
            if self.counted.get(name, 0) != lineage.tokens:
                missing = lineage.tokens - self.counted.get(name, 0)
                self.violated(f"{missing} tokens of {name} are in no global weights at the end")

    def settled(self) -> None:
        """Check after an orderly end of global rounds."""
        for name in self.lineages:
            if self._adopted.get(name) != len(self.weights) - 1:
                self.violated(f"{name} ends with global weights {self._adopted.get(name)}")


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


class FakeReductions:
    """All reductions of a simulation.

    parted: pairs of names that cannot reach each other. outcomes: by attempt, whether reductions
    ended well at members.
    """

    def __init__(self, chance: random.Random, profile: FaultProfile) -> None:
        self.chance = chance
        self.profile = profile
        self.parted: set[frozenset[str]] = set()
        self.is_calm = False
        self.outcomes: dict[int, set[bool]] = {}
        self._reductions: dict[int, _Reduction] = {}

    def connected(self, helper: FakeHelper, job: ReductionJob) -> None:
        """A helper has all addresses. The last one begins the reduction."""
        reduction = self._reductions.setdefault(job.attempt, _Reduction(len(job.weights)))
        reduction.here[helper.name] = helper
        if len(reduction.here) == reduction.world:
            self._reduce(job.attempt, reduction)

    def _reduce(self, attempt: int, reduction: _Reduction) -> None:
        helpers = [reduction.here[name] for name in sorted(reduction.here)]
        jobs = [helper.job for helper in helpers]
        assert all(job is not None for job in jobs), "who takes part has a job"
        agreed = {(job.weights, job.piece_values) for job in jobs if job is not None}
        assert len(agreed) == 1, "all members reduce the same view"
        now = helpers[0].clock.time()
        reduction.begun_at, reduction.ends_at = now, now + self.chance.uniform(*REDUCTION_S)
        names = set(reduction.here)
        if any(pair <= names for pair in self.parted):
            for helper, job in zip(helpers, jobs, strict=True):
                assert job is not None
                self._answer(helper, attempt, now + job.timeout_s, None)
            return
        result = self._result(helpers)
        fails = not self.is_calm and self.chance.random() < self.profile.reduction_fails
        differs = not self.is_calm and self.chance.random() < self.profile.reduction_differs
        for helper in helpers:
            is_ok = not (fails and self.chance.random() < 0.5)
            total = result if is_ok else None
            if is_ok and differs and helper is helpers[-1]:
                total = result + np.float32(1.0)
            at = reduction.ends_at + self.chance.uniform(0.0, 2.0)
            self._answer(helper, attempt, at, total)

    def _result(self, helpers: list[FakeHelper]) -> Vector:
        """The sum, as `nodes.reduction_helper.reduction` computes it, in the order of ranks."""
        parts = {helper.job.rank: helper.gained() for helper in helpers if helper.job is not None}
        total = np.zeros_like(parts[0])
        for rank in sorted(parts):
            total = total + parts[rank]
        return total

    def _answer(self, helper: FakeHelper, attempt: int, when: float, total: Vector | None) -> None:
        helper.clock.call_at(when, self._answered, helper, attempt, total)

    def _answered(self, helper: FakeHelper, attempt: int, total: Vector | None) -> None:
        if helper.is_in(attempt):
            self.outcomes.setdefault(attempt, set()).add(total is not None)
            helper.end(total)

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

    def gained(self) -> Vector:
        """Return this member's part of the sum: what its group gained, with its weight."""
        job = self.job
        assert job is not None, "it takes part"
        gained = (self._read(job.base) - self._read(job.cut)) * np.float32(job.weights[job.rank])
        return gained if job.residual is None else gained - self._read(job.residual)

    def _read(self, path: Path) -> Vector:
        job = self.job
        assert job is not None, "it takes part"
        content = self._files.read_whole(path, job.skip + 4 * job.values)
        return np.frombuffer(content[job.skip :], "<f4")

    def end(self, total: Vector | None) -> None:
        """Write and report the sum; None: an error."""
        job, self.job = self.job, None
        assert job is not None
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
