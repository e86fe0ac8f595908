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

from fsl_async.roles.phrasing import counted
from fsl_async.roles.sync.delta import BALANCE, DeltaKey, MergedDelta, one_each
from fsl_async.roles.sync.norm_guard import NormGuard
from fsl_async.roles.sync.weighting import Weighting, balance_factor

MOST_SHARE = 2.0
_LEAST_CLIENTS = 3
"""With two clients a median of token counts is no judge between them."""
_LEAST_CLIP = 1e-30
"""A weight stays above 0."""
_SHOWN = 4


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
            lines.append(_clip_line(merged, clips))
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
        found = []
        for one in merged:
            most, why = one.delta.tokens, ""
            if len(known) >= _LEAST_CLIENTS:
                most, why = self.guard.most_tokens(one.delta, known)
            if most < one.delta.tokens:
                lines.append(
                    f"{most} of the {one.delta.tokens} tokens that {one.key.client} claims count:"
                    f" {why}"
                )
            found.append(evolve(one, delta=evolve(one.delta, tokens=most)))
        return found

    def _with_balance(self, merged: Sequence[MergedDelta], lines: list[str]) -> list[MergedDelta]:
        if not any(BALANCE in one.delta.facts for one in merged):
            return list(merged)
        most = most_balance([(one.delta.tokens, balance_factor(one.delta)) for one in merged])
        above = sorted({one.key.client for one in merged if balance_factor(one.delta) > most})
        if not above:
            return list(merged)
        lines.append(
            f"the balance of labels that {_names(above)} report counts as {most:.2g}, so that none"
            f" has more than {MOST_SHARE:g} x its share by tokens"
        )
        return [
            evolve(one, delta=evolve(one.delta, facts=one.delta.facts | {BALANCE: most}))
            if balance_factor(one.delta) > most
            else one
            for one in merged
        ]


def most_balance(clients: Sequence[tuple[float, float]]) -> float:
    """Return the balance above which a client would have more than `MOST_SHARE` times its share.

    clients: tokens and balance of each. As many of the best balanced as needed are lowered to it.
    """
    tokens = sum(count for count, _ in clients)
    lowered = 0.0
    rest = sum(count * balance for count, balance in clients)
    for count, balance in sorted(clients, key=lambda one: -one[1]):
        if MOST_SHARE * lowered >= tokens:
            break
        most = MOST_SHARE * rest / (tokens - MOST_SHARE * lowered)
        if balance <= most:
            return most
        lowered += count
        rest -= count * balance
    return max(balance for _, balance in clients)


def _clip_line(merged: Sequence[MergedDelta], clips: dict[DeltaKey, float]) -> str:
    parts = [
        f"{one.key.client}'s delta of norm {one.norm:.3g} counts as one of"
        f" {clips[one.key] * one.norm:.3g}"
        for one in merged
        if one.key in clips
    ]
    more = f", and {counted(len(parts) - _SHOWN, 'more delta')}" if len(parts) > _SHOWN else ""
    return ", ".join(parts[:_SHOWN]) + more


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
