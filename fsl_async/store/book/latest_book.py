"""Latest book: the newest merged delta of each client, which a later version may use again. Pure.

Part of the book (fsl_async.store.book.book), in runs whose rule uses deltas again. A client's
newest delta is that of its newest incarnation and sequence. It has what is needed to know it for
any version that a rollback can go back to: the deltas merged in versions that are not forgotten,
and the newest one of each client before.

No delta is used again once its base is more than `limit` versions old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from fsl_async.roles.sync.delta import DeltaKey, MergedDelta, StoredDelta, newest_of_clients
from fsl_async.store.book.records import from_fact, to_fact

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@frozen
class Latest:
    """A delta that was merged into `version`. staleness, weight: as it was then."""

    version: int
    stored: StoredDelta
    staleness: int
    weight: float

    @property
    def merged(self) -> MergedDelta:
        """The delta as it entered that version."""
        return MergedDelta(self.stored.delta, self.staleness, self.weight, self.stored.norm)

    @property
    def key(self) -> DeltaKey:
        """The key of the delta."""
        return self.stored.key


@define
class LatestBook:
    """Deltas that versions merged and a later version may use again. limit: versions; 0: none."""

    limit: int = 0
    _entries: list[Latest] = field(factory=list)  # in the order of merges

    def merge(self, version: int, stored: StoredDelta, entry: Mapping[str, Any]) -> None:
        """Add a delta that `version` merged. entry: of the version's line."""
        if self.limit:
            stored = evolve(stored, delta=evolve(stored.delta, metrics={}))
            self._entries.append(Latest(version, stored, entry["staleness"], entry["weight"]))

    def at(self, version: int) -> dict[str, Latest]:
        """Return, by client, the delta that the version after `version` may use again."""
        return {
            client: one
            for client, one in self._newest_at(version).items()
            if version - one.stored.key.base <= self.limit
        }

    def needed_from(self, version: int) -> list[StoredDelta]:
        """Return the deltas that versions after `version`, made or not yet made, may use again."""
        later = [one for one in self._entries if one.version > version]
        return [one.stored for one in (*self.at(version).values(), *later)]

    def forget(self, version: int) -> None:
        """Forget deltas that no version after `version` may use again.

        A client's newest delta stays even if it is too old: an earlier one must not take its place.
        """
        kept = self._newest_at(version)
        self._entries = [
            one
            for one in self._entries
            if one.version > version or kept.get(one.stored.key.client) is one
        ]

    def back_to(self, version: int, members: Iterable[Mapping[str, Any]] | None) -> None:
        """Go back to `version`. members: of what it was then, where this book forgot that."""
        if members is not None:
            self._entries = []
            self._add(members)
        self._entries = [one for one in self._entries if one.version <= version]

    def members_at(self, version: int) -> list[dict[str, Any]]:
        """The newest delta of each client at `version`, as JSON."""
        return _members(self._newest_at(version).values())

    def _newest_at(self, version: int) -> dict[str, Latest]:
        newest = newest_of_clients(one for one in self._entries if one.version <= version)
        return dict(sorted(newest.items()))

    def _add(self, members: Iterable[Mapping[str, Any]]) -> None:
        for one in members:
            stored = from_fact(one)
            self._entries.append(Latest(one["version"], stored, one["staleness"], one["weight"]))


def _members(entries: Iterable[Latest]) -> list[dict[str, Any]]:
    return [
        {
            "version": one.version,
            "staleness": one.staleness,
            "weight": one.weight,
            **to_fact(one.stored),
        }
        for one in entries
    ]
