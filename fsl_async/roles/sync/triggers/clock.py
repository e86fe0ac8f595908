"""`sync.trigger = "clock"`: pretraining. Clients train all the time and are called by the clock to send what they have. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fsl_async.roles.messages import Message
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.deltas import DeltaBook
from fsl_async.roles.sync.ps_state import Member, ParameterServerRules
from fsl_async.roles.sync.round import ArrivalHistory, Round, Verdict
from fsl_async.roles.sync.triggers.base import Opening, Trigger


class Clock(Trigger):
    """A call every `every_s`; a round merges by quorum and grace."""

    name: ClassVar[str] = "clock"
    trains: ClassVar[bool] = False
    last_round: ClassVar[bool] = True
    ordered: ClassVar[bool] = False

    def call(self, number: int, *, last: bool) -> Message:
        """Send what you have."""
        return msg.Call(number, last)

    def after_version(
        self, rules: ParameterServerRules, called_at: float | None, now: float
    ) -> float:
        """By the clock; a round that overran leaves the clients a moment to move onto the new version first."""
        if called_at is None:
            return now + rules.every_s
        return max(called_at + rules.every_s, now + 0.1 * rules.every_s)

    def after_close(self, rules: ParameterServerRules, called_at: float, now: float) -> float:
        """By the clock."""
        return max(called_at + rules.every_s, now)

    def after_start(self, rules: ParameterServerRules, since_version_s: float, now: float) -> float:
        """A period after the last version, as without the restart: a server that is killed more often must still make some.

        The clients get a moment to come back, and a clock that was set to nonsense costs a period at the most.
        """
        left_s = max(rules.every_s - since_version_s, rules.drain_s)
        return now + min(left_s, rules.every_s)

    def when_short(self, rules: ParameterServerRules, now: float) -> float | None:
        """At the next beat of the clock."""
        return now + rules.every_s

    def cap_s(self, rules: ParameterServerRules) -> float:
        """A round is over before the next one."""
        return 0.95 * rules.every_s

    def again_s(self, rules: ParameterServerRules) -> float:
        """Once in a period."""
        return rules.every_s

    def choose(self, here: Mapping[str, Member], deltas: DeltaBook) -> Opening:
        """Everybody."""
        return Opening({name: member.incarnation for name, member in here.items()})

    def verdict(
        self,
        open_: Round,
        rules: ParameterServerRules,
        history: ArrivalHistory,
        now: float,
        pending: int,
    ) -> Verdict:
        """Quorum, then grace."""
        return open_.verdict(rules.round, history, now, pending=pending)
