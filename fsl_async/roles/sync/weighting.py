"""Computes the weight of each delta in a round. Pure.

    average = scale(merged) * sum_i weight(i) * Delta_i

Both are computed when a version is ordered. Each strategy is a class with these two methods. To add
one, add a class and a line in WEIGHTINGS.

Staleness s (versions committed since the delta's base) discounts by d = (1 + s) ** -exponent (Xie
et al., FedAsync, arXiv:1903.03934; Nguyen et al., FedBuff, arXiv:2106.06639: exponent 0.5). It is
0.25 for `latest` in fine-tuning and for `arrivals`, which give sites that send seldom their weight:
their deltas are the older ones. As in FedBuff the discount is not normalized away: a round of stale
deltas makes a smaller step.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, ClassVar, Protocol

from attrs import frozen

from fsl_async.roles.sync.delta import BALANCE
from fsl_async.roles.sync.norm_guard import MOST_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsl_async.roles.sync.delta import Delta, MergedDelta

STALENESS_EXPONENT, MILD_EXPONENT = 0.5, 0.25
LEAST_BALANCE = 0.01
"""Balance that a site of one label counts with."""
MOST_RARE = 3.0
"""A delta of a client that sends seldom counts at most this many times."""


class Weighting(Protocol):
    """A strategy. All methods depend on their arguments only, so a replay is exact."""

    @property
    def growth(self) -> float:
        """How a delta may grow with its steps, as a power; 0: it counts by its mean step."""

    def weight(self, delta: Delta, staleness: int) -> float:
        """The factor of a delta in the sum; finite and not negative."""

    def scale(self, merged: Sequence[MergedDelta], usual_steps: float | None = None) -> float:
        """The factor of a sum of exactly `merged`; 0 when they hold no work.

        usual_steps: of a delta of this run, in the mean; None: of those merged here.
        """


def staleness_discount(staleness: int, exponent: float = STALENESS_EXPONENT) -> float:
    """(1 + staleness) ** -exponent: 1 for a fresh delta."""
    return float((1.0 + staleness) ** -exponent)


def _reciprocal(total: float) -> float:
    return 1.0 / total if total > 0.0 else 0.0


def _tokens_a_step(delta: Delta) -> float:
    return delta.tokens / delta.steps if delta.steps else 0.0


@frozen
class BatchWeighting:
    """Weighs clients by their tokens a step, and adds up a client's several deltas.

    A delta grows with its steps by itself; times the tokens of a step it counts as in data
    parallel, where a gradient weighs as much as its batch has tokens. A delta without steps has no
    weight. Not for clients that send full weights, which do not add up.
    """

    growth: ClassVar[float] = 1.0

    def weight(self, delta: Delta, staleness: int) -> float:
        """Tokens a step, times the staleness discount."""
        return _tokens_a_step(delta) * staleness_discount(staleness)

    def scale(self, merged: Sequence[MergedDelta], usual_steps: float | None = None) -> float:
        """One over the sum of the clients' tokens a step."""
        work: dict[str, tuple[int, int]] = {}
        for delta in (one.delta for one in merged if one.delta.steps > 0):
            tokens, steps = work.get(delta.key.client, (0, 0))
            work[delta.key.client] = (tokens + delta.tokens, steps + delta.steps)
        return _reciprocal(math.fsum(tokens / steps for tokens, steps in work.values()))


def balance_factor(delta: Delta) -> float:
    """The balance of the labels that a delta was trained on, if it reports one; at least 0.01.

    A classifier's site moves the threshold between labels by those that it has, and a site of one
    label moves nothing else (docs/TUNING.md, Ranks and labels). So n rows with shares p_c count as
    n * (1 - sum of p_c^2) * C / (C - 1): 1 for equally many of each. Not 0 for one label: where all
    sites are so, all count the same.
    """
    reported = delta.facts.get(BALANCE, 1.0)
    if isinstance(reported, bool) or not isinstance(reported, int | float):
        return 1.0
    return min(1.0, max(LEAST_BALANCE, reported)) if math.isfinite(reported) else LEAST_BALANCE


@frozen
class TokensWeighting:
    """Weighs deltas by their tokens: the average over the data, as in FedAvg.

    A delta also grows with its number of steps, so a fast client counts almost twice. Rows with
    labels count by their balance.
    """

    growth: ClassVar[float] = 0.5

    def weight(self, delta: Delta, staleness: int) -> float:
        """Tokens times the staleness discount."""
        discount = staleness_discount(staleness)
        return delta.tokens * balance_factor(delta) * discount

    def scale(self, merged: Sequence[MergedDelta], usual_steps: float | None = None) -> float:
        """One over the sum of tokens."""
        return _reciprocal(
            math.fsum(one.delta.tokens * balance_factor(one.delta) for one in merged)
        )


@frozen
class UniformWeighting:
    """Weighs all deltas equally."""

    growth: ClassVar[float] = 0.5
    exponent: ClassVar[float] = STALENESS_EXPONENT

    def weight(self, delta: Delta, staleness: int) -> float:
        """The staleness discount alone."""
        return staleness_discount(staleness, self.exponent)

    def scale(self, merged: Sequence[MergedDelta], usual_steps: float | None = None) -> float:
        """One over the number of deltas."""
        return _reciprocal(float(len(merged)))


@frozen
class FedNovaWeighting:
    """Weighs each client's mean step by its tokens (FedNova, Wang et al., arXiv:2007.07481).

    With p_i = tokens_i / sum of tokens and H_i steps: average = (sum_i p_i H_i) * sum_i p_i Delta_i
    / H_i, so a client does not count more because it took more steps. A delta without steps has no
    weight.
    """

    growth: ClassVar[float] = 0.0

    def weight(self, delta: Delta, staleness: int) -> float:
        """Tokens a step, times the staleness discount."""
        return _tokens_a_step(delta) * staleness_discount(staleness)

    def scale(self, merged: Sequence[MergedDelta], usual_steps: float | None = None) -> float:
        """The token-weighted mean of the steps, divided by the sum of tokens."""
        counted = [one.delta for one in merged if one.delta.steps > 0]
        tokens = float(sum(one.tokens for one in counted))
        # A claim of many steps must not make all others count for more.
        most = math.inf if usual_steps is None else MOST_STEPS * usual_steps
        tokens_times_steps = float(sum(one.tokens * min(one.steps, most) for one in counted))
        return tokens_times_steps * _reciprocal(tokens) * _reciprocal(tokens)


@frozen
class AnarchicWeighting:
    """Weighs clients' mean steps equally, whatever number of steps each chose to train.

    AFA-CD (Yang et al., ICML 2022): m deltas of H_i steps give 1 / m * sum_i Delta_i / H_i, here
    times the usual number of steps, so that an outer learning rate means what it does elsewhere. A
    delta without steps has no weight. A client that sends often has the weight of all its deltas.
    """

    growth: ClassVar[float] = 0.0
    exponent: ClassVar[float] = STALENESS_EXPONENT

    def weight(self, delta: Delta, staleness: int) -> float:
        """One over the steps, times the staleness discount."""
        discount = staleness_discount(staleness, self.exponent)
        return _reciprocal(float(delta.steps)) * discount

    def scale(self, merged: Sequence[MergedDelta], usual_steps: float | None = None) -> float:
        """The usual steps over the number of deltas."""
        if usual_steps is None:
            steps = [one.delta.steps for one in merged if one.delta.steps > 0]
            usual_steps = math.fsum(steps) * _reciprocal(float(len(steps)))
        return usual_steps * _reciprocal(float(len(merged)))


@frozen
class LatestWeighting(AnarchicWeighting):
    """Weighs clients' mean steps equally, those of earlier versions included.

    AFA-CS (Yang et al., ICML 2022): the newest update of each of M clients, new or not, give 1 / M
    * sum_m Delta_m / H_m, times the usual number of steps. Several new deltas of a client count as
    their mean (`fsl_async.store.rules.aggregation`).
    """

    def scale(self, merged: Sequence[MergedDelta], usual_steps: float | None = None) -> float:
        """The usual steps over the number of clients. merged: with what is used again."""
        clients = len({one.key.client for one in merged})
        return super().scale(merged, usual_steps) * len(merged) * _reciprocal(float(clients))


@frozen
class TunedLatestWeighting(LatestWeighting):
    """Weighs as `latest` in fine-tuning: old deltas fade less, and versions move less far.

    Times the share of the clients whose delta is new (`fsl_async.roles.sync.deltas`), so versions
    move as far as clients train; else they swing between what clients have (docs/adr/0175).
    """

    exponent: ClassVar[float] = MILD_EXPONENT


@frozen
class ArrivalsWeighting(UniformWeighting):
    """Weighs deltas equally, times `rarity`: clients count equally however often they send.

    The expected sum is that of equal arrivals, as in Horvitz and Thompson 1952. The newest arrivals
    are known where a version is ordered (`fsl_async.roles.sync.deltas`), so `weight` is without it.
    """

    exponent: ClassVar[float] = MILD_EXPONENT


def rarity(arrivals: Sequence[str]) -> dict[str, float]:
    """Return, by client, an equal share of the arrivals over its own share; at most MOST_RARE.

    arrivals: the client of each delta.
    """
    counts = Counter(arrivals)
    equal = len(arrivals) / len(counts) if counts else 0.0
    return {client: min(MOST_RARE, equal / count) for client, count in counts.items()}


WEIGHTINGS: dict[str, Callable[[], Weighting]] = {
    "batch": BatchWeighting,
    "tokens": TokensWeighting,
    "uniform": UniformWeighting,
    "fednova": FedNovaWeighting,
    "anarchic": AnarchicWeighting,
    "latest": LatestWeighting,
    "latest-tuned": TunedLatestWeighting,
    "arrivals": ArrivalsWeighting,
}


def weighting_named(name: str) -> Weighting:
    """The strategy of that name. Raises ValueError, with the names that exist."""
    if name not in WEIGHTINGS:
        raise ValueError(f"no weighting is called {name!r}; there are {', '.join(WEIGHTINGS)}")
    return WEIGHTINGS[name]()
