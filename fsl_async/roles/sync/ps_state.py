"""The parts of the parameter server's state: its phases and its members. Pure."""

from __future__ import annotations

import enum

from attrs import frozen, mutable

from fsl_async.roles.sync.progress import RunPosition

EXIT_FAILED = 1
EXIT_DAMAGED = 2
"""A restart may fail again: an operator has to repair the state."""


@frozen
class Merging:
    """Facts about the rules that merge deltas, for the machine (`nodes.ps.aggregation`).

    least_clients: that must have pending deltas. reuses: a version also has the newest merged delta
    of other clients. compares: the rule compares deltas, unmoved ones too. clips_values: a clipped
    delta is multiplied, and not its weight.
    """

    least_clients: int = 1
    reuses: bool = False
    compares: bool = False
    clips_values: bool = False


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
