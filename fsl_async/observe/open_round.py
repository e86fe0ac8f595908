"""The open round as a parameter server's journal shows it: who is waited for, and how long. Pure.

called   clients that were called in a round
needed   as many of the called that are here must send a delta before it may merge (sync.quorum)
merged   called clients whose delta of this round is in the new version
late     called, still connected, and no delta when the round merged: it comes into a later version
left     called, and gone since

Answers go to the machine's own `Round`, and its rule (`QuorumAndGrace`) decides when the grace
window closes, with the times in the journal.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from attrs import field, mutable

from fsl_async.observe.clients import ClientState
from fsl_async.roles.phrasing import counted
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.roles.sync.round import ArrivalHistory, Round, RoundRules
from fsl_async.roles.sync.triggers.completion import QuorumAndGrace

NAMED = 5
"""More names than these are a number."""


@mutable
class OpenRound:
    """The clients of the open round, and of those before it that have not answered yet."""

    number: int = -1
    """The version that the newest round starts from; -1 before the first round."""
    is_open: bool = False
    asked: dict[str, int] = field(factory=dict)
    """The called clients of the newest round, and the incarnation that was called."""
    empty: set[str] = field(factory=set)
    """The called clients whose answer had nothing to merge."""
    calls_again: bool = False
    """The next call is the first one of a process that goes on with the round."""
    closes_at: float | None = None
    """When the grace window closes, seconds since 1970; None: not begun."""
    late: set[str] = field(factory=set)
    """Connected clients whose round merged without them."""
    merged: int = 0
    """Deltas in the newest version."""
    loss: float | None = None
    """Mean loss that these carried."""
    _round: Round = field(factory=lambda: Round(-1, 0.0, 0.0, {}))
    _arrivals: ArrivalHistory = field(factory=ArrivalHistory)

    def call(self, name: str, incarnation: int, number: int, now: float, cap_s: float) -> None:
        """Count a call; the first one opens the round."""
        if not self.is_open or self.number != number:
            self.number, self.is_open, self.closes_at = number, True, None
            self._round, self.calls_again = Round(number, now, cap_s, {}), True
        if self.calls_again:
            self.calls_again = False
            self.asked.clear()
            self.empty.clear()
        self.asked[name] = self._round.expected[name] = incarnation

    def answer(self, name: str, now: float, *, number: int, contributed: bool) -> None:
        """Count a client's answer to round `number`: a delta, or that there is none."""
        self.late.discard(name)
        if number != self.number:
            return
        if not contributed:
            self.empty.add(name)
        is_first = self.is_open and self._round.answer(name, contributed=contributed)
        if is_first and contributed:
            self._arrivals.offsets_s.append(now - self._round.called_at)

    def arrived(self, name: str, incarnation: int) -> None:
        """Expect a called client again that is back as the same process."""
        self._round.rejoin(name, incarnation)

    def left(self, name: str, incarnation: int, *, is_gone: bool) -> None:
        """Expect a client no more whose session ended. is_gone: it has no other session."""
        self._round.leave(name, incarnation)
        if is_gone:
            self.late.discard(name)

    def evaluate(self, quorum: float, grace: Collection[float], now: float) -> None:
        """Find when the grace window closes, by the rule of the machine."""
        if not (self.is_open and quorum and len(grace) == 3 and self._round.cap_s):
            return
        completion = QuorumAndGrace(RoundRules(quorum, *grace))
        pending = self._round.contributors()
        verdict = completion.verdict(self._round, self._arrivals, now, pending=pending)
        if verdict.action == "wait":
            self.closes_at = verdict.until

    def close(self) -> None:
        """End the round. Clients without an answer are late only if it made a version."""
        self.is_open, self.closes_at = False, None

    def commit(self, merged: int, loss: float | None = None) -> None:
        """End the round with a version of so many deltas."""
        self.merged, self.loss = merged, loss
        self.late |= set(self.waited_for())
        self.close()

    def restart(self) -> None:
        """Forget all clients: a process of the parameter server begins or ends."""
        self.close()
        self.late.clear()
        self.asked.clear()
        self._arrivals.offsets_s.clear()

    def waited_for(self) -> list[str]:
        """Return the called clients that are here and have not answered."""
        return self._round.missing() if self.is_open else []

    def alive(self, clients: Mapping[str, ClientState]) -> list[str]:
        """Return the called that are here, as the same process."""
        return [
            name
            for name, incarnation in self.asked.items()
            if (client := clients.get(name)) is not None
            and client.connected
            and client.incarnation == incarnation
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; times in seconds since 1970."""
        return {
            "open": self.is_open,
            "number": self.number,
            "called_at": self._round.called_at if self.is_open else None,
            "called": len(self.asked) if self.is_open else 0,
            "answered": self._round.contributors() if self.is_open else 0,
            "waited_for": self.waited_for(),
            "quorum_at": self._round.quorum_at if self.is_open else None,
            "closes_at": self.closes_at,
            "late": sorted(self.late),
        }

    def words(
        self, rounds: Mapping[str, int], clients: Mapping[str, ClientState], quorum: float
    ) -> str:
        """Say which clients are in the version that was just made of it, and which are not.

        rounds: delta key -> the round that it answered, of all deltas that were merged. quorum: of
        the run; 0 = not known.
        """
        if rounds and not self.asked:  # clients sent by themselves
            return f"{counted(len(rounds), 'delta')} merged, from {_some(map(client_of, rounds))}"
        merged = {client_of(key) for key, number in rounds.items() if number == self.number}
        merged &= set(self.asked)
        others = [
            key
            for key, number in rounds.items()
            if number != self.number or client_of(key) not in merged
        ]
        alive = self.alive(clients)
        expected = {*alive, *merged}  # a client that has answered may leave
        needed = max(1, math.ceil(quorum * len(expected))) if quorum else 0
        parts = [f"{len(merged)} of {counted(len(self.asked), 'called client')} merged"]
        if needed:
            parts[0] += f" ({needed} needed)"
        missing = [name for name in self.asked if name not in merged]
        here = [name for name in missing if name in alive]
        for word, names in (
            ("late", [name for name in here if name not in self.empty]),
            ("nothing to merge from", [name for name in here if name in self.empty]),
            ("left", [name for name in missing if name not in alive]),
        ):
            if names:
                parts.append(f"{word}: {_some(names)}")
        if others:
            which = f"and {counted(len(others), 'delta')} of earlier rounds"
            parts.append(f"{which}, from {_some(map(client_of, others))}")
        return ", ".join(parts)


def client_of(key: str) -> str:
    """Return the client of a delta's key."""
    return key.partition("/")[0]


def base_of(key: str) -> int:
    """Return the version that a delta was computed from. Raises ValueError."""
    return DeltaKey.parse(key).base


def _some(names: Iterable[str]) -> str:
    found = sorted(set(names))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more
