"""The ways to run rounds, by their names in `sync.trigger`. Pure.

    trigger     a round opens (schedule)  it calls (selection)            complete (completion)
    clock       every `every_s`           all at once                     quorum and grace window
    rounds      as soon as there is a     all at once                     all have answered
                version
    turns       the same                  all, one by one in shard order  the last one has answered
    sequential  the same                  one, the next by shard          it has answered
    buffer      as soon as there is a     none: clients send by           K deltas are pending, or
                version                   themselves                      one is and a time is over

With `buffer` only the last round of a run calls clients, all at once, and waits for them. With
`clock`, a client is called to send its progress (`messages.Call`): pretraining. With the
others it is called to train a round (`messages.Turn`), from the version that the round starts from
to the round's end, where it waits for the resulting version: split learning.

To add one, add a file with the new part, and an entry in TRIGGERS.
"""

from __future__ import annotations

from collections.abc import Callable

from fsl_async.roles.sync.ps_state import ParameterServerRules
from fsl_async.roles.sync.triggers.completion import AllAnswered, Buffered, QuorumAndGrace, Verdict
from fsl_async.roles.sync.triggers.schedule import BackToBack, Continuous, Periodic
from fsl_async.roles.sync.triggers.selection import Everyone, InTurns, OneByOne, Opening
from fsl_async.roles.sync.triggers.trigger import Trigger

__all__ = ["TRIGGERS", "Opening", "Trigger", "Verdict", "trigger_of"]


def _clock(rules: ParameterServerRules) -> Trigger:
    schedule = Periodic(rules.every_s, rules.drain_s)
    completion = QuorumAndGrace(rules.round)
    return Trigger(schedule, Everyone(skips_done=False), completion, trains=False)


def _rounds(rules: ParameterServerRules) -> Trigger:
    schedule = BackToBack(rules.round_cap_s, rules.drain_s)
    completion = AllAnswered(passes=False)
    return Trigger(schedule, Everyone(skips_done=True), completion, trains=True)


def _turns(rules: ParameterServerRules) -> Trigger:
    schedule = BackToBack(rules.round_cap_s, rules.drain_s)
    return Trigger(schedule, InTurns(), AllAnswered(passes=True), trains=True)


def _sequential(rules: ParameterServerRules) -> Trigger:
    schedule = BackToBack(rules.round_cap_s, rules.drain_s)
    return Trigger(schedule, OneByOne(), AllAnswered(passes=True), trains=True)


def _buffer(rules: ParameterServerRules) -> Trigger:
    schedule = Continuous(rules.every_s, rules.least_s, rules.drain_s)
    completion = Buffered(rules.buffer, rules.every_s)
    selection = Everyone(skips_done=False)
    return Trigger(schedule, selection, completion, trains=False, clients_lead=True)


TRIGGERS: dict[str, Callable[[ParameterServerRules], Trigger]] = {
    "clock": _clock,
    "rounds": _rounds,
    "turns": _turns,
    "sequential": _sequential,
    "buffer": _buffer,
}


def trigger_of(rules: ParameterServerRules) -> Trigger:
    """A new trigger of the name in the rules; raises KeyError when there is none."""
    return TRIGGERS[rules.trigger](rules)
