"""Records the parameter server's deltas: acknowledged, settled, and the weight of each. Pure.

A delta is offered, then refused before its transfer or stored. A stored delta is acknowledged and
pending, and then merged; one that is not finite is quarantined instead. The last key of a client
stands for all before it (`delta.Outcomes`), so the state stays small in a long run, and a key
before it is refused.

How much each delta of a version counts is decided once (`Counting`), when the version is ordered,
because it depends on the other deltas of the version:

- a client counts once: each of its n deltas has an nth of the weight of their mean work, unless
  clients send at their own pace, where several deltas are a client's work
- tokens of a client count up to `guard.max_tokens_median` x the median of the version's clients
- a client has at most `guard.max_share` of the weights, because tokens and the balance of labels
  are only claimed
- a delta that is too long counts as a shorter one (`norm_guard`)
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from attrs import evolve, frozen

from fsl_async.roles.sync.delta import (
    BALANCE,
    EPSILON,
    Delta,
    DeltaKey,
    MergedDelta,
    Outcomes,
    Score,
    StoredDelta,
    newest_of_clients,
    one_each,
)
from fsl_async.roles.sync.norm_guard import NormGuard, claim_line
from fsl_async.roles.sync.weighting import (
    ArrivalsWeighting,
    TunedLatestWeighting,
    Weighting,
    rarity,
)

MAX_TOKENS = 10**12
"""Limit of one delta. With the store's limit on a delta's norm it keeps every sum within fp32."""
USUAL_DELTAS = 64
"""Merged deltas over which the usual number of steps is the median, and arrivals are counted."""
REMEMBERED_GLOBAL = 64
"""Versions of global weights that are known by number."""
REMEMBERED_VERSIONS = 256
"""Digests kept of past versions, to check the lineage of clients that were away for long."""
MOST_OF_EQUAL, MOST_BY_BALANCE = 1.5, 2.0
"""A client may have 1.5 times an equal share, also where that is above `guard.max_share`; where
clients report the balance of their labels, twice an equal share instead."""
_LEAST_CLIENTS = 3
"""Between two clients neither a median nor a share is a judge."""
_LEAST_CLIP = 1e-30
"""A weight stays above 0."""
_EXACT, _SHOWN = 1e-9, 4


class Deltas:
    """Pending and settled deltas, and the versions that a delta may be based on.

    epsilon: that a delta's client may have spent; 0: the run is not private. reuses: whether a
    version also has the newest merged delta of each client without a new one. weighs_unmoved:
    whether a delta of norm 0 has a weight, as for rules that compare deltas (docs/adr/0141).
    counting: how much each counts in a version.
    one_base: whether a version is made from deltas of the version before alone; those that became
    old on their way have no part in it.
    """

    def __init__(
        self,
        weighting: Weighting,
        *,
        max_staleness: int,
        keep_versions: int,
        epsilon: float = 0.0,
        reuses: bool = False,
        weighs_unmoved: bool = False,
        counting: Counting,
        one_base: bool = False,
    ) -> None:
        self.weighting = weighting
        self.counting = counting
        self._epsilon = epsilon
        self.max_staleness = max_staleness
        self.pending: dict[DeltaKey, StoredDelta] = {}
        self.merging: tuple[MergedDelta, ...] = ()
        self.counted_less: list[str] = []
        """Lines on the deltas of the current merge that do not count in full."""
        self.reused: tuple[MergedDelta, ...] = ()
        """Merged before, and a part of the current merge again, with its weight there."""
        self._reuses = reuses
        self._weighs_unmoved = weighs_unmoved
        self._one_base = one_base
        self._latest: dict[str, MergedDelta] = {}  # client -> its newest one, as it was merged
        self.settled = Outcomes()
        self._received = Outcomes()
        """The last keys that were received or acknowledged."""
        self.version = -1
        self.digests: dict[int, str] = {}
        self.global_versions: list[int] = []
        """The newest ones made of the weights of all groups; no delta is older for them."""
        self._steps: deque[int] = deque(maxlen=USUAL_DELTAS)
        """Steps of the last merged deltas, one for each client and version."""
        self._arrivals: deque[str] = deque(maxlen=USUAL_DELTAS)
        """Clients of the last merged deltas."""
        self._memory = max(max_staleness, keep_versions, REMEMBERED_VERSIONS)

    def recovered(
        self,
        usual: Sequence[StoredDelta],
        latest: Sequence[MergedDelta] = (),
        arrivals: Sequence[str] = (),
    ) -> None:
        """Restore the newest merged deltas, oldest first.

        usual: one of each client and version. latest: the newest one of each client. arrivals: the
        client of each.
        """
        self._steps.extend(one.delta.steps for one in usual)
        self._arrivals.extend(arrivals)
        self._latest = newest_of_clients(latest)

    def advance(self, version: int, digest: str, *, is_global: bool = False) -> int:
        """Record a durable version and its deltas as merged. Returns their tokens.

        is_global: it is of the weights of all groups.
        """
        self.version = version
        if is_global:
            self.global_versions = [*self.global_versions, version][-REMEMBERED_GLOBAL:]
        self.digests[version] = digest
        self.digests.pop(version - self._memory - 1, None)
        tokens = 0
        for merged in self.merging:
            del self.pending[merged.key]
            self.settled.settle(merged.key, "merged")
            tokens += merged.delta.tokens
        if self._reuses:
            self._latest = newest_of_clients([*self._latest.values(), *self.merging])
        self._steps.extend(one.delta.steps for one in one_each(self.merging))
        self._arrivals.extend(arrivals_of(self.merging))
        self.counting.guard.advance()
        self.merging = self.reused = ()
        return tokens

    def _again(self) -> tuple[MergedDelta, ...]:
        """Return the deltas that the next merge uses again, in the order of the clients' names.

        A delta gets older with each version, and is used no more when it is too old to be accepted.
        """
        clients = {key.client for key in self.pending}
        again = (self._latest[client] for client in sorted(self._latest.keys() - clients))
        return tuple(
            self._aged(one) for one in again if self.staleness(one.key) <= self.max_staleness
        )

    def _aged(self, one: MergedDelta) -> MergedDelta:
        """The delta as it is now; a weight below its usual one was clipped, and stays so."""
        staleness = self.staleness(one.key)
        usual = self.weighting.weight(one.delta, one.staleness)
        share = self.weighting.weight(one.delta, staleness) / usual if usual else 0.0
        return evolve(one, staleness=staleness, weight=one.weight * share)

    def begin_merge(
        self,
        scores: Mapping[DeltaKey, Score] | None = None,
        only: Collection[DeltaKey] | None = None,
    ) -> tuple[tuple[MergedDelta, ...], float]:
        """Begin to merge the pending deltas. Returns them and the scale of the average.

        scores: an evaluator's; a delta that it refuses has no weight, whatever else it would be
        compared with. only: these of the pending ones; None: all. See also `reused`.
        """
        self.reused = self._again()
        pending = [
            self._weighed(one, (scores or {}).get(key))
            for key, one in self.pending.items()
            if only is None or key in only
        ]
        self.merging, work, self.counted_less = self.counting.count(pending)
        if isinstance(self.weighting, ArrivalsWeighting):
            factors = rarity([*self._arrivals, *arrivals_of(pending)][-USUAL_DELTAS:])
            self.merging = tuple(
                evolve(one, weight=one.weight * factors[one.key.client]) for one in self.merging
            )
        clients = one_each(self.merging)
        steps = [*self._steps, *(one.delta.steps for one in clients)][-USUAL_DELTAS:]
        # Not the mean: one delta that claims a million steps would make all others count for more.
        usual_steps = statistics.median(steps) if steps else None
        scale = self.weighting.scale(_counted((*work, *self.reused)), usual_steps)
        if self.reused and isinstance(self.weighting, TunedLatestWeighting):
            new = len({one.key.client for one in self.merging})
            scale *= new / (new + len(self.reused))
        return self.merging, scale

    def weights(self, scale: float) -> dict[str, float]:
        """Return, by client, the factor of its deltas in the current merge, reused ones included.

        scale: of the merge. Where clients count by their mean step, factors are of whole deltas.
        """
        number = Counter(one.key.client for one in self.merging)
        found = dict.fromkeys(sorted({*number, *(one.key.client for one in self.reused)}), 0.0)
        for one in (*self.merging, *self.reused):
            client = one.key.client
            steps = one.delta.steps if self.weighting.growth == 0.0 else 1
            count = number[client] or 1 if self._reuses else 1
            found[client] += scale * one.weight * steps / count
        return found

    def shares(self, keys: Iterable[DeltaKey]) -> list[float]:
        """The share that each pending delta would have of a version of these, by its own weight."""
        weights = [self._weighed(self.pending[key]).weight for key in keys]
        total = math.fsum(weights)
        return [weight / total if total else 0.0 for weight in weights]

    def _weighed(self, stored: StoredDelta, score: Score | None = None) -> MergedDelta:
        """The delta with the weight that it has by itself."""
        staleness = self.staleness(stored.key)
        # One that changes nothing would take weight from those that do.
        is_counted = stored.norm > 0.0 or self._weighs_unmoved
        is_counted = is_counted and not (score is not None and score.refused)
        if is_counted and not (self._one_base and staleness):
            weight = self.weighting.weight(stored.delta, staleness)
        else:
            weight = 0.0
        return MergedDelta(stored.delta, staleness, weight, stored.norm, score=score)

    def abandon_merge(self) -> None:
        """Make the deltas of a failed merge pending again."""
        self.merging = self.reused = ()

    @property
    def mergeable(self) -> int:
        """How many pending deltas can make a version.

        Without those that became older than `max_staleness` on their way: they enter a version of
        others, where a rule that needs one base gives them no weight.
        """
        return sum(self.staleness(key) <= self.max_staleness for key in self.pending)

    @property
    def clients_pending(self) -> int:
        """How many clients have a pending delta."""
        return len({key.client for key in self.pending})

    def receive(self, key: DeltaKey) -> None:
        """Record that a delta is received: an earlier one of its client is not, from here on."""
        self._received.settle(key, "accepted")

    def is_acknowledged(self, key: DeltaKey) -> bool:
        """Whether the delta was acknowledged: another offer gets the same answer."""
        return key in self.pending or self.settled.of(key) == "merged"

    def objection(self, offer: Delta) -> tuple[str, str] | None:
        """Why an offered delta will never be merged, as a code and a sentence; None: it may be."""
        key = offer.key
        if self._received.of(key) == "superseded":
            newest = self._received[key.client][0].text
            return "superseded", f"its client has sent {newest} before; numbers have to grow"
        outcome = self.settled.of(key)
        if outcome is not None:
            return outcome, f"this delta is {outcome}"
        if offer.tokens > MAX_TOKENS or offer.steps > MAX_TOKENS:
            return (
                "absurd",
                f"no client trains {offer.tokens} tokens in {offer.steps} steps between two syncs",
            )
        if offer.tokens < 1 or offer.steps < 1:
            return (
                "empty",
                f"a delta of {offer.tokens} tokens in {offer.steps} steps has no weight",
            )
        problem = self._privacy_problem(offer) if self._epsilon else None
        if problem is not None:
            return "privacy", problem
        if (
            self.version < 0
            or key.base > self.version
            or self.digests.get(key.base, offer.base_digest) != offer.base_digest
        ):
            text = (
                f"version {key.base} with digest {offer.base_digest} is not of this run's lineage"
            )
            return "lineage", text
        if self.staleness(key) > self.max_staleness:
            text = (
                f"computed from version {key.base}, the run is at {self.version};"
                f" at most {self.max_staleness} versions behind is merged"
            )
            return "stale", text
        return None

    def _privacy_problem(self, offer: Delta) -> str | None:
        """Why a private run does not take this delta."""
        spent: Any = offer.facts.get(EPSILON)
        if type(spent) not in (int, float) or not 0 <= spent < math.inf:
            return "it was not trained privately: it reports no epsilon, and this run has a budget"
        if spent > self._epsilon:
            return f"its client has spent epsilon {spent:g}, of at most {self._epsilon:g}"
        return None

    def staleness(self, key: DeltaKey) -> int:
        """Versions of deltas between a delta's base and that which the next merge starts from.

        The next merge starts from the version that is being made, if there is one.
        """
        others = sum(key.base < version <= self.version for version in self.global_versions)
        return max(0, self.version + (1 if self.merging else 0) - key.base - others)

    def acknowledge(self, stored: StoredDelta) -> None:
        """Queue a durable delta for the next merge."""
        self.receive(stored.key)
        self.pending[stored.key] = stored


def arrivals_of(merged: Iterable[MergedDelta]) -> list[str]:
    """Return the client of each delta of a version, in the order of their names."""
    return sorted(one.key.client for one in merged)


def _counted(merged: tuple[MergedDelta, ...]) -> tuple[MergedDelta, ...]:
    """Return the deltas with a weight; all where none has one, as the average is zero then."""
    return tuple(one for one in merged if one.weight) or merged


@frozen
class Counting:
    """How deltas count in a run.

    own_pace: several deltas of a client are its work. clips_values: a clipped delta is multiplied,
    and its weight is as without (docs/adr/0148).
    """

    weighting: Weighting
    guard: NormGuard
    own_pace: bool = False
    clips_values: bool = False

    def count(
        self, merged: Sequence[MergedDelta]
    ) -> tuple[tuple[MergedDelta, ...], list[MergedDelta], list[str]]:
        """Return the deltas with their final weights, the work that the average is divided by, and
        lines on deltas that count less.
        """
        for one in (one for one in merged if one.is_refused):
            self.guard.forget(one.key)
        number = Counter(one.key.client for one in merged if one.weight)
        merged, lines = self._with_tokens(merged, number)
        work = [one for one in merged if one.weight] or merged
        if not self.own_pace:
            work = self._with_share(one_each(work), lines)
        means = {one.key.client: one.delta for one in work}
        clips = self.guard.clips([one for one in merged if not one.is_refused])
        counted, shorter = [], []
        for one in merged:
            clip = max(_LEAST_CLIP, clips.get(one.key, 1.0))
            if clip < 1.0:
                name, norm = one.key.client, one.norm
                shorter.append(
                    f"{name}'s delta of norm {norm:.3g} counts as one of {clip * norm:.3g}"
                )
            delta = one.delta if self.own_pace else means.get(one.key.client, one.delta)
            weight = self.weighting.weight(delta, one.staleness) if one.weight else 0.0
            weight /= 1 if self.own_pace else max(1, number[one.key.client])
            whole = 1.0 if self.clips_values else clip
            counted.append(evolve(one, weight=whole * weight, clip=clip))
        return tuple(counted), work, lines + ([_some(shorter)] if shorter else [])

    def _with_tokens(
        self, merged: Sequence[MergedDelta], number: Counter[str]
    ) -> tuple[list[MergedDelta], list[str]]:
        known = [one.delta for one in one_each(one for one in merged if not one.is_refused)]
        if len(known) < _LEAST_CLIENTS:
            return list(merged), []
        found, lines = [], {}
        for one in merged:
            deltas = 1 if self.own_pace else max(1, number[one.key.client])
            most, why = self.guard.most_tokens(one.delta, known, deltas)
            if most < one.delta.tokens:
                lines[one.key.client] = claim_line(one.delta, most, why)
            found.append(evolve(one, delta=evolve(one.delta, tokens=most)))
        return found, list(lines.values())[:_SHOWN]

    def _with_share(self, clients: list[MergedDelta], lines: list[str]) -> list[MergedDelta]:
        """Return clients with fewer tokens where the share of one is too large."""
        max_share = self.guard.limits.max_share
        if not max_share or len(clients) < _LEAST_CLIENTS:
            return clients
        has_balance = any(BALANCE in one.delta.facts for one in clients)
        most = MOST_BY_BALANCE if has_balance else max(max_share * len(clients), MOST_OF_EQUAL)
        weights = [self.weighting.weight(one.delta, 0) for one in clients]
        limit = limit_of(weights, most)
        above = [one.key.client for one, w in zip(clients, weights, strict=True) if w > limit]
        if above:
            lines.append(
                f"{_some(sorted(above))} would have more of the version by tokens or labels, and"
                f" counts as {most / len(clients):.0%} of it"
            )
        return [
            _part_of(one, limit / weight) if weight > limit else one
            for one, weight in zip(clients, weights, strict=True)
        ]


def _part_of(one: MergedDelta, part: float) -> MergedDelta:
    tokens: Any = part * one.delta.tokens  # weighed only; those that are recorded are whole
    return evolve(one, delta=evolve(one.delta, tokens=tokens))


def limit_of(values: Sequence[float], most: float) -> float:
    """Return the limit of values at which, lowered to it, none is above `most` times their mean."""
    limit, lower = math.inf, max(values)
    while lower < (1.0 - _EXACT) * limit:  # each lowers the mean, and so the limit
        limit = lower
        lower = min(limit, most * fmean(min(value, limit) for value in values))
    return limit


def _some(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return ", ".join(parts[:_SHOWN]) + more
