"""Decides how much each delta of a version counts, once all of its deltas are there. Pure.

A delta has a weight from when it is stored, so that it is added while it arrives. What depends on
the other deltas of the version is decided when the version is ordered:

- a client counts once: each of its n deltas has an nth of its weight, unless clients send at their
  own pace, where several deltas are a client's work
- tokens count up to `guard.max_tokens_median` x the median of the version's clients
- the balance of labels gives a client at most `MOST_SHARE` times its share by tokens, because it is
  only reported
- a delta that is too long counts as a shorter one (`norm_guard`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attrs import evolve, frozen

from fsl_async.roles.sync.delta import BALANCE, DeltaKey, MergedDelta, one_each
from fsl_async.roles.sync.norm_guard import NormGuard, claim_line
from fsl_async.roles.sync.weighting import TokensWeighting, Weighting, balance_factor

MOST_SHARE = 2.0
_LEAST_CLIENTS = 3
"""With two clients a median of token counts is no judge between them."""
_LEAST_CLIP = 1e-30
"""A weight stays above 0."""
_STEPS, _SHOWN = 128, 4


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

    def count(self, merged: Sequence[MergedDelta]) -> tuple[tuple[MergedDelta, ...], list[str]]:
        """Return the deltas with their final weights, and lines on those that count less."""
        lines: list[str] = []
        merged = self._with_balance(self._with_tokens(merged, lines), lines)
        clips = self.guard.clips(merged)
        if clips:
            lines.append(
                _some(
                    [
                        f"{one.key.client}'s delta of norm {one.norm:.3g} counts as one of"
                        f" {clips[one.key] * one.norm:.3g}"
                        for one in merged
                        if one.key in clips
                    ]
                )
            )
        deltas = Counter(one.key.client for one in merged)
        return tuple(self._weighed(one, deltas, clips) for one in merged), lines

    def by_client(self, merged: Sequence[MergedDelta]) -> list[MergedDelta]:
        """Return what the average is divided by: one delta a client, with its mean work."""
        return list(merged) if self.own_pace else one_each(merged)

    def _weighed(
        self, one: MergedDelta, deltas: Counter[str], clips: dict[DeltaKey, float]
    ) -> MergedDelta:
        clip = max(_LEAST_CLIP, clips.get(one.key, 1.0))
        weight = self.weighting.weight(one.delta, one.staleness) if one.weight else 0.0
        if not self.own_pace:
            weight /= deltas[one.key.client]
        return evolve(one, weight=weight if self.clips_values else clip * weight, clip=clip)

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

    def _with_balance(self, merged: list[MergedDelta], lines: list[str]) -> list[MergedDelta]:
        if not isinstance(self.weighting, TokensWeighting):
            return merged
        most = most_balance([(one.delta.tokens, balance_factor(one.delta)) for one in merged])
        above = {one.key.client for one in merged if balance_factor(one.delta) > most}
        if above:
            lines.append(
                f"the balance of labels of {_some(sorted(above))} counts as {most:.2g}, because a"
                f" client has at most {MOST_SHARE:g} x its share by tokens"
            )
        return [
            evolve(one, delta=evolve(one.delta, facts=one.delta.facts | {BALANCE: most}))
            if one.key.client in above
            else one
            for one in merged
        ]


def most_balance(clients: Sequence[tuple[float, float]]) -> float:
    """Return the balance above which a client would have more than `MOST_SHARE` times its share.

    clients: tokens and balance of each, which is lowered to it.
    """
    most, tokens = 1.0, sum(count for count, _ in clients)
    for _ in range(_STEPS):  # each lowers the sum, and so the limit
        total = sum(count * min(balance, most) for count, balance in clients)
        most = min(most, MOST_SHARE * total / tokens)
    return most


def _some(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return ", ".join(parts[:_SHOWN]) + more
