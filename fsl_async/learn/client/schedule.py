"""Learning rates as functions of the run's progress, not of a client's own steps. Imports no torch.

Clients of unequal speed, clients that join late and clients that were relaunched all train at one
rate, because the parameter server announces how far the run is and at what pace it goes on.

    wsd        constant, then linear to `final` at the end of the run (warm-up, stable, decay;
               Hu et al., MiniCPM, arXiv:2404.06395; Hägele et al., arXiv:2405.18392)
    cosine     half a cosine from 1 to `final` (Loshchilov & Hutter, arXiv:1608.03983)
    constant   1

Where no end of the run is planned, all three are constant.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from fsl_async.roles.sync.progress import DECAYS_FROM, RunPosition, fade_of

FINAL_RATE = 0.02
WARMUP_STEPS = 20


class RunClock:
    """The run's progress at any moment: the last announcement, extrapolated at its pace.

    At most to the version after the next: where the parameter server is away or cannot be reached,
    rates must not fall to their end.

    Written by one thread, read by any. now: seconds of a monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._heard: tuple[RunPosition, float] | None = None

    def announced(self, position: RunPosition) -> None:
        """Continue from a position that the parameter server announced just now."""
        self._heard = position, self._now()

    @property
    def progress(self) -> float | None:
        """Share of the run that is done, 0 to 1; None where no end is planned."""
        heard = self._heard
        if heard is None:
            return None
        position, at = heard
        if not position.is_planned:
            return None
        passed_s = max(0.0, self._now() - at)
        return min(position.reach, position.progress + position.pace_per_s * passed_s)

    @property
    def decays_from(self) -> float:
        """Progress at which the decay of "wsd" begins."""
        return DECAYS_FROM if self._heard is None else self._heard[0].decays_from


@frozen
class Schedule:
    """The rate as a share of its peak. final: the share at the end of the run.

    warmup_steps: over which a client's rate rises from 0 at the start of the run; rewarm_steps: the
    same for a client that joins later or was relaunched, whose optimizer has no moments.
    """

    kind: str = "wsd"
    final: float = FINAL_RATE
    warmup_steps: int = WARMUP_STEPS
    rewarm_steps: int = WARMUP_STEPS

    @classmethod
    def of(cls, train: Mapping[str, Any]) -> Schedule:
        """Read the table [train] of a run's configuration."""
        return cls(
            train.get("schedule", "wsd"),
            float(train.get("final_rate", FINAL_RATE)),
            int(train.get("warmup_steps", WARMUP_STEPS)),
            int(train.get("rewarm_steps", WARMUP_STEPS)),
        )

    def factor(
        self, progress: float | None, decays_from: float, *, steps: int, late: bool
    ) -> float:
        """The rate as a share of its peak.

        progress: of the run, None without a planned end. decays_from: progress at which the decay
        of "wsd" begins. steps: that this client has made since it attached its model. late: it
        attached after version 0.
        """
        warmup = self.rewarm_steps if late else self.warmup_steps
        warmed = min(1.0, (steps + 1) / (warmup + 1))
        if progress is None:
            return warmed
        return warmed * self._share(progress, decays_from)

    def _share(self, progress: float, decays_from: float) -> float:
        if self.kind == "cosine":
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2
        if self.kind == "constant":
            return 1.0
        return self.final + (1 - self.final) * fade_of(progress, decays_from)
