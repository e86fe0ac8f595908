"""Sums a node's bytes over all its incarnations, from the notes "traffic" of its journal. Pure.

Each process counts from zero, so its last note has its sums. Directions are seen from the clients.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from attrs import field, mutable

_KINDS = ("payload", "coded", "sockets")


@mutable
class Account:
    """Sums of one node. Apply the journal's lines in order; `as_dict` has the result."""

    _before: dict[str, Counter[str]] = field(factory=lambda: {kind: Counter() for kind in _KINDS})
    _now: dict[str, dict[str, int]] = field(factory=dict)
    # Squares of relative errors, times payload.
    _lost: dict[str, float] = field(factory=dict)
    _of: Counter[str] = field(factory=Counter)
    _error: dict[str, float] = field(factory=dict)

    def apply(self, line: Mapping[str, Any]) -> None:
        """Apply one line of the journal; a malformed one changes nothing."""
        if line.get("type") == "node_started":
            self._end_incarnation()
        elif line.get("type") == "traffic":
            try:
                now = {kind: {k: int(v) for k, v in line[kind].items()} for kind in _KINDS}
                error = {k: float(v) for k, v in (line.get("error") or {}).items()}
            except (KeyError, TypeError, ValueError, AttributeError):
                return
            self._now, self._error = now, error

    def _end_incarnation(self) -> None:
        for kind, sums in self._now.items():
            self._before[kind].update(sums)
        payload = self._now.get("payload", {})
        for name, error in self._error.items():
            lost = error * error * payload.get(name, 0)
            self._lost[name] = self._lost.get(name, 0.0) + lost
            self._of[name] += payload.get(name, 0)
        self._now, self._error = {}, {}

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Bytes as payload, coded and sockets, and error; by "category direction".

        Sockets are by direction only.
        """
        found: dict[str, dict[str, Any]] = {}
        for kind in _KINDS:
            sums = self._before[kind] + Counter(self._now.get(kind, {}))
            found[kind] = {name: sums[name] for name in sorted(sums)}
        payload = self._now.get("payload", {})
        found["error"] = {}
        for name in sorted({*self._lost, *self._error}):
            own = payload.get(name, 0)
            lost = self._lost.get(name, 0.0) + self._error.get(name, 0.0) ** 2 * own
            found["error"][name] = float(f"{math.sqrt(lost / max(self._of[name] + own, 1)):.4g}")
        return found


def account_lines(node: str, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table for people; empty for a node that has moved no bytes."""
    if not found["payload"] and not found["sockets"]:
        return []
    lines = [f"{f'bytes of the {node}':34}{'payload':>16}{'coded':>16}{'coding error':>15}"]
    for name, size in found["payload"].items():
        error = found["error"].get(name)
        shown = "" if error is None else "none" if error == 0 else f"{error:.2%}"
        lines.append(f"  {name:32}{size:>16,}{found['coded'].get(name, 0):>16,}{shown:>15}")
    for direction in ("up", "down"):
        label = f"sockets {direction}"
        lines.append(f"  {label:32}{'':16}{found['sockets'].get(direction, 0):>16,}")
    return lines
