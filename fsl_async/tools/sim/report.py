"""The result of a simulated run: the object that `demo` prints too, with figures of a simulation
only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
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
    lineages = [group.invariants.lineage for group in groups]
    messages = world.network.counts
    kinds = dict(counts.kinds)
    for kind in ("dropped", "duplicated", "reordered"):
        if messages.get(kind):
            kinds[f"message {kind}"] = messages[kind]
    return Report(
        rounds=sum(max(0, lineage.version) for lineage in lineages),
        clients=simulation.settings.clients * len(groups),
        tokens=sum(lineage.tokens for lineage in lineages),
        loss_first=None,
        loss_last=None,
        eval_loss=None,
        bytes_raw=0,
        bytes_sent=0,
        ratio=None,
        relaunches=counts.relaunches,
        deltas_merged=sum(len(lineage.merged) for lineage in lineages),
        deltas_lost=sum(group.invariants.deltas_lost for group in groups),
        deltas_doubled=sum(lineage.doubled for lineage in lineages),
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
        deltas_reused=(
            sum(lineage.uses_again for lineage in lineages) if simulation.settings.latest else None
        ),
        groups=simulation.group_facts() or None,
    )
