"""Decides how much each delta of a version counts, once all of its deltas are there. Pure.

Once, when the version is ordered, because it depends on the other deltas of the version:

- a client counts once: each of its n deltas has an nth of the weight of their mean work, unless
  clients send at their own pace, where several deltas are a client's work
- tokens of a client count up to `guard.max_tokens_median` x the median of the version's clients
- a client has at most `guard.max_share` of the weights, because tokens and the balance of labels
  are only claimed
- a delta that is too long counts as a shorter one (`norm_guard`)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from attrs import evolve, frozen

from fsl_async.roles.sync.delta import BALANCE, MergedDelta, one_each
from fsl_async.roles.sync.norm_guard import NormGuard, claim_line
from fsl_async.roles.sync.weighting import Weighting

MOST_OF_EQUAL, MOST_BY_BALANCE = 1.5, 2.0
"""A client may have 1.5 times an equal share, also where that is above `guard.max_share`; where
clients report the balance of their labels, twice an equal share instead."""
_LEAST_CLIENTS = 3
"""Between two clients neither a median nor a share is a judge."""
_LEAST_CLIP = 1e-30
"""A weight stays above 0."""
_EXACT, _SHOWN = 1e-9, 4


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
        number = Counter(one.key.client for one in merged if one.weight)
        merged, lines = self._with_tokens(merged, number)
        work = [one for one in merged if one.weight] or merged
        if not self.own_pace:
            work = self._with_share(one_each(work), lines)
        means = {one.key.client: one.delta for one in work}
        clips = self.guard.clips(merged)
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
        known = [one.delta for one in one_each(merged)]
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
