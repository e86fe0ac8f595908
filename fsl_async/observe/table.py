"""The live table of a run on a terminal, and plain lines elsewhere. Both are views of a `RunState` and know nothing else.

On a terminal, with `rich` installed (the extra `live`), one table is redrawn in place. Without either, every `News` is one line:
a few dozen for a run of a minute, and what a log file should hold.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

from fsl_async.observe.client_state import ClientState, News, counted, megabytes
from fsl_async.observe.state import RunState

NEWS_SHOWN = 6

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 14
COLUMNS = ("client", "state", "version", "step", "loss", "", "tokens/s", "deltas", "sent up")


class View(Protocol):
    """Shows a run while it goes on."""

    def update(self, state: RunState, news: Sequence[News], now: float) -> None:
        """Show the state at `now` (seconds since 1970) and what is new since the last call."""
        ...

    def close(self) -> None:
        """Leave the terminal as a person expects it."""
        ...


class Records:
    """One JSON object for each piece of news, for programs that watch."""

    def __init__(self, record: Any) -> None:
        self._record = record

    def update(self, state: RunState, news: Sequence[News], now: float) -> None:
        """Print the news."""
        for one in news:
            seconds = round(max(0.0, one.t - state.started_at), 3)
            self._record(
                one.kind, seconds=seconds, client=one.client, level=one.level, text=one.text
            )

    def close(self) -> None:
        """Nothing to do."""


class PlainLines:
    """One line for each piece of news, with the seconds since the run began."""

    def __init__(self, say: Any) -> None:
        self._say = say

    def update(self, state: RunState, news: Sequence[News], now: float) -> None:
        """Print the news."""
        for one in news:
            self._say(news_line(state, one))

    def close(self) -> None:
        """Nothing to do."""


class LiveTable:
    """The table, redrawn in place by rich. `ends_at`: when the run is planned to end, seconds since 1970."""

    def __init__(self, ends_at: float | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self.ends_at = ends_at
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()

    def update(self, state: RunState, news: Sequence[News], now: float) -> None:
        """Draw."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(expand=False, pad_edge=False)
        for title in COLUMNS:
            numeric = title in {"version", "step", "tokens/s", "deltas"}
            table.add_column(title, justify="right" if numeric else "left", no_wrap=True)
        for name in sorted(state.clients):
            client = state.clients[name]
            table.add_row(*row(client, now), style=_STYLES.get(client.doing, ""))
        told = [
            Text(news_line(state, one), style="yellow" if one.level == "warning" else "dim")
            for one in list(state.news)[-NEWS_SHOWN:]
        ]
        self._live.update(Group(Text(header(state, now, self.ends_at)), table, *told), refresh=True)

    def close(self) -> None:
        """Stop redrawing; the last table stays."""
        self._live.stop()


_STYLES = {"gone": "red", "joining": "yellow", "fetching": "yellow", "sending": "cyan"}


def open_view(output: Any, *, ends_at: float | None = None) -> View:
    """Objects with --json; the table when standard output is a terminal and rich is there; else lines."""
    if output.as_json:
        return Records(output.record)
    if sys.stdout.isatty():
        try:
            return LiveTable(ends_at)
        except ImportError:
            output.say("(pip install 'fsl-async[live]' shows this as a table)")
    return PlainLines(output.say)


def header(state: RunState, now: float, ends_at: float | None = None) -> str:
    """The run in one or two lines."""
    parts = [
        f"run {state.run or '?'}",
        state.phase if not state.ending else f"{state.phase} ({state.ending})",
        f"version {state.version}" if state.version >= 0 else "no version yet",
        counted(state.rounds, "round"),
        f"{state.tokens:,} tokens merged",
    ]
    if state.participation is not None:
        parts.append(f"participation {state.participation:.0%}")
    if state.bytes_sent:
        parts.append(
            f"{megabytes(state.bytes_raw)} as {megabytes(state.bytes_sent)} ({state.ratio:.1f}x)"
        )
    if ends_at is not None and state.phase != "ended":
        parts.append(f"{max(0.0, ends_at - now):.0f} s left")
    return ", ".join(parts)


def row(client: ClientState, now: float) -> tuple[str, ...]:
    """A client's cells, under COLUMNS."""
    up = client.up
    ratio = f" ({up.ratio:.1f}x)" if up.ratio else ""
    again = f", relaunched {client.relaunches}x" if client.relaunches else ""
    return (
        client.name,
        client.words(now) + again,
        str(client.version) if client.version >= 0 else "-",
        f"{client.step:,}",
        f"{client.loss:.3f}" if client.loss is not None else "-",
        sparkline(list(client.losses), _SPARK_WIDTH),
        f"{client.tokens_per_s:,.0f}" if client.tokens_per_s else "-",
        str(client.deltas_merged),
        f"{megabytes(up.raw)} as {megabytes(up.sent)}{ratio}" if up.sent else "-",
    )


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    ]


def news_line(state: RunState, news: News) -> str:
    """One piece of news with the seconds since the run began."""
    return f"{max(0.0, news.t - state.started_at):6.1f} s  {news.text}"


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
