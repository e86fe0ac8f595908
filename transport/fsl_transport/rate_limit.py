"""Token buckets: how much of something may happen in a time, with room for bursts. Pure.

A bucket holds up to ``burst`` tokens and gets ``per_s`` more each second; what happens takes tokens, and may not happen when there are not
enough (the leaky bucket as a meter, Turner 1986). Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from itertools import islice

from attrs import frozen

from fsl_transport.errors import LocalError


@frozen
class Rate:
    """So many a second in the long run, so many at once."""

    per_s: float
    burst: float

    def __attrs_post_init__(self) -> None:
        """Check."""
        if not (self.per_s > 0 and self.burst >= 1):
            raise LocalError(f"{self} must let something through: per_s above 0, burst 1 or more")


class TokenBucket:
    """One bucket, full at first."""

    __slots__ = ("_at", "_tokens", "rate")

    def __init__(self, rate: Rate, now: float) -> None:
        self.rate = rate
        self._tokens = rate.burst
        self._at = now

    def fill(self, now: float) -> float:
        """How many tokens there are now. A clock that went back gives nothing."""
        if now > self._at:
            self._tokens = min(self.rate.burst, self._tokens + (now - self._at) * self.rate.per_s)
            self._at = now
        return self._tokens

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Take so many, or none. More than ``burst`` at once are taken from a full bucket, which then owes them."""
        if self.fill(now) < min(tokens, self.rate.burst):
            return False
        self._tokens -= tokens
        return True


class RateLimit:
    """A bucket for each of many keys, which strangers choose: no more than ``limit`` are remembered.

    One that is full again says nothing and is forgotten first; then the one that was used least recently, whose key so gets a
    full bucket back: who has ``limit`` keys is not held by buckets of one key each, but by that for all.
    """

    __slots__ = ("_buckets", "_limit", "_rate")

    def __init__(self, rate: Rate, limit: int) -> None:
        self._rate = rate
        self._limit = limit
        self._buckets: dict[str, TokenBucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, now: float) -> bool:
        """Take one token of ``key``."""
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            while len(self._buckets) >= self._limit:
                del self._buckets[next(iter(self._buckets))]
            bucket = TokenBucket(self._rate, now)
        self._buckets[key] = bucket  # the newest is last
        return bucket.take(now)

    def forget_full(self, now: float) -> None:
        """Drop the buckets that are full again, among the oldest few."""
        for key in list(islice(self._buckets, 64)):
            if self._buckets[key].fill(now) >= self._rate.burst:
                del self._buckets[key]
