"""`sync.trigger = "relay"`: one client per version, by shard; what it made of the weights is what the next one starts from. Pure.

Only the one whose turn comes is told of a version, and it gets it whole: nobody else needs it, and it has missed those in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fsl_async.roles.sync.delta import Delta, DeltaKey
from fsl_async.roles.sync.deltas import DeltaBook
from fsl_async.roles.sync.ps_state import Member
from fsl_async.roles.sync.round import Round, Verdict
from fsl_async.roles.sync.triggers.base import Opening, Trigger, done_before, in_order


class Relay(Trigger):
    """It knows whose turn was the last one, also after a restart: whose delta the newest version was made of."""

    name: ClassVar[str] = "relay"
    tells_all: ClassVar[bool] = False

    def __init__(self) -> None:
        self._last = ""
        self._last_shard = -1

    def recovered(self, settled: Mapping[DeltaKey, str]) -> None:
        """The newest version was made by the one whose delta has the highest base."""
        merged = [key for key, outcome in settled.items() if outcome == "merged"]
        if merged:
            self._last = max(merged, key=lambda key: key.base).client

    def choose(self, here: Mapping[str, Member], deltas: DeltaBook) -> Opening:
        """The next one by shard; nobody when a delta from the newest version is here already."""
        if done_before(here, deltas) or deltas.pending:
            return Opening()
        order = in_order(here)
        if self._last in here:
            self._last_shard = here[self._last].shard
        later = [name for name in order if here[name].shard > self._last_shard]
        self._last = (later or order)[0]
        self._last_shard = here[self._last].shard
        return Opening({self._last: here[self._last].incarnation})

    def too_long(self, open_: Round, reason: str, pending: int) -> Verdict:
        """Its turn is over."""
        return Verdict("pass", reason)

    def objection(self, offer: Delta, open_: Round | None) -> tuple[str, str] | None:
        """A turn that is over has made nothing: the weights have gone on to another client."""
        name = offer.key.client
        if open_ is not None and open_.awaits(name, offer.key.incarnation):
            return None
        return "turn", f"it is not, or no longer, the turn of {name}"
