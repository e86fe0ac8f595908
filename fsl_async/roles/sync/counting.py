"""Decides how much each delta of a version counts, once all of its deltas are there. Pure.

A delta has a weight from when it is stored, so that it is added while it arrives. What depends on
the other deltas of the version is decided when the version is ordered:

- a client counts once: each of its n deltas has an nth of its weight, unless clients send at their
  own pace, where several deltas are a client's work
- tokens count up to `guard.max_tokens_median` x the median of the version's clients
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
        lines: list[str] = []
        merged = self._with_tokens(merged, lines)
        weighed = self._with_share(merged, lines)
        clips = self.guard.clips(merged)
        counted, shorter = [], []
        for one, weight in zip(merged, (one.weight for one in weighed), strict=True):
            clip = max(_LEAST_CLIP, clips.get(one.key, 1.0))
            if clip < 1.0:
                name, norm = one.key.client, one.norm
                shorter.append(
                    f"{name}'s delta of norm {norm:.3g} counts as one of {clip * norm:.3g}"
                )
            whole = 1.0 if self.clips_values else clip
            counted.append(evolve(one, weight=whole * weight, clip=clip))
        lines += [_some(shorter)] if shorter else []
        work = [one for one in weighed if one.weight] or weighed
        return tuple(counted), work if self.own_pace else one_each(work), lines

    def _with_tokens(self, merged: Sequence[MergedDelta], lines: list[str]) -> list[MergedDelta]:
        known = [one.delta for one in one_each(merged)]
        if len(known) < _LEAST_CLIENTS:
            return list(merged)
        found = []
        for one in merged:
            most, why = self.guard.most_tokens(one.delta, known)
            if most < one.delta.tokens:
                lines.append(claim_line(one.delta, most, why))
            found.append(evolve(one, delta=evolve(one.delta, tokens=most)))
        return found

    def _with_share(self, merged: list[MergedDelta], lines: list[str]) -> list[MergedDelta]:
        """Weigh the deltas, with fewer tokens for a client with too large a share."""
        deltas = Counter(one.key.client for one in merged if one.weight)
        weighed = [self._weighed(one, deltas) for one in merged]
        max_share = self.guard.rules.max_share
        if self.own_pace or not max_share or len(deltas) < _LEAST_CLIENTS:
            return weighed
        shares = dict.fromkeys(deltas, 0.0)
        for one in weighed:
            if one.weight:
                shares[one.key.client] += one.weight
        has_balance = any(BALANCE in one.delta.facts for one in merged)
        most = MOST_BY_BALANCE if has_balance else max(max_share * len(shares), MOST_OF_EQUAL)
        limit = limit_of(list(shares.values()), most)
        above = {client: limit / share for client, share in shares.items() if share > limit}
        if above:
            lines.append(
                f"{_some(sorted(above))} would have more of the version by tokens or labels, and"
                f" counts as {most / len(shares):.0%} of it"
            )
        return [self._weighed(one, deltas, above.get(one.key.client, 1.0)) for one in merged]

    def _weighed(self, one: MergedDelta, deltas: Counter[str], part: float = 1.0) -> MergedDelta:
        """The delta with its weight. part: of its tokens, which are recorded whole."""
        tokens: Any = part * one.delta.tokens if part < 1.0 else one.delta.tokens
        delta = evolve(one.delta, tokens=tokens)
        weight = self.weighting.weight(delta, one.staleness) if one.weight else 0.0
        of_client = 1 if self.own_pace else max(1, deltas[one.key.client])
        return evolve(one, delta=delta, weight=weight / of_client)


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
