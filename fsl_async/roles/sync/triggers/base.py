"""When a round opens, who is called in it, and when it is over: the interface of `sync.trigger`, and what all but the clock share. Pure.

    trigger   a round opens                    called in it                              over when
    clock     every `every_s`                  all who are here, at once                 quorum and grace, see `roles.round`
    rounds    as soon as the version is there  all who are here, at once                 all called who are still here have answered
    turns     the same                         all who are here, one after another,      the last one has answered
                                               in the order of their shards
    relay     the same                         one, the next in the order of the shards  it has answered

By the clock, a client is called to send what it has (`messages.Call`). With the others it is called to train a round (`messages.Turn`): from
the version that the round starts from, to the round's end, where it waits for what comes of it. A called client that has not answered
`round_cap_s` after its call is waited for no longer; of a round of which nothing has come, all are.

Whose delta of the open round is durable already (its server died before it was merged) is not called again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from fsl_async.roles.messages import Message
from fsl_async.roles.phrasing import share_of
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import Delta, DeltaKey
from fsl_async.roles.sync.deltas import DeltaBook
from fsl_async.roles.sync.ps_state import Member, ParameterServerRules
from fsl_async.roles.sync.round import ArrivalHistory, Round, Verdict

PAUSE_S = 1.0
"""After a round without a version, so that clients with nothing to send are not called in a loop."""


@frozen
class Opening:
    """Who takes part in a round."""

    called: dict[str, int] = field(factory=dict)  # name -> incarnation; those called at once
    waiting: tuple[str, ...] = ()  # their turns come later, in this order
    answered: tuple[str, ...] = ()  # of the called: has answered already


class Trigger(ABC):
    """One way to run rounds. The methods here are those of a round that is trained from beginning to end."""

    name: ClassVar[str]
    trains: ClassVar[bool] = True
    """Whether a call is a Turn: train this round, and wait for what comes of it. Else: send what you have."""
    last_round: ClassVar[bool] = False
    """Whether the end of the run calls for one more round, because clients train between rounds."""
    tells_all: ClassVar[bool] = True
    """Whether a new version is announced to all at once, and led to update by update."""
    ordered: ClassVar[bool] = True
    """Whether it must know who trains which shard."""

    def call(self, number: int, *, last: bool) -> Message:
        """What is said to a client that is called."""
        return msg.Turn(number, last)

    def after_version(
        self, rules: ParameterServerRules, called_at: float | None, now: float
    ) -> float:
        """When to open a round after a version is durable; `called_at` is when the last one was, None for version 0."""
        return now

    def after_close(self, rules: ParameterServerRules, called_at: float, now: float) -> float:
        """When to open a round after one that made no version."""
        return now + PAUSE_S

    def after_start(self, rules: ParameterServerRules, since_version_s: float, now: float) -> float:
        """When to open a round in a server that goes on with a run: its clients get a moment to come back."""
        return now + rules.drain_s

    def when_short(self, rules: ParameterServerRules, now: float) -> float | None:
        """When to look again while too few clients are here; None: as soon as another one is."""
        return None

    def cap_s(self, rules: ParameterServerRules) -> float:
        """How long an answer is waited for."""
        return rules.round_cap_s

    def again_s(self, rules: ParameterServerRules) -> float:
        """How long a round that is open beyond its cap waits before it is looked at again."""
        return rules.round_cap_s

    @abstractmethod
    def choose(self, here: Mapping[str, Member], deltas: DeltaBook) -> Opening:
        """Who takes part, of those who are here and hold a version."""

    def verdict(
        self,
        open_: Round,
        rules: ParameterServerRules,
        history: ArrivalHistory,
        now: float,
        pending: int,
    ) -> Verdict:
        """What to do with the open round: as `Round.verdict`, and "next": call the next one."""
        missing = open_.missing()
        sent = f"{share_of(open_.contributors(), open_.called)} sent a delta"
        if not missing:
            if open_.waiting:
                return Verdict("next", sent)
            return Verdict("merge", sent) if pending else Verdict("close", sent)
        if now < open_.called_at + open_.cap_s:
            return Verdict("wait", sent)
        return self.too_long(open_, f"{sent}, none from {open_.named_missing()} in time", pending)

    def too_long(self, open_: Round, reason: str, pending: int) -> Verdict:
        """What to do when the cap is over and somebody is missing."""
        return Verdict("merge", reason) if pending else Verdict("wait", reason)

    def objection(self, offer: Delta, open_: Round | None) -> tuple[str, str] | None:
        """Why a delta does not fit this way of running rounds."""
        return None

    def recovered(  # noqa: B027 - only one of them remembers anything
        self, settled: Mapping[DeltaKey, str]
    ) -> None:
        """A server goes on with a run in which these deltas were merged."""


def in_order(here: Mapping[str, Member]) -> list[str]:
    """The names by shard; those whose shard is not known come last."""
    return sorted(here, key=lambda name: (here[name].shard < 0, here[name].shard, name))


def done_before(here: Mapping[str, Member], deltas: DeltaBook) -> tuple[str, ...]:
    """Those whose delta from the newest version waits to be merged, in this life or from one before."""
    durable = {key.client for key in deltas.pending if key.base == deltas.version}
    return tuple(name for name in in_order(here) if name in durable)
