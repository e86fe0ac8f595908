"""Fault profiles of a simulated run. One seed decides all faults, so a storm can be repeated.

Mean times between faults are those of one client (or of one server); times are exponential, as for
independent failures. `storm` is a bad week: every client is killed about every two hours,
connections are reset, links are cut for minutes, messages are lost, duplicated, delayed and
reordered, and the parameter server is killed every few hours.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class FaultProfile:
    """Mean seconds between faults (0 = never), seconds of recovery (from, to), probabilities per
    message.
    """

    client_kill_every_s: float = 0.0
    client_return_s: tuple[float, float] = (20.0, 120.0)
    reset_every_s: float = 0.0
    partition_every_s: float = 0.0
    partition_s: tuple[float, float] = (30.0, 600.0)
    server_kill_every_s: float = 0.0
    server_return_s: tuple[float, float] = (5.0, 60.0)
    disk_full_every_s: float = 0.0
    """A parameter server's disk is full: some calls in a row fail."""
    disk_kills: float = 0.0
    """Kills of the parameter server in the middle of a call to its disk."""
    power_cuts: float = 0.0
    """Deaths of the parameter server after which its disk has lost what was not synced."""
    server_pause_every_s: float = 0.0
    """Each group's parameter server is stopped for a while, as by SIGSTOP."""
    server_pause_s: tuple[float, float] = (5.0, 400.0)
    ring_cut_every_s: float = 0.0
    """One parameter server is parted from another one, or from all others."""
    ring_fails: float = 0.0
    """Reductions that end well at some members and with an error at the others."""
    ring_differs: float = 0.0
    """Reductions that give another result at one member."""
    delay_s: float = 0.03
    jitter_s: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0

    @property
    def longest_s(self) -> float:
        """Seconds after the last fault within which every process and link is back."""
        longest_s = max(self.client_return_s[1], self.partition_s[1], self.server_return_s[1])
        return max(longest_s, self.server_pause_s[1] if self.server_pause_every_s else 0.0) + 60.0


HOUR_S = 3600.0

PROFILES = {
    "none": FaultProfile(),
    "mild": FaultProfile(
        client_kill_every_s=12 * HOUR_S,
        reset_every_s=4 * HOUR_S,
        partition_every_s=24 * HOUR_S,
        server_kill_every_s=24 * HOUR_S,
        jitter_s=0.02,
        drop=0.0002,
        ring_fails=0.02,
    ),
    "storm": FaultProfile(
        client_kill_every_s=2 * HOUR_S,
        reset_every_s=0.5 * HOUR_S,
        partition_every_s=4 * HOUR_S,
        server_kill_every_s=4 * HOUR_S,
        server_pause_every_s=6 * HOUR_S,
        ring_cut_every_s=1 * HOUR_S,
        ring_fails=0.3,
        ring_differs=0.02,
        disk_full_every_s=2 * HOUR_S,
        disk_kills=0.5,
        power_cuts=0.5,
        jitter_s=0.1,
        drop=0.003,
        duplicate=0.002,
        reorder=0.005,
    ),
}
