"""What a journal shows over time: rounds, timelines of clients, bytes. Pure.

`Course` is a node's state with its history. What is kept is bounded: `RoundSeries` by its buckets,
a timeline by `MAX_SEGMENTS` for each client, samples of bytes by `MAX_SAMPLES`. So each segment
of a journal begins with all of it, and readers need no older one.

A client's timeline is a row of segments. Each begins at a time and lasts until the next:

    fetching   it joins, publishes, or fetches a version
    training   it trains
    sending    a delta of it is on its way
    late       it was called, and the round merged without its delta
    hangs      its heartbeats tell that training makes no step
    gone       its session is over, and it did not end in good order
    done       the run, or its part in it, is over

`marks` are moments: "joined", "relaunched", "reconnected" sessions, launches by the parameter
server ("waiting", "launched", "left alone", "failed", "gave up"), and "held", "refused" deltas.

Figures by round are dense columns, which share one axis: bucket `i` holds the rounds
`(first + i) * every` to `(first + i + 1) * every - 1`. A client that sent nothing in a bucket has
NaN there, so a gap stays a gap. At `MAX_BUCKETS` buckets, `every` doubles and pairs of buckets
become one: memory is bounded, whatever the length of the run.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, TypeAlias

from attrs import field, fields, mutable

from fsl_async.observe import segments
from fsl_async.observe.clients import ClientState, Line, News
from fsl_async.observe.run_state import PS, RunState
from fsl_async.observe.segments import Column

MAX_BUCKETS = 1024
"""Points on the axis at most."""
MAX_CLIENTS = 256
"""Clients with columns: names come from the network. Later ones have their present state only."""

Reduce: TypeAlias = Callable[[Sequence[float]], float]


def _last(values: Sequence[float]) -> float:
    return values[-1]


OF_CLIENT = ("loss", "tokens", "raw", "coded")
"""Columns of a client: mean loss; tokens; bytes in fp32 and as sent; the last three are sums."""
OF_RUN = ("t", "tokens", "loss", "cosine", "merged")
"""Columns of a node: when the round ended, tokens merged until then, mean loss of its deltas, mean
cosine between them, number of merged deltas."""
_COUNT = "losses"
"""Also of a client: the number of losses in the mean."""
_JOINED_OF_CLIENT: dict[str, Reduce] = {
    "loss": fmean, "tokens": sum, "raw": sum, "coded": sum, _COUNT: sum,
}  # fmt: skip
_JOINED_OF_RUN: dict[str, Reduce] = {
    "t": _last, "tokens": _last, "loss": fmean, "cosine": fmean, "merged": sum,
}  # fmt: skip
"""How the known values of two buckets become one."""
_NONE = float("nan")

Columns: TypeAlias = dict[str, Column]


@mutable
class RoundSeries:
    """The columns of a node. `clock` counts changes; `changed` has its value by bucket."""

    first: int = 0
    every: int = 1
    clock: int = 0
    changed: list[int] = field(factory=list)
    run: Columns = field(factory=lambda: _columns(OF_RUN, 0))
    clients: dict[str, Columns] = field(factory=dict)

    def __len__(self) -> int:
        return len(self.changed)

    def add(self, client: str, number: int, *, loss: float | None, **sums: float) -> None:
        """Add one delta (or upload) of a client in round `number`."""
        at = self._bucket(number)
        columns = self._of(client)
        if at is None or columns is None:
            return
        if loss is not None and math.isfinite(loss):
            count = 0.0 if math.isnan(columns[_COUNT][at]) else columns[_COUNT][at]
            before = columns["loss"][at] if count else 0.0
            columns["loss"][at] = before + (loss - before) / (count + 1)
            columns[_COUNT][at] = count + 1
        for name, value in sums.items():
            before = columns[name][at]
            columns[name][at] = value if math.isnan(before) else before + value

    def close(self, number: int, **values: float | None) -> None:
        """Set figures of the node for round `number`, which has made a version.

        Tokens are those of the run so far, so they are set, and the number of merged is added up.
        """
        at = self._bucket(number)
        if at is None:
            return
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                before = self.run[name][at]
                adds = name == "merged" and not math.isnan(before)
                self.run[name][at] = before + value if adds else value

    def truncate(self, number: int) -> None:
        """Forget rounds from `number` on: a rollback made them void."""
        at = number // self.every - self.first + (number % self.every > 0)
        if not 0 <= at < len(self):
            return
        for columns in (self.run, *self.clients.values()):
            for column in columns.values():
                del column[at:]
        del self.changed[at:]
        self.clock += 1
        if self.changed:
            self.changed[-1] = self.clock

    def rounds(self) -> list[int]:
        """The axis: the first round of each bucket."""
        return [(self.first + at) * self.every for at in range(len(self))]

    def since(self, clock: int) -> int:
        """The first bucket that has changed after `clock`; the length if none has."""
        return next((at for at, then in enumerate(self.changed) if then > clock), len(self))

    def _bucket(self, number: int) -> int | None:
        if number < 0:
            return None
        if not self.changed:
            self.first = number // self.every
        at = number // self.every - self.first
        if at < 0:
            return None
        while at >= MAX_BUCKETS:
            self._halve()
            at = number // self.every - self.first
        more = at + 1 - len(self)
        if more > 0:
            for columns in (self.run, *self.clients.values()):
                for column in columns.values():
                    column.extend([_NONE] * more)
            self.changed.extend([0] * more)
        self.clock += 1
        self.changed[at] = self.clock
        return at

    def _of(self, client: str) -> Columns | None:
        found = self.clients.get(client)
        if found is None and len(self.clients) < MAX_CLIENTS:
            found = self.clients[client] = _columns((*OF_CLIENT, _COUNT), len(self))
        return found

    def _halve(self) -> None:
        self.every *= 2
        odd, first = self.first % 2, self.first // 2
        for columns in (self.run, *self.clients.values()):
            joined = _JOINED_OF_RUN if columns is self.run else _JOINED_OF_CLIENT
            for name, column in columns.items():
                columns[name] = _paired(column, odd, joined[name])
        self.first, self.clock = first, self.clock + 1
        self.changed = [self.clock] * len(self.run["t"])


def _columns(names: tuple[str, ...], length: int) -> Columns:
    return {name: Column([_NONE] * length) for name in names}


def _paired(column: Column, odd: int, join: Reduce) -> Column:
    padded = [*([_NONE] * odd), *column]
    pairs = (padded[at : at + 2] for at in range(0, len(padded), 2))
    known = ([value for value in pair if not math.isnan(value)] for pair in pairs)
    return Column(join(values) if values else _NONE for values in known)


def plain(column: list[float], begin: int = 0) -> list[float | None]:
    """Values for JSON from bucket `begin` on, with 6 digits; None is a gap."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in column[begin:]]


def as_dict(series: RoundSeries, since: int = 0) -> dict[str, Any]:
    """Return what has changed after the clock value `since`, for JSON: columns from bucket `begin`.

    Those of clients are `of_client`'s, with this `begin`.
    """
    begin = series.since(since)
    times = [None if math.isnan(value) else round(value, 3) for value in series.run["t"][begin:]]
    return {
        "clock": series.clock,
        "begin": begin,
        "every": series.every,
        "rounds": series.rounds()[begin:],
        "t": times,
        **{name: plain(series.run[name], begin) for name in OF_RUN if name != "t"},
    }


def of_client(series: RoundSeries, name: str, begin: int) -> dict[str, list[float | None]]:
    """A client's columns from bucket `begin` on, for JSON."""
    return {key: plain(series.clients[name][key], begin) for key in OF_CLIENT}


MAX_SEGMENTS = 512
MAX_MARKS = 128
MAX_SAMPLES = 1024

STATES = ("fetching", "training", "sending", "late", "hangs", "gone", "done")
SAMPLED = ("raw up", "raw down", "coded up", "coded down", "sockets up", "sockets down")
"""Columns of bytes; up is from clients to the server. raw (in fp32) and coded are at a
parameter server those of deltas and versions, as `status` counts them, else of all payload."""
_MARKS = {"joined", "relaunched", "reconnected"}
_LAUNCHES = {"waiting", "launched", "left alone", "failed", "gave up"}


def _newest_marks(marks: Iterable[tuple[float, str]]) -> deque[tuple[float, str]]:
    return deque(marks, MAX_MARKS)


@mutable
class Timeline:
    """A client's segments: when each begins (seconds since 1970), and its state."""

    begins: Column = field(factory=Column)
    states: bytearray = field(factory=bytearray)
    marks: deque[tuple[float, str]] = field(factory=deque, converter=_newest_marks)
    launch: str = ""
    """What the server said of its last launch: Slurm's job and its state, among others."""
    clock: int = 0
    """Counts changes."""
    generation: int = 0
    """Counts changes of segments before the newest two."""

    @property
    def state(self) -> str:
        """The newest; empty before the first."""
        return STATES[self.states[-1]] if self.states else ""

    def enter(self, t: float, state: str) -> None:
        """A state begins."""
        if state == self.state:
            return
        if self.begins and t <= self.begins[-1]:  # no time has passed in the one before
            self.states[-1] = STATES.index(state)
            if len(self.states) > 1 and self.states[-1] == self.states[-2]:
                del self.states[-1], self.begins[-1]
        else:
            self.begins.append(t)
            self.states.append(STATES.index(state))
        self.clock += 1
        if len(self.begins) > MAX_SEGMENTS:
            self._coarsen()

    def segments(self) -> list[tuple[float, str]]:
        """All of them."""
        return [(t, STATES[state]) for t, state in zip(self.begins, self.states, strict=True)]

    def _coarsen(self) -> None:
        """Join the older half in pairs, under the state of the longer one of each."""
        self.generation += 1
        half = len(self.begins) // 4 * 2
        begins, states = Column(), bytearray()
        for at in range(0, half, 2):
            middle, end = self.begins[at + 1], self.begins[at + 2]
            longer = at if middle - self.begins[at] >= end - middle else at + 1
            if not states or states[-1] != self.states[longer]:
                begins.append(self.begins[at])
                states.append(self.states[longer])
        self.begins = Column([*begins, *self.begins[half:]])
        self.states = states + self.states[half:]


@mutable
class Samples:
    """Bytes over time, from the notes "traffic". At `MAX_SAMPLES` every second one is left out."""

    columns: dict[str, Column] = field(factory=lambda: {name: Column() for name in ("t", *SAMPLED)})
    clock: int = 0
    _every: int = 1
    _seen: int = 0

    def __len__(self) -> int:
        return len(self.columns["t"])

    def add(self, t: float, sums: dict[str, float]) -> None:
        """Add a sample; of those that follow too closely, the last one is kept."""
        if self._seen % self._every and len(self):
            for column in self.columns.values():
                del column[-1]
        self._seen += 1
        self.columns["t"].append(t)
        for name in SAMPLED:
            self.columns[name].append(sums[name])
        self.clock += 1
        if len(self) > MAX_SAMPLES:
            self._every *= 2
            self.columns = {name: Column(column[::2]) for name, column in self.columns.items()}
            self._seen = 0


@mutable
class History:
    """The course of one node's journal."""

    rounds: RoundSeries = field(factory=RoundSeries)
    timelines: dict[str, Timeline] = field(factory=dict)
    bytes: Samples = field(factory=Samples)
    relays: dict[str, list[int]] = field(factory=dict)
    """Of a relay, by server: connections open, accepted, bytes up and down of ended ones."""
    job: str = ""
    """Of Slurm, of a client's own journal."""
    requeues: int = 0
    begins_at: float | None = None
    """Time of the first line."""
    lines: int = 0
    _connections: dict[int, str] = field(factory=dict)
    _samples: dict[str, int] = field(factory=dict)
    _version: int = -1
    """The newest one before the line that is taken."""

    def apply(self, line: Line, run: RunState) -> None:
        """Take a line that `run` has taken. Never fails; a malformed line changes nothing."""
        self.lines += 1
        if self.begins_at is None and run.node.last_t:
            self.begins_at = run.node.last_t
        kind = line.get("type")
        handler = getattr(self, f"_on_{kind}", None)
        try:
            if handler is not None:
                handler(run, line)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            return
        finally:
            self._version = run.ps.version
        peer = line.get("peer")
        if kind in {"node_started", "node_ended", segments.SO_FAR}:
            self._follow(run.clients.values(), run)
        elif isinstance(peer, str) and (client := run.clients.get(peer)) is not None:
            self._follow((client,), run)
        elif isinstance(peer, str):  # it was refused: its place is for others
            self.timelines.pop(peer, None)

    def _follow(self, clients: Iterable[ClientState], run: RunState) -> None:
        late = run.ps.late
        for client in clients:
            line = self.timeline(client.name)
            if line is not None:
                state = client.doing if client.doing in STATES else "fetching"
                if state == "training" and client.name in late:
                    state = "late"
                elif state in {"training", "sending"} and client.hangs:
                    state = "hangs"
                line.enter(run.node.last_t, state)

    def timeline(self, name: str) -> Timeline | None:
        """The client's; None for those beyond `MAX_CLIENTS`."""
        found = self.timelines.get(name)
        if found is None and len(self.timelines) < MAX_CLIENTS:
            found = self.timelines[name] = Timeline()
        return found

    def _mark(self, name: str, t: float, what: str) -> None:
        line = self.timeline(name)
        if line is not None:
            line.marks.append((t, what))
            line.clock += 1

    # --- the lines, by their types ---

    def _on_so_far(self, run: RunState, line: Line) -> None:
        if self.lines > 1:  # the lines before it were read, too
            return
        found = segments.restored(History, line["history"])
        for each in fields(History):
            setattr(self, each.name, getattr(found, each.name))

    def _on_client(self, run: RunState, line: Line) -> None:
        name, outcome = str(line["peer"]), line["outcome"]
        if line["begins"]:  # `RunState` has just told how
            news = run.news[-1] if run.news else None
            if news is not None and news.client == name and news.kind in _MARKS:
                self._mark(name, run.node.last_t, news.kind)
        elif outcome in {"held", "quarantined"}:
            self._mark(name, run.node.last_t, "held")
        elif outcome not in {"", "accepted", "released"}:
            self._mark(name, run.node.last_t, "refused")

    def _on_relaunch(self, run: RunState, line: Line) -> None:
        what = str(line["what"])
        name = str(line["client"])
        timeline = self.timeline(name) if what in _LAUNCHES and name else None
        if timeline is not None:
            self._mark(name, run.node.last_t, what)
            text = str(line.get("text", ""))
            timeline.launch = text.removeprefix(name).lstrip(": ")

    def _on_delta_stored(self, run: RunState, line: Line) -> None:
        stored = line["stored"]
        delta = stored["delta"]
        key, number = str(delta["key"]), int(delta.get("round", -1))
        base = int(key.split("/")[2])
        number = min(number if number >= 0 else base, max(run.ps.version, 0))
        loss = _finite((delta.get("metrics") or {}).get("loss"))
        self.rounds.add(
            str(line["peer"]),
            number,
            loss=loss,
            tokens=int(delta["tokens"]),
            raw=4 * run.ps.values,
            coded=int(stored["bytes"]),
        )

    def _on_version(self, run: RunState, line: Line) -> None:
        version, made = int(line["version"]), run.ps.newest
        if line["made_of"] == "disk":
            # A restart goes on with the open round: its deltas are pending, and not stored again.
            if version < self._version:
                self.rounds.truncate(max(0, version))
        elif made is not None:
            self.rounds.close(
                max(version - 1, 0),
                t=run.node.last_t,
                tokens=made.tokens,
                loss=made.loss,
                cosine=made.cosine,
                merged=sum(made.deltas.values()),
            )

    def _on_round(self, run: RunState, line: Line) -> None:
        no_more = {name for name, one in self.timelines.items() if one.state == "late"}
        names = no_more.union(run.ps.late)
        self._follow((run.clients[name] for name in names if name in run.clients), run)

    def _on_traffic(self, run: RunState, line: Line) -> None:
        found = run.account.as_dict()
        sums = dict.fromkeys(SAMPLED, 0.0)
        for kind, column in (("payload", "raw"), ("coded", "coded"), ("sockets", "sockets")):
            for name, size in found[kind].items():
                direction = name.rpartition(" ")[2]
                if direction in {"up", "down"}:
                    sums[f"{column} {direction}"] += size
        if run.node.role == PS:
            for direction, moved in (("up", run.ps.up), ("down", run.ps.down)):
                sums[f"raw {direction}"] = float(moved.raw)
                sums[f"coded {direction}"] = float(moved.sent)
        self.bytes.add(run.node.last_t, sums)

    def _on_upload_trained(self, run: RunState, line: Line) -> None:
        if line.get("problem") is not None:
            return
        name, _, number, _ = str(line["key"]).split("/")
        newest = max(run.split_server.round, 0)
        self.rounds.add(name, min(int(number), newest), loss=_finite(line["loss"]))
        if name in run.clients:
            self._follow((run.clients[name],), run)

    def _on_round_done(self, run: RunState, line: Line) -> None:
        number = min(int(line["round"]), max(run.split_server.round, 0))
        samples = int(line["samples"])
        self.rounds.add(str(line["peer"]), number, loss=None, tokens=samples)
        self._samples["all"] = self._samples.get("all", 0) + samples
        self.rounds.close(number, t=run.node.last_t, tokens=self._samples["all"])

    def _on_connection_accepted(self, run: RunState, line: Line) -> None:
        server = str(line["server"])
        if server in self.relays or len(self.relays) < MAX_CLIENTS:
            figures = self.relays.setdefault(server, [0, 0, 0, 0])
            figures[0] += 1
            figures[1] += 1
            self._connections[int(line["connection"])] = server

    def _on_connection_ended(self, run: RunState, line: Line) -> None:
        figures = self.relays[self._connections.pop(int(line["connection"]))]
        figures[0] -= 1
        figures[2] += int(line["up"])
        figures[3] += int(line["down"])

    def _on_node_started(self, run: RunState, line: Line) -> None:
        self.job, self.requeues = str(line.get("slurm_job") or ""), int(line.get("requeues") or 0)
        self._connections.clear()
        for figures in self.relays.values():
            figures[0] = 0


def _finite(value: Any) -> float | None:
    """A number, if it is one: a loss that is not finite is text in the journal."""
    is_one = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_one else None


@mutable
class Course:
    """A node's state and its history: what a note so_far has of the lines before it."""

    state: RunState = field(factory=RunState)
    history: History = field(factory=History)

    def apply(self, line: Line) -> list[News]:
        """Take one line; returns its news."""
        news = self.state.apply(line)
        self.history.apply(line, self.state)
        return news
