"""A parameter server in a roster: its member, and the coordinator if it is the first. Pure.

The coordinator's own group is a member like the others: their messages to each other stay in here.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from fsl_async.roles.groups import events as ev
from fsl_async.roles.groups.coordinator import GroupsCoordinator
from fsl_async.roles.groups.member import COORDINATOR, GroupMember
from fsl_async.roles.machine import Effect, Event, Received, Send, TimerFired

if TYPE_CHECKING:
    from fsl_async.config.settings import Config


class GroupsMachine:
    """`handle` and `next_deadline` are the whole interface."""

    def __init__(self, config: Config) -> None:
        self.name = config.run.name
        self.member = GroupMember(config)
        self.coordinator = GroupsCoordinator(config) if config.leads else None

    @property
    def round(self) -> int:
        """The round of the global weights that the group has adopted; -1: none."""
        return self.member.round

    def next_deadline(self) -> float | None:
        """When `handle(TimerFired())` is due, in seconds of the caller's clock."""
        halves = [self.member, self.coordinator]
        times = [one.deadlines.next() for one in halves if one is not None]
        return min((time for time in times if time is not None), default=None)

    def check(self, event: Received[Any]) -> None:
        """Raise MessageError for a message that its peer may not send."""
        (self.coordinator or self.member).check(event)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event and return effects in the order in which they are to be carried out."""
        if isinstance(event, TimerFired):
            return self._timers(now)
        if isinstance(event, Received):
            return self._deliver((self.coordinator or self.member).handle(event, now), now)
        effects: list[Effect] = []
        if self.coordinator is not None:
            effects += self.coordinator.handle(event, now)
        if not (isinstance(event, ev.PeerHere | ev.PeerGone) and self.coordinator is not None):
            effects += self.member.handle(event, now)
        if self.coordinator is not None and isinstance(event, ev.GroupsRecovered):
            effects += self.member.handle(ev.PeerHere(COORDINATOR), now)
        if (
            self.coordinator is not None
            and isinstance(event, ev.Adopted)
            and not event.decision.round
        ):
            effects = [*self.coordinator.begun(event.decision, now), *effects]
        return self._deliver(effects, now)

    def _timers(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for half in (self.coordinator, self.member):
            for name in half.deadlines.pop_due(now) if half is not None else ():
                effects += half.timer(name, now)  # type: ignore[union-attr]
        return self._deliver(effects, now)

    def _deliver(self, effects: list[Effect], now: float) -> list[Effect]:
        """Give each half the messages of the other; return what is left, in order."""
        if self.coordinator is None:
            return effects
        left: list[Effect] = []
        waiting = deque(effects)
        while waiting:
            effect = waiting.popleft()
            if isinstance(effect, Send) and effect.peer == COORDINATOR:
                more = self.coordinator.handle(Received(self.name, effect.message), now)
            elif isinstance(effect, Send) and effect.peer == self.name:
                more = self.member.handle(Received(COORDINATOR, effect.message), now)
            else:
                left.append(effect)
                continue
            waiting.extendleft(reversed(more))
        return left
