"""The figures of a run that other programs show: for Prometheus, and as series of points. Pure.

Names and units are Prometheus's conventions: base units (bytes, seconds), `_total` for what only
grows while the server goes on from its journal. A figure that is not known has no sample. Clients
that are gone keep their counters and lose the figures of the moment: a loss, a speed.
`figures.txt` has a row for each figure, with the roles of the nodes that have it, and where in a
run's state it is.

A journal's lines become points of the series that trackers show:

    role            a point for each              its step
    ps              version                       the version
    ps              delta_meta, where the client measured a version      that version
    server          round that is over            the round
    client          rebased                       the version

Steps are what a restarted reader goes on from. After a rollback versions are made again: a tracker
that has the step already keeps what it has.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from attrs import field, frozen, mutable

from fsl_async.observe.clients import ClientState, Line
from fsl_async.observe.evaluations import Evaluation
from fsl_async.observe.run_state import CLIENT, PS, SPLIT_SERVER, RunState
from fsl_async.roles.sync.facts import VersionFact

MAX_CLIENTS = 256
"""Names that become labels; those beyond are counted in `fsl_clients_unlisted`."""
MAX_DATA = 16
"""Data sets of held-out losses, likewise."""
PHASES = ("starting", "waiting", "ready", "collecting", "merging", "serving", "ended")
DOING = ("joining", "publishing", "fetching", "training", "sending", "gone", "done")

GAUGE, COUNTER = "gauge", "counter"


@frozen
class Reading:
    """A run at a moment. up: whether its process is there. evaluations: the newest of each data."""

    state: RunState
    up: bool = True
    evaluations: Sequence[Evaluation] = ()

    @property
    def role(self) -> str:
        """The node's; that of a parameter server where the journal lacks it."""
        role = self.state.node.role
        return role if role in {SPLIT_SERVER, CLIENT} else PS


Sample = tuple[tuple[str, ...], float]
Values = Iterable[tuple[tuple[str, ...], Any]]
Read = Callable[[Reading], Values]
Get = Callable[[Any], Any]

_ROLES = {
    "ps": (PS,),
    "server": (SPLIT_SERVER,),
    "servers": (PS, SPLIT_SERVER),
    "client": (CLIENT,),
    "all": (PS, SPLIT_SERVER, CLIENT),
}


@frozen
class Figure:
    """One figure. name: Prometheus's, `_total` included. series: the trackers', with labels in
    braces; page: the control room's, of a site; empty: not for them. get: the value of a site.
    """

    name: str
    help: str
    read: Read
    labels: tuple[str, ...]
    series: str
    roles: tuple[str, ...]
    page: str
    get: Get | None

    @property
    def kind(self) -> str:
        """Counter or gauge."""
        return COUNTER if self.name.endswith("_total") else GAUGE

    def samples(self, reading: Reading) -> list[Sample]:
        """Label values and value, of what is known and finite."""
        if reading.role not in self.roles:
            return []
        found = self.read(reading)
        return [
            (labels, float(value))
            for labels, value in found
            if value is not None and math.isfinite(value)
        ]


def clients_of(state: RunState) -> list[ClientState]:
    """The clients that are listed: those that are here, then by arrival; MAX_CLIENTS at most."""
    known = sorted(state.clients.values(), key=lambda one: not one.connected)  # stable
    return known[:MAX_CLIENTS]


# --- how figures are read: by a path, or a function's name with brackets, below one of these ---


_PARTS: dict[str, Callable[[Reading], Iterable[tuple[tuple[str, ...], Any]]]] = {
    "run": lambda of: [((), of.state)],
    "groups": lambda of: [((), of.state.groups)] if of.state.groups.is_on else [],
    "client": lambda of: [((one.name,), one) for one in clients_of(of.state)],
    "here": lambda of: [((one.name,), one) for one in clients_of(of.state) if one.connected],
    "ways": lambda of: [(("up",), of.state.ps.up), (("down",), of.state.ps.down)],
    "held_out": lambda of: [((one.data, one.of), one) for one in of.evaluations[:MAX_DATA]],
}
"""Below which part of a reading a value is, by the first word of its path: labels, and the part."""


def _info(reading: Reading) -> Values:
    node = reading.state.node
    return [((node.run, node.host, node.address), 1)]


def _phase(reading: Reading) -> Values:
    return [((name,), reading.state.node.phase == name) for name in PHASES]


def _doing(reading: Reading) -> Values:
    found = Counter(client.doing for client in reading.state.clients.values())
    return [((name,), found[name]) for name in DOING]


def _by_category(kind: str) -> Read:
    def read(reading: Reading) -> Values:
        for name, count in reading.state.account.as_dict()[kind].items():
            category, _, direction = name.rpartition(" ")
            yield (category, direction), count

    return read


def _sockets(reading: Reading) -> Values:
    found = reading.state.account.as_dict()["sockets"]
    return [((direction,), found.get(direction, 0)) for direction in ("up", "down")]


def _speed(state: RunState) -> float | None:
    speeds = [one.tokens_per_s for one in state.clients.values() if one.connected]
    return math.fsum(speeds) if speeds else None


def _cosine(state: RunState) -> float | None:
    return state.ps.cosines[-1] if state.ps.cosines else None


def _loss(client: ClientState) -> float | None:
    """Not that of the process before, while the client catches up."""
    return None if client.returning else client.loss


def _lag_s(client: ClientState) -> float | None:
    return None if client.lag_p99_ms is None else client.lag_p99_ms / 1000


_GETTERS: dict[str, Get] = {
    "speed()": _speed,
    "cosine()": _cosine,
    "held()": lambda state: len(state.ps.held),
    "unlisted()": lambda state: max(0, len(state.clients) - MAX_CLIENTS),
    "troubled()": lambda client: bool(client.trouble),
    "loss()": _loss,
    "lag_s()": _lag_s,
    "rank()": lambda client: client.facts.get("rank"),
}
_READERS: dict[str, Read] = {
    "info()": _info,
    "up()": lambda reading: [((), reading.up)],
    "phase()": _phase,
    "doing()": _doing,
    "payload()": _by_category("payload"),
    "coded()": _by_category("coded"),
    "sockets()": _sockets,
}


def _reader(kind: str, get: Get, unknown: str) -> Read:
    """How a value is read. unknown: the number that stands for one that is not known."""
    if kind == "sum":
        return lambda reading: [((), sum(map(get, reading.state.clients.values())))]
    none = float(unknown or "nan")
    return lambda reading: [
        (labels, None if (found := get(part)) == none else found)
        for labels, part in _PARTS[kind](reading)
    ]


def _catalog() -> Iterator[Figure]:
    """The rows of `figures.txt`, a figure each."""
    _, *rows = (Path(__file__).parent / "figures.txt").read_text().splitlines()
    for row in rows:
        name, labels, series, page, roles, unknown, value, help_ = map(str.strip, row.split("|"))
        kind, _, path = value.partition(".")
        if path:
            get = _GETTERS.get(path) or attrgetter(path)
            read = _reader(kind, get, unknown)
        else:
            get, read = None, _READERS[value]
        yield Figure(name, help_, read, tuple(labels.split()), series, _ROLES[roles], page, get)


CATALOG = tuple(_catalog())


OF_SITES = {one.page: one.get for one in CATALOG if one.page and one.get}
"""The control room's figures of a site: how each is read."""


def prefix_of(role: str) -> str:
    """How the series of a node begin: a process may hold both servers."""
    return "split/" if role == SPLIT_SERVER else ""


def series_of(reading: Reading) -> dict[str, float]:
    """The figures of the trackers, by series; those of a split server begin with split/."""
    prefix = prefix_of(reading.role)
    found = {}
    for figure in CATALOG:
        if figure.series:
            for labels, value in figure.samples(reading):
                named = dict(zip(figure.labels, labels, strict=True))
                found[prefix + figure.series.format_map(named)] = value
    return found


def table() -> list[str]:
    """The catalog as a table in Markdown, for docs/TRACKERS.md."""
    rows = ["| Prometheus | labels | trackers | what |", "|---|---|---|---|"]
    for one in CATALOG:
        labels = ", ".join(one.labels)
        series = f"`{one.series}`" if one.series else ""
        rows.append(f"| `{one.name}` | {labels} | {series} | {one.help} |")
    return rows


HELD_OUT = "held_out"
_OF_A_MERGE = ("loss/mean", "staleness/mean", "staleness/max")
_MOST_OF_A_NAME = 80
_NOT_IN_A_SERIES = re.compile(r"[^A-Za-z0-9._-]+")


@frozen
class Point:
    """Values by series at one step. t: seconds since 1970."""

    step: int
    t: float
    values: dict[str, float]


def evaluated(one: Evaluation, t: float) -> Point:
    """The point of a version's held-out loss. t: when it was measured, seconds since 1970."""
    data = _NOT_IN_A_SERIES.sub("_", one.data)[-_MOST_OF_A_NAME:].strip("_")
    where = f"{HELD_OUT}/{data}" if data else HELD_OUT
    mean = "" if one.of == "weights" else f"_{one.of}"
    found = {
        "loss": one.loss,
        "perplexity": one.perplexity if one.accuracy is None else None,
        "bits_per_byte": one.bits_per_byte,
        "accuracy": one.accuracy,
    }
    values = {f"{where}/{name}{mean}": v for name, v in found.items() if v is not None}
    return Point(one.version, t, values)


def newest_of_each(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """The newest evaluation of each data, and of weights and means apart."""
    found: dict[tuple[str, str], Evaluation] = {}
    for one in evaluations:
        key = one.data, one.of
        if key not in found or found[key].version <= one.version:
            found[key] = one
    return [found[key] for key in sorted(found)]


@mutable
class Points:
    """Makes points of lines. `apply` takes them in order, as `RunState` does, and fails on none."""

    state: RunState = field(factory=RunState)
    _round: int = -1

    def apply(self, line: Line) -> list[Point]:
        """Take one line; returns the points that are complete with it."""
        state, kind = self.state, line.get("type")
        version, measured = state.ps.version, _last(state)
        state.apply(line)
        if kind == "version":
            made = state.ps.newest
            if line.get("made_of") != "disk" and made is not None:
                return [self._version(made)]
            return [self._version(None)] if -1 < version < state.ps.version else []
        newest = _last(state)
        if kind == "delta_meta" and newest is not None and newest is not measured:
            return [evaluated(newest, state.node.last_t)] if newest.version >= 0 else []
        if kind == "rebased":
            return [Point(state.site.version, state.node.last_t, series_of(Reading(state)))]
        if kind in {"upload_trained", "finish"} and state.node.role == SPLIT_SERVER:
            return self._rounds(ended=kind == "finish")
        self._round = state.split_server.round if kind == "so_far" else self._round
        return []

    def _version(self, made: VersionFact | None) -> Point:
        """The state at a new version, without what the state has of an earlier one."""
        values = series_of(Reading(self.state))
        if made is None or made.cosine is None:
            values.pop("cosine", None)
        for name in () if made is not None and made.deltas else _OF_A_MERGE:
            values.pop(name, None)
        return Point(self.state.ps.version, self.state.node.last_t, values)

    def _rounds(self, *, ended: bool) -> list[Point]:
        """The round that is over, as the next one has begun or the run ends."""
        before, newest = self._round, self.state.split_server.round
        self._round = newest
        over = newest if ended else before
        if over < 0 or (newest == before and not ended):
            return []
        return [Point(over, self.state.node.last_t, series_of(Reading(self.state)))]

    @property
    def step(self) -> int:
        """The newest step of which a point may exist."""
        node = self.state.node
        if node.role == CLIENT:
            return self.state.site.version
        return self.state.split_server.round if node.role == SPLIT_SERVER else self.state.ps.version


def _last(state: RunState) -> Evaluation | None:
    return state.ps.evaluations[-1] if state.ps.evaluations else None
