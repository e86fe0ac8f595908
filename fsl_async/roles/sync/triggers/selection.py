"""Which clients a round calls, and in which order. Pure.

A client whose delta of the open round is durable already, because the parameter server ended
before it was merged, is not called to train that round again.
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
    """tells_all: a new version is announced to all at once, and a client far behind gets update
    after update.
    """

    tells_all: ClassVar[bool]

    def choose(self, here: Mapping[str, Member], deltas: DeltaBook) -> Opening:
        """The clients of the next round, of those that are here and hold a version."""
        ...

    def objection(self, offer: Delta, open_: Round | None) -> tuple[str, str] | None:
        """Why a delta does not fit this selection, as a code and a sentence."""
        ...

    def recovered(self, settled: Mapping[DeltaKey, str]) -> None:
        """The parameter server continues a run; settled: the outcomes of its deltas so far."""
        ...


class _Any:
    """Takes deltas from any client and remembers nothing."""

    tells_all: ClassVar[bool] = True

    def objection(self, offer: Delta, open_: Round | None) -> tuple[str, str] | None:
        """None."""
        return None

    def recovered(self, settled: Mapping[DeltaKey, str]) -> None:
        """Nothing to remember."""


@frozen
class Everyone(_Any):
    """All at once. skips_done: not a client whose delta of this round is durable already."""

    skips_done: bool

    def choose(self, here: Mapping[str, Member], deltas: DeltaBook) -> Opening:
        """All that are here."""
        called = {name: member.incarnation for name, member in here.items()}
        answered = done_before(here, deltas) if self.skips_done else ()
        return Opening(called, answered=answered)


@frozen
class InTurns(_Any):
    """All, one after another by shard."""

    def choose(self, here: Mapping[str, Member], deltas: DeltaBook) -> Opening:
        """All that are here, the first one now."""
        answered = done_before(here, deltas)
        order = [name for name in in_order(here) if name not in answered]
        now = (*answered, *order[:1])
        called = {name: here[name].incarnation for name in now}
        return Opening(called, tuple(order[1:]), answered)


@define
class OneByOne:
    """One client to a version, the next by shard: it starts from what the last one made.

    Only that client is told of a version, and gets it in full: the others do not need it, and it
    lacks the versions in between. `_last` is known after a restart too: the client whose delta
    made the newest version.
    """

    tells_all: ClassVar[bool] = False

    _last: str = ""
    _last_shard: int = -1

    def choose(self, here: Mapping[str, Member], deltas: DeltaBook) -> Opening:
        """The next by shard; none when a delta of the newest version is here already."""
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
        """A turn that is over has made nothing: the weights are at another client by now."""
        name = offer.key.client
        if open_ is not None and open_.awaits(name, offer.key.incarnation):
            return None
        return "turn", f"it is not, or no longer, the turn of {name}"

    def recovered(self, settled: Mapping[DeltaKey, str]) -> None:
        """The newest version is of the delta with the highest base."""
        merged = [key for key, outcome in settled.items() if outcome == "merged"]
        if merged:
            self._last = max(merged, key=lambda key: key.base).client


def in_order(here: Mapping[str, Member]) -> list[str]:
    """The names by shard."""
    return sorted(here, key=lambda name: (here[name].shard, name))


def done_before(here: Mapping[str, Member], deltas: DeltaBook) -> tuple[str, ...]:
    """Clients whose delta of the newest version waits to be merged, of whichever incarnation."""
    durable = {key.client for key in deltas.pending if key.base == deltas.version}
    return tuple(name for name in in_order(here) if name in durable)
