"""Outcomes of deltas: the newest settled delta of each client stands for all before it. Pure.

A client offers one delta at a time, and takes a higher number only after an answer. So one of an
earlier number was settled, too, and nothing here can tell how: it is superseded. The parameter
server's machine has one copy, which is ahead of the disk (fsl_async.roles.sync.deltas); the store
has another, which is durable (fsl_async.store.book.book).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol, TypeVar

from fsl_async.roles.sync.delta import DeltaKey

Outcome = Literal["accepted", "merged", "quarantined", "superseded"]


class Keyed(Protocol):
    """Something of a delta."""

    @property
    def key(self) -> DeltaKey:
        """The key of the delta."""


T = TypeVar("T", bound=Keyed)


def newest_of_clients(ones: Iterable[T]) -> dict[str, T]:
    """Return the newest of each client, by client; of equal numbers the last one."""
    return {one.key.client: one for one in sorted(ones, key=lambda one: one.key.order)}


class Outcomes(dict[str, tuple[DeltaKey, Outcome]]):
    """Client -> its newest settled delta, and the outcome of that."""

    def settle(self, key: DeltaKey, outcome: Outcome) -> None:
        """Record the outcome of a delta."""
        if key.client not in self or self[key.client][0].order <= key.order:
            self[key.client] = (key, outcome)

    def settle_all(self, outcomes: Mapping[DeltaKey, Outcome]) -> None:
        """Record the outcomes of deltas, in any order."""
        for key in sorted(outcomes):
            self.settle(key, outcomes[key])

    def unsettle(self, key: DeltaKey) -> None:
        """Forget the outcome of a delta, unless its client has settled another one since."""
        if self.get(key.client, (None,))[0] == key:
            del self[key.client]

    def of(self, key: DeltaKey) -> Outcome | None:
        """Return the outcome of a delta; None: it is not settled."""
        if key.client not in self or key.order > self[key.client][0].order:
            return None
        last, outcome = self[key.client]
        return outcome if key == last else "superseded"
