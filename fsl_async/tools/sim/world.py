"""What all processes of a simulation share, and the clock of each. One seed decides all faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import field, mutable

import fsl_transport as tp
from fsl_async.nodes.runtime import Journal
from fsl_async.observe.journal import TraceHash
from fsl_async.roles.machine import Effect, Event
from fsl_async.tools.sim.settings import HOUR_S, FaultProfile


class ProcessClock:
    """The clock of one process: after a kill, none of its planned calls happens.

    A process that is paused, as by SIGSTOP, makes up for its calls when it goes on.
    """

    __slots__ = ("_paused", "_scheduler", "alive", "time")

    def __init__(self, scheduler: tp.VirtualScheduler) -> None:
        self._scheduler = scheduler
        self._paused: list[tuple[Callable[..., object], tuple[object, ...]]] | None = None
        self.alive = True
        self.time = scheduler.time

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object
    ) -> tp.Cancellable:
        """Plan a call that happens only if this process is still alive."""
        return self._scheduler.call_at(when, self._run, callback, args)

    def _run(self, callback: Callable[..., object], args: tuple[object, ...]) -> None:
        if self._paused is not None:
            self._paused.append((callback, args))
        elif self.alive:
            callback(*args)

    def pause(self) -> None:
        """Stop the process; harmless if it is stopped."""
        if self._paused is None:
            self._paused = []

    def go_on(self) -> None:
        """Let it run; harmless if it does."""
        waiting, self._paused = self._paused or (), None
        for callback, args in waiting:
            self.call_at(self.time(), callback, *args)


class SilentJournal:
    """Keeps nothing."""

    def event(self, _event: Any, _now: float, _cause: int | None = None) -> int:
        """Keep nothing."""
        return 0

    effect = fact = event


class CheckedMachine:
    """A machine with a check after every event."""

    def __init__(self, machine: Any, check: Callable[[Event, list[Effect]], None]) -> None:
        self._machine = machine
        self._check = check
        self.next_deadline, self.check = machine.next_deadline, machine.check

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle an event, then check."""
        effects: list[Effect] = self._machine.handle(event, now)
        self._check(event, effects)
        return effects


@mutable
class Counts:
    """Counts of events and faults."""

    faults: int = 0
    relaunches: int = 0
    events: int = 0
    bytes_sent: int = 0
    kinds: dict[str, int] = field(factory=dict)
    called: int = 0
    """Clients called for a round, over all merged rounds."""
    answered: int = 0
    """Those of them whose delta is in their round."""

    @property
    def participation(self) -> float:
        """Deltas in a merged round over the clients called for it."""
        return self.answered / self.called if self.called else 0.0

    def fault(self, kind: str) -> None:
        """Count an injected fault."""
        self.faults += 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1


class World:
    """Time, network, journal, counts and violations of one simulation."""

    def __init__(
        self, profile: FaultProfile, seed: int, keep_journal: Journal | None = None
    ) -> None:
        self.scheduler = tp.VirtualScheduler()
        self.conditions = profile.conditions
        self.network = tp.MemNetwork(self.scheduler, seed, self.conditions)
        self.trace = TraceHash()
        self.journal: Journal = keep_journal or self.trace
        self.counts = Counts()
        self.violations: list[str] = []
        """The violations of invariants that were found."""

    def violated(self, text: str) -> None:
        """Record a violation of an invariant."""
        self.violations.append(f"at {self.scheduler.time():.3f} s: {text}")

    def at(self, delay_s: float, action: Callable[..., object], *args: object) -> None:
        """Plan a call, so many seconds from now."""
        self.scheduler.call_at(self.scheduler.time() + delay_s, action, *args)

    def figures(self) -> dict[str, Any]:
        """Return time, events, faults and violations, for a report."""
        counts, kinds = self.counts, dict(self.counts.kinds)
        for kind in ("dropped", "duplicated", "reordered"):
            if self.network.counts[kind]:
                kinds[f"message {kind}"] = self.network.counts[kind]
        return {
            "virtual_hours": self.scheduler.time() / HOUR_S,
            "events": counts.events,
            "faults": sum(kinds.values()),
            "faults_by_kind": kinds,
            "relaunches": counts.relaunches,
            "participation": round(counts.participation, 4),
            "invariant_violations": len(self.violations),
        }
