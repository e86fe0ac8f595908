"""Fits global rounds in between one group's versions. Pure.

In a global round the parameter servers of several groups average what their groups gained. The
group's member takes a cut of the newest version, and merges are held from then on; later it brings
global weights, which become a version. Both happen between two versions, never during a merge.

    TakeCut          TakeCut, after a version that is being made; merges are held
    ResumeMerges     the open round goes on
    Adopt            Adopt, after a version that is being made; VersionCommitted or AdoptFailed
                     follows

The left column has effects of the member's machine, which are events here. At the end of the run
GroupEnds, an effect of `run_end`, is an event of the member, and EndGroup follows.

While merges are held, clients train, and their deltas are acknowledged. The end of the run does not
wait for merges that are held.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from fsl_async.roles.groups.effects import Adopt, ResumeMerges, TakeCut
from fsl_async.roles.machine import Effect
from fsl_async.roles.sync.ps_state import Phase

if TYPE_CHECKING:
    from fsl_async.roles.groups.events import AdoptFailed
    from fsl_async.roles.sync.rounds import RoundCoordinator


class GroupHold:
    """Requests of the global round that wait for a version. It shares the coordinator's state."""

    def __init__(self, rounds: RoundCoordinator) -> None:
        self._rounds = rounds
        self._waiting: deque[TakeCut | Adopt] = deque()

    def asked(self, event: TakeCut | Adopt, now: float) -> list[Effect]:
        """Do what the global round asks, once no version is being made."""
        self._waiting.append(event)
        return self.serve()

    def serve(self) -> list[Effect]:
        """Do what waits, if no version is being made."""
        rounds, effects = self._rounds, list[Effect]()
        while self._waiting and rounds.phase not in {Phase.MERGING, Phase.DONE}:
            event = self._waiting.popleft()
            if isinstance(event, TakeCut):
                rounds.is_held = True
            else:
                rounds.phase = Phase.MERGING
            effects.append(event)
        return effects

    def resumed(self, event: ResumeMerges, now: float) -> list[Effect]:
        """Let the open round go on."""
        self._rounds.is_held = False
        return self._rounds.evaluate(now)

    def failed(self, event: AdoptFailed, now: float) -> list[Effect]:
        """Go on without the version of global weights; the member brings them again."""
        rounds = self._rounds
        if rounds.round is not None:
            rounds.phase = Phase.COLLECTING
        else:
            rounds.phase = Phase.READY if rounds.deltas.version >= 0 else Phase.EMPTY
        return [*rounds.evaluate(now), *self.serve()]
