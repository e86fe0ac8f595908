"""When a fault comes, of which kind, to whom, for how long. Pure: chance comes from one seed, so a storm can be had again.

Faults come as independent failures do: the time to the next one is exponential. The kind and the victim are drawn evenly. What lasts, lasts evenly long between
two bounds; a kill lasts no time: whoever launches the process again decides when it is back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from attrs import field, frozen, validators

KILL, STOP, PARTITION, SLOW = KINDS = ("kill", "stop", "partition", "slow")
HOUR_S = 3600.0


@frozen
class Fault:
    """One fault: `at_s` after the beginning, for `lasts_s`. `share` in [0, 1) picks the victim among those who can be one."""

    at_s: float
    kind: str
    lasts_s: float
    share: float

    def victim(self, names: Sequence[str]) -> str | None:
        """Whom it hits, of `names` in their order; None when there is nobody."""
        return names[int(self.share * len(names))] if names else None


@frozen
class Storm:
    """How bad it is. Times in seconds."""

    faults_per_hour: float = field(validator=validators.gt(0.0))
    kinds: tuple[str, ...] = field(validator=validators.min_len(1))
    seed: int = 0
    away_s: tuple[float, float] = (2.0, 20.0)

    def faults(self, seconds: float) -> Iterator[Fault]:
        """Those of the first `seconds`, in order, one by one: a storm may be long."""
        chance = random.Random(f"chaos/{self.seed}")  # noqa: S311 - not for secrets
        at = chance.expovariate(self.faults_per_hour / HOUR_S)
        while at < seconds:
            kind = self.kinds[int(chance.random() * len(self.kinds))]
            lasts = chance.uniform(*self.away_s)
            yield Fault(at, kind, 0.0 if kind == KILL else lasts, chance.random())
            at += chance.expovariate(self.faults_per_hour / HOUR_S)
