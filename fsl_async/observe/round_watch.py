"""Who was asked in the open round and how it went, in the words that everything uses for it. Pure.

called   clients that the server asked for their deltas in this round
needed   as many of the called that are still here must send one before the round may merge (sync.quorum)
merged   called clients whose delta of this round is in the new version
late     called, still connected, and no delta when the round merged; it comes into a later version
left     called, and gone since
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from attrs import field, mutable

from fsl_async.observe.client_state import ClientState, counted

NAMED = 5
"""More names than these are a number."""


@mutable
class RoundWatch:
    """The open round. `number` is the version that it starts from."""

    number: int = -1
    asked: dict[str, int] = field(factory=dict)  # client -> incarnation
    empty: set[str] = field(factory=set)  # answered, but with nothing that can be merged

    def open(self, number: int) -> None:
        """A round begins: nobody is called yet."""
        self.number = number
        self.asked.clear()
        self.empty.clear()

    def alive(self, clients: Mapping[str, ClientState]) -> list[str]:
        """The called that are here, in the same life."""
        return [
            name
            for name, incarnation in self.asked.items()
            if (client := clients.get(name)) is not None
            and client.connected
            and client.incarnation == incarnation
        ]

    def words(
        self, rounds: Mapping[str, int], clients: Mapping[str, ClientState], quorum: float
    ) -> str:
        """Who is in the version that was just made of it, and who is not.

        rounds: delta key -> the round that it answered, of all deltas that were merged. quorum: of the run; 0 = not known.
        """
        merged = {_client(key) for key, number in rounds.items() if number == self.number}
        merged &= set(self.asked)
        others = [key for key in rounds if _client(key) not in merged]
        others += [key for key, n in rounds.items() if n != self.number and _client(key) in merged]
        alive = self.alive(clients)
        expected = {*alive, *merged}  # who has answered may leave
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
            who = _some({_client(key): None for key in others})
            parts.append(f"and {counted(len(others), 'delta')} of earlier rounds, from {who}")
        return ", ".join(parts)


def _client(key: str) -> str:
    return key.partition("/")[0]


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more
