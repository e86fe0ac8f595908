"""Decides what each SIGINT and SIGTERM requests of a node. Pure; times are arguments.

A Slurm job gets SIGTERM as a process group, and its batch script forwards another copy: the node
receives it twice, milliseconds apart. So a SIGTERM within `SAME_REQUEST_S` of the first one is the
same request, unless a terminal is attached, where a person may send it. Ctrl-C twice always stops
at once.
"""

from __future__ import annotations

import enum

SAME_REQUEST_S = 2.0
"""A forwarded copy comes within milliseconds, a scheduler's next SIGTERM many seconds later."""


class Asked(enum.Enum):
    """What a signal requests."""

    END = "end"
    """A drained end."""
    SAME = "same"
    """Nothing new: a copy of the first signal."""
    AT_ONCE = "at once"
    """An immediate end."""


class StopRequests:
    """Classifies SIGINT and SIGTERM. attended: a terminal is attached, so copies do not occur."""

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
