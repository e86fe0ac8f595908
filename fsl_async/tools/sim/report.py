"""The result of a simulated run: the object that `demo` prints too, with figures of a simulation
only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsl_async.tools.sim.groups_simulation import GroupsSimulation
    from fsl_async.tools.sim.simulation import Simulation


def report(
    simulation: Simulation | GroupsSimulation, seconds: float, journal: str
) -> dict[str, Any]:
    """Make the report of a simulation. Of groups, versions, deltas and clients are added up.

    Losses are None: nothing is learned. Kinds of run other than pretraining have a member with
    their own figures, of their name; it is None for the others.
    """
    counts, world = simulation.counts, simulation.world
    groups = simulation.groups
    lineages = [group.invariants.lineage for group in groups]
    messages = world.network.counts
    kinds = dict(counts.kinds)
    for kind in ("dropped", "duplicated", "reordered"):
        if messages.get(kind):
            kinds[f"message {kind}"] = messages[kind]
    found = {
        "rounds": sum(max(0, lineage.version) for lineage in lineages),
        "clients": simulation.settings.clients * len(groups),
        "tokens": sum(lineage.tokens for lineage in lineages),
        "loss_first": None,
        "loss_last": None,
        "eval_loss": None,
        "bytes_raw": 0,
        "bytes_sent": 0,
        "ratio": None,
        "relaunches": counts.relaunches,
        "deltas_merged": sum(len(lineage.merged) for lineage in lineages),
        "deltas_lost": sum(group.invariants.deltas_lost for group in groups),
        "deltas_doubled": sum(lineage.doubled for lineage in lineages),
        "participation": round(counts.participation, 4),
        "seconds": round(seconds, 3),
        "run_dir": journal,
        "virtual_hours": world.scheduler.time() / 3600.0,
        "events": counts.events,
        "faults": sum(kinds.values()),
        "faults_by_kind": kinds,
        "seed": simulation.settings.seed,
        "invariant_violations": len(simulation.violations),
        "trace_sha256": None if journal else world.trace.hexdigest(),
        **dict.fromkeys(("split", "tune", "deltas_reused", "groups")),
    }
    if simulation.settings.latest:
        found["deltas_reused"] = sum(lineage.uses_again for lineage in lineages)
    if simulation.kind:
        found[simulation.kind] = simulation.facts()
    return found
