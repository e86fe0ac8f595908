"""Book: the state that the facts of a ledger add up to. Pure.

    fact          effect
    run           names the run; the first one counts
    lease         `name` holds shard `index`; with `provisional` another client
                  may take the shard until `name` leases it for good
    incarnation   the newest incarnation of `name`
    decay         learning rates fall from `decays_from` on; the run has other limits
    accepted      a delta is acknowledged and pending
    quarantined   a delta is excluded from merging, on arrival or later; with `held` it may be
                  released; with `lost` its file was missing or damaged at a start
    released      a held delta is pending again
    version       a version exists; the deltas it lists are merged
    rollback      the run is at version `to` again; `pending` lists the deltas that are pending
                  again, `aside` those that are quarantined, `gone` those that are lost
    sum           which sites a secure sum is of, before they are asked to open it
    received      a channel has delivered the sum of a round (fsl_async.store.rules.air)
    begun, cut,   global rounds (fsl_async.store.book.groups_state)
    attempt,
    global
    renewed       the ledger was lost and this one begins: the run is at version `to`, `versions`
                  lists the remaining records up to it, `aside` the deltas that were in the spool;
                  those are unknown again, so a client without an answer may send one again

A key is in at most one of `pending`, `merged` and `quarantined`: this is what "merged at most once"
means here.

The book does not grow with the run. It has each key of the newest `keep_versions` versions, to
which a rollback can go back, and of the newest accepted deltas. Of all before, it has the newest
settled key of each client, which stands for those before it (`fsl_async.roles.sync.delta`). A
line with "rollback" has what a book that forgot the versions in between needs: `digest`,
`tokens_total`, `settled`, the newest settled key of each client at version `to`, and `latest`,
where a rule uses deltas again (fsl_async.store.book.latest_book).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from fsl_async.roles.sync.delta import POSITION, DeltaKey, Outcomes, StoredDelta
from fsl_async.roles.sync.deltas import REMEMBERED_VERSIONS, USUAL_DELTAS
from fsl_async.roles.sync.norm_guard import MOST_HELD
from fsl_async.store.book.groups_state import GroupsState
from fsl_async.store.book.latest_book import LatestBook
from fsl_async.store.book.records import Received, answers_from, decay_from, from_fact, to_fact
from fsl_async.store.deltas.seed_step import SeedStep
from fsl_async.store.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fsl_async.roles.sync.delta import Outcome
    from fsl_async.roles.sync.progress import Decay
    from fsl_async.roles.sync.roster import Answers
    from fsl_async.store.book.records import VersionRecord

    Reasons = Mapping[str, str]

REMEMBERED = 64
"""Number of the newest accepted deltas that define the usual norm."""


MOST_QUARANTINED = 16
"""Number of quarantined deltas of a client that are known one by one."""


class Book:
    """The state after the facts so far. `apply` changes it; everything else only reads.

    keep_versions: how many of the newest versions have all their deltas in it. history: of how many
    of the newest versions of a run of zeroth order it has the steps. reuse: how many versions old
    the base of a merged delta that is used again may be; 0: none is.
    """

    def __init__(self, keep_versions: int, history: int = 0, reuse: int = 0) -> None:
        self.keep_versions = keep_versions
        self.history = history
        self.seeds: dict[int, SeedStep] = {}  # of the newest versions, oldest first
        self.since: int | None = None
        """While set, versions after it have all their deltas too, however many they are."""
        self.forgotten = -1
        """The newest version whose deltas are not known one by one any more."""
        self.run = ""
        self.version = -1
        # When its line was written, seconds since 1970; 0 before version 0.
        self.version_at = 0.0
        self.began_s = 0.0  # for which the run was served before version 0
        self.digests: dict[int, str] = {}  # of the newest versions
        self.tokens_total = 0
        self.generation = 0
        self.rollback_targets: list[int] = []
        self.void: dict[int, str] = {}  # digests of the newest versions that rollbacks undid
        self.decay: Decay | None = None
        self.sum: Answers | None = None  # the newest one that was to be opened
        self.received: Received | None = None  # the newest sum of a channel
        self.pending: dict[DeltaKey, StoredDelta] = {}
        self.merged: dict[DeltaKey, int] = {}  # in versions not forgotten, or in `accepted`
        # The newest of each client, with the version at that time.
        self.quarantined: dict[DeltaKey, int] = {}
        # The newest quarantined ones of each client that may be released.
        self.held: dict[DeltaKey, StoredDelta] = {}
        # Client -> its newest delta that was merged or quarantined and is in neither any more.
        self.settled = Outcomes()
        # The newest accepted deltas, pending, merged or quarantined, oldest first.
        self.accepted: deque[StoredDelta] = deque(maxlen=REMEMBERED)
        # Clients of the last merged deltas, those of a version in the order of their names.
        self.arrivals: deque[str] = deque(maxlen=USUAL_DELTAS)
        self.leases: dict[str, int] = {}
        # Client -> where its newest acknowledged delta ended in its data.
        self.positions: dict[str, dict[str, float]] = {}
        self.provisional: set[str] = set()  # clients with a provisional lease
        self.groups = GroupsState()
        self.latest = LatestBook(reuse)
        self.incarnations: dict[str, int] = {}
        # What versions not forgotten merged; None: it was not pending, so details are unknown. A
        # rollback makes those with details pending again.
        self._details: dict[int, dict[DeltaKey, StoredDelta | None]] = {}
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
            "begun": self.groups.begun,
            "cut": self.groups.offered,
            "attempt": self.groups.attempted,
            "sum": self._apply_sum,
            "received": self._apply_received,
            "global": self.groups.decide,
        }

    def known(self, key: DeltaKey) -> Outcome | None:
        """Return the outcome of `key`; None when it was never acknowledged."""
        if key in self.pending:
            return "accepted"
        if key in self.merged:
            return "merged"
        if key in self.quarantined or key in self.held:
            return "quarantined"
        return self.settled.of(key)

    def seeds_between(self, since: int, version: int) -> list[SeedStep] | None:
        """Return the steps from version `since` to `version`; None if not all are here."""
        wanted = range(since + 1, version + 1)
        if not wanted or any(number not in self.seeds for number in wanted):
            return None
        return [self.seeds[number] for number in wanted]

    @property
    def usual(self) -> list[StoredDelta]:
        """The newest merged deltas, oldest first.

        Pending ones are left out because they are still to be judged, quarantined ones because they
        do not count. All of the newest version are in it, so that a client with many deltas does
        not displace the others.
        """
        newest = [delta for delta in self.accepted if delta.key in self.merged]
        last = [one for one in self._details.get(self.version, {}).values() if one]
        return list({one.key: one for one in (*newest, *last)}.values())

    def merged_after(self, version: int) -> list[StoredDelta]:
        """The deltas merged after `version` whose details are kept, in merge order."""
        return [
            delta
            for number in sorted(self._details)
            if number > version
            for delta in self._details[number].values()
            if delta is not None
        ]

    def outcomes(self) -> dict[DeltaKey, Outcome]:
        """The outcomes of all deltas that are known and not pending."""
        found: dict[DeltaKey, Outcome] = dict(self.settled.values())
        found |= dict.fromkeys(self.merged, "merged")
        found |= dict.fromkeys([*self.quarantined, *self.held], "quarantined")
        return {key: outcome for key, outcome in found.items() if key not in self.pending}

    def rollback_to(
        self, record: VersionRecord, holds: Callable[[StoredDelta], bool], leave_out: Reasons
    ) -> dict[str, Any]:
        """Return the members of the line by which the run goes back to a version.

        holds: whether a delta's file is there. leave_out: client -> why its deltas that are pending
        or merged later are quarantined, with those that others computed from later versions.
        StoreError: it has none. The version must not be before `forgotten`.
        """
        merged, target = self.merged_after(record.version), record.version
        aside = {
            delta.key: to_fact(delta)
            | {"reason": leave_out.get(delta.key.client, "its base was rolled back")}
            for delta in (*merged, *self.pending.values())
            if delta.key.client in leave_out or (leave_out and delta.key.base > target)
        }
        for client in leave_out.keys() - {key.client for key in aside}:
            raise StoreError(f"{client} has no delta that waits or was merged after {target}")
        again = [delta for delta in merged if delta.key not in aside and holds(delta)]
        returning = {delta.key for delta in again} | aside.keys()
        after = [key for key, version in self.merged.items() if version > record.version]
        return {
            "to": record.version,
            "pending": [to_fact(delta) for delta in again],
            "gone": [key.text for key in after if key not in returning],
            "aside": list(aside.values()),
            "digest": record.digest,
            "tokens_total": record.tokens_total,
            "settled": self._settled_at(record.version),
            **({"latest": latest} if (latest := self.latest.members_at(record.version)) else {}),
        }

    def _settled_at(self, version: int) -> dict[str, str]:
        found = Outcomes(self.settled)
        for key, number in self.merged.items():
            if number <= version:
                found.settle(key, "merged")
        for key in self.quarantined:  # where they stay
            found.settle(key, "quarantined")
        return {key.text: outcome for key, outcome in found.values()}

    def apply(self, fact: Mapping[str, Any]) -> None:
        """Apply one fact. StoreError: this release does not know its type."""
        apply = self._appliers.get(fact["fact"])
        if apply is None:
            raise StoreError(
                f"the ledger has a fact {fact['fact']!r} of a newer release; "
                f"use that release for this run directory"
            )
        apply(fact)

    def _apply_sum(self, fact: Mapping[str, Any]) -> None:
        self.sum = answers_from(fact)

    def _apply_received(self, fact: Mapping[str, Any]) -> None:
        self.received = Received.from_fact(fact)

    def _apply_run(self, fact: Mapping[str, Any]) -> None:
        self.run = self.run or fact["run"]

    def _apply_decay(self, fact: Mapping[str, Any]) -> None:
        self.decay = decay_from(fact)

    def _apply_incarnation(self, fact: Mapping[str, Any]) -> None:
        self.incarnations[fact["name"]] = fact["incarnation"]

    def _apply_accepted(self, fact: Mapping[str, Any]) -> None:
        delta = from_fact(fact)
        self.pending[delta.key] = delta
        facts = delta.delta.facts
        if position := {name: facts[name] for name in POSITION if facts.get(name) is not None}:
            self.positions[delta.key.client] = position
        leaving = [self.accepted[0].key] if len(self.accepted) == REMEMBERED else []
        self.accepted.append(delta)
        for key in leaving:
            is_forgotten = key in self.merged and self.merged[key] <= self.forgotten
            if is_forgotten and all(one.key != key for one in self.accepted):
                del self.merged[key]

    def _apply_quarantined(self, fact: Mapping[str, Any]) -> None:
        key = DeltaKey.parse(fact["key"])
        self.pending.pop(key, None)
        self.quarantined[key] = self.version
        if fact.get("held"):
            self.held[key] = from_fact(fact)
        for kept, most in ((self.quarantined, MOST_QUARANTINED), (self.held, MOST_HELD)):
            of_client = [one for one in kept if one.client == key.client]
            for one in of_client[:-most]:
                self.settled.settle(one, "quarantined")
                del kept[one]

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
        self._add_version(fact)
        self.line_written(fact)

    def line_written(self, fact: Mapping[str, Any]) -> None:
        """Note when the line of a version was written, which may be after `apply`."""
        self.version_at = float(fact.get("at", 0.0))
        if fact["version"] == 0:
            self.began_s = float(fact.get("up", 0.0))

    def _add_version(self, fact: Mapping[str, Any]) -> None:
        self.version = version = fact["version"]
        self.digests[version] = fact["digest"]
        self.tokens_total = fact["tokens_total"]
        if "groups" in fact:
            self.groups.adopt(version, fact["groups"], self.tokens_total)
        if "seeds" in fact:
            self.seeds[version] = SeedStep.from_json(fact["seeds"])
        for old in [one for one in self.seeds if one <= version - self.history]:
            del self.seeds[old]
        details = self._details[version] = {}
        for entry in fact["merged"]:
            key = DeltaKey.parse(entry["key"])
            details[key] = stored = self.pending.pop(key, None)
            if stored is not None:
                self.latest.merge(version, stored, entry)
            self.merged[key] = version
        self.arrivals.extend(sorted(key.client for key in details))
        self._forget()

    def _forget(self) -> None:
        """Forget what no rollback can need: see the head of this file."""
        since = self.version if self.since is None else self.since
        oldest = min(self.version - max(self.keep_versions, REMEMBERED_VERSIONS), since)
        for version in [one for one in self.digests if one <= oldest]:
            del self.digests[version]
        last = min(self.version - self.keep_versions, since)
        if last <= self.forgotten:
            return
        self.forgotten = last
        self.latest.forget(last)
        newest = {delta.key for delta in self.accepted}
        for version in [one for one in self._details if one <= last]:
            for key in self._details.pop(version):
                self.settled.settle(key, "merged")
                if key not in newest:
                    del self.merged[key]
        for key in [one for one, version in self.quarantined.items() if version <= last]:
            self.settled.settle(key, "quarantined")
            del self.quarantined[key]

    def _apply_rollback(self, fact: Mapping[str, Any]) -> None:
        target: int = fact["to"]
        # The line holds the deltas' details, because keep_versions may have changed since.
        again = [from_fact(member) for member in fact["pending"]]
        self.pending = {delta.key: delta for delta in again} | self.pending
        # A delta that is neither merged any more nor pending is unknown again: a client that still
        # has it may send it again.
        self.merged = {key: version for key, version in self.merged.items() if version <= target}
        self.void |= {v: digest for v, digest in self.digests.items() if v > target}
        self.digests = {v: digest for v, digest in self.digests.items() if v <= target}
        self.digests[target] = fact["digest"]
        self.seeds = {v: step for v, step in self.seeds.items() if v <= target}
        self._details = {v: details for v, details in self._details.items() if v <= target}
        if target < self.forgotten:
            self.forgotten = target
            self.settled = _parse_settled(fact["settled"])
            self.latest.back_to(target, fact.get("latest", ()))
        else:
            self.latest.back_to(target, None)
        self.version = target
        self.tokens_total = fact["tokens_total"]
        self.decay = None  # it may have begun later; the operator can ask again
        self.sum = self.received = None
        self.generation += 1
        self.rollback_targets.append(target)
        for member in fact.get("aside", ()):
            self._apply_quarantined(member)

    def _apply_renewed(self, fact: Mapping[str, Any]) -> None:
        for record in fact["versions"]:
            self._add_version(record)
        # Above every generation on disk, so that every version above `to` is void (see recovery).
        self.generation = fact["generation"]
        self.rollback_targets = [fact["to"]] * self.generation


def _parse_settled(members: Mapping[str, Outcome]) -> Outcomes:
    found = Outcomes()
    found.settle_all({DeltaKey.parse(key): outcome for key, outcome in members.items()})
    return found
