"""Results of a comparison of tuning: rows for programs, a table for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from attrs import frozen

from fsl_async.tools.compare.outcome import Gathered, Point, point_row, reached_row
from fsl_async.tools.compare.table import drawn, wrapped

KINDS = ("payload", "coded", "sockets")
"""Bytes of values in their number format; of streams; of everything at the sockets."""

Traffic = Mapping[str, Mapping[str, float]]
"""Kind -> category and direction -> bytes."""


@frozen(kw_only=True)
class Result:
    """One run.

    ranks: of the sites' adapters. points: the curve; of training alone its end only. parts: of each
    site alone (accuracy or None, loss). sites: bytes of each site in a round. memory: the parameter
    server's peak in bytes, None without one. by_loss: whether target and curve are losses. target:
    0: none.
    """

    method: str
    seed: int
    ranks: tuple[int, ...]
    points: tuple[Point, ...]
    by_loss: bool = False
    target: float = 0.0
    parts: tuple[tuple[float | None, float], ...] = ()
    sites: Mapping[str, Traffic] = {}
    memory: int | None = None
    problem: str = ""

    @property
    def last(self) -> Point | None:
        """The newest point that was scored."""
        return next((p for p in reversed(self.points) if p.loss is not None), None)

    @property
    def reached(self) -> Point | None:
        """The first point at the target."""
        return next((p for p in self.points if self.is_at_target(p)), None)

    def is_at_target(self, point: Point) -> bool:
        """Whether a point is at the target."""
        return is_at_target(point, self.target, by_loss=self.by_loss)

    @property
    def traffic(self) -> Traffic:
        """Bytes of a site in a round, the mean over sites."""
        found: dict[str, Mapping[str, float]] = {}
        for kind in KINDS:
            each = [one[kind] for one in self.sites.values()]
            names = sorted({name for one in each for name in one})
            found[kind] = {name: fmean(one.get(name, 0.0) for one in each) for name in names}
        return found

    @property
    def scores(self) -> list[tuple[float | None, float]]:
        """(accuracy, loss) at the end; of `local` one for each site."""
        last = self.last
        if self.parts or last is None or last.loss is None:
            return list(self.parts)
        return [(last.accuracy, last.loss)]


def is_at_target(point: Point, target: float, *, by_loss: bool) -> bool:
    """Whether a point is at the target; 0: there is none."""
    if not target:
        return False
    if by_loss:
        return point.loss is not None and point.loss <= target
    return point.accuracy is not None and point.accuracy >= target


def traffic_of(gathered: Gathered) -> dict[str, Traffic]:
    """Bytes of each site in a round: from its first version to the end, over the rounds."""
    found: dict[str, Traffic] = {}
    for client in sorted(gathered.began):
        mine = {version: one for (name, version), one in gathered.rounds.items() if name == client}
        first, last = min(mine), max(mine)
        if last > first:
            found[client] = {
                kind: {
                    name: (size - mine[first][kind].get(name, 0)) / (last - first)
                    for name, size in mine[last][kind].items()
                }
                for kind in KINDS
            }
    return found


def row(result: Result, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return one JSON object with all figures of a run."""
    last, reached = result.last, result.reached
    return {
        "bench": "compare",
        "method": result.method,
        "seed": result.seed,
        "ranks": list(result.ranks),
        "choices": dict(common),
        "target": result.target,
        "reached": None if reached is None else reached_row(reached),
        "accuracy": None if last is None else last.accuracy,
        "loss": None if last is None else last.loss,
        "alone": [list(one) for one in result.parts],
        "rounds": last.round if last else 0,
        "seconds": last.seconds if last else None,
        "site_round_bytes": {kind: dict(one) for kind, one in result.traffic.items()},
        "sites": {
            name: {kind: dict(one) for kind, one in found.items()}
            for name, found in result.sites.items()
        },
        "ps_memory_bytes": result.memory,
        "problem": result.problem,
        "points": [point_row(point) for point in result.points],
    }


def by_method(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The runs of each method, one for each seed, in the order of the first ones."""
    found: dict[str, list[Result]] = {}
    for one in results:
        found.setdefault(one.method, []).append(one)
    return found


def lines(results: Sequence[Result]) -> list[str]:
    """Return the lines printed at the end, at most 80 columns wide."""
    groups = by_method(results)
    columns = _columns(results)
    rows = [[text(group) for text in columns.values()] for group in groups.values()]
    shown = [*drawn(list(columns), rows), ""]
    if len({one.seed for one in results}) > 1:
        shown.append("±: standard deviation over seeds")
    if any(one.parts for one in results):
        shown.append("local: mean and standard deviation over sites")
    for method, group in groups.items():
        shown += _target_lines(method, group)
    if any(one.sites for one in results):
        shown.append("kB of a site in a round, mean over sites: payload / coded")
    for method, group in groups.items():
        shown += _traffic_lines(method, group[0])
        shown += [f"  {method}: {one.problem}"[:80] for one in group if one.problem]
    return shown


def _columns(results: Sequence[Result]) -> dict[str, Any]:
    """Head of each column -> its text of a method's runs."""
    found: dict[str, Any] = {"method": lambda group: group[0].method, "rank": _rank}
    if any(score[0] is not None for one in results for score in one.scores):
        found["accuracy"] = lambda group: _mean(group, 0, 100, 1, "%")
    found["loss"] = lambda group: _mean(group, 1, 1, 3, "")
    found |= {
        "kB up": lambda group: _coded(group, "up"),
        "kB down": lambda group: _coded(group, "down"),
        "seconds": lambda group: _average((p.seconds for p in _ends(group)), "{:,.1f}"),
        "PS MB": lambda group: _average(
            (one.memory / 1e6 for one in group if one.memory), "{:,.0f}"
        ),
    }
    return found


def _rank(group: Sequence[Result]) -> str:
    least, most = min(group[0].ranks), max(group[0].ranks)
    return str(most) if least == most else f"{least}-{most}"


def _mean(group: Sequence[Result], which: int, factor: int, digits: int, unit: str) -> str:
    values = [score[which] for one in group for score in one.scores]
    known = [factor * value for value in values if value is not None]
    if not known:
        return "-"
    spread = f"±{stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{fmean(known):.{digits}f}{spread}{unit}"


def _ends(group: Sequence[Result]) -> list[Point]:
    return [one.last for one in group if one.last is not None]


def _average(values: Iterable[float], shown: str) -> str:
    known = list(values)
    return shown.format(fmean(known)) if known else "-"


def _coded(group: Sequence[Result], direction: str) -> str:
    sums = [
        sum(size for name, size in one.traffic["coded"].items() if name.endswith(f" {direction}"))
        for one in group
        if one.sites
    ]
    return _average((size / 1e3 for size in sums), "{:,.1f}")


def _target_lines(method: str, group: Sequence[Result]) -> list[str]:
    if not group[0].target or not group[0].sites:
        return []
    reached = [one.reached for one in group]
    found = [point for point in reached if point is not None]
    if not found:
        return [f"{method}: did not reach the target"]
    often = "" if len(found) == len(group) else f" (with {len(found)} of {len(group)} seeds)"
    rounds = _average((point.round for point in found), "{:.3g}")
    size = _average((point.bytes / 1e6 for point in found), "{:,.2f}")
    seconds = _average((point.seconds for point in found), "{:,.1f}")
    return [f"{method}: target in round {rounds}, after {size} MB and {seconds} s{often}"]


def _traffic_lines(method: str, result: Result) -> list[str]:
    if not result.sites:
        return []
    traffic = result.traffic
    payload, coded = traffic["payload"], traffic["coded"]
    parts = [
        f"{name} {payload.get(name, 0) / 1e3:,.2f} / {coded.get(name, 0) / 1e3:,.2f}"
        for name in sorted({*payload, *coded})
    ]
    parts += [f"sockets {name} {size / 1e3:,.2f}" for name, size in traffic["sockets"].items()]
    return wrapped(f"  {method}: ", parts)
