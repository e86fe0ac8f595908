"""Counts unrequested ends of child processes by their last error, for the verdict of a command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fsl_async.cluster.restarts import ALIKE
from fsl_async.cluster.supervisor import ChildExited


class Deaths:
    """Collects ends of child processes by their last error; false while there are none."""

    def __init__(self) -> None:
        self._names: dict[str, Counter[str]] = {}
        """Ends by error, then by child."""
        self._last: dict[str, tuple[str, int]] = {}
        """The last error of each child, and how often in a row it ended with that."""
        self._lost: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._names)

    def add(self, end: ChildExited) -> None:
        """Count an end."""
        error = end.error or end.why
        self._names.setdefault(error, Counter())[end.name] += 1
        before, times = self._last.get(end.name, ("", 0))
        self._last[end.name] = error, times + 1 if error == before else 1
        if end.relaunch_in_s is None:
            self._lost.add(end.name)

    def are_hopeless(self, names: Iterable[str]) -> bool:
        """Whether each of these ended for good, or `ALIKE` times in a row with one error."""
        return all(
            name in self._lost or self._last.get(name, ("", 0))[1] >= ALIKE for name in names
        )

    def lines(self) -> list[str]:
        """A line for each error, the most frequent first: who ended, how often, with what."""
        ordered = sorted(self._names.items(), key=lambda item: -item[1].total())
        return [
            f"{', '.join(sorted(names))} ended"
            + (f" {names.total()} times" if names.total() > 1 else "")
            + f": {error}"
            for error, names in ordered
        ]
