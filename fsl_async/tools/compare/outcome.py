"""From the clients' journals to a curve and a result: scores against bytes, seconds, waiting. Pure.

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share. No client trains while
a version is scored (`node`), so those seconds are subtracted from the run's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from attrs import asdict, field, frozen, mutable

LINES = (b'"take_snapshot"', b'"traffic"', b'"node_ended"')
"""Words of the journal's lines that are read."""
KINDS = ("payload", "coded", "sockets")
"""Bytes of values in their number format; of streams; of everything at the sockets."""

Traffic = Mapping[str, Mapping[str, float]]
"""Kind -> category and direction -> bytes."""


class Score(NamedTuple):
    """A version's metrics on held-out data.

    accuracy: share of right labels, or of positive margins (dpo); None with lm. loss: nats a
    trained token (lm) or a sample.
    """

    accuracy: float | None
    loss: float


class Scored(NamedTuple):
    """When a version was scored, and how many seconds that took."""

    at: float
    seconds: float
    score: Score


@frozen
class Point:
    """The run at the end of a round.

    round: number of rounds done. accuracy, loss: of the version on held-out data, None when it was
    not measured. seconds: of training and transfers since the first call. coded, payload: bytes by
    category and direction, all clients, from the first download on. sockets: bytes up and down.
    waited, trained: seconds that clients' training threads waited, and all of theirs, summed over
    clients.
    """

    round: int
    accuracy: float | None
    loss: float | None
    seconds: float
    coded: Mapping[str, int] = {}
    payload: Mapping[str, int] = {}
    sockets: Mapping[str, int] = {}
    waited: float = 0.0
    trained: float = 0.0

    @property
    def bytes(self) -> int:
        """Bytes that the streams carried, both directions."""
        return sum(self.coded.values())

    @property
    def idle_share(self) -> float:
        """Share of the clients' time in which they waited."""
        return self.waited / self.trained if self.trained else 0.0

    def row(self) -> dict[str, Any]:
        """Return all figures, for a row."""
        return {**asdict(self), "bytes": self.bytes, "idle_share": round(self.idle_share, 4)}


@mutable
class ClientCosts:
    """A client's costs by the version that it trained for, from its journal.

    Those of a version end when the client has fetched it; where clients take turns, each fetches
    only the one that its next turn begins with.
    """

    began: float | None = None
    """When it began its first round."""
    notes: dict[int, Mapping[str, Any]] = field(factory=dict)
    """By version: "now", "waited_s", and bytes since the client's start, of all kinds."""
    _newest: int = 0
    _ended: bool = False

    def apply(self, line: Mapping[str, Any]) -> None:
        """Take a line of the journal."""
        match line["type"]:
            case "take_snapshot" if int(line["round"]) >= 0:
                self.began = float(line["now"]) if self.began is None else self.began
                self._newest = int(line["round"]) + 1
            case "node_ended":
                self._ended = True
            case "traffic" if "version" in line:
                self.notes[self._newest] = line
            case "traffic" if self._ended and self.notes:  # bytes after the last version count too
                newest = max(self.notes)
                self.notes[newest] = {**self.notes[newest], **{k: line[k] for k in KINDS}}

    def at(self, version: int) -> Mapping[str, Any] | None:
        """Return the newest note up to a version: where clients take turns, not all hold each."""
        known = [one for one in self.notes if one <= version]
        return self.notes[max(known)] if known else None

    def per_round(self) -> Traffic:
        """Return the bytes of a round: the mean, without what was sent before the first one."""
        rounds = len(self.notes) - 1
        if rounds < 1:
            return {}
        first, last = min(self.notes), max(self.notes)
        return {
            kind: {
                name: (size - self.notes[first][kind].get(name, 0)) / rounds
                for name, size in self.notes[last][kind].items()
            }
            for kind in KINDS
        }


@mutable
class Curve:
    """The costs of all clients and the scores of a run, so far. turns: versions of a round."""

    turns: int = 1
    clients: dict[str, ClientCosts] = field(factory=dict)
    scores: dict[int, Scored] = field(factory=dict)

    def is_complete(self, version: int) -> bool:
        """Whether the costs of the round that ends with a version are all known.

        A version is scored before clients fetch it: until then its bytes are missing. Where clients
        take turns, each makes one version of a round.
        """
        newest = [max(one.notes, default=-1) for one in self.clients.values()]
        return all(held > version - self.turns for held in newest)

    def points(self) -> tuple[Point, ...]:
        """Return a point for every round whose version is scored or held by a client."""
        versions = {one for client in self.clients.values() for one in client.notes}
        ends = sorted(v for v in versions | set(self.scores) if v > 0 and v % self.turns == 0)
        return tuple(map(self.point, ends))

    def point(self, version: int) -> Point:
        """Return the run at a version, which ends a round."""
        found = [
            (one.began, note)
            for one in self.clients.values()
            if one.began is not None and (note := one.at(version)) is not None
        ]
        notes = [note for _, note in found]
        scored = self.scores.get(version)
        begin = min((began for began, _ in found), default=0.0)
        held = [one.notes[version]["now"] for one in self.clients.values() if version in one.notes]
        end = scored.at if scored is not None else max(held, default=begin)
        before = sum(one.seconds for made, one in self.scores.items() if made < version)
        trained = sum(max(0.0, note["now"] - began - self._scoring(note)) for began, note in found)
        waited = sum(max(0.0, note["waited_s"] - self._scoring(note)) for note in notes)
        return Point(
            round=version // self.turns,
            accuracy=None if scored is None else scored.score.accuracy,
            loss=None if scored is None else scored.score.loss,
            seconds=round(max(0.0, end - begin - before), 3),
            coded=_summed(note["coded"] for note in notes),
            payload=_summed(note["payload"] for note in notes),
            sockets=_summed(note["sockets"] for note in notes),
            waited=round(waited, 3),
            trained=round(trained, 3),
        )

    def _scoring(self, note: Mapping[str, Any]) -> float:
        """Return the seconds a client waited for scores, of versions scored before a note."""
        scores = self.scores.values()
        return sum(one.seconds for one in scores if one.at + one.seconds <= note["now"])

    def sites(self) -> dict[str, Traffic]:
        """Return the bytes of each client in a round."""
        found = {name: one.per_round() for name, one in sorted(self.clients.items())}
        return {name: one for name, one in found.items() if one}


def _summed(records: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for record in records:
        found.update(record)
    return dict(sorted(found.items()))


@frozen(kw_only=True)
class Outcome:
    """The result of one run.

    ranks: of the sites' adapters. points: the curve; of training alone its end only. by_loss:
    whether target and curve are losses. target: 0: none. parts: of each site alone (accuracy or
    None, loss). sites: bytes of each client in a round. memory: the server's peak in bytes, None
    without one.
    """

    method: str
    seed: int = 0
    ranks: tuple[int, ...] = ()
    points: tuple[Point, ...] = ()
    by_loss: bool = False
    target: float = 0.0
    parts: tuple[tuple[float | None, float], ...] = ()
    sites: Mapping[str, Traffic] = {}
    memory: int | None = None
    problem: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether this is training without a network, whose only point is its end."""
        return bool(self.points) and not any(point.coded for point in self.points)

    @property
    def last(self) -> Point | None:
        """The newest point that was scored, or without one the end."""
        scored = [point for point in self.points if point.loss is not None] or self.points
        return scored[-1] if scored else None

    @property
    def best(self) -> float | None:
        """The highest accuracy of all rounds."""
        return max((p.accuracy for p in self.points if p.accuracy is not None), default=None)

    @property
    def reached(self) -> Point | None:
        """The first point at the target; None in training without a network."""
        return next((p for p in self.points if p.coded and self.is_at_target(p)), None)

    def height(self, point: Point) -> float | None:
        """Return the figure that the target is of: accuracy, or loss."""
        return point.loss if self.by_loss else point.accuracy

    def is_at_target(self, point: Point) -> bool:
        """Whether a point is at the target; never without one."""
        height = self.height(point)
        if not self.target or height is None:
            return False
        return height <= self.target if self.by_loss else height >= self.target

    @property
    def traffic(self) -> Traffic:
        """Bytes of a client in a round, the mean over clients."""
        found: dict[str, Mapping[str, float]] = {}
        for kind in KINDS:
            each = [one[kind] for one in self.sites.values()]
            names = sorted({name for one in each for name in one})
            found[kind] = {name: fmean(one.get(name, 0.0) for one in each) for name in names}
        return found

    @property
    def scores(self) -> list[tuple[float | None, float]]:
        """(accuracy, loss) at the end; of sites alone one for each."""
        last = self.last
        if self.parts or last is None or last.loss is None:
            return list(self.parts)
        return [(last.accuracy, last.loss)]

    def row(self, choices: Mapping[str, Any]) -> dict[str, Any]:
        """Return one JSON object with all figures of the run."""
        last, reached = self.last, self.reached
        return {
            "bench": "compare",
            "method": self.method,
            "seed": self.seed,
            "ranks": list(self.ranks),
            "choices": dict(choices),
            "target": self.target,
            "problem": self.problem,
            "reached": None if reached is None else reached.row(),
            "best_accuracy": self.best,
            "accuracy": None if last is None else last.accuracy,
            "loss": None if last is None else last.loss,
            "alone": [list(one) for one in self.parts],
            "rounds": self.points[-1].round if self.points else 0,
            "seconds": None if last is None else last.seconds,
            "site_round_bytes": self.traffic,
            "sites": dict(self.sites),
            "ps_memory_bytes": self.memory,
            "points": [point.row() for point in self.points],
        }
