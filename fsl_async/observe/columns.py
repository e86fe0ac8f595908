"""The table of clients as lines of text that fit a width. Pure.

What matters most comes first: who, what it does, on which version, at what loss and speed, how many of its deltas were merged, how much
it sent. These fit 80 columns in their short forms. A wider terminal also gets whole names, steps, the course of the loss, whole
states and both sizes of what was sent, in this order, each as far as there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from attrs import frozen

from fsl_async.observe.client_state import ClientState, megabytes
from fsl_async.roles.sync.training_trouble import LOSS_IS

LOSS_LEGEND = "losses are running means; a version's line has the mean over its round"
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 14
_NAME_WIDTH = 14
_GAP = 2

Cell = Callable[[ClientState, float], str]


@frozen
class Column:
    """One column: how a cell is written where there is room, and where there is not (None: left out there)."""

    title: str
    full: Cell
    short: Cell | None
    is_number: bool = False


def fitted(clients: Sequence[ClientState], now: float, width: int | None = None) -> list[str]:
    """A line of titles and a line for each client, none longer than `width` (None: as long as they like)."""
    full = [[one.title, *(one.full(client, now) for client in clients)] for one in _COLUMNS]
    if width is None:
        return _lines(full)
    chosen: list[list[str] | None] = [
        None if one.short is None else [one.title, *(one.short(client, now) for client in clients)]
        for one in _COLUMNS
    ]
    for index in _UPGRADES:
        wider = [*chosen[:index], full[index], *chosen[index + 1 :]]
        if _width(wider) <= width:
            chosen = wider
    for index in reversed(
        range(2, len(_COLUMNS))
    ):  # a very narrow terminal: the last ones go first
        if _width(chosen) <= width:
            break
        chosen[index] = None
    kept = [(cells, one) for cells, one in zip(chosen, _COLUMNS, strict=True) if cells]
    return [line[:width] for line in _lines([c for c, _ in kept], [one for _, one in kept])]


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


def _lines(columns: Sequence[Sequence[str]], which: Sequence[Column] | None = None) -> list[str]:
    """Columns as aligned lines."""
    aligned = []
    for cells, column in zip(columns, which or _COLUMNS, strict=True):
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


def _version(client: ClientState, _: float) -> str:
    return str(client.version) if client.version >= 0 else "-"


def _step(client: ClientState, _: float) -> str:
    return f"{client.step:,}"


def _loss(client: ClientState, _: float) -> str:
    if client.trouble.startswith(LOSS_IS):
        return client.trouble.removeprefix(LOSS_IS).partition(",")[0]
    return f"{client.loss:.3f}" if client.loss is not None else "-"


def _spark(client: ClientState, _: float) -> str:
    return sparkline(list(client.losses), _SPARK_WIDTH)


def _speed(client: ClientState, _: float) -> str:
    if client.tokens_per_s >= 1e6:
        return f"{client.tokens_per_s / 1e6:,.1f} M"
    return f"{client.tokens_per_s:,.0f}" if client.tokens_per_s else "-"


def _deltas(client: ClientState, _: float) -> str:
    return str(client.deltas_merged)


def _sent(client: ClientState, _: float) -> str:
    up = client.up
    ratio = f" ({up.ratio:.1f}x)" if up.ratio else ""
    return f"{megabytes(up.raw)} as {megabytes(up.sent)}{ratio}" if up.sent else "-"


def _short_sent(client: ClientState, _: float) -> str:
    return megabytes(client.up.sent) if client.up.sent else "-"


_COLUMNS = (
    Column("client", lambda client, _: client.name, _name),
    Column("state", _state, _short_state),
    Column("version", _version, _version, is_number=True),
    Column("loss", _loss, _loss),
    Column("tokens/s", _speed, _speed, is_number=True),
    Column("deltas", _deltas, _deltas, is_number=True),
    Column("sent up", _sent, _short_sent),
    Column("step", _step, None, is_number=True),
    Column("losses", _spark, None),
)
_UPGRADES = (0, 7, 8, 1, 6)
"""Which columns get their full form where there is room, in this order."""
