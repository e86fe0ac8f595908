"""The ways to run rounds, by the name that `sync.trigger` gives them. To add one: a file beside these, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from fsl_async.roles.sync.triggers.base import Opening, Trigger
from fsl_async.roles.sync.triggers.clock import Clock
from fsl_async.roles.sync.triggers.rounds import Rounds
from fsl_async.roles.sync.triggers.sequential import Relay
from fsl_async.roles.sync.triggers.turns import Turns

__all__ = ["TRIGGERS", "Opening", "Trigger", "trigger_named"]

TRIGGERS: Mapping[str, type[Trigger]] = {
    trigger.name: trigger for trigger in (Clock, Rounds, Turns, Relay)
}


def trigger_named(name: str) -> Trigger:
    """A new trigger of that name; raises KeyError when there is none."""
    return TRIGGERS[name]()
