"""Simulates groups of clients whose parameter servers average among themselves.

Each group is a `Simulation` of its own, in one world with the others: one clock, one network, one
journal. The production code of groups (`nodes.ps.groups`, `roles.groups`) runs on top of it, with a
reduction that is replaced (`fake_reductions`). Parameter servers, the coordinator too, are killed,
stopped for a while, and parted from each other.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import fsl_transport as tp
from fsl_async.nodes.ps.groups import GroupsShell
from fsl_async.nodes.ps.shell import ParameterServerShell
from fsl_async.nodes.runtime import Journal
from fsl_async.roles.groups import effects as do
from fsl_async.roles.groups import events as ev
from fsl_async.roles.groups.coordinator import CoordinatorPhase
from fsl_async.roles.groups.member import MemberPhase
from fsl_async.roles.machine import Done, Effect, Event
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.ps import ParameterServerMachine
from fsl_async.store.store import Store
from fsl_async.tools.sim.fake_reductions import FakeHelper, FakeReductions
from fsl_async.tools.sim.groups_invariants import GroupsInvariants
from fsl_async.tools.sim.settings import SimulationSettings
from fsl_async.tools.sim.simulation import Run, Simulation
from fsl_async.tools.sim.training import Trainer
from fsl_async.tools.sim.world import ProcessClock, World

EVERY_VERSIONS = 6
"""Versions of the coordinator's group from one global round to the next."""


class GroupSimulation(Simulation):
    """One group in a world of several. It records for how long its merges were held."""

    def __init__(self, settings: SimulationSettings, name: str, among: GroupsSimulation) -> None:
        roster = ",".join(f"{one}=fsl://127.0.0.1:{7100}" for one in among.roster)
        config = settings.config(
            f"run.name={name}",
            f"groups.roster={roster}",
            f"groups.every={EVERY_VERSIONS}",
        )
        super().__init__(settings, world=among.world, prefix=f"{name}-", config=config)
        self.name, self.among = name, among
        self.invariants.violated = lambda text: self.world.violated(f"{name}: {text}")
        self.shell: GroupsShell | None = None
        self.held_s = 0.0
        """For how long merges were held, in all; by this process, `_held_at` since when."""
        self.longest_held_s = 0.0
        self._held_at: float | None = None

    def begin(self) -> None:
        """Launch all processes, and plan their faults."""
        super().begin()
        self._plan(self.profile.server_pause_every_s, self._pause_server)

    def server_of(self, name: str) -> str:
        """The name at which the parameter server of a group listens."""
        return f"{name}-{self.server.removeprefix(f'{self.name}-')}"

    # --- the process of the parameter server ---

    def _prepare(
        self, clock: ProcessClock, shell: ParameterServerShell, store: Store, number: int
    ) -> None:
        dialer = None
        if not self.config.leads:
            link = self.network.dialer(self.name, self.server_of(self.config.groups.coordinator))
            dialer = self._dials(link, clock, self.name, number, role="group")
        helper = functools.partial(
            FakeHelper, self.among.reductions, self.name, clock, self._files, self._server_is_dead
        )
        self.shell = shell.groups = GroupsShell(self.config, shell.context, dialer, helper)
        self._check_events(self.shell.node, self._after_groups)

    def _after_server(
        self, machine: ParameterServerMachine, event: Event, effects: list[Effect]
    ) -> None:
        super()._after_server(machine, event, effects)
        if machine.rounds.is_held and self._held_at is None:
            self._held_at = self.scheduler.time()
        elif not machine.rounds.is_held:
            self._goes_on()

    def _goes_on(self) -> None:
        """Record that merges go on, in this process or in the next one."""
        if self._held_at is not None:
            seconds, self._held_at = self.scheduler.time() - self._held_at, None
            self.held_s += seconds
            self.longest_held_s = max(self.longest_held_s, seconds)

    def _after_client(
        self, machine: ClientMachine, training: Trainer, event: Event, effects: list[Effect]
    ) -> None:
        super()._after_client(machine, training, event, effects)
        if self._held_at is not None and training.is_held and not self.among.is_ending:
            self.invariants.violated(f"{machine.name} waits in a step while merges are held")

    def _after_groups(self, event: Event, effects: list[Effect]) -> None:
        rounds, happened = self.among.global_rounds, self.among.happened
        # A process that died before it knew of its cut finds it on disk.
        if isinstance(event, ev.CutTaken | ev.GroupsRecovered) and event.cut is not None:
            rounds.offers(self.name, event.cut)
        if isinstance(event, Done) and isinstance(event.of, do.KeepDecision) and not event.problem:
            rounds.decided(event.of.attempt)
        elif isinstance(event, ev.GroupsRecovered) and event.decided is not None:
            rounds.decided(event.decided.attempt)
        elif isinstance(event, ev.Adopted) and event.decision.round:
            happened["adopted"] += 1
            happened["late"] += event.gained
        held = event.decision if isinstance(event, ev.Adopted) else None
        if isinstance(event, ev.GroupsRecovered):
            held = event.adopted
        if self.config.leads and held is not None and not held.round:
            rounds.begun(self.name, held.digest)
        for effect in effects:
            happened["attempts"] += isinstance(effect, do.KeepAttempt)
            if isinstance(effect, do.StartReduction):
                rounds.reduces(effect.view)
            elif isinstance(effect, do.KeepDecision):
                rounds.decides(effect)

    @property
    def is_settled(self) -> bool:
        """Whether no global round is under way here."""
        shell = self.shell
        if shell is None or self.server not in self.processes:
            return False
        machine, coordinator = shell.machine, shell.machine.coordinator
        is_idle = coordinator is None or (
            coordinator.phase is CoordinatorPhase.IDLE and not coordinator.is_due
        )
        return is_idle and machine.phase is MemberPhase.FREE and machine.cut is None

    # --- faults ---

    def _kill(self, name: str) -> bool:
        if name == self.server and name in self.processes:
            assert self.shell is not None
            self.shell.process.kill()
            self.network.kill(self.name)
            self._goes_on()
        return super()._kill(name)

    def _links(self) -> list[tp.MemLink]:
        names = (self.server, self.name)
        return [link for link in map(self.network.link, names) if link is not None]

    def _pause_server(self) -> None:
        process = self.processes.get(self.server)
        if process is not None:
            self.counts.fault("server stopped for a while")
            process.clock.pause()
            links = self._links()
            for link in links:
                link.pause()
            seconds = self._chance.uniform(*self.profile.server_pause_s)
            self._at(seconds, self._go_on, process.clock, links)

    def _go_on(self, clock: ProcessClock, links: list[tp.MemLink]) -> None:
        if clock.alive:
            for link in links:
                link.go_on()
            clock.go_on()


class GroupsSimulation(Run):
    """Several groups, each with these settings, and their global rounds."""

    kind = "groups"
    groups: Sequence[GroupSimulation]

    def __init__(
        self, settings: SimulationSettings, *, keep_journal: Journal | None = None
    ) -> None:
        super().__init__(settings, World(settings.profile, settings.seed, keep_journal), "ring")
        self.happened: Counter[str] = Counter()
        """Attempts, and adoptions of global weights; "late": without the group's cut, or after it
        merged on.
        """
        self.reductions = FakeReductions(self._chance, self.profile)
        self.is_ending = False
        """Whether clients wait for the end of the run."""
        self.roster = tuple(f"g{number:03d}" for number in range(settings.groups))
        self.groups = [GroupSimulation(settings, name, self) for name in self.roster]
        lineages = {group.name: group.invariants.lineage for group in self.groups}
        codec = self.groups[0].config.codec.spec_global
        self.global_rounds = GroupsInvariants(self.world.violated, lineages, codec)
        for name, lineage in lineages.items():
            lineage.adopts = functools.partial(self.global_rounds.adopts, name)

    def begin(self) -> None:
        """See `Run.begin`."""
        super().begin()
        self._plan(self.profile.group_cut_every_s, self._cut)

    def _end(self) -> None:
        """End global rounds, then the groups: no new faults before."""
        self._calm = self.reductions.is_calm = True
        super()._end()
        if not self.is_ending and not self.violations:
            self.world.violated("global rounds did not end")
        if not self.violations:
            self.global_rounds.ended()

    def _is_settled(self) -> bool:
        """Whether no global round is under way, or was not when this was asked before."""
        if not self.is_ending and all(group.is_settled for group in self.groups):
            self.global_rounds.settled()
            self.is_ending = True
        return self.is_ending

    # --- partitions between parameter servers ---

    def _cut(self) -> None:
        """Part one parameter server from another one, or from all others."""
        self.counts.fault("partition between parameter servers")
        one, *others = self._chance.sample(self.roster, len(self.roster))
        if self._chance.random() < 0.5:
            others = others[:1]
        pairs = [frozenset((one, other)) for other in others]
        self.reductions.parted.update(pairs)
        for pair in pairs:
            self._link(pair, cut=True)
        self._at(self._chance.uniform(*self.profile.partition_s), self._heal, pairs)

    def _heal(self, pairs: list[frozenset[str]]) -> None:
        self.reductions.parted.difference_update(pairs)
        for pair in pairs:
            self._link(pair, cut=False)

    def _link(self, pair: frozenset[str], *, cut: bool) -> None:
        """Cut or heal the session of a member with the coordinator, if that is the pair."""
        first = self.groups[0]
        if first.name in pair:
            (member,) = pair - {first.name}
            act = self.network.cut if cut else self.network.heal
            act(member, first.server)

    # --- the result ---

    def facts(self) -> dict[str, Any]:
        """Return the figures of global rounds."""
        rounds, happened = self.global_rounds, self.happened
        decided = len(rounds.decisions)
        contributors = sum(len(one.contributors) for one in rounds.decisions)
        hours = self.scheduler.time() / 3600.0
        held_s = sum(group.held_s for group in self.groups)
        return {
            "groups": len(self.groups),
            "global_rounds": decided,
            "attempts": happened["attempts"],
            "attempts_failed": happened["attempts"] - decided,
            "reductions_mixed": self.reductions.mixed,
            "members_per_round": round(contributors / decided, 2) if decided else 0.0,
            "adopted": happened["adopted"],
            "adopted_late": happened["late"],
            "held_s_per_group_and_round": round(held_s / (len(self.groups) * max(1, decided)), 1),
            "longest_held_s": round(max(group.longest_held_s for group in self.groups), 1),
            "share_of_time_held": round(held_s / 3600.0 / (len(self.groups) * hours), 4),
            "tokens_in_global_weights": sum(
                end - begin for one in rounds.decisions for begin, end in one.contributors.values()
            ),
        }
