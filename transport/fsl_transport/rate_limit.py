"""Token buckets: limit the rate of an activity and allow bursts. Pure.

A bucket holds at most ``burst`` tokens and gains ``per_s`` per second. Each action takes tokens and
is denied where too few are left (the leaky bucket as a meter, Turner 1986). Times are seconds of
one monotonic clock.
"""

from __future__ import annotations

from itertools import islice

from attrs import frozen

from fsl_transport.errors import LocalError


@frozen
class Rate:
    """``per_s`` actions per second on average, ``burst`` at once."""

    per_s: float
    burst: float

    def __attrs_post_init__(self) -> None:
        """Check that the rate allows anything at all."""
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
        """Add the tokens due by ``now`` and return the total. A clock that goes back adds none."""
        if now > self._at:
            self._tokens = min(self.rate.burst, self._tokens + (now - self._at) * self.rate.per_s)
            self._at = now
        return self._tokens

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Take ``tokens`` or none; return whether they were taken.

        An action that needs more than ``burst`` passes when the bucket is full and leaves a debt.
        """
        if self.fill(now) < min(tokens, self.rate.burst):
            return False
        self._tokens -= tokens
        return True


class RateLimit:
    """One bucket per key, for keys that unauthenticated peers choose: at most ``limit`` are kept.

    Full buckets carry no information and are dropped first, then the least recently used. A dropped
    key starts again with a full bucket, so a peer with more than ``limit`` keys is bounded only by
    a bucket shared by all keys.
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
        self._buckets[key] = bucket  # the most recently used is last
        return bucket.take(now)

    def forget_full(self, now: float) -> None:
        """Drop full buckets among the 64 least recently used."""
        for key in list(islice(self._buckets, 64)):
            if self._buckets[key].fill(now) >= self._rate.burst:
                del self._buckets[key]
