"""The open round as a parameter server's journal shows it: who is waited for, and how long. Pure.

It repeats the rule of `roles.sync.triggers.completion.QuorumAndGrace` with that rule's own code
(`ArrivalHistory`), from the times in the journal. A reader that begins in the middle of a process,
at a note so_far, does not know the arrivals before it: then there is no time for the grace window
until `MIN_OFFSETS` arrivals are known, and no quorum of a round that was open then.
"""

from __future__ import annotations

import math
from typing import Any

from attrs import field, mutable

from fsl_async.observe.clients import Line
from fsl_async.observe.run_state import RunState
from fsl_async.observe.segments import SO_FAR
from fsl_async.roles.sync.round import MIN_OFFSETS, ArrivalHistory, RoundRules


@mutable
class RoundWindow:
    """Clients of the open round, and of those before it that have not answered yet."""

    is_open: bool = False
    number: int = -1
    called_at: float = 0.0
    asked: dict[str, int] = field(factory=dict)
    """Called clients -> incarnation."""
    answered: dict[str, bool] = field(factory=dict)
    """Those that answered: with a delta, or with nothing to merge."""
    quorum_at: float | None = None
    late: set[str] = field(factory=set)
    """Connected clients whose round merged without them."""
    merged: int = 0
    """Deltas in the newest version."""
    _arrivals: ArrivalHistory = field(factory=ArrivalHistory)
    _knows_all: bool = False
    _has_begun: bool = False
    _merged_before: int = 0

    def apply(self, line: Line, run: RunState) -> None:
        """Take a line that `run` has taken. Raises KeyError, TypeError or ValueError."""
        handler = _HANDLERS.get(str(line.get("type")))
        if handler is not None:
            handler(self, line, run)
        self._has_begun = True
        if self.is_open and self.quorum_at is None:
            expected = self._expected(run)
            needed = max(1, math.ceil(run.ps.quorum * len(expected)))
            if sum(self.answered.values()) >= needed and run.ps.quorum:
                self.quorum_at = run.node.last_t

    def waited_for(self, run: RunState) -> list[str]:
        """Called clients that are here and have not answered."""
        if not self.is_open:
            return []
        return sorted(name for name in self._expected(run) if name not in self.answered)

    def closes_at(self, run: RunState) -> float | None:
        """When the grace window closes, seconds since 1970; None: not begun, or not known."""
        rules = run.ps.grace
        if not self.is_open or self.quorum_at is None or len(rules) != 3 or not run.ps.every_s:
            return None
        if not self._knows_all and len(self._arrivals.offsets_s) < MIN_OFFSETS:
            return None
        factor, least_s, first_s = rules
        until = self._arrivals.grace_until(
            RoundRules(grace_mad_factor=factor, grace_min_s=least_s, first_grace_s=first_s),
            self.called_at,
            self.quorum_at,
        )
        return min(until, max(self.called_at + run.ps.every_s, self.quorum_at))

    def as_dict(self, run: RunState) -> dict[str, Any]:
        """Plain values; times in seconds since 1970."""
        return {
            "open": self.is_open,
            "number": self.number,
            "called_at": self.called_at if self.is_open else None,
            "called": len(self.asked) if self.is_open else 0,
            "answered": sum(self.answered.values()) if self.is_open else 0,
            "waited_for": self.waited_for(run),
            "quorum_at": self.quorum_at if self.is_open else None,
            "closes_at": self.closes_at(run),
            "late": sorted(self.late),
        }

    def _expected(self, run: RunState) -> list[str]:
        return [
            name
            for name, incarnation in self.asked.items()
            if name in self.answered
            or (
                (client := run.clients.get(name)) is not None
                and client.connected
                and client.incarnation == incarnation
            )
        ]

    def _sent(self, line: Line, run: RunState) -> None:
        message, name = line["message"], str(line["peer"])
        kind = message.get("type")
        if kind in {"call/1", "turn/1"}:
            if not self.is_open or self.number != int(message["round"]):
                self.is_open, self.number = True, int(message["round"])
                self.called_at, self.quorum_at = run.node.last_t, None
                self.asked.clear()
                self.answered.clear()
            client = run.clients.get(name)
            self.asked[name] = client.incarnation if client is not None else -1
        elif kind == "declined/1" and message.get("code") != "later":
            self._answer(name, contributed=False)

    def _stored(self, line: Line, run: RunState) -> None:
        name = str(line["peer"])
        self.late.discard(name)
        if int(line["stored"]["delta"].get("round", -1)) == self.number:
            if self.is_open and name in self.asked and name not in self.answered:
                self._arrivals.offsets_s.append(run.node.last_t - self.called_at)
            self._answer(name, contributed=True)

    def _answer(self, name: str, *, contributed: bool) -> None:
        self.late.discard(name)
        if self.is_open and name in self.asked:
            self.answered.setdefault(name, contributed)

    def _skipped(self, line: Line, run: RunState) -> None:
        self._answer(str(line["peer"]), contributed=False)

    def _committed(self, line: Line, run: RunState) -> None:
        total = run.ps.deltas_merged
        self.merged, self._merged_before = max(0, total - self._merged_before), total
        if self.is_open:
            self.late |= set(self.waited_for(run))
            self.is_open = False

    def _noted(self, line: Line, run: RunState) -> None:
        if " closes without a new version" in str(line.get("text", "")):
            self.is_open = False

    def _left(self, line: Line, run: RunState) -> None:
        client = run.clients.get(str(line["peer"]))
        if client is None or not client.connected:
            self.late.discard(str(line["peer"]))

    def _started(self, line: Line, run: RunState) -> None:
        self.is_open, self._knows_all = False, True
        self.late.clear()
        self._arrivals.offsets_s.clear()

    def _so_far(self, line: Line, run: RunState) -> None:
        if not self._has_begun:  # else the lines before it were read, too
            self._merged_before = run.ps.deltas_merged

    def _ended(self, line: Line, run: RunState) -> None:
        self.is_open = False
        self.late.clear()


_HANDLERS: dict[str, Any] = {
    "send": RoundWindow._sent,  # noqa: SLF001
    "delta_stored": RoundWindow._stored,  # noqa: SLF001
    "round_skipped": RoundWindow._skipped,  # noqa: SLF001
    "version_committed": RoundWindow._committed,  # noqa: SLF001
    "note": RoundWindow._noted,  # noqa: SLF001
    "client_left": RoundWindow._left,  # noqa: SLF001
    "node_started": RoundWindow._started,  # noqa: SLF001
    "node_ended": RoundWindow._ended,  # noqa: SLF001
    SO_FAR: RoundWindow._so_far,  # noqa: SLF001
}
"""Journal line -> what it changes."""
