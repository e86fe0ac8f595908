"""The table of a comparison, at most 80 columns wide, and its picture.

`draw` plots accuracy or loss against bytes, rounds and seconds, and needs matplotlib (extra
`plot`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fsl_async.errors import UsageError, to_install
from fsl_async.roles.phrasing import megabytes
from fsl_async.tools.compare.outcome import Outcome, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH = 80
NONE = "-"

Group = Sequence[Outcome]
"""The runs of one method, one for each seed."""
Column = Callable[[Group], str]


def by_method(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Return the runs of each method, one for each seed, in the order of the first ones."""
    found: dict[str, list[Outcome]] = {}
    for one in outcomes:
        found.setdefault(one.method, []).append(one)
    return found


def lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines printed at the end: scores and bytes, costs up to the target, categories."""
    groups = by_method(outcomes)
    shown = [*_table(_SCORES, groups), "", *_table(_costs(outcomes), groups), ""]
    if any(one.target for one in outcomes) and not any(one.reached for one in outcomes):
        shown.append("no method reached the target")
    elif any(one.target for one in outcomes):
        shown.append("rounds, MB, against, seconds: to the target; against: over the least MB")
    if any(one.sites for one in outcomes):
        shown.append("up, down: coded bytes of a client in a round, mean over clients")
    if len({one.seed for one in outcomes}) > 1:
        shown.append("±: standard deviation over seeds")
    if any(one.parts for one in outcomes):
        shown.append("local: mean and standard deviation over sites")
    if any(one.sites for one in outcomes):
        shown.append("bytes of a client in a round, by category: payload / coded")
    for method, group in groups.items():
        shown += _category_lines(method, group[0])
        shown += [f"  {method}: {one.problem}"[:WIDTH] for one in group if one.problem]
    return shown


def _table(columns: Mapping[str, Column], groups: Mapping[str, Group]) -> list[str]:
    """Draw the columns in which some method has a value."""
    found = {head: list(map(text, groups.values())) for head, text in columns.items()}
    kept = {head: cells for head, cells in found.items() if set(cells) != {NONE}}
    return drawn(list(kept), list(zip(*kept.values(), strict=True)))


def _method(group: Group) -> str:
    return group[0].method


def _rank(group: Group) -> str:
    ranks = group[0].ranks
    least, most = min(ranks, default=0), max(ranks, default=0)
    return NONE if not ranks else str(most) if least == most else f"{least}-{most}"


def _mean(figure: Callable[[Outcome], float | None], shown: str | Callable[[float], str]) -> Column:
    """Return a column: the mean of a figure over the runs that have it."""
    text = shown.format if isinstance(shown, str) else shown

    def column(group: Group) -> str:
        known = [value for one in group if (value := figure(one)) is not None]
        return text(fmean(known)) if known else NONE

    return column


def _spread(which: int, factor: float, digits: int, unit: str = "") -> Column:
    """Return a column: mean and deviation of the scores' accuracy (0) or loss (1)."""

    def column(group: Group) -> str:
        scores = [score[which] for one in group for score in one.scores]
        known = [factor * score for score in scores if score is not None]
        spread = f"±{stdev(known):.{digits}f}" if len(known) > 1 else ""
        return f"{fmean(known):.{digits}f}{spread}{unit}" if known else NONE

    return column


def _sent(direction: str) -> Column:
    def size(one: Outcome) -> float | None:
        found = [size for name, size in one.traffic["coded"].items() if name.endswith(direction)]
        return sum(found) if found else None

    return _mean(size, megabytes)


_SCORES: Mapping[str, Column] = {
    "method": _method,
    "rank": _rank,
    "accuracy": _spread(0, 100.0, 1, "%"),
    "best": _mean(lambda one: one.best, "{:.1%}"),
    "loss": _spread(1, 1.0, 3),
    "up": _sent(" up"),
    "down": _sent(" down"),
    "PS MB": _mean(lambda one: one.memory and one.memory / 1e6, "{:,.0f}"),
}


def _costs(outcomes: Sequence[Outcome]) -> dict[str, Column]:
    """Return the columns of costs: up to the target, and of the whole run."""
    least = min((one.reached.bytes for one in outcomes if one.reached), default=0) or 1

    def reached(figure: Callable[[Point], float], shown: str) -> Column:
        return _mean(lambda one: figure(one.reached) if one.reached else None, shown)

    def seeds(group: Group) -> str:
        return f"{sum(one.reached is not None for one in group)} of {len(group)}"

    return {
        "method": _method,
        "rounds": reached(lambda point: point.round, "{:.3g}"),
        "MB": reached(lambda point: point.bytes / 1e6, "{:,.2f}"),
        "against": reached(lambda point: point.bytes / least, "{:.2f}x"),
        "seconds": reached(lambda point: point.seconds, "{:,.1f}"),
        "seeds": lambda group: seeds(group) if len(group) > 1 and group[0].target else NONE,
        "total s": _mean(lambda one: one.last.seconds if one.last else None, "{:,.1f}"),
        "idle": _mean(lambda one: one.points[-1].idle_share if one.sites else None, "{:.0%}"),
    }


def _category_lines(method: str, outcome: Outcome) -> list[str]:
    payload, coded, sockets = (outcome.traffic[kind] for kind in ("payload", "coded", "sockets"))
    parts = [
        f"{name} {megabytes(payload.get(name, 0))} / {megabytes(coded.get(name, 0))}"
        for name in sorted({*payload, *coded})
    ]
    parts += [f"sockets {name} {megabytes(size)}" for name, size in sockets.items()]
    return wrapped(f"  {method}: ", parts) if parts else []


def drawn(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, its first column to the left, the others to the right."""
    every = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in every
    ]


def rows_of(columns: Mapping[str, Callable[[Any], str]], items: Iterable[Any]) -> list[str]:
    """Return the lines of a table with a row for each item."""
    return drawn(list(columns), [[text(one) for text in columns.values()] for one in items])


def wrapped(begin: str, parts: Sequence[str]) -> list[str]:
    """Return parts with commas between them, on as many lines as they need."""
    found, line = [], begin
    for number, part in enumerate(parts):
        piece = part + ("," if number + 1 < len(parts) else "")
        if len(line) + len(piece) > WIDTH and line.strip():
            found.append(line.rstrip())
            line = "      "
        line += piece + " "
    return [*found, line.rstrip()]


def check_plot(path: Path) -> None:
    """Raise UsageError, before anything is trained, when the picture could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--png needs matplotlib, which is not installed: {to_install('plot')}")
    if path.suffix.lower() != ".png":
        raise UsageError(
            f"--png {path}: the picture is a PNG; call it {path.name or 'compare'}.png"
        )


_AXES: tuple[tuple[str, Callable[[Point], float], bool], ...] = (
    ("MB on the wire, both directions, all clients", lambda p: p.bytes / 1e6, True),
    ("rounds", lambda p: p.round, False),
    ("seconds of training and transfers", lambda p: p.seconds, False),
)


LABELS = 5
"""Of an axis at most, so that they do not overlap."""
_WIDE = 10.0
"""From this ratio of the largest to the least on, an axis is logarithmic."""


def draw(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Write the picture."""
    figure_of(outcomes, title).savefig(path, dpi=130)


def panels_of(labels: Sequence[str], what: str) -> tuple[Figure, Sequence[Any]]:
    """Make a figure, with a panel for each label of a horizontal axis. what: the vertical one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Sequence[Any] = figure.subplots(1, len(labels), sharey=True)
    for panel, label in zip(panels, labels, strict=True):
        panel.set_xlabel(label)
        panel.grid(visible=True, alpha=0.25)
    panels[0].set_ylabel(what)
    return figure, panels


def figure_of(outcomes: Sequence[Outcome], title: str) -> Figure:
    """Make the picture: three panels with a line for each run; dashed what needs no network."""
    what = "loss" if outcomes[0].by_loss else "accuracy"
    figure, panels = panels_of([axis[0] for axis in _AXES], f"{what} on the held-out set")
    for panel, (label, place, is_wide) in zip(panels, _AXES, strict=True):
        for number, (method, group) in enumerate(by_method(outcomes).items()):
            _plot(panel, place, method, group, f"C{number % 10}")
        if outcomes[0].target:
            panel.axhline(outcomes[0].target, color="0.6", linewidth=0.8, linestyle=":")
        limits = panel.dataLim
        if is_wide and limits.minposx < math.inf and limits.x1 >= _WIDE * limits.minposx:
            logarithmic(panel)
        else:
            panel.xaxis.get_major_locator().set_params(nbins=LABELS, integer=label == "rounds")
    panels[-1].legend(fontsize=8)
    readable = title.encode(errors="replace").decode()  # a path may be no valid text
    figure.suptitle(readable, fontsize=10, parse_math=False)
    return figure


def _plot(
    panel: Axes, place: Callable[[Point], float], method: str, group: Sequence[Outcome], color: str
) -> None:
    """Draw the runs of a method, one for each seed."""
    if group[0].is_alone:
        ends = [one.height(last) for one in group if (last := one.last) is not None]
        known = [height for height in ends if height is not None]
        if known:
            panel.axhline(fmean(known), color=color, linestyle="--", linewidth=1.0, label=method)
        return
    for count, one in enumerate(group):
        found = [(place(p), height) for p in one.points if (height := one.height(p)) is not None]
        panel.plot(
            [at for at, _ in found],
            [height for _, height in found],
            marker=".",
            color=color,
            linewidth=1.4,
            label=None if count else method,
        )


def logarithmic(panel: Axes) -> None:
    """Make its x axis logarithmic, with few plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_xscale("log")
    decades = math.log10(panel.dataLim.x1 / panel.dataLim.minposx)
    subs = (1.0, 3.0) if decades < LABELS / 2 else (1.0,)
    panel.xaxis.set_major_locator(LogLocator(subs=subs, numticks=LABELS))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
