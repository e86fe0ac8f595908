"""A trigger: when a round opens, which clients it calls, and when it is complete. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from fsl_async.roles.messages import Message
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.deltas import DeltaBook
from fsl_async.roles.sync.ps_state import Member
from fsl_async.roles.sync.triggers.completion import Completion
from fsl_async.roles.sync.triggers.schedule import Schedule
from fsl_async.roles.sync.triggers.selection import Opening, Selection


@frozen
class Trigger:
    """One way to run rounds. Each run has its own: a selection may have state.

    trains: a call is a Turn: train this round, and wait for the resulting version. Else it is a
    Call: send the progress since the last one; the end of the run then calls one more round.
    clients_lead: clients send by themselves (`roles.sync.pacing`), and only the last round of a run
    calls them.
    """

    schedule: Schedule
    selection: Selection
    completion: Completion
    trains: bool
    clients_lead: bool = False

    def opening(self, here: Mapping[str, Member], deltas: DeltaBook, *, last: bool) -> Opening:
        """The clients of the next round. last: after it nothing is merged."""
        if self.clients_lead and not last:
            return Opening()
        return self.selection.choose(here, deltas)

    def call(self, number: int, *, last: bool) -> Message:
        """The message to a client that is called."""
        return msg.Turn(number, last) if self.trains else msg.Call(number, last)
