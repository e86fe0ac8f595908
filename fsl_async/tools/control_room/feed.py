"""What a page has not got yet of a node's history. Pure.

A page holds a copy of the columns and timelines. `Cursor.parts` yields messages that bring the copy
up to date: each is small enough that the loop is not held for long, and a page that reads slowly
gets fewer and larger ones, because the next message is made when the last one is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import field, mutable

from fsl_async.observe.history import STATES, History, Timeline
from fsl_async.observe.round_series import as_dict, of_client

CLIENTS_A_PART = 8


@mutable
class _Place:
    """What the page has of one client's timeline."""

    line: Timeline
    clock: int = -1
    generation: int = 0
    segments: int = 0


@mutable
class Cursor:
    """What one page has of one node."""

    node: int
    _rounds: int = 0
    _bytes: int = -1
    _places: dict[str, _Place] = field(factory=dict)

    def parts(self, history: History) -> Iterator[dict[str, Any]]:
        """Messages, in order."""
        series = history.rounds
        if series.clock != self._rounds:
            found = as_dict(series, self._rounds)
            self._rounds = series.clock
            begin = int(found["begin"])
            yield {"node": self.node, "rounds": found}
            names = list(series.clients)
            for at in range(0, len(names), CLIENTS_A_PART):
                columns = {
                    name: of_client(series, name, begin) for name in names[at : at + CLIENTS_A_PART]
                }
                yield {"node": self.node, "begin": begin, "clients": columns}
        if history.bytes.clock != self._bytes:
            self._bytes = history.bytes.clock
            samples = {name: list(column) for name, column in history.bytes.columns.items()}
            yield {"node": self.node, "bytes": samples}
        dropped = [
            name
            for name, place in self._places.items()
            if history.timelines.get(name) is not place.line
        ]
        if dropped:
            for name in dropped:
                del self._places[name]
            yield {"node": self.node, "dropped": dropped}
        names = [name for name in history.timelines if self._is_new(name, history.timelines[name])]
        for at in range(0, len(names), CLIENTS_A_PART):
            some = names[at : at + CLIENTS_A_PART]
            lines = {name: self._timeline(name, history.timelines[name]) for name in some}
            yield {"node": self.node, "timelines": lines}

    def _is_new(self, name: str, line: Timeline) -> bool:
        place = self._places.get(name)
        return place is None or place.clock != line.clock

    def _timeline(self, name: str, line: Timeline) -> dict[str, Any]:
        place = self._places.setdefault(name, _Place(line))
        # The newest two segments may have changed since.
        begin = max(0, place.segments - 2) if place.generation == line.generation else 0
        place.clock, place.generation = line.clock, line.generation
        place.segments = len(line.begins)
        return {
            "begin": begin,
            "t": [round(t, 2) for t in line.begins[begin:]],
            "states": [STATES[state] for state in line.states[begin:]],
            "marks": [[round(t, 2), what] for t, what in line.marks],
        }
