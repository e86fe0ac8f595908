"""Fits global rounds in between one group's versions. Pure.

The group's member takes a cut of the newest version, and merges are held from then on; later it
brings global weights, which become a version. Both happen between two versions, never during a
merge.

    TakeCut          TakeGroupCut, after a version that is being made; merges are held
    ResumeMerges     the open round goes on
    Adopt            CommitGlobal, after a version that is being made; VersionCommitted follows, or
                     Done with a problem

These are effects of the member's machine. At the end of the run GroupEnds, of `run_end`, is an
event of it, and EndGroup follows.

Held, clients train and send deltas, which are acknowledged. The end of the run is not held.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from attrs import frozen

from fsl_async.roles.groups.effects import Adopt, ResumeMerges, TakeCut
from fsl_async.roles.groups.events import Decision
from fsl_async.roles.machine import Done, Effect, EndSession
from fsl_async.roles.sync.ps_state import Member, Phase

if TYPE_CHECKING:
    from fsl_async.roles.sync.rounds import RoundCoordinator


@frozen
class TakeGroupCut(Effect, tag="take_group_cut"):
    """Make the newest version durable as the cut of global round `round`."""

    round: int


@frozen
class CommitGlobal(Effect, tag="commit_global"):
    """Make `version` of decided global weights.

    Ends in VersionCommitted, or Done with a problem.
    """

    version: int
    decision: Decision
    counted: bool


class GroupHold:
    """Requests of the global round that wait for a version. It shares the coordinator's state."""

    def __init__(self, rounds: RoundCoordinator) -> None:
        self._rounds = rounds
        self._waiting: deque[TakeCut | Adopt] = deque()
        self._before: Phase | None = None
        """The phase before a version of global weights that is being made."""

    def asked(self, event: TakeCut | Adopt, now: float) -> list[Effect]:
        """Do what the global round asks, once no version is being made."""
        self._waiting.append(event)
        return self.serve(now)

    def serve(self, now: float) -> list[Effect]:
        """Do what waits, if no version is being made."""
        rounds, effects = self._rounds, list[Effect]()
        while self._waiting and rounds.phase not in {Phase.MERGING, Phase.DONE}:
            event = self._waiting.popleft()
            if isinstance(event, TakeCut):
                rounds.is_held = True
                effects.append(TakeGroupCut(event.round))
                continue
            self._before, rounds.phase = rounds.phase, Phase.MERGING
            number = rounds.deltas.version + 1
            effects.append(CommitGlobal(number, event.decision, event.counted))
        return effects

    def resumed(self, event: ResumeMerges, now: float) -> list[Effect]:
        """Let the open round go on."""
        self._rounds.is_held = False
        return self._rounds.evaluate(now)

    def failed(self, event: Done[CommitGlobal], now: float) -> list[Effect]:
        """Go on without the version of global weights; the member brings them again."""
        if self._before is None:
            return []
        self._rounds.phase, self._before = self._before, None
        return [*self._rounds.evaluate(now), *self.serve(now)]

    def committed(self) -> None:
        """Note that a version is durable."""
        self._before = None

    def began(self, members: dict[str, Member]) -> list[Effect]:
        """End sessions from before version 0: their models were compared with no run's model."""
        return [
            EndSession(name, "the run has a model now: attach again")
            for name, member in list(members.items())
            if member.attached or member.agrees
        ]
