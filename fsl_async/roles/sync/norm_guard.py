"""Limits the weight of deltas by norm and token count, and excludes outliers. Pure.

The values and the token counts of a client may be wrong or forged. The guard compares norms and
token counts with the running medians of accepted deltas (the last `MEMORY`): a median is robust
while fewer than half of the deltas are wrong. A rule with value 0 is off.

    max_tokens_per_s     counted tokens are at most this x the seconds since the client's last
                         delta, or since it joined
    max_tokens_median    and at most this x the median of tokens, and in a step at most this x the
                         median of tokens a step, by which clients are weighed
    clip_norm            a delta's weight is lowered so that it counts as one of at most this norm
    clip_median          ... or of at most this x the median of norms
    outlier_median       a delta of more than this x the median of norms is excluded: the ledger has
                         the reason, and its file is kept

Tokens are counted when a delta is offered, so that the ledger, the weights and the run's limit use
the same number. An excluded delta is declined, or, where deltas may be released, accepted and held:
at each new version it is compared again, and merged with its staleness if it is no outlier any more
(the median moves during training).

Clipping is that of Sun et al. 2019 (arXiv:1911.07963), applied to weights: the average contains
clip x delta, divided by the sum of unclipped weights. The median uses norms before clipping.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from attrs import field, frozen, mutable

from fsl_async.roles.sync.delta import Delta, DeltaKey, StoredDelta

MEMORY = 64

MOST_HELD = 16
"""How many deltas of a client are held back to be released; older ones stay in quarantine."""


@frozen
class GuardRules:
    """The limits; 0: no limit. least: accepted deltas that medians need."""

    clip_norm: float = 0.0
    clip_median: float = 0.0
    outlier_median: float = 0.0
    least: int = 5
    max_tokens_per_s: float = 0.0
    max_tokens_median: float = 0.0
    release: bool = False

    @property
    def clips(self) -> bool:
        """Whether a delta's weight may depend on its norm."""
        return self.clip_norm > 0.0 or self.clip_median > 0.0


@mutable
class NormGuard:
    """Medians of accepted deltas, and deltas held back. Times in seconds of the caller's clock."""

    rules: GuardRules = field(factory=GuardRules)
    held: dict[DeltaKey, StoredDelta] = field(factory=dict)
    _norms: deque[float] = field(factory=lambda: deque(maxlen=MEMORY))
    _tokens: deque[int] = field(factory=lambda: deque(maxlen=MEMORY))
    _batches: deque[float] = field(factory=lambda: deque(maxlen=MEMORY))
    """Tokens a step."""
    _since: dict[str, float] = field(factory=dict)
    _settled: dict[str, tuple[DeltaKey, int]] = field(factory=dict)

    def recovered(self, usual: Iterable[StoredDelta], held: Iterable[StoredDelta]) -> None:
        """Restore the newest merged deltas and the held ones from disk, oldest first."""
        for one in usual:
            self._remember(one)
        if self.rules.release:
            self.held = {one.key: one for one in held}

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
        rules = self.rules
        if rules.max_tokens_per_s:
            seconds = max(0.0, now - self._since.get(key.client, now))
            most = max(1, int(rules.max_tokens_per_s * seconds))
            if most < counted:
                counted, why = most, f"{rules.max_tokens_per_s:g} a second for {seconds:.1f} s"
        if rules.max_tokens_median and len(self._tokens) >= rules.least:
            usual = median(self._tokens)
            most = max(1, int(rules.max_tokens_median * usual))
            if most < counted:
                counted, why = most, f"{rules.max_tokens_median:g} x the median of {usual:g}"
            a_step = rules.max_tokens_median * median(self._batches or [math.inf])
            most = max(1, int(min(a_step * delta.steps, tokens)))
            if most < counted:
                counted, why = most, f"at most {a_step:g} a step, {delta.steps} steps"
        if why is not None:
            self._settled[key.client] = (key, counted)
            why = f"{counted} of the {tokens} tokens that {key.client} claims count: {why}"
        return counted, why

    def outlier(self, norm: float) -> str | None:
        """Why a delta of that norm is excluded, or None."""
        factor = self.rules.outlier_median
        if not factor or len(self._norms) < self.rules.least:
            return None
        usual = median(self._norms)
        if norm <= factor * usual:
            return None
        return f"its norm of {norm:.4g} is above {factor:g} x the median of {usual:.4g}"

    def clip(self, norm: float) -> float:
        """The factor of a delta's weight: 1, or limit / norm."""
        limits = []
        if self.rules.clip_norm:
            limits.append(self.rules.clip_norm)
        if self.rules.clip_median and len(self._norms) >= self.rules.least:
            limits.append(self.rules.clip_median * median(self._norms))
        limit = min(limits, default=norm)
        return limit / norm if norm > limit else 1.0

    def accepted(self, stored: StoredDelta, now: float) -> None:
        """Add an accepted delta to the medians."""
        self._remember(stored)
        self.stored(stored.key.client, now)

    def _remember(self, one: StoredDelta) -> None:
        self._norms.append(one.norm)
        self._tokens.append(one.delta.tokens)
        if one.delta.steps:
            self._batches.append(one.delta.tokens / one.delta.steps)

    def stored(self, client: str, now: float) -> None:
        """Restart a client's time at its delta, accepted or not."""
        self._since[client] = now
        self._settled.pop(client, None)

    def hold(self, one: StoredDelta) -> None:
        """Hold an excluded delta, if deltas may be released."""
        if not self.rules.release:
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
