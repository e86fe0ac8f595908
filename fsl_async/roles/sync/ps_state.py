"""The parts of the parameter server's state: its rules, its phases and its members. Pure."""

from __future__ import annotations

import enum

from attrs import field, frozen, mutable

from fsl_async.roles.sync.norm_guard import GuardRules
from fsl_async.roles.sync.progress import DECAYS_FROM, RunLimits, RunPosition
from fsl_async.roles.sync.round import RoundRules

EXIT_FAILED = 1
EXIT_DAMAGED = 2
"""A restart may fail again: an operator has to repair the state."""
LEAST_RETRY_CAP_S = 10.0


@frozen
class PaceRules:
    """How often clients send by themselves; see `roles.sync.pacing`.

    steps, seconds: between two deltas of a client; 0: not by that. by_speed: DyLU.
    """

    steps: int = 0
    seconds: float = 0.0
    by_speed: bool = False


@frozen
class ParameterServerRules:
    """The part of the run's configuration that decides here. Times in seconds; 0: no limit."""

    trigger: str = "clock"
    every_s: float = 600.0
    round_cap_s: float = 3600.0
    round: RoundRules = field(factory=RoundRules)
    min_clients: int = 1
    max_staleness: int = 4
    buffer: int = 2
    """Of the trigger "buffer": deltas that make a version."""
    least_s: float = 0.0
    """Of the trigger "buffer": from one version to the next at least."""
    pace: PaceRules | None = None
    """How often clients send by themselves; None: they are called."""
    limits: RunLimits = field(factory=RunLimits)
    """At the start; a decay may bring others."""
    decays_from: float = DECAYS_FROM
    decays: bool = True
    """Whether learning rates have a decay that can be asked for."""
    drain_s: float = 10.0
    stalled_s: float = 60.0
    drain_cap_s: float = 3600.0
    keep_versions: int = 3
    guard: GuardRules = field(factory=GuardRules)
    least_clients: int = 1  # that must have pending deltas for the aggregation rule
    aggregation: str = "mean"
    reuses: bool = False  # whether a version also has the newest merged delta of other clients
    compares: bool = False  # whether the aggregation rule compares deltas, unmoved ones too
    clips_values: bool = False  # whether a clipped delta is multiplied, and not its weight
    shards: int = 1
    history: int = 0
    """Versions whose scalars a returning client replays at most; 0: versions are no scalars."""
    epsilon: float = 0.0  # that a client may have spent; 0: the run is not private
    publishes: bool = True  # whether a client publishes version 0; else it comes from other servers
    last_global_s: float = 0.0
    """That the end waits for a last global round; 0: there are no other parameter servers."""

    @property
    def is_group(self) -> bool:
        """Whether there are other parameter servers."""
        return self.last_global_s > 0.0

    @property
    def retry_s(self) -> float:
        """The first wait before a failed write is tried again."""
        return min(30.0, 0.1 * self.every_s)

    @property
    def retry_cap_s(self) -> float:
        """The longest wait between two tries: after the operator made space, at most one sync."""
        return max(self.every_s, LEAST_RETRY_CAP_S)


class Phase(enum.Enum):
    """The phases of a run."""

    EMPTY = "empty"
    READY = "ready"
    COLLECTING = "collecting"
    MERGING = "merging"
    DONE = "done"


@mutable
class Member:
    """A client with a session."""

    incarnation: int
    attached: bool = False
    version: int = -1
    shard: int = -1
    position: RunPosition | None = None  # the last one announced
    sent: int = -1  # the version whose scalars were last sent to it
    agrees: bool = False  # its model is the run's
