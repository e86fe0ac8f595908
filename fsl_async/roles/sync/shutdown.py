"""The state of a run's end, and how long its steps wait. Pure.

Each step to the end (`roles.sync.run_end`) waits `drain_s`, and then goes on waiting for clients
whose transfers advance, `STALLED_S` at a time: a slow path may still deliver. Everything together
waits at most `DRAIN_CAP_S`.
"""

from __future__ import annotations

from attrs import mutable

MOMENT_S = 0.1
STALLED_S = 60.0
"""How long a step waits for a transfer to advance. Receivers report every 2 MiB at least."""
DRAIN_CAP_S = 3600.0


@mutable
class RunShutdown:
    """The state of a run's end. Times in seconds."""

    drain_s: float
    reason: str | None = None
    """None until the run is to end."""
    began_at: float = 0.0
    last_round_over: bool = False

    @property
    def asked(self) -> bool:
        """Whether the run is to end."""
        return self.reason is not None

    def begin(self, reason: str, now: float) -> None:
        """Record that the run is to end, for `reason`."""
        self.reason, self.began_at = reason, now

    def first_wait_s(self, usual_s: float) -> float:
        """How long a step waits at first: drain_s or the usual time of answers, within the cap."""
        return min(max(self.drain_s, usual_s), DRAIN_CAP_S)

    def longer(self, now: float) -> float | None:
        """Until when to wait for transfers that advance; None when the time is used up."""
        until = min(now + STALLED_S, self.began_at + DRAIN_CAP_S)
        return until if until > now + MOMENT_S else None
