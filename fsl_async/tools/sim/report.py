"""The result of a simulated run: the object that `demo` prints too, with figures of a simulation
only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
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


def report(simulation: Simulation, seconds: float, journal: str) -> Report:
    """Make the report of a simulation."""
    disk, invariants, counts = simulation.disk, simulation.invariants, simulation.counts
    messages = simulation.network.counts
    kinds = dict(counts.kinds)
    for kind in ("dropped", "duplicated", "reordered"):
        if messages.get(kind):
            kinds[f"message {kind}"] = messages[kind]
    return Report(
        rounds=max(0, len(disk.models) - 1),
        clients=simulation.settings.clients,
        tokens=disk.tokens_merged,
        loss_first=None,
        loss_last=None,
        eval_loss=None,
        bytes_raw=0,
        bytes_sent=0,
        ratio=None,
        relaunches=counts.relaunches,
        deltas_merged=len(disk.merged),
        deltas_lost=invariants.deltas_lost,
        deltas_doubled=invariants.deltas_doubled,
        checkpoints=disk.checkpoints,
        versions_replayed=disk.replayed,
        participation=round(simulation.participation.share, 4),
        seconds=round(seconds, 3),
        run_dir=journal,
        virtual_hours=simulation.scheduler.time() / 3600.0,
        events=counts.events,
        faults=sum(kinds.values()),
        faults_by_kind=kinds,
        seed=simulation.settings.seed,
        invariant_violations=len(invariants.violations),
        trace_sha256=None if journal else simulation.trace.hexdigest(),
    )
