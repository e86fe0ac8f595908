"""Decides what each SIGINT and SIGTERM asks of a node. Pure; times are arguments.

A Slurm job gets SIGTERM as a process group, and its batch script forwards its own copy: the node
receives it twice, milliseconds apart. So a SIGTERM within `SAME_REQUEST_S` of the first one repeats
it, unless a terminal is attached: there a person may be waiting. Ctrl-C twice always stops at once.
"""

from __future__ import annotations

import enum

SAME_REQUEST_S = 2.0
"""A forwarded copy arrives within milliseconds; a scheduler's next SIGTERM comes many seconds
later.
"""


class Asked(enum.Enum):
    """What a signal asks for."""

    END = "end"
    """An end in good order."""
    SAME = "same"
    """Nothing new: a copy of the first signal."""
    AT_ONCE = "at once"
    """An end without further delay."""


class StopRequests:
    """Counts SIGINT and SIGTERM. `attended`: whether a terminal is attached, so that copies are not
    expected.
    """

    def __init__(self, *, attended: bool) -> None:
        self._attended = attended
        self._first: tuple[str, float] | None = None

    def ask(self, name: str, now: float) -> Asked:
        """Take the signal `name` at `now` (monotonic seconds)."""
        if self._first is None:
            self._first = (name, now)
            return Asked.END
        first, at = self._first
        is_copy = name == first == "SIGTERM" and now - at <= SAME_REQUEST_S
        return Asked.SAME if is_copy and not self._attended else Asked.AT_ONCE
