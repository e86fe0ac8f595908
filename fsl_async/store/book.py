"""Book: the state that the facts of a ledger add up to. Pure.

    fact          effect
    run           names the run; the first one counts
    lease         `name` holds shard `index`; with `provisional` another client
                  may take the shard until `name` leases it for good
    incarnation   the newest incarnation of `name`
    decay         learning rates fall from `decays_from` on; the run has other limits
    accepted      a delta is acknowledged and pending
    quarantined   a delta is excluded from merging, on arrival or later; with `held` it may be
                  released
    released      a held delta is pending again
    version       a version exists; the deltas it lists are merged
    rollback      the run is at version `to` again; `pending` lists the deltas that are pending
                  again, `gone` those that are lost
    renewed       the ledger was lost and this one begins: the run is at version `to`, `versions`
                  lists the remaining records up to it, `aside` the deltas that were in the spool;
                  those are unknown again, so a client without an answer may send one again

A key is in at most one of `pending`, `merged` and `quarantined`: this is what "merged at most once"
means here.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from fsl_async.roles.sync.delta import DeltaKey, StoredDelta
from fsl_async.store.errors import StoreError
from fsl_async.store.records import VersionRecord, decay_from, from_fact

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fsl_async.roles.sync.progress import Decay
    from fsl_async.store.records import Outcome


REMEMBERED = 64
"""How many of the newest accepted deltas define the usual norm."""


class Book:
    """The state after the facts so far. `apply` changes it; everything else only reads."""

    def __init__(self, keep_versions: int) -> None:
        self._keep_versions = keep_versions
        self.run = ""
        self.version = -1
        # When its line was written, seconds since 1970; 0 before version 0.
        self.version_at = 0.0
        self.began_s = 0.0  # for which the run was served before version 0
        self.digests: dict[int, str] = {}
        self.tokens_total = 0
        self.generation = 0
        self.rollback_targets: list[int] = []
        self.decay: Decay | None = None
        self.pending: dict[DeltaKey, StoredDelta] = {}
        self.merged: dict[DeltaKey, int] = {}
        self.quarantined: dict[DeltaKey, str] = {}
        self.held: dict[DeltaKey, StoredDelta] = {}  # the quarantined ones that may be released
        # The newest accepted deltas, pending, merged or quarantined, oldest first.
        self.accepted: deque[StoredDelta] = deque(maxlen=REMEMBERED)
        self.leases: dict[str, int] = {}
        self.provisional: set[str] = set()  # clients with a provisional lease
        self.incarnations: dict[str, int] = {}
        # Details of the deltas in recent versions, by version: a rollback makes them pending again.
        self._details: dict[int, dict[DeltaKey, StoredDelta]] = {}
        self._tokens_at: dict[int, int] = {}
        self._appliers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "run": self._apply_run,
            "lease": self._apply_lease,
            "decay": self._apply_decay,
            "incarnation": self._apply_incarnation,
            "accepted": self._apply_accepted,
            "quarantined": self._apply_quarantined,
            "released": self._apply_released,
            "version": self._apply_version,
            "rollback": self._apply_rollback,
            "renewed": self._apply_renewed,
        }

    def known(self, key: DeltaKey) -> Outcome | None:
        """Return the outcome of `key`; None when it was never acknowledged."""
        if key in self.pending:
            return "accepted"
        if key in self.merged:
            return "merged"
        return "quarantined" if key in self.quarantined else None

    @property
    def usual(self) -> list[StoredDelta]:
        """The newest merged deltas, oldest first.

        Pending ones are left out because they are still to be judged, quarantined ones because they
        do not count.
        """
        return [delta for delta in self.accepted if delta.key in self.merged]

    def merged_after(self, version: int) -> list[StoredDelta]:
        """The deltas merged after `version` whose details are kept, in merge order."""
        return [
            delta
            for number in sorted(self._details)
            if number > version
            for delta in self._details[number].values()
        ]

    def apply(self, fact: Mapping[str, Any]) -> None:
        """Apply one fact. StoreError: this release does not know its type."""
        apply = self._appliers.get(fact["fact"])
        if apply is None:
            raise StoreError(
                f"the ledger has a fact {fact['fact']!r} of a newer release; "
                f"use that release for this run directory"
            )
        apply(fact)

    def _apply_run(self, fact: Mapping[str, Any]) -> None:
        self.run = self.run or fact["run"]

    def _apply_decay(self, fact: Mapping[str, Any]) -> None:
        self.decay = decay_from(fact)

    def _apply_incarnation(self, fact: Mapping[str, Any]) -> None:
        self.incarnations[fact["name"]] = fact["incarnation"]

    def _apply_accepted(self, fact: Mapping[str, Any]) -> None:
        delta = from_fact(fact)
        self.pending[delta.key] = delta
        self.accepted.append(delta)

    def _apply_quarantined(self, fact: Mapping[str, Any]) -> None:
        key = DeltaKey.parse(fact["key"])
        self.pending.pop(key, None)
        self.quarantined[key] = fact["reason"]
        if fact.get("held"):
            self.held[key] = from_fact(fact)

    def _apply_released(self, fact: Mapping[str, Any]) -> None:
        delta = from_fact(fact)
        self.quarantined.pop(delta.key, None)
        self.held.pop(delta.key, None)
        self.pending[delta.key] = delta

    def _apply_lease(self, fact: Mapping[str, Any]) -> None:
        name, index = fact["name"], fact["index"]
        for other in [other for other in self.provisional if self.leases[other] == index]:
            del self.leases[other]
            self.provisional.discard(other)
        self.leases[name] = index
        if fact.get("provisional", False):
            self.provisional.add(name)
        else:
            self.provisional.discard(name)

    def _apply_version(self, fact: Mapping[str, Any]) -> None:
        self._add_version(VersionRecord.from_fact(fact))
        self.version_at = float(fact.get("at", 0.0))
        if self.version == 0:
            self.began_s = float(fact.get("up", 0.0))

    def _add_version(self, record: VersionRecord) -> None:
        self.version = record.version
        self.digests[record.version] = record.digest
        self.tokens_total = record.tokens_total
        self._tokens_at[record.version] = record.tokens_total
        details = {}
        for entry in record.merged:
            delta = self.pending.pop(entry.key, None)
            if delta is not None:
                details[entry.key] = delta
            self.merged[entry.key] = record.version
        self._details[record.version] = details
        self._details.pop(record.version - self._keep_versions, None)

    def _apply_rollback(self, fact: Mapping[str, Any]) -> None:
        target: int = fact["to"]
        # The line holds the deltas' details, because keep_versions may have changed since.
        again = [from_fact(member) for member in fact["pending"]]
        self.pending = {delta.key: delta for delta in again} | self.pending
        # A delta that is neither merged any more nor pending is unknown again: a client that still
        # has it may send it again.
        self.merged = {key: version for key, version in self.merged.items() if version <= target}
        self.digests = {v: digest for v, digest in self.digests.items() if v <= target}
        self._details = {v: details for v, details in self._details.items() if v <= target}
        self.version = target
        self.tokens_total = self._tokens_at[target]
        self.decay = None  # it may have begun later; the operator can ask again
        self.generation += 1
        self.rollback_targets.append(target)

    def _apply_renewed(self, fact: Mapping[str, Any]) -> None:
        for record in fact["versions"]:
            self._add_version(VersionRecord.from_fact(record))
        # Above every generation on disk, so that every version above `to` is void (see recovery).
        self.generation = fact["generation"]
        self.rollback_targets = [fact["to"]] * self.generation
