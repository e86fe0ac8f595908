"""Screening: what a delta may count for, whoever sent it, and which is kept out. Pure.

A client may err or lie about its values and about its work. Compared are norms and token counts with the running medians of what was
accepted before (the last `MEMORY` deltas): a median stands still while fewer than half of the deltas are wrong. All rules are off at 0.

    max_tokens_per_s     tokens that count: at most this x the seconds since the client's last delta (or since it came)
    max_tokens_median    and at most this x the median of tokens; both are settled when a delta is offered, so that the ledger, the
                         weights and the run's limit all have the same number
    clip_norm            a delta's weight is lowered so that it counts as one of at most this norm
    clip_median          ... or of at most this x the median of norms
    outlier_median       a delta of more than this x the median of norms is kept out: in the ledger with its reason, its file aside

What is kept out is said to be refused, or, where deltas may be released, accepted: then each new version looks at it again, and
when it is no outlier any more (the median moves as training goes on) it is merged with its staleness.

Clipping is that of Sun et al. 2019 (arXiv:1911.07963), by weight: the average has clip x delta in it, and the sum of the weights that it is
divided by is that of unclipped deltas. Norms of clipped deltas enter the median as they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from attrs import field, frozen, mutable

from fsl_async.roles.sync.delta import Delta, DeltaKey, StoredDelta

MEMORY = 64


@frozen
class GuardRules:
    """What is checked; 0 is never. `least`: accepted deltas before medians count."""

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
    """The server's memory of what is usual. Times in seconds of the caller's clock."""

    rules: GuardRules = field(factory=GuardRules)
    held: dict[DeltaKey, StoredDelta] = field(factory=dict)
    _norms: deque[float] = field(factory=lambda: deque(maxlen=MEMORY))
    _tokens: deque[int] = field(factory=lambda: deque(maxlen=MEMORY))
    _since: dict[str, float] = field(factory=dict)
    _settled: dict[str, tuple[DeltaKey, int]] = field(factory=dict)

    def recovered(self, usual: Iterable[StoredDelta], held: Iterable[StoredDelta]) -> None:
        """Take what the disk has, oldest first: the newest merged deltas, and those that are kept out."""
        for one in usual:
            self._norms.append(one.norm)
            self._tokens.append(one.delta.tokens)
        if self.rules.release:
            self.held = {one.key: one for one in held}

    def came(self, client: str, now: float) -> None:
        """A client says hello: if it is new, what it trains counts from now on."""
        self._since.setdefault(client, now)

    def known_since(self, clients: Iterable[str], since: float) -> None:
        """Clients whose last delta is about as old as that."""
        for client in clients:
            self._since.setdefault(client, since)

    def tokens(self, delta: Delta, now: float) -> tuple[int, str | None]:
        """How many of the claimed tokens count, and why not all. The same for each offer of a key."""
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
        if why is not None:
            self._settled[key.client] = (key, counted)
            why = f"{counted} of the {tokens} tokens that {key.client} claims count: {why}"
        return counted, why

    def outlier(self, norm: float) -> str | None:
        """Why a delta of that norm is kept out, or None."""
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
        """A delta counts: remember what is usual."""
        self._norms.append(stored.norm)
        self._tokens.append(stored.delta.tokens)
        self.stored(stored.key.client, now)

    def stored(self, client: str, now: float) -> None:
        """A client's delta has come, whatever became of it: what it trains next counts from now on."""
        self._since[client] = now
        self._settled.pop(client, None)

    def hold(self, one: StoredDelta) -> None:
        """Keep in mind what is kept out."""
        if self.rules.release:
            self.held[one.key] = one

    def releasable(self) -> list[StoredDelta]:
        """Take out those that are no outliers any more."""
        found = [one for one in self.held.values() if self.outlier(one.norm) is None]
        for one in found:
            del self.held[one.key]
        return found
