"""Weighting: how much each delta counts in a round. Pure.

    average = scale(merged) * sum_i weight(i) * Delta_i

`weight` is needed when a delta arrives, because it is added to the accumulator and then forgotten; `scale` is known only
at the commit. Each strategy is a class with these two methods: adding one is adding a class and a line in WEIGHTINGS.

Staleness s (versions committed since the delta's base) discounts by d = (1 + s) ** -exponent (Xie et al., FedAsync,
arXiv:1903.03934; Nguyen et al., FedBuff, arXiv:2106.06639: exponent 0.5). As in FedBuff the discount is not divided out
again: a round of stale deltas makes a smaller step, where normalised weights would make a full one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsl_async.roles.sync.delta import Delta, MergedDelta

DEFAULT_STALENESS_EXPONENT = 0.5


class Weighting(Protocol):
    """A strategy. Both methods are functions of their arguments alone, so a replay gives the same numbers."""

    def weight(self, delta: Delta, staleness: int) -> float:
        """The factor of a delta that old in the accumulator; finite and not negative."""

    def scale(self, merged: Sequence[MergedDelta]) -> float:
        """The factor of the whole accumulator once exactly `merged` are in it; 0 when they hold no work at all."""


def staleness_discount(staleness: int, exponent: float = DEFAULT_STALENESS_EXPONENT) -> float:
    """(1 + staleness) ** -exponent: 1 for a fresh delta, and 1 for every delta when the exponent is 0."""
    return float((1.0 + staleness) ** -exponent)


def _reciprocal(total: float) -> float:
    return 1.0 / total if total > 0.0 else 0.0


@frozen
class TokensWeighting:
    """Each delta counts by the tokens it was trained on: the average over the data, as FedAvg has it.

    With Adam inside, a delta also grows with its number of steps, so a fast client counts almost twice; FedNova does not.
    """

    staleness_exponent: float = DEFAULT_STALENESS_EXPONENT

    def weight(self, delta: Delta, staleness: int) -> float:
        """Tokens times the staleness discount."""
        discount = staleness_discount(staleness, self.staleness_exponent)
        return delta.tokens * discount

    def scale(self, merged: Sequence[MergedDelta]) -> float:
        """One over the tokens of all."""
        return _reciprocal(float(sum(one.delta.tokens for one in merged)))


@frozen
class UniformWeighting:
    """Each delta counts the same."""

    staleness_exponent: float = DEFAULT_STALENESS_EXPONENT

    def weight(self, delta: Delta, staleness: int) -> float:
        """The staleness discount alone."""
        return staleness_discount(staleness, self.staleness_exponent)

    def scale(self, merged: Sequence[MergedDelta]) -> float:
        """One over their number."""
        return _reciprocal(float(len(merged)))


@frozen
class FedNovaWeighting:
    """Each client's mean step counts by its tokens, times the mean number of steps (Wang et al., arXiv:2007.07481).

    With p_i = tokens_i / tokens of all and H_i steps: average = (sum_i p_i H_i) * sum_i p_i Delta_i / H_i, so a client does
    not count more because its many steps took it further. A delta without steps counts nothing.
    """

    staleness_exponent: float = DEFAULT_STALENESS_EXPONENT

    def weight(self, delta: Delta, staleness: int) -> float:
        """Tokens per step, times the staleness discount."""
        if delta.steps == 0:
            return 0.0
        discount = staleness_discount(staleness, self.staleness_exponent)
        return delta.tokens / delta.steps * discount

    def scale(self, merged: Sequence[MergedDelta]) -> float:
        """The token-weighted mean of the steps, divided by the tokens of all."""
        counted = [one.delta for one in merged if one.delta.steps > 0]
        tokens = float(sum(one.tokens for one in counted))
        tokens_times_steps = float(sum(one.tokens * one.steps for one in counted))
        return tokens_times_steps * _reciprocal(tokens) * _reciprocal(tokens)


WEIGHTINGS: dict[str, Callable[[float], Weighting]] = {
    "tokens": TokensWeighting,
    "uniform": UniformWeighting,
    "fednova": FedNovaWeighting,
}


def weighting_named(name: str, staleness_exponent: float = DEFAULT_STALENESS_EXPONENT) -> Weighting:
    """The strategy of that name; ValueError names the ones there are."""
    if name not in WEIGHTINGS:
        raise ValueError(f"no weighting is called {name!r}; there are {', '.join(WEIGHTINGS)}")
    return WEIGHTINGS[name](staleness_exponent)
