"""The open round as a parameter server's journal shows it: who is waited for, and how long. Pure.

The journal's lines are applied to the `Round` of the parameter server, and its rule
(`QuorumAndGrace`) decides with the times in the journal. A reader that begins in the middle of a
process, at a note so_far, does not know the arrivals before it: then there is no time for the grace
window until `MIN_OFFSETS` arrivals are known, and no quorum of a round that was open then.
"""

from __future__ import annotations

from typing import Any

from attrs import field, mutable

from fsl_async.observe.clients import Line
from fsl_async.observe.run_state import RunState
from fsl_async.observe.segments import SO_FAR
from fsl_async.roles.sync.round import MIN_OFFSETS, ArrivalHistory, Round, RoundRules
from fsl_async.roles.sync.triggers.completion import QuorumAndGrace


@mutable
class RoundWindow:
    """Clients of the open round, and of those before it that have not answered yet."""

    open: Round | None = None
    number: int = -1
    """The number of the newest round; -1 before the first one."""
    closes_at: float | None = None
    """When the grace window closes, seconds since 1970; None: not begun, or not known."""
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
            self.closes_at = self._close_of(run)
        self._has_begun = True

    def _close_of(self, run: RunState) -> float | None:
        rules = run.ps.grace
        if self.open is None or not run.ps.quorum or len(rules) != 3:
            return None
        completion = QuorumAndGrace(RoundRules(run.ps.quorum, *rules))
        pending = self.open.contributors()
        verdict = completion.verdict(self.open, self._arrivals, run.node.last_t, pending=pending)
        is_known = self._knows_all or len(self._arrivals.offsets_s) >= MIN_OFFSETS
        if not is_known or not run.ps.every_s:
            return None
        return verdict.until if verdict.action == "wait" else self.closes_at

    def waited_for(self) -> list[str]:
        """Called clients that are here and have not answered."""
        return [] if self.open is None else self.open.missing()

    def as_dict(self) -> dict[str, Any]:
        """Plain values; times in seconds since 1970."""
        one = self.open
        return {
            "open": one is not None,
            "number": self.number,
            "called_at": None if one is None else one.called_at,
            "called": 0 if one is None else one.called,
            "answered": 0 if one is None else one.contributors(),
            "waited_for": self.waited_for(),
            "quorum_at": None if one is None else one.quorum_at,
            "closes_at": self.closes_at,
            "late": sorted(self.late),
        }

    def _sent(self, line: Line, run: RunState) -> None:
        message, name = line["message"], str(line["peer"])
        kind = message.get("type")
        if kind in {"call/1", "turn/1"}:
            number = int(message["round"])
            if self.open is None or self.number != number:
                self.open = Round(number, run.node.last_t, run.ps.every_s, {})
                self.number = number
            client = run.clients.get(name)
            self.open.expected[name] = client.incarnation if client is not None else -1
            self.open.called += 1
        elif kind == "declined/1" and message.get("code") != "later":
            self._answer(name, contributed=False)

    def _stored(self, line: Line, run: RunState) -> None:
        name = str(line["peer"])
        self.late.discard(name)
        if int(line["stored"]["delta"].get("round", -1)) != self.number:
            return
        if self._answer(name, contributed=True) and self.open is not None:
            self._arrivals.offsets_s.append(run.node.last_t - self.open.called_at)

    def _answer(self, name: str, *, contributed: bool) -> bool:
        self.late.discard(name)
        return self.open is not None and self.open.answer(name, contributed=contributed)

    def _skipped(self, line: Line, run: RunState) -> None:
        self._answer(str(line["peer"]), contributed=False)

    def _committed(self, line: Line, run: RunState) -> None:
        total = run.ps.deltas_merged
        self.merged, self._merged_before = max(0, total - self._merged_before), total
        self.late |= set(self.waited_for())
        self.open = None

    def _noted(self, line: Line, run: RunState) -> None:
        if " closes without a new version" in str(line.get("text", "")):
            self.open = None

    def _arrived(self, line: Line, run: RunState) -> None:
        if self.open is not None:
            self.open.rejoin(str(line["peer"]), int(line["incarnation"]))

    def _left(self, line: Line, run: RunState) -> None:
        name = str(line["peer"])
        if self.open is not None:
            self.open.leave(name, int(line["incarnation"]))
        client = run.clients.get(name)
        if client is None or not client.connected:
            self.late.discard(name)

    def _started(self, line: Line, run: RunState) -> None:
        self._ended(line, run)
        self._knows_all = True
        self._arrivals.offsets_s.clear()

    def _so_far(self, line: Line, run: RunState) -> None:
        if not self._has_begun:  # else the lines before it were read, too
            self._merged_before = run.ps.deltas_merged

    def _ended(self, line: Line, run: RunState) -> None:
        self.open = None
        self.late.clear()


_HANDLERS: dict[str, Any] = {
    "send": RoundWindow._sent,  # noqa: SLF001
    "delta_stored": RoundWindow._stored,  # noqa: SLF001
    "round_skipped": RoundWindow._skipped,  # noqa: SLF001
    "version_committed": RoundWindow._committed,  # noqa: SLF001
    "note": RoundWindow._noted,  # noqa: SLF001
    "client_hello": RoundWindow._arrived,  # noqa: SLF001
    "client_left": RoundWindow._left,  # noqa: SLF001
    "node_started": RoundWindow._started,  # noqa: SLF001
    "node_ended": RoundWindow._ended,  # noqa: SLF001
    SO_FAR: RoundWindow._so_far,  # noqa: SLF001
}
"""Journal line -> what it changes."""
