"""Limits what one client can do by its norms, tokens and number of deltas. Pure.

The values and the token counts of a client may be wrong or forged. The guard compares them with
medians, which are robust while fewer than half of the clients are wrong: a client has one norm and
one token count in each, however many deltas it sends. A rule with value 0 is off.

    max_tokens_per_s     counted tokens are at most this x the seconds since the client's last
                         delta, or since it joined
    max_tokens_median    and at most this x the median of tokens, and in a step at most this x the
                         median of tokens a step, by which clients are weighed
    max_share            a client has at most this share of the weights of a version (`counting`)
    clip_norm            a delta counts as one of at most this norm
    clip_median          ... or of at most this x the median of its version (`limit`)
    outlier_median       a delta of more than this x the median of norms is excluded: the ledger has
                         the reason, and its file is kept

Tokens are counted when a delta is offered, so that the ledger, the weights and the run's limit use
the same number. An excluded delta is declined, or, where deltas may be released, accepted and held:
at each new version it is compared again, and merged with its staleness if it is no outlier any more
(the median moves during training).

Clipping is that of Sun et al. 2019 (arXiv:1911.07963). The median is of one version, from the first
one on, because norms of earlier versions do not exist there, and fall later. A delta grows with its
steps, measured as s^0.6 to s^1.3 (docs/QUALITY.md). So one of fewer steps than the median is
compared by the root of its steps, and one of more by `growth`, up to MOST_STEPS medians.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from attrs import field, mutable

from fsl_async.roles.sync.delta import ORDER, Delta, DeltaKey, MergedDelta, StoredDelta, one_each

if TYPE_CHECKING:
    from fsl_async.config.settings import GuardConfig

MEMORY = 64
"""Clients whose newest delta is remembered."""

MOST_STEPS, MOST_OLD = 4, 4
"""Up to so many times the median of steps a delta may be longer than the others; and versions for
which a client's newest delta is a measure, or as many as there are clients."""

MOST_HELD = 16
"""How many deltas of a client are held back to be released; older ones stay in quarantine."""
LEAST_DELTAS = 5
"""Deltas that must have been accepted before medians of earlier versions count, and clients with
whose newest deltas a version of fewer is completed."""


@mutable
class NormGuard:
    """Each client's newest delta, and deltas held back. Times in seconds of the caller's clock.

    growth: of a delta with its steps, as a power; 0: clients are weighed by their mean step, and
    its norm is compared. by_order: deltas of zeroth order are compared apart.
    """

    limits: GuardConfig
    growth: float = 0.5
    by_order: bool = False
    held: dict[DeltaKey, StoredDelta] = field(factory=dict)
    _newest: dict[str, StoredDelta] = field(factory=dict)
    """Client -> its newest delta; the client of the newest one is last."""
    _accepted: int = 0
    """Deltas, of which one for each client and version counts."""
    _counted: set[str] = field(factory=set)
    """Clients whose delta since the last version counts in `_accepted`."""
    _since: dict[str, float] = field(factory=dict)
    _settled: dict[str, tuple[DeltaKey, int]] = field(factory=dict)

    def recovered(self, usual: Sequence[StoredDelta], held: Iterable[StoredDelta]) -> None:
        """Restore the newest merged deltas and the held ones from disk, oldest first.

        usual: one of each client and version.
        """
        self._accepted = len(usual)
        for one in usual:
            self._remember(one)
        if self.limits.release:
            self.held = {one.key: one for one in held}

    def advance(self) -> None:
        """Begin a new version: each client's next delta counts again."""
        self._counted.clear()

    def joined(self, client: str, now: float) -> None:
        """Start to count the time of a new client."""
        self._since.setdefault(client, now)

    def known_since(self, clients: Iterable[str], since: float) -> None:
        """Set the approximate time of the last delta of clients that have none yet."""
        for client in clients:
            self._since.setdefault(client, since)

    def tokens(self, delta: Delta, now: float) -> tuple[int, str | None]:
        """How many of the claimed tokens count, and why not all. Same result for the same key."""
        key, tokens = delta.key, delta.tokens
        before = self._settled.get(key.client)
        if before is not None and before[0] == key:
            return before[1], None
        counted, why = tokens, None
        limits = self.limits
        if limits.max_tokens_per_s:
            seconds = max(0.0, now - self._since.get(key.client, now))
            most = max(1, int(limits.max_tokens_per_s * seconds))
            if most < counted:
                counted, why = most, f"{limits.max_tokens_per_s:g} a second for {seconds:.1f} s"
        if self._accepted >= LEAST_DELTAS and len(self._newest) > 1:
            most, reason = self.most_tokens(delta, [one.delta for one in self._newest.values()])
            if most < counted:
                counted, why = most, reason
        if why is not None:
            self._settled[key.client] = (key, counted)
            why = claim_line(delta, counted, why)
        return counted, why

    def most_tokens(self, delta: Delta, known: Sequence[Delta], deltas: int = 1) -> tuple[int, str]:
        """How many tokens of a delta may count beside those of `known`, one a client, and why.

        deltas: of its client in the version.
        """
        factor = self.limits.max_tokens_median
        if not factor:
            return delta.tokens, ""
        usual = median(one.tokens for one in known)
        a_step = factor * median(one.tokens / one.steps if one.steps else 0.0 for one in known)
        most = max(1, int(min(factor * usual / deltas, delta.tokens)))
        most_of_steps = max(1, int(min(a_step * delta.steps, delta.tokens)))
        if most_of_steps < most:
            return most_of_steps, f"at most {a_step:g} a step, {delta.steps} steps"
        return most, f"{factor:g} x the median of {usual:g}"

    def outlier(self, norm: float) -> str | None:
        """Why a delta of that norm is excluded, or None."""
        factor = self.limits.outlier_median
        if not factor or self._accepted < LEAST_DELTAS:
            return None
        usual = median(one.norm for one in self._newest.values())
        if norm <= factor * usual:
            return None
        return f"its norm of {norm:.4g} is above {factor:g} x the median of {usual:.4g}"

    def clips(self, merged: Sequence[MergedDelta]) -> dict[DeltaKey, float]:
        """The factors, below 1, of the deltas of a version that count as shorter than they are."""
        clip_norm = self.limits.clip_norm or math.inf
        moved = [one for one in merged if one.norm > 0.0]
        found: dict[DeltaKey, float] = {}
        for zeroth in (False, True) if self.by_order else (None,):
            deltas = [one for one in moved if zeroth in (None, _is_zeroth(one.delta))]
            limit, usual = self._limit(one_each(deltas), zeroth)
            if zeroth and math.isinf(limit):  # only one client has scalars: a way out for a liar
                limit, usual = self._limit(one_each(moved), None)
            for one in deltas:
                size = self._size(one.norm, one.delta.steps / usual, is_measure=False)
                if size > limit or one.norm > clip_norm:
                    found[one.key] = min(limit / size, clip_norm / one.norm)
        return found

    def _limit(self, clients: Sequence[MergedDelta], zeroth: bool | None) -> tuple[float, float]:
        """The largest size that counts whole beside these clients, and their median of steps.

        The newest deltas of others complete a version of few clients: of zeroth order, or of first
        order, or None: of any. Of two, the shorter is the measure.
        """
        names = {one.key.client for one in clients}
        # Sizes change during training, so clients that have left are no measure.
        since = max((one.key.base for one in clients), default=0) - max(MOST_OLD, len(self._newest))
        work = [(one.norm, one.delta.steps) for one in clients]
        for name, one in reversed(self._newest.items()):
            is_new = name not in names and one.key.base >= since and one.norm > 0.0
            if is_new and zeroth in (None, _is_zeroth(one.delta)) and len(work) < LEAST_DELTAS:
                work.append((one.norm, one.delta.steps))
        if not self.limits.clip_median or len(work) < 2:
            return math.inf, 1.0
        usual = max(1.0, median(steps for _, steps in work))
        sizes = [self._size(norm, steps / usual, is_measure=True) for norm, steps in work]
        shortest = len(sizes) == 2
        return self.limits.clip_median * (min(sizes) if shortest else median(sizes)), usual

    def _size(self, norm: float, steps: float, *, is_measure: bool) -> float:
        """The norm as if the delta were of the median of steps. steps: in medians.

        One of fewer steps is judged by their root, and is a measure by `growth`: the milder ones.
        """
        is_root = steps < 1.0 and self.growth > 0.0 and not is_measure
        power = 0.5 if is_root else self.growth or 1.0
        return norm / float(min(max(steps, 1e-12), MOST_STEPS) ** power)

    def accepted(self, stored: StoredDelta, now: float) -> None:
        """Add an accepted delta to the medians."""
        client = stored.key.client
        self._accepted += client not in self._counted
        self._counted.add(client)
        self._remember(stored)
        self.stored(client, now)

    def _remember(self, one: StoredDelta) -> None:
        client = one.key.client
        self._newest.pop(client, None)
        self._newest[client] = one
        for oldest in list(self._newest)[:-MEMORY]:
            del self._newest[oldest]

    def stored(self, client: str, now: float) -> None:
        """Restart a client's time at its delta, accepted or not."""
        self._since[client] = now
        self._settled.pop(client, None)

    def forget(self, key: DeltaKey) -> None:
        """Take a delta out of the medians again, which an evaluator has refused."""
        one = self._newest.get(key.client)
        if one is not None and one.key == key:
            del self._newest[key.client]

    def hold(self, one: StoredDelta) -> None:
        """Hold an excluded delta, if deltas may be released."""
        if not self.limits.release:
            return
        self.held[one.key] = one
        of_client = [key for key in self.held if key.client == one.key.client]
        for key in of_client[:-MOST_HELD]:
            del self.held[key]

    def releasable(self) -> list[StoredDelta]:
        """Remove and return the held deltas that are no outliers any more."""
        found = [one for one in self.held.values() if self.outlier(one.norm) is None]
        for one in found:
            del self.held[one.key]
        return found


def claim_line(delta: Delta, counted: int, why: str) -> str:
    """A line about claimed tokens that do not all count."""
    return f"{counted} of the {delta.tokens} tokens that {delta.key.client} claims count: {why}"


def _is_zeroth(delta: Delta) -> bool:
    return delta.facts.get(ORDER) == 0
