"""The result of a simulated run: the object that `demo` prints too, with figures of a simulation
only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from fsl_async.tools.sim.latest_counting import LatestDisk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsl_async.tools.sim.counting import Disk
    from fsl_async.tools.sim.groups_simulation import GroupsSimulation
    from fsl_async.tools.sim.simulation import Simulation


@frozen
class Report:
    """The result of a simulated run. Losses and weights are None, because learning is a counter."""

    rounds: int
    clients: int
    tokens: int
    loss_first: None
    loss_last: None
    eval_loss: None
    bytes_raw: int
    bytes_sent: int
    ratio: float | None
    relaunches: int
    deltas_merged: int
    deltas_lost: int
    deltas_doubled: int
    checkpoints: int
    """Versions whose weights were written to disk."""
    versions_replayed: int
    """Versions that starts made again, from a checkpoint and the spool."""
    participation: float
    seconds: float
    run_dir: str
    virtual_hours: float
    events: int
    faults: int
    faults_by_kind: dict[str, int]
    seed: int
    invariant_violations: int
    trace_sha256: str | None
    split: dict[str, Any] | None = None
    """For split learning only: method, mode, outcomes of the uploads, bytes by category."""
    tune: dict[str, Any] | None = None
    """For tuning only: mode, deltas that were late, stale or quarantined, and fetches."""
    deltas_reused: int | None = None
    """With --latest only: how often a version used a delta of an earlier one again."""
    groups: dict[str, Any] | None = None
    """For groups only: global rounds, attempts, and for how long merges were held."""


def report(simulation: Simulation | GroupsSimulation, seconds: float, journal: str) -> Report:
    """Make the report of a simulation. Of groups, versions, deltas and clients are added up."""
    counts, world = simulation.counts, simulation.world
    groups = simulation.groups
    disks = [group.disk for group in groups]
    messages = world.network.counts
    kinds = dict(counts.kinds)
    for kind in ("dropped", "duplicated", "reordered"):
        if messages.get(kind):
            kinds[f"message {kind}"] = messages[kind]
    return Report(
        rounds=sum(max(0, len(disk.models) - 1) for disk in disks),
        clients=simulation.settings.clients * len(groups),
        tokens=sum(disk.tokens_merged for disk in disks),
        loss_first=None,
        loss_last=None,
        eval_loss=None,
        bytes_raw=0,
        bytes_sent=0,
        ratio=None,
        relaunches=counts.relaunches,
        deltas_merged=sum(len(disk.merged) for disk in disks),
        deltas_lost=sum(group.invariants.deltas_lost for group in groups),
        deltas_doubled=sum(group.invariants.deltas_doubled for group in groups),
        checkpoints=sum(disk.checkpoints for disk in disks),
        versions_replayed=sum(disk.replayed for disk in disks),
        participation=round(simulation.participation.share, 4),
        seconds=round(seconds, 3),
        run_dir=journal,
        virtual_hours=world.scheduler.time() / 3600.0,
        events=counts.events,
        faults=sum(kinds.values()),
        faults_by_kind=kinds,
        seed=simulation.settings.seed,
        invariant_violations=len(simulation.violations),
        trace_sha256=None if journal else world.trace.hexdigest(),
        split=simulation.split_facts() or None,
        tune=simulation.tune_facts() or None,
        deltas_reused=_reuses(disks),
        groups=simulation.group_facts() or None,
    )


def _reuses(disks: Sequence[Disk]) -> int | None:
    """How often a version used a delta of an earlier one again; None where none may be."""
    counts = [disk.reuses for disk in disks if isinstance(disk, LatestDisk)]
    return sum(counts) if counts else None
