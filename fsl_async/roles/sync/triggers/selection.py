"""Decides which clients a round calls, and in which order. Pure.

A client whose delta of the open round is durable already, because the parameter server was
restarted before the merge, is not called to train that round again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from attrs import define, field, frozen

from fsl_async.roles.sync.delta import Delta, DeltaKey
from fsl_async.roles.sync.deltas import DeltaBook
from fsl_async.roles.sync.ps_state import Member
from fsl_async.roles.sync.round import Round


@frozen
class Opening:
    """The clients of a round: `called` at once (name -> incarnation), `waiting` for their turn in
    this order, and those of the called that have `answered` already.
    """

    called: dict[str, int] = field(factory=dict)
    waiting: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()


class Selection(Protocol):
    """A rule of choice.

    announces_to_all: a new version is announced to all clients at once, and a client far behind
    gets update after update.
    """

    announces_to_all: ClassVar[bool]

    def choose(self, here: Mapping[str, Member], deltas: DeltaBook) -> Opening:
        """The clients of the next round, of those that are here and hold a version."""
        ...

    def objection(self, offer: Delta, open_: Round | None) -> tuple[str, str] | None:
        """Why a delta does not fit this selection, as a code and a sentence."""
        ...

    def recovered(self, settled: Mapping[DeltaKey, str]) -> None:
        """Restore the state of a run that continues. settled: the outcomes of its deltas."""
        ...


class _Any:
    """Accepts deltas of any client and has no state."""

    announces_to_all: ClassVar[bool] = True

    def objection(self, offer: Delta, open_: Round | None) -> tuple[str, str] | None:
        """No objection."""
        return None

    def recovered(self, settled: Mapping[DeltaKey, str]) -> None:
        """Do nothing: there is no state."""


@frozen
class Everyone(_Any):
    """All at once. skips_done: clients whose delta of this round is durable count as answered."""

    skips_done: bool

    def choose(self, here: Mapping[str, Member], deltas: DeltaBook) -> Opening:
        """All that are here."""
        called = {name: member.incarnation for name, member in here.items()}
        answered = done_before(here, deltas) if self.skips_done else ()
        return Opening(called, answered=answered)


@frozen
class InTurns(_Any):
    """All, one after another in shard order."""

    def choose(self, here: Mapping[str, Member], deltas: DeltaBook) -> Opening:
        """All that are here, the first one now."""
        answered = done_before(here, deltas)
        order = [name for name in in_order(here) if name not in answered]
        now = (*answered, *order[:1])
        called = {name: here[name].incarnation for name in now}
        return Opening(called, tuple(order[1:]), answered)


@define
class OneByOne:
    """One client per version, in shard order: it starts from the weights of the one before.

    A version is announced to that client only, and sent in full: the others do not need it, and it
    lacks the versions in between. `_last`, the client whose delta made the newest version, is
    restored after a restart.
    """

    announces_to_all: ClassVar[bool] = False

    _last: str = ""
    _last_shard: int = -1

    def choose(self, here: Mapping[str, Member], deltas: DeltaBook) -> Opening:
        """The next in shard order; none when a delta of the newest version is pending."""
        if done_before(here, deltas) or deltas.pending:
            return Opening()
        order = in_order(here)
        if self._last in here:
            self._last_shard = here[self._last].shard
        later = [name for name in order if here[name].shard > self._last_shard]
        self._last = (later or order)[0]
        self._last_shard = here[self._last].shard
        return Opening({self._last: here[self._last].incarnation})

    def objection(self, offer: Delta, open_: Round | None) -> tuple[str, str] | None:
        """Object to a delta of a turn that is over: another client trains those weights now."""
        name = offer.key.client
        if open_ is not None and open_.awaits(name, offer.key.incarnation):
            return None
        return "turn", f"it is not, or no longer, the turn of {name}"

    def recovered(self, settled: Mapping[DeltaKey, str]) -> None:
        """Find the client of the newest version: its delta has the highest base."""
        merged = [key for key, outcome in settled.items() if outcome == "merged"]
        if merged:
            self._last = max(merged, key=lambda key: key.base).client


def in_order(here: Mapping[str, Member]) -> list[str]:
    """The names in shard order."""
    return sorted(here, key=lambda name: (here[name].shard, name))


def done_before(here: Mapping[str, Member], deltas: DeltaBook) -> tuple[str, ...]:
    """Clients whose delta of the newest version is pending, of any incarnation."""
    durable = {key.client for key in deltas.pending if key.base == deltas.version}
    return tuple(name for name in in_order(here) if name in durable)
