"""The disk of a simulated run whose versions use each client's newest delta again (AFA-CS).

It checks what a version uses again against what it knows by itself: the newest merged delta of each
client without a new one, unless it is too old, with the weight of its age, after any crash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, field, mutable

from fsl_async.store.merging import AT_START, Average
from fsl_async.tools.sim.counting import CountingStore, Disk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsl_async.roles.sync.delta import MergedDelta
    from fsl_async.roles.sync.events import Recovered
    from fsl_async.roles.sync.progress import RunPosition
    from fsl_async.store.records import Committed


@mutable
class LatestDisk(Disk):
    """What a parameter server has made durable, with the newest merged delta of each client."""

    latest: dict[str, MergedDelta] = field(factory=dict)
    reuses: int = 0
    """Uses of deltas that an earlier version merged."""
    most_reused: int = 0
    """Of them in one version."""


class LatestStore(CountingStore):
    """A store of a rule that uses deltas again, up to `reuse` versions after their base."""

    disk: LatestDisk

    def __init__(
        self,
        disk: LatestDisk,
        keep_versions: int,
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], object]], object],
        *,
        reuse: int,
        weight: Callable[[int, int], float],
    ) -> None:
        """weight: of a delta, by its steps and staleness."""
        super().__init__(disk, keep_versions, clock, later)
        self._reuse = reuse
        self._weight = weight

    def recover(self) -> Recovered:
        """See `CountingStore.recover`."""
        return evolve(super().recover(), latest=tuple(self.disk.latest.values()))

    def average(
        self,
        version: int,
        merged: Sequence[MergedDelta],
        scale: float,
        position: RunPosition = AT_START,
        *,
        reused: Sequence[MergedDelta] = (),
    ) -> Average:
        """See `CountingStore.average`."""
        made = super().average(version, merged, scale, position, reused=reused)
        sent = {one.key.client for one in merged}
        due = {
            one.key: self._weight(one.delta.steps, version - 1 - one.key.base)
            for one in self.disk.latest.values()
            if one.key.client not in sent and version - 1 - one.key.base <= self._reuse
        }
        used = {one.key: one.weight for one in reused}
        assert len(used) == len(reused), "a delta is used once in a version"
        assert used.keys() == due.keys(), "other clients' newest deltas are used again, and no else"
        for key, weight in due.items():
            assert abs(used[key] - weight) <= 1e-9 * weight, "a delta weighs as its age says"
        return evolve(made, reused=tuple(reused))

    def advance(self, average: Average) -> Committed:
        """See `CountingStore.advance`."""
        made, disk = super().advance(average), self.disk
        for one in average.merged:
            last = disk.latest.get(one.key.client)
            if last is None or last.key.order < one.key.order:
                disk.latest[one.key.client] = one
        disk.reuses += len(average.reused)
        disk.most_reused = max(disk.most_reused, len(average.reused))
        return made
