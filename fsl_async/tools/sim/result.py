"""The result of a simulated run: its course, and the part of each client."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, field, frozen, mutable

from fsl_async.observe.table import sparkline
from fsl_async.roles.sync.delta import MergedDelta
from fsl_async.tools.compare.table import drawn, panels_of, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fsl_async.accounting.traffic import Traffic

ROWS = 12
"""Versions, and clients, of a table at most."""
BARS = 48
"""Longest line of losses, in characters."""


@frozen
class Point:
    """A version. Bytes: at the servers' links so far, all clients, heads included.

    loss: mean of the merged deltas by tokens; eval_loss: the newest; NaN where none was reported.
    """

    version: int
    digest: str
    hours: float
    tokens: int
    bytes_up: int
    bytes_down: int
    loss: float = math.nan
    eval_loss: float = math.nan
    merged: int = 0

    @property
    def bytes(self) -> int:
        """Bytes in both directions."""
        return self.bytes_up + self.bytes_down


@mutable
class ClientPart:
    """A client's part in the run, over all of its launches."""

    name: str
    rate: float = 1.0
    steps: int = 0
    """Trained, sent or not."""
    deltas: int = 0
    """Merged."""
    tokens: int = 0
    """Tokens of merged deltas."""
    staleness: int = 0
    """Sum of the staleness of merged deltas, in versions."""
    waited_s: float = 0.0
    """Virtual time in which training waited: for the first weights, for a round, in a hold."""
    launches: int = 0


def loss_of(merged: Sequence[MergedDelta], name: str) -> float:
    """Return the mean of a metric over merged deltas, by tokens; NaN where none reports it."""
    found = [
        (float(value), max(1, one.delta.tokens))
        for one in merged
        if (value := one.delta.metrics.get(name)) is not None and math.isfinite(value)
    ]
    weight = sum(tokens for _, tokens in found)
    return sum(value * tokens for value, tokens in found) / weight if found else math.nan


def by_category(traffics: Iterable[Traffic]) -> dict[str, int]:
    """Return the coded bytes of all streams by category and direction, like "activations up"."""
    summed: Counter[tuple[str, str]] = Counter()
    for traffic in traffics:
        summed.update(traffic.coded)
    return {" ".join(key): size for key, size in sorted(summed.items())}


@frozen(repr=False)
class Result:
    """A simulated run. `print(result)` shows its tables; `result.figure()` draws it.

    seconds: it took here. memory: peak resident bytes of this process.
    """

    run_dir: Path
    run: str
    reason: str
    """Why it ended."""
    points: tuple[Point, ...]
    clients: tuple[ClientPart, ...]
    faults: dict[str, int] = field(factory=dict)
    seconds: float = 0.0
    memory: int = 0
    bytes_by_category: dict[str, int] = field(factory=dict)
    """Bytes that the streams carried, by keys like "activations up"; repeated ones count again."""
    counts: str = "tokens"
    """The unit of tokens: in split learning they are samples."""

    @property
    def digests(self) -> dict[int, str]:
        """The digest of each version, SHA-256 in hexadecimal."""
        return {point.version: point.digest for point in self.points}

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; None where a loss is unknown."""

        def plain(values: dict[str, Any]) -> dict[str, Any]:
            return {
                key: None if isinstance(value, float) and math.isnan(value) else value
                for key, value in values.items()
            }

        last = self.points[-1] if self.points else None
        return {
            "run": self.run,
            "run_dir": str(self.run_dir),
            "reason": self.reason,
            "versions": last.version if last else -1,
            "hours": last.hours if last else 0.0,
            "tokens": last.tokens if last else 0,
            "seconds": round(self.seconds, 3),
            "memory": self.memory,
            "faults": self.faults,
            "bytes_by_category": self.bytes_by_category,
            "points": [plain(asdict(point)) for point in self.points],
            "clients": [asdict(client) for client in self.clients],
        }

    def table(self) -> list[str]:
        """Return the lines that are printed at the end."""
        columns: dict[str, Callable[[Point], str]] = {
            "version": lambda one: str(one.version),
            "hours": lambda one: f"{one.hours:,.2f}",
            self.counts: lambda one: f"{one.tokens:,}",
            "MB up": lambda one: f"{one.bytes_up / 1e6:,.1f}",
            "MB down": lambda one: f"{one.bytes_down / 1e6:,.1f}",
            "loss": lambda one: _shown(one.loss),
            "held-out": lambda one: _shown(one.eval_loss),
        }
        lines = rows_of(columns, _spread(self.points))
        curve = [point.loss for point in self.points if math.isfinite(point.loss)]
        if curve:
            lines += [
                "",
                f"loss by version  {sparkline(curve, BARS)}  {curve[0]:.4g} -> {curve[-1]:.4g}",
            ]
        return [*lines, "", *self._client_table(), "", *self._byte_table()]

    def _byte_table(self) -> list[str]:
        rows = [
            [*key.rsplit(" ", 1), f"{size / 1e6:,.3f}"]
            for key, size in self.bytes_by_category.items()
        ]
        return drawn(["streams", "direction", "MB"], rows)

    def _client_table(self) -> list[str]:
        chosen = _spread(sorted(self.clients, key=lambda one: (one.tokens, one.name)))
        columns: dict[str, Callable[[ClientPart], str]] = {
            "client": lambda one: one.name,
            "rate": lambda one: f"{one.rate:g}",
            "steps": lambda one: f"{one.steps:,}",
            "deltas": lambda one: f"{one.deltas:,}",
            self.counts: lambda one: f"{one.tokens:,}",
            "staleness": lambda one: f"{one.staleness / max(1, one.deltas):.1f}",
            "waited h": lambda one: f"{one.waited_s / 3600:,.2f}",
            "launches": lambda one: str(one.launches),
        }
        lines = rows_of(columns, chosen)
        if len(chosen) < len(self.clients):
            lines.append(
                f"{len(chosen)} of {len(self.clients)} clients, from the least to the most merged"
                f" {self.counts}; --json has all of them"
            )
        return lines

    def __repr__(self) -> str:
        return "\n".join([f"{self.run_dir}: {self.reason}", *self.table()])

    def figure(self) -> Figure:
        """Draw loss against tokens, bytes and virtual hours. Needs matplotlib (extra `plot`)."""
        axes: dict[str, Callable[[Point], float]] = {
            f"merged {self.counts}": lambda point: point.tokens,
            "MB on the wire, both directions, all clients": lambda point: point.bytes / 1e6,
            "virtual hours": lambda point: point.hours,
        }
        figure, panels = panels_of(list(axes), "loss")
        for panel, place in zip(panels, axes.values(), strict=True):
            for name in ("loss", "eval_loss"):
                found = [one for one in self.points if math.isfinite(getattr(one, name))]
                if found:
                    heights = [getattr(one, name) for one in found]
                    panel.plot([place(one) for one in found], heights, marker=".", label=name)
        panels[-1].legend(fontsize=8)
        return figure


def _shown(loss: float) -> str:
    return "-" if math.isnan(loss) else f"{loss:.4g}"


def _spread(every: Sequence[Any], most: int = ROWS) -> list[Any]:
    """Return at most `most` items, evenly spread, the first and the last among them."""
    if len(every) <= most:
        return list(every)
    return [every[round(at * (len(every) - 1) / (most - 1))] for at in range(most)]
