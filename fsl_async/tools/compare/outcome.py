"""Turns the reports of a run's nodes into a curve: accuracy per round against bytes, seconds,
waiting.

Pure. Reports are dicts, because nodes may be processes. Times are seconds of a clock that all nodes
share (CLOCK_MONOTONIC).

    {"event": "began", "client", "at"}                                its first batch is next
    {"event": "round", "client", "version", "at", "holds",            it trained for this version,
     "coded", "payload", "sockets", "waited", "trained"}              and holds it or not yet;
                                                                      counters since its start
    {"event": "scored", "version", "at", "seconds",                   the joined model of this
     "accuracy", "loss", "samples"}                                   version; how long that took

No client trains while a version is scored (`problem.Scorer`), so those seconds are subtracted from
the run's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen, mutable

ACTIVATIONS_UP = "activations up"


@frozen
class Point:
    """The run at the end of a round.

    round: number of rounds done. accuracy: of the joined model on the held-out set, None when it
    was not measured. seconds: of training and transfers since the first batch. coded, payload:
    bytes by category and direction, all clients, from the first download on. sockets: bytes up and
    down. waited, trained: seconds that clients' training threads waited, and all of theirs, summed
    over clients.
    """

    round: int
    accuracy: float | None
    loss: float | None
    seconds: float
    coded: Mapping[str, int]
    payload: Mapping[str, int]
    sockets: Mapping[str, int]
    waited: float
    trained: float

    @property
    def bytes(self) -> int:
        """Bytes that the streams carried, both directions."""
        return sum(self.coded.values())

    @property
    def idle_share(self) -> float:
        """Share of the clients' time in which they waited."""
        return self.waited / self.trained if self.trained else 0.0


@frozen
class Outcome:
    """The result of a method's run. `reached` is the first point at the target, None without
    one.
    """

    method: str
    points: tuple[Point, ...]
    target: float
    problem: str = ""

    @property
    def reached(self) -> Point | None:
        """The first point at the target."""
        return next(
            (p for p in self.points if p.accuracy is not None and p.accuracy >= self.target), None
        )

    @property
    def best(self) -> float | None:
        """The highest accuracy of all rounds."""
        return max((p.accuracy for p in self.points if p.accuracy is not None), default=None)

    @property
    def last(self) -> Point | None:
        """The end of the run."""
        return self.points[-1] if self.points else None


@mutable
class Gathered:
    """The reports of one run's nodes so far."""

    turns: int = 1
    """Versions per round."""
    began: dict[str, float] = field(factory=dict)
    rounds: dict[tuple[str, int], Mapping[str, Any]] = field(factory=dict)
    scores: dict[int, Mapping[str, Any]] = field(factory=dict)

    def take(self, record: Mapping[str, Any]) -> bool:
        """Add a report; returns whether it is of a known kind."""
        kind = record.get("event")
        if kind == "began":
            self.began.setdefault(str(record["client"]), float(record["at"]))
        elif kind == "round":
            self.rounds[str(record["client"]), int(record["version"])] = record
        elif kind == "scored":
            self.scores[int(record["version"])] = record
        else:
            return False
        return True

    def is_complete(self, version: int, clients: Iterable[str]) -> bool:
        """Whether all clients have reported what the round that ends with `version` cost them.

        A version is scored before clients fetch it: until then its bytes are missing. Where clients
        take turns, each makes one version of a round.
        """
        newest: dict[str, int] = {}
        for (client, made), record in self.rounds.items():
            if record["holds"]:
                newest[client] = max(made, newest.get(client, made))
        return all(newest.get(client, -1) > version - self.turns for client in clients)

    def points(self) -> tuple[Point, ...]:
        """Return the curve: a point for every round that some client has reported."""
        versions = {version for _, version in self.rounds} | set(self.scores)
        ends = [v for v in sorted(versions) if v > 0 and v % self.turns == 0]
        return tuple(self._point(version) for version in ends)

    def _point(self, version: int) -> Point:
        held = [self._newest(client, version) for client in sorted(self.began)]
        reports = [record for record in held if record is not None]
        score = self.scores.get(version)
        own = [record for (_, v), record in self.rounds.items() if v == version]
        start = min(self.began.values(), default=0.0)
        end = float(score["at"]) if score else max((r["at"] for r in own), default=start)
        before = sum(float(s["seconds"]) for v, s in self.scores.items() if v < version)
        return Point(
            round=version // self.turns,
            accuracy=None if score is None else score["accuracy"],
            loss=None if score is None else float(score["loss"]),
            seconds=round(max(0.0, end - start - before), 3),
            coded=_summed(reports, "coded"),
            payload=_summed(reports, "payload"),
            sockets=_summed(reports, "sockets"),
            waited=round(sum(r["waited"] - self._waited_for_scores(r) for r in reports), 3),
            trained=round(sum(r["trained"] - self._waited_for_scores(r) for r in reports), 3),
        )

    def _waited_for_scores(self, record: Mapping[str, Any]) -> float:
        """Return the seconds a client waited for scores: of versions scored before it held this
        one.
        """
        scores = [s for s in self.scores.values() if s["at"] + s["seconds"] <= record["at"]]
        return float(sum(s["seconds"] for s in scores))

    def _newest(self, client: str, version: int) -> Mapping[str, Any] | None:
        """Return a client's last report up to `version`: where clients take turns, one holds each
        version.
        """
        mine = [v for name, v in self.rounds if name == client and v <= version]
        return self.rounds[client, max(mine)] if mine else None


def _summed(records: Iterable[Mapping[str, Any]], name: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for record in records:
        found.update({str(key): int(size) for key, size in record[name].items()})
    return dict(sorted(found.items()))


def is_reached(target: float, accuracy: float) -> bool:
    """Whether a run may stop."""
    return accuracy >= target


def row(outcome: Outcome, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return one JSON object with all figures of a method's run."""
    reached, last = outcome.reached, outcome.last
    return {
        "bench": "compare",
        "method": outcome.method,
        "choices": dict(common),
        "target": outcome.target,
        "problem": outcome.problem,
        "reached": None if reached is None else reached_row(reached),
        "best_accuracy": outcome.best,
        "rounds": last.round if last else 0,
        "points": [point_row(point) for point in outcome.points],
    }


def reached_row(point: Point) -> dict[str, Any]:
    """Return the figures of the first point at the target."""
    return {
        "round": point.round,
        "accuracy": point.accuracy,
        "seconds": point.seconds,
        "bytes": point.bytes,
        "coded": dict(point.coded),
        "payload": dict(point.payload),
        "sockets": dict(point.sockets),
    }


def point_row(point: Point) -> dict[str, Any]:
    """Return the figures of a point."""
    return {
        **reached_row(point),
        "loss": point.loss,
        "waited": point.waited,
        "trained": point.trained,
        "idle_share": round(point.idle_share, 4),
    }


HEAD = ("method", "rounds", "MB to it", "against", "seconds", "best", "MB a round", "idle")


def cells(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return the table's rows as text.

    "rounds", "MB to it" and "seconds" are up to the target; "against" is the bytes over the least
    of all methods, so that the best has 1.
    """
    sizes = [point.bytes for o in outcomes if (point := o.reached) is not None]
    least = min(sizes, default=0)
    return [_cells(outcome, least) for outcome in outcomes]


def _cells(outcome: Outcome, least: int) -> tuple[str, ...]:
    reached, last, best = outcome.reached, outcome.last, outcome.best
    if last is None:
        return (outcome.method, "-", "-", "-", "-", "-", "-", "-")
    found = ("-", "-", "-", "-")
    if reached is not None:
        against = f"{reached.bytes / least:.2f}x" if least else "-"
        found = (
            str(reached.round),
            f"{reached.bytes / 1e6:,.2f}",
            against,
            f"{reached.seconds:,.1f}",
        )
    per_round = f"{last.bytes / last.round / 1e6:,.3f}" if last.round else "-"
    shown = "-" if best is None else f"{best:.1%}"
    return (outcome.method, *found, shown, per_round, f"{last.idle_share:.0%}")


def categories(outcome: Outcome) -> list[tuple[str, float]]:
    """Return MB by category and direction, to the target or, if not reached, to the end."""
    point = outcome.reached or outcome.last
    return [] if point is None else [(name, size / 1e6) for name, size in point.coded.items()]
