"""The live table of a run on a terminal, and plain lines elsewhere. Both are views of a `RunState` and know nothing else.

On a terminal, with `rich` installed (the extra `live`), one table is redrawn in place. Without either, every `News` is one line:
a few dozen for a run of a minute, and what a log file should hold.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fsl_async.observe.client_state import News, counted, megabytes
from fsl_async.observe.columns import LOSS_LEGEND, fitted
from fsl_async.observe.state import RunState

if TYPE_CHECKING:
    from rich.console import Console

NEWS_SHOWN = 6


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
            self._record(one.kind, **news_fields(state, one))

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

    def __init__(self, ends_at: float | None = None, console: Console | None = None) -> None:
        from rich import console as screen
        from rich.live import Live

        self.ends_at = ends_at
        self._console = screen.Console() if console is None else console
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()

    def update(self, state: RunState, news: Sequence[News], now: float) -> None:
        """Draw what fits on the screen: the header, the clients, then the newest news that there is room for."""
        from rich.console import Group
        from rich.text import Text

        width, height = self._console.size
        head = Text(header(state, now, self.ends_at))
        left = height - len(head.wrap(self._console, width)) - 2
        shown: list[Text] = []
        if state.clients:
            names = sorted(state.clients)
            lines = fitted([state.clients[name] for name in names], now, width)
            styles = ["bold", *(_STYLES.get(state.clients[name].doing, "") for name in names)]
            rows = [
                Text(line, style=style, no_wrap=True, overflow="crop")
                for line, style in zip(lines, styles, strict=True)
            ]
            room = max(4, left - 3)
            if len(rows) > room:
                hidden = counted(len(rows) - room + 1, "client")
                rows = [*rows[: room - 1], Text(f"and {hidden} more", style="dim")]
            shown = [*rows, Text(LOSS_LEGEND, style="dim", no_wrap=True, overflow="crop")]
            left -= len(shown)
        told: list[Text] = []
        for one in reversed(sorted(state.news, key=lambda one: one.t)[-NEWS_SHOWN:]):
            style = "yellow" if one.level == "warning" else "dim"
            text = Text(news_line(state, one), style=style)
            left -= len(text.wrap(self._console, width))
            if left < 0:
                break
            told.insert(0, text)
        self._live.update(Group(head, *shown, *told), refresh=True)

    def close(self) -> None:
        """Stop redrawing; the last table stays."""
        self._live.stop()


_STYLES = {"gone": "red", "joining": "yellow", "fetching": "yellow", "sending": "cyan"}


_PHASES = {"waiting": "waiting for the first client's weights"}
"""Phases that are clearer in other words."""


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
    if not state.run:
        return "the parameter server is starting"
    phase = _PHASES.get(state.phase, state.phase)
    parts = [f"run {state.run}", phase if not state.ending else f"{phase} ({state.ending})"]
    if state.version >= 0:
        parts.append(f"version {state.version}")
        parts.append(counted(state.rounds, "round"))
        parts.append(f"{state.tokens:,} tokens merged")
    if state.participation is not None:
        parts.append(f"participation {state.participation:.0%}")
    if state.bytes_sent:
        parts.append(
            f"{megabytes(state.bytes_raw)} as {megabytes(state.bytes_sent)} ({state.ratio:.1f}x)"
        )
    if ends_at is not None and state.phase != "ended":
        parts.append(f"{max(0.0, ends_at - now):.0f} s left")
    return ", ".join(parts)


def news_fields(state: RunState, news: News) -> dict[str, Any]:
    """One piece of news as fields of a JSON object."""
    seconds = round(max(0.0, news.t - state.started_at), 3)
    return {"seconds": seconds, "client": news.client, "level": news.level, "text": news.text}


def news_line(state: RunState, news: News) -> str:
    """One piece of news with the seconds since the run began."""
    return f"{max(0.0, news.t - state.started_at):6.1f} s  {news.text}"
