"""Scaling: what synchronizing a large model costs in bytes, seconds, memory and disk. Pure.

docs/COSTS.md has the formulas in words. P is the number of parameters; rates are bytes a second.
"""

from __future__ import annotations

import math

from attrs import frozen

FP32 = 4
"""Bytes of a value."""
LINK_SHARE = 0.5
"""Of a period, that a sync may take: the rest is for what is late, and for retries."""


@frozen
class Measured:
    """What docs/BENCHMARKS.md measured, on two cores; a larger machine does better.

    bits: coded, of a parameter, each way. stored_s, committed_s, snapshot_s: seconds for a value
    (an uploaded one; one of the model; one of a client that copies and rebases). disk: bytes a
    second of a checkpoint. memory, lean_memory: of the parameter server, fp32 models.
    """

    bits: float = 5.62
    stored_s: float = 13.9 / 2.4e9
    committed_s: float = 5.9e-9
    snapshot_s: float = 0.1 / 201.5e6
    disk: float = 12e9 / 55
    memory: float = 4.3
    lean_memory: float = 1.5


@frozen
class Sites:
    """Sites of equal lines. `line`: of each site and of each parameter server; `near`: within a
    group. `groups`: 1 for a flat run.
    """

    parameters: float
    sites: int
    line: float
    near: float = 1.25e9
    groups: int = 1
    global_every: int = 6

    @property
    def members(self) -> int:
        """Sites of a group."""
        return math.ceil(self.sites / self.groups)


@frozen
class Costs:
    """Of one sync. `pause_s`: merges of a group are held so long for a global round; 0: no groups.
    `period_s`: the shortest time from one sync to the next that the lines allow.
    """

    delta_bytes: float
    server_bytes: float
    sync_s: float
    pause_s: float
    period_s: float


def sync_s(sites: Sites, known: Measured, rate: float) -> float:
    """From the call until all clients of one parameter server hold the new version."""
    values = sites.parameters * sites.members
    carried = values * known.bits / 8 / rate
    return max(carried, values * known.stored_s) + sites.parameters * known.committed_s + carried


def reduction_s(sites: Sites) -> float:
    """The sum of a global round: 2 (G-1)/G fp32 models over each server's line."""
    if sites.groups == 1:
        return 0.0
    return 2 * (sites.groups - 1) / sites.groups * FP32 * sites.parameters / sites.line


def flat(sites: Sites, known: Measured) -> Costs:
    """One parameter server, whose line all sites share."""
    delta = sites.parameters * known.bits / 8
    seconds = sync_s(sites, known, sites.line)
    return Costs(delta, 2 * delta * sites.members, seconds, 0.0, seconds / LINK_SHARE)


def grouped(sites: Sites, known: Measured) -> Costs:
    """A parameter server near the sites of each group, and reductions over the lines between them.

    The cut and the result are written and read once each: four models of disk in a pause.
    """
    delta = sites.parameters * known.bits / 8
    seconds = sync_s(sites, known, sites.near)
    pause = reduction_s(sites) + 4 * FP32 * sites.parameters / known.disk
    fetch = sites.members * sites.parameters * known.bits / 8 / sites.near
    # Of `global_every` syncs one waits for a pause, and its version is one more coded update.
    cycle = sites.global_every * seconds + pause + fetch
    reduction_bytes = 2 * (sites.groups - 1) / sites.groups * FP32 * sites.parameters
    moved = 2 * delta * sites.members + (reduction_bytes + fetch * sites.near) / sites.global_every
    return Costs(delta, moved, seconds, pause, cycle / sites.global_every / LINK_SHARE)


def asynchronous(sites: Sites, known: Measured) -> Costs:
    """Clients that send by themselves, and a version of half as many deltas as there are sites.

    Each site fetches each version, so two come down for one delta that goes up.
    """
    delta = sites.parameters * known.bits / 8
    up = sites.sites * delta / sites.line
    stored = sites.sites * sites.parameters * known.stored_s
    seconds = max(2 * up, up + stored, 2 * sites.parameters * known.committed_s)
    return Costs(delta, 3 * delta * sites.sites, seconds, 0.0, seconds / LINK_SHARE)


def stalled(parameters: float, known: Measured, hosts: int) -> float:
    """Seconds in which a client that is spread over some hosts does not train, for each sync."""
    return parameters * known.snapshot_s / hosts


def groups_of(sites: int) -> int:
    """Groups of four sites, or two."""
    return max(2, sites // 4)
