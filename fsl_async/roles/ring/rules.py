"""The rules of groups, read from the table [ring]. Pure."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

PIECE_VALUES = 1 << 24
LEAST_PIECE_VALUES = 1 << 14
"""Smaller pieces take long for nothing: each is one exchange of all members."""


@frozen
class RingRules:
    """What the machines of groups decide by. Times in seconds.

    roster: the names of all parameter servers; the first one coordinates. every: versions of the
    fastest group from one global round to the next, 0: by `every_s`. retry_s: after an
    attempt that came to nothing; twice as long after each further one, up to longest_retry_s.
    """

    name: str
    roster: tuple[str, ...]
    every: int = 6
    every_s: float = 0.0
    hold_s: float = 120.0
    grace_s: float = 10.0
    retry_s: float = 0.5
    longest_retry_s: float = 60.0
    staleness_exponent: float = 0.5
    piece_values: int = PIECE_VALUES
    codec: dict[str, Any] = field(factory=dict)
    """How global weights are coded for clients: the members of a CodecSpec."""

    @property
    def coordinator(self) -> str:
        """The name of the coordinator."""
        return self.roster[0]

    @property
    def coordinates(self) -> bool:
        """Whether this is the coordinator."""
        return self.name == self.roster[0]
