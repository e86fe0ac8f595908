"""How far a run is on its way to its end, and how long it waits there. Pure.

Each step to the end (`roles.sync.run_end`) waits `drain_s`, and then goes on waiting for clients whose transfers advance,
`stalled_s` at a time: a slow path is not a dead one. All of it together waits at most `cap_s`.
"""

from __future__ import annotations

from attrs import mutable

MOMENT_S = 0.1


@mutable
class RunShutdown:
    """How far the run is on its way to its end. Times in seconds."""

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
        """The run is to end, for `reason`."""
        self.reason, self.began_at = reason, now

    def first_wait_s(self, usual_s: float) -> float:
        """How long a step waits at first: drain_s, or as long as answers usually take, within the cap."""
        return min(max(self.drain_s, usual_s), self.cap_s)

    def longer(self, now: float) -> float | None:
        """Until when to wait for transfers that advance; None when the time is used up, but for a moment."""
        until = min(now + self.stalled_s, self.began_at + self.cap_s)
        return until if until > now + MOMENT_S else None
