"""`sync.trigger = "rounds"`: all train the same round at once, and the next begins when it is merged. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fsl_async.roles.sync.deltas import DeltaBook
from fsl_async.roles.sync.ps_state import Member
from fsl_async.roles.sync.triggers.base import Opening, Trigger, done_before


class Rounds(Trigger):
    """Who comes later, or comes back as a new process, is called in the next round."""

    name: ClassVar[str] = "rounds"
    ordered: ClassVar[bool] = False

    def choose(self, here: Mapping[str, Member], deltas: DeltaBook) -> Opening:
        """Everybody, at once."""
        called = {name: member.incarnation for name, member in here.items()}
        return Opening(called, answered=done_before(here, deltas))
