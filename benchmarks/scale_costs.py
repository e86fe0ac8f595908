"""Costs of large models and many sites: prints the tables of docs/COSTS.md.

    python benchmarks/scale_costs.py            tables from the formulas below
    python benchmarks/scale_costs.py --check    two of their rows by the simulator, without faults

The check plays the production code. In the flat row a small model travels at rates that make a
delta and a version take as long as in the row; a line that several streams share is divided evenly.
Lines of groups have no limit. Work of processor and disk is not simulated, and left out of the
formula there.

docs/COSTS.md has the formulas in words. P is the number of parameters; rates are bytes a second.
"""

import math
import sys
from statistics import median
from typing import Any

import numpy as np
from attrs import evolve, frozen

from fsl_async.roles.machine import Send
from fsl_async.roles.sync.events import Rebased
from fsl_async.roles.sync.messages import Call
from fsl_async.store.model.manifest import Manifest
from fsl_async.tools.sim import fake_reductions
from fsl_async.tools.sim.groups_simulation import GroupsSimulation
from fsl_async.tools.sim.invariants import Lineage
from fsl_async.tools.sim.settings import SimulationSettings
from fsl_async.tools.sim.simulation import Simulation
from fsl_async.tools.sim.training import VirtualTraining

FP32 = 4
"""Bytes of a value."""
LINK_SHARE = 0.5
"""A sync may take this share of a period; the rest is for late deltas and retries."""


@frozen
class Measured:
    """Constants from docs/BENCHMARKS.md, measured on two cores; a larger machine does better.

    bits: coded, of a parameter, each way. stored_s, committed_s, snapshot_s: seconds for a value
    (an uploaded one; one of the model; one of a client that copies and rebases). disk: bytes a
    second of a checkpoint. memory, lean_memory: of the parameter server, fp32 models.
    """

    bits: float = 2.19
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
    """Costs of one sync. `pause_s`: a global round holds a group's merges so long; 0: no groups.
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


# --- the tables ---

SIZES = (1e9, 7e9, 70e9)
COUNTS = (4, 16, 64)
GBITS = (0.1, 1.0, 10.0)
HOSTS = {1e9: 1, 7e9: 2, 70e9: 16}
USUAL_S = 600.0
DAY_S = 86_400.0
KNOWN = Measured()
VALUES = 65_536
FRAME = 218_100
"""Values of the model in the check, and the bytes of a delta or an update: fp32, entropy-coded."""


def seconds(value: float) -> str:
    """Short text for a duration."""
    if value < 100:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.0f} h" if value < 2 * DAY_S else f"{value / DAY_S:.0f} d"


def table() -> None:
    """Print both tables."""
    print("| P | a delta | PS memory, lean | disk in ten minutes | client stalled |")
    print("|---|---:|---:|---:|---:|")
    for size in SIZES:
        written = 3 * FP32 * size / USUAL_S / 1e6
        hosts = f"{HOSTS[size]} host" + "s" * (HOSTS[size] > 1)
        stop = stalled(size, KNOWN, HOSTS[size])
        print(
            f"| {size / 1e9:.0f} B | {size * KNOWN.bits / 8e9:.2g} GB"
            f" | {KNOWN.memory * FP32 * size / 1e9:.0f} GB,"
            f" {KNOWN.lean_memory * FP32 * size / 1e9:.0f} GB"
            f" | {written:.0f} MB/s | {stop:.1f} s ({hosts}),"
            f" {stop / USUAL_S:.1%} |"
        )
    print()
    print("| P | sites | Gbit/s | flat: sync | PS moves | groups | sync | pause | async: period |"
          " shortest period: flat, groups | choose |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    for size in SIZES:
        for count in COUNTS:
            for gbits in GBITS:
                print(row(size, count, gbits))


def row(size: float, count: int, gbits: float) -> str:
    """One row of the second table."""
    sites = Sites(size, count, gbits * 1e9 / 8)
    some = evolve(sites, groups=groups_of(count))
    one, several, own = flat(sites, KNOWN), grouped(some, KNOWN), asynchronous(sites, KNOWN)
    return (
        f"| {size / 1e9:.0f} B | {count} | {gbits:g} | {seconds(one.sync_s)}"
        f" | {one.server_bytes / 1e9:.0f} GB | {some.groups} x {some.members}"
        f" | {seconds(several.sync_s)} | {seconds(several.pause_s)} | {seconds(own.period_s)}"
        f" | {seconds(one.period_s)}, {seconds(several.period_s)} | {choice(one, several)} |"
    )


def choice(one: Costs, several: Costs) -> str:
    """What to use: the simplest that keeps ten minutes, else the one with the shorter period."""
    if one.period_s <= USUAL_S:
        return "flat, 10 min"
    if several.period_s >= one.period_s:
        return f"flat, {seconds(one.period_s)}"
    return f"groups, {seconds(max(USUAL_S, several.period_s))}"


# --- the check ---


class Times:
    """A journal that records when a call went out and when a client held a version."""

    def __init__(self) -> None:
        self.calls: dict[int, float] = {}
        self.held: dict[int, list[float]] = {}

    def event(self, item: Any, now: float, cause: int | None = None) -> int:
        """Take an event."""
        if isinstance(item, Rebased):
            self.held.setdefault(item.version, []).append(now)
        return 0

    def effect(self, item: Any, now: float, cause: int | None = None) -> int:
        """Take an effect."""
        if isinstance(item, Send) and isinstance(item.message, Call):
            self.calls.setdefault(item.message.round, now)
        return 0

    def fact(self, item: Any, now: float, cause: int | None = None) -> int:
        """Take a fact."""
        return 0


class LargeSimulation(Simulation):
    """A simulation of a model of VALUES weights, beside whose frames headers are small."""

    def __init__(self, settings: SimulationSettings, times: Times) -> None:
        config = settings.config("codec.up=fp32", "codec.down=fp32")
        super().__init__(settings, keep_journal=times, config=config)
        self.manifest = Manifest.from_shapes([("weights", (VALUES,))])
        self.invariants.lineage = Lineage(config.codec.spec_down, self.manifest)

    def _training(self, *given: Any) -> VirtualTraining:
        """Return training whose steps change all weights: equal ones would be coded in less."""
        made = super()._training(*given)
        assert isinstance(made, VirtualTraining)
        step = made.unit * np.random.default_rng(0).normal(size=VALUES).astype(np.float32)
        made.work = lambda begin, end: (end - begin) * step  # type: ignore[method-assign]
        return made


def check() -> None:
    """Print the check."""
    no_work = evolve(KNOWN, stored_s=0.0, committed_s=0.0)
    sites = Sites(1e9, 4, 1e9 / 8)
    times = Times()
    settings = SimulationSettings(clients=sites.members, hours=3.0, faults="none")
    run = LargeSimulation(settings, times)
    rate = sites.line / sites.members * FRAME / (sites.parameters * KNOWN.bits / 8)
    for name in run.names:
        slow = evolve(run.world.conditions, bytes_per_s=rate)
        run.network.set_conditions(name, run.server, slow)
    run.run()
    assert not run.violations, run.violations
    found = [
        max(held) - times.calls[version - 1]
        for version, held in times.held.items()
        if version - 1 in times.calls and len(held) == len(run.names)
    ]
    report("flat, 1 B, 4 sites, 1 Gbit/s: sync", sync_s(sites, no_work, sites.line), median(found))

    sites = Sites(1e9, 16, 1e9 / 8, groups=4)
    fake_reductions.REDUCTION_S = (reduction_s(sites), reduction_s(sites))
    several = GroupsSimulation(evolve(settings, groups=4))
    several.run()
    assert not several.violations, several.violations
    facts = several.facts()
    held = facts["held_s_per_group_and_round"]
    report("groups, 1 B, 4 x 4, 1 Gbit/s: pause without disks", reduction_s(sites), held)
    print(f"  {facts}")


def report(what: str, formula: float, simulated: float) -> None:
    """Print a formula beside a simulated figure."""
    print(f"{what}: formula {formula:.1f} s, simulated {simulated:.1f} s,"
          f" {simulated - formula:+.1f} s ({simulated / formula - 1:+.0%})")  # fmt: skip


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        check()
    else:
        table()
