"""Prints a run in a terminal: the table of clients, and a line for each piece of news.

Both show a `RunState`: a few dozen lines for a run of a minute. A running server prints its news
itself, while it writes them to its journal (`Reporter`).

The table fits the terminal's width. What matters most comes first: the client, what it does, on
which version, at what loss and speed, how many of its deltas were merged, how much it sent. These
fit 80 columns in their short forms. A wider terminal also gets full names, steps, the course of the
loss, full states and both sizes of what was sent, in this order, each as far as there is room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from attrs import evolve, frozen

import fsl_transport as tp
from fsl_async.observe.clients import ClientState, News
from fsl_async.observe.journal import JournalWriter
from fsl_async.observe.journal_lines import as_fields, fact_fields, type_of
from fsl_async.observe.run_state import CLIENT, SPLIT_SERVER, RunState, tells_something
from fsl_async.roles.machine import Note
from fsl_async.roles.phrasing import counted, figure, megabytes
from fsl_async.roles.sync.training_trouble import LOSS_IS

LOSS_LEGEND = "losses are running means; a version's line has the mean over its round"
_SPLIT_LEGEND = "losses are those of uploads, as the split server trained them"
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 14
_NAME_WIDTH = 14
_GAP = 2

Cell = Callable[[ClientState, float], str]


# --- the table of clients ---


@frozen
class Column:
    """One column: a cell where there is room, and where there is not (None: left out there)."""

    title: str
    full: Cell
    short: Cell | None
    is_number: bool = False


def client_lines(state: RunState, now: float, width: int | None = None) -> list[str]:
    """The table: a line of titles and one for each client, none longer than `width`."""
    columns, upgrades = _LAYOUTS.get(state.node.role, _AT_PARAMETER_SERVER)
    columns = tuple(
        evolve(one, title=one.title.replace("tokens", state.ps.counts)) for one in columns
    )
    clients = [state.clients[name] for name in sorted(state.clients)]
    if any(client.epsilon is not None for client in clients):
        columns, upgrades = (*columns, _EPSILON), (*upgrades, len(columns))
    if any(client.unsent is not None for client in clients):
        columns, upgrades = (*columns, _UNSENT), (*upgrades, len(columns))
    return _fitted(clients, now, width, columns, upgrades)


def legend(state: RunState) -> str:
    """What the losses in the table are."""
    return _SPLIT_LEGEND if state.node.role == SPLIT_SERVER else LOSS_LEGEND


def _fitted(
    clients: Sequence[ClientState],
    now: float,
    width: int | None,
    columns: Sequence[Column],
    upgrades: Sequence[int],
) -> list[str]:
    chosen: list[list[str] | None] = [
        [one.title, *(one.full(client, now) for client in clients)] for one in columns
    ]
    # Short forms first, those of the last upgrade before others; then the last columns go.
    for place, index in enumerate([*reversed(upgrades), *reversed(range(2, len(columns)))]):
        if width is None or _width(chosen) <= width:
            break
        short = columns[index].short if place < len(upgrades) else None
        title = columns[index].title
        chosen[index] = short and [title, *(short(client, now) for client in clients)]
    kept = [(cells, one) for cells, one in zip(chosen, columns, strict=True) if cells]
    return [line[:width] for line in _aligned([c for c, _ in kept], [one for _, one in kept])]


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars, low to high; more than `width` of them are averaged in groups."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _width(chosen: Sequence[Sequence[str] | None]) -> int:
    widths = [max(map(len, cells)) for cells in chosen if cells]
    return sum(widths) + _GAP * (len(widths) - 1)


def _aligned(cells_of: Sequence[Sequence[str]], columns: Sequence[Column]) -> list[str]:
    aligned = []
    for cells, column in zip(cells_of, columns, strict=True):
        size = max(map(len, cells))
        aligned.append([f"{cell:{'>' if column.is_number else '<'}{size}}" for cell in cells])
    return [(" " * _GAP).join(cells).rstrip() for cells in zip(*aligned, strict=True)]


def _name(client: ClientState, _: float) -> str:
    if len(client.name) <= _NAME_WIDTH:
        return client.name
    # Names of clients often differ at the end only.
    return f"{client.name[: _NAME_WIDTH - 7]}…{client.name[-6:]}"


def _state(client: ClientState, now: float) -> str:
    words = client.words(now)
    return f"{words}, relaunched {client.relaunches}x" if client.relaunches else words


def _short_state(client: ClientState, now: float) -> str:
    if client.doing != "gone":
        return client.words(now)
    gone_s = max(0.0, now - client.gone_at)
    if gone_s < 1000:
        return f"gone {gone_s:.0f} s"
    return f"gone {gone_s / 60:.0f} min" if gone_s < 36_000 else f"gone {gone_s / 3600:.0f} h"


def _loss(client: ClientState, _: float) -> str:
    if client.trouble.startswith(LOSS_IS):
        return client.trouble.removeprefix(LOSS_IS).partition(",")[0]
    return figure(client.loss) if client.loss is not None else "-"


def _speed(client: ClientState) -> str:
    if client.tokens_per_s >= 1e6:
        return f"{client.tokens_per_s / 1e6:,.1f} M"
    return f"{client.tokens_per_s:,.0f}" if client.tokens_per_s else "-"


def _sent(client: ClientState, _: float) -> str:
    up = client.up
    if not up.sent:
        return "-"
    bits = f" ({up.bits:.2f} bits)" if up.bits else ""
    return f"{megabytes(up.raw)} as {megabytes(up.sent)}{bits}"


def _short_sent(client: ClientState, _: float) -> str:
    return megabytes(client.up.sent) if client.up.sent else "-"


def _number(title: str, cell: Callable[[ClientState], str], *, is_short: bool = True) -> Column:
    """A column of numbers, the same where there is little room, or left out there."""

    def full(client: ClientState, _: float) -> str:
        return cell(client)

    return Column(title, full, full if is_short else None, is_number=True)


_EPSILON = _number("epsilon", lambda one: "-" if one.epsilon is None else f"{one.epsilon:.2f}")
_UNSENT = _number(
    "kept back", lambda one: "-" if one.unsent is None else f"{one.unsent:.0%}", is_short=False
)
_CLIENT = Column("client", lambda client, _: client.name, _name)
_DOING = Column("state", _state, _short_state)
_LOSS = Column("loss", _loss, _loss)
_LOSSES = Column("losses", lambda one, _: sparkline(list(one.losses), _SPARK_WIDTH), None)

_Layout = tuple[tuple[Column, ...], tuple[int, ...]]
"""Columns, and which of them get their full form where there is room, in this order."""

_AT_PARAMETER_SERVER: _Layout = (
    (
        _CLIENT,
        _DOING,
        _number("version", lambda one: str(one.version) if one.version >= 0 else "-"),
        _LOSS,
        _number("tokens/s", _speed),
        _number("deltas", lambda one: str(one.deltas_merged)),
        Column("sent up", _sent, _short_sent),
        _number("step", lambda one: f"{one.step:,}", is_short=False),
        _LOSSES,
    ),
    (0, 7, 8, 1, 6),
)
_AT_SPLIT_SERVER: _Layout = (
    (_CLIENT, _DOING, _LOSS, _number("uploads", lambda one: f"{one.uploads:,}"), _LOSSES),
    (0, 4, 1),
)
_LAYOUTS = {SPLIT_SERVER: _AT_SPLIT_SERVER}


# --- lines ---

_PHASES = {"waiting": "waiting for the first client's weights"}
"""Phases that are clearer in other words."""


def header(state: RunState) -> str:
    """The run in one or two lines."""
    node = state.node
    if node.role == SPLIT_SERVER:
        return _split_header(state)
    if node.role == CLIENT:
        return f"{node.name} in run {node.run or 'none yet'}, version {state.site.version}"
    if not node.run:
        return "the parameter server is starting"
    ps, phase = state.ps, _PHASES.get(node.phase, node.phase)
    parts = [f"run {node.run}", phase if not node.ending else f"{phase} ({node.ending})"]
    if ps.version >= 0:
        parts.append(f"version {ps.version}")
        parts.append(counted(ps.rounds, "round"))
        parts.append(f"{ps.tokens:,} {ps.counts} merged")
    if ps.participation is not None:
        parts.append(f"participation {ps.participation:.0%}")
    if ps.bytes_sent:
        parts.append(f"{megabytes(ps.bytes_raw)} as {megabytes(ps.bytes_sent)} ({ps.ratio:.1f}x)")
    return ", ".join(parts)


def _split_header(state: RunState) -> str:
    node, split = state.node, state.split_server
    phase = f"{node.phase} ({node.ending})" if node.ending else node.phase
    parts = [f"split server ({split.method}) of run {node.run or 'none yet'}", phase]
    if split.round >= 0:
        parts.append(f"newest round {split.round}")
    if split.loss is not None:
        parts.append(f"loss {figure(split.loss)}")
    here = sum(client.connected for client in state.clients.values())
    return ", ".join([*parts, f"{counted(here, 'client')} connected"])


def news_fields(state: RunState, news: News) -> dict[str, Any]:
    """One piece of news as fields of a JSON object."""
    seconds = round(max(0.0, news.t - state.node.started_at), 3)
    return {"seconds": seconds, "client": news.client, "level": news.level, "text": news.text}


def news_line(state: RunState, news: News) -> str:
    """One piece of news with the seconds since the run began."""
    return f"{max(0.0, news.t - state.node.started_at):6.1f} s  {news.text}"


def show_news(output: Any, state: RunState, news: Sequence[News]) -> None:
    """Print a line for each piece of news; an object with --json."""
    for one in news:
        if output.as_json:
            output.record(one.kind, **news_fields(state, one))
        else:
            output.say(news_line(state, one))


GARBAGE_EVERY_S = 1.0

_AT_PS = frozenset({"joined", "relaunched", "reconnected", "gone"})
"""News of clients that the parameter server prints: a split server does not print them again."""


class Reporter:
    """Writes to `journal` and prints the news of a `RunState` of its lines. On the loop thread.

    say: takes one line; instead of it `record`, if given, takes a kind and fields. now: the shell's
    clock, for notes that come from no machine. clock: seconds since 1970.
    """

    def __init__(
        self,
        journal: JournalWriter,
        say: Callable[[str], None],
        now: Callable[[], float],
        clock: Callable[[], float] = time.time,
        record: Callable[..., None] | None = None,
    ) -> None:
        self._journal = journal
        self._say = say
        self._now = now
        self._clock = clock
        self._record = record
        self._state = RunState()
        self._last: Any = None

    def event(self, event: Any, now: float, cause: int | None = None) -> int:
        """Write an event; returns its number."""
        self._tell(event)
        return self._journal.event(event, now, cause)

    def effect(self, effect: Any, now: float, cause: int | None = None) -> int:
        """Write an effect; returns its number."""
        self._tell(effect)
        self._last = effect
        return self._journal.effect(effect, now, cause)

    def fact(self, fact: Any, now: float, cause: int | None = None) -> int:
        """Write a fact; returns its number."""
        self._apply(fact.tag, {"now": now, **fact_fields(fact)})
        return self._journal.fact(fact, now, cause)

    def note(self, name: str, now: float, cause: int | None = None, /, **fields: Any) -> int:
        """Write a note; returns its number."""
        self._apply(name, fields)
        return self._journal.note(name, now, cause, **fields)

    def say(self, note: Note) -> None:
        """Carry a Note out: the machine's was told when it was written, the shell's is now."""
        if note is not self._last:
            self.note("note", self._now(), text=note.text, level=note.level)

    def _tell(self, item: Any) -> None:
        name = type_of(item)
        if tells_something(name):
            self._apply(name, as_fields(item))

    def _apply(self, name: str, fields: dict[str, Any]) -> None:
        stamp = self._clock()
        for news in self._state.apply({"t": stamp, "type": name, **fields}):
            if news.kind == "server":  # the command prints itself where it listens
                continue
            if self._state.node.role == SPLIT_SERVER and news.kind in _AT_PS:
                continue
            if self._record is not None:
                self._record(news.kind, **news_fields(self._state, news))
            else:
                self._say(f"{time.strftime('%H:%M:%S', time.localtime(stamp))}  {news.text}")


class GarbageWatch:
    """Writes to the journal how many messages were not of this program, whenever there are more."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, endpoint: tp.ListenerEndpoint, journal: Reporter
    ) -> None:
        self._loop, self._endpoint, self._journal = loop, endpoint, journal
        self._seen = 0
        self._timer = loop.call_later(GARBAGE_EVERY_S, self._look)

    def _look(self) -> None:
        if self._endpoint.garbage > self._seen:
            self._seen = self._endpoint.garbage
            self._journal.note("unreadable_messages", self._loop.time(), garbage=self._seen)
        self._timer = self._loop.call_later(GARBAGE_EVERY_S, self._look)

    def close(self) -> None:
        """Stop looking."""
        self._timer.cancel()
