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
from typing import TYPE_CHECKING

from fsl_async.roles.sync.triggers.completion import AllAnswered, Buffered, QuorumAndGrace, Verdict
from fsl_async.roles.sync.triggers.schedule import BackToBack, Continuous, Periodic
from fsl_async.roles.sync.triggers.selection import Everyone, InTurns, OneByOne, Opening
from fsl_async.roles.sync.triggers.trigger import Trigger

if TYPE_CHECKING:
    from fsl_async.config.settings import Config

__all__ = ["TRIGGERS", "Opening", "Trigger", "Verdict", "trigger_of"]


def _clock(config: Config) -> Trigger:
    schedule = Periodic(config.sync.every_s, config.session.drain_s)
    completion = QuorumAndGrace(config.sync)
    return Trigger(schedule, Everyone(skips_done=False), completion, trains=False)


def _rounds(config: Config) -> Trigger:
    completion = AllAnswered(passes=False)
    return Trigger(_back_to_back(config), Everyone(skips_done=True), completion, trains=True)


def _turns(config: Config) -> Trigger:
    return Trigger(_back_to_back(config), InTurns(), AllAnswered(passes=True), trains=True)


def _sequential(config: Config) -> Trigger:
    return Trigger(_back_to_back(config), OneByOne(), AllAnswered(passes=True), trains=True)


def _back_to_back(config: Config) -> BackToBack:
    return BackToBack(config.sync.round_cap_s, config.session.drain_s)


def _buffer(config: Config) -> Trigger:
    sync = config.sync
    schedule = Continuous(sync.every_s, sync.version_gap_s, config.session.drain_s)
    completion = Buffered(sync.buffer_size, sync.every_s)
    selection = Everyone(skips_done=False)
    return Trigger(schedule, selection, completion, trains=False, clients_lead=True)


TRIGGERS: dict[str, Callable[[Config], Trigger]] = {
    "clock": _clock,
    "rounds": _rounds,
    "turns": _turns,
    "sequential": _sequential,
    "buffer": _buffer,
}


def trigger_of(config: Config) -> Trigger:
    """A new trigger; raises KeyError for "auto" (`config.recipes.with_implied` replaces it)."""
    return TRIGGERS[config.sync.trigger](config)
