"""The state of a run's end, and how long its steps wait. Pure.

Each step to the end (`roles.sync.run_end`) waits `drain_s`, and then goes on waiting for clients
whose transfers advance, `stalled_s` at a time: a slow path may still deliver. Everything together
waits at most `cap_s`.
"""

from __future__ import annotations

from attrs import mutable

MOMENT_S = 0.1


@mutable
class RunShutdown:
    """The state of a run's end. Times in seconds."""

    drain_s: float
    stalled_s: float
    cap_s: float
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
        return min(max(self.drain_s, usual_s), self.cap_s)

    def longer(self, now: float) -> float | None:
        """Until when to wait for transfers that advance; None when the time is used up."""
        until = min(now + self.stalled_s, self.began_at + self.cap_s)
        return until if until > now + MOMENT_S else None
