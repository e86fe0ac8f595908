"""`sync.trigger = "turns"`: all train the same round from the same version, one after another by shard. Pure.

The split server sees one client's uploads after another's, as a computation in one process would make them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fsl_async.roles.sync.deltas import DeltaBook
from fsl_async.roles.sync.ps_state import Member
from fsl_async.roles.sync.round import Round, Verdict
from fsl_async.roles.sync.triggers.base import Opening, Trigger, done_before, in_order


class Turns(Trigger):
    """The next is called when the one before has answered, has gone, or has taken longer than the cap."""

    name: ClassVar[str] = "turns"

    def choose(self, here: Mapping[str, Member], deltas: DeltaBook) -> Opening:
        """Everybody, the first one now."""
        answered = done_before(here, deltas)
        order = [name for name in in_order(here) if name not in answered]
        now = (*answered, *order[:1])
        called = {name: here[name].incarnation for name in now}
        return Opening(called, tuple(order[1:]), answered)

    def too_long(self, open_: Round, reason: str, pending: int) -> Verdict:
        """Its turn is over."""
        return Verdict("pass", reason)
