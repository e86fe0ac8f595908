"""Draws the time, kind, victim and duration of faults. Pure: one seed is always the same storm.

Times between faults are exponential, as of independent failures. Kind and victim are uniform. The
duration is uniform between two bounds; a kill has none, because its launcher decides when the
process is back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from attrs import field, frozen, validators

KILL, STOP, PARTITION, SLOW = KINDS = ("kill", "stop", "partition", "slow")
HOUR_S = 3600.0


@frozen
class Fault:
    """One fault: `at_s` seconds after the start, for `lasts_s`.

    share: in [0, 1), picks the victim among the possible ones.
    """

    at_s: float
    kind: str
    lasts_s: float
    share: float

    def victim(self, names: Sequence[str]) -> str | None:
        """The name of the process to hit; None when `names` is empty."""
        return names[int(self.share * len(names))] if names else None


@frozen
class Storm:
    """The parameters of a storm. away_s: shortest and longest duration of a fault."""

    faults_per_hour: float = field(validator=validators.gt(0.0))
    kinds: tuple[str, ...] = field(validator=validators.min_len(1))
    seed: int = 0
    away_s: tuple[float, float] = (2.0, 20.0)

    def faults(self, seconds: float) -> Iterator[Fault]:
        """The faults of the first `seconds`, in order; lazily, because a storm may be long."""
        rng = random.Random(f"chaos/{self.seed}")  # noqa: S311 - not for secrets
        at = rng.expovariate(self.faults_per_hour / HOUR_S)
        while at < seconds:
            kind = self.kinds[int(rng.random() * len(self.kinds))]
            lasts = rng.uniform(*self.away_s)
            yield Fault(at, kind, 0.0 if kind == KILL else lasts, rng.random())
            at += rng.expovariate(self.faults_per_hour / HOUR_S)
