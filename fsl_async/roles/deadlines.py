"""A few named deadlines and which comes first. Pure: the clock is an argument everywhere."""

from __future__ import annotations


class Deadlines:
    """Named deadlines in seconds of the caller's clock; setting a name again moves it.

    A machine holds a handful, so the earliest is found by looking at all of them.
    """

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times: dict[str, float] = {}

    def set(self, name: str, when: float) -> None:
        """Arm `name` at `when`, replacing an earlier setting."""
        self._times[name] = when

    def cancel(self, name: str) -> None:
        """Disarm `name`; harmless when it is not armed."""
        self._times.pop(name, None)

    def clear(self) -> None:
        """Disarm everything."""
        self._times.clear()

    def when(self, name: str) -> float | None:
        """When `name` is due, or None."""
        return self._times.get(name)

    def next(self) -> float | None:
        """The earliest deadline, or None when nothing is armed."""
        return min(self._times.values(), default=None)

    def pop_due(self, now: float) -> list[str]:
        """Disarm and return the names due at `now`, earliest first, equal times by name."""
        due = sorted((when, name) for name, when in self._times.items() if when <= now)
        for _, name in due:
            del self._times[name]
        return [name for _, name in due]
