"""Accuracy or loss against bytes, rounds and seconds, as a PNG. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fsl_async.errors import UsageError
from fsl_async.process.program import to_install
from fsl_async.tools.compare.outcome import Outcome, Point
from fsl_async.tools.compare.table import by_method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


def figure_of(outcomes: Sequence[Outcome], title: str) -> Figure:
    """Make the picture: three panels with a line for each run; dashed what needs no network."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(_AXES), sharey=True)
    for panel, (label, place, is_wide) in zip(panels, _AXES, strict=True):
        for number, (method, group) in enumerate(by_method(outcomes).items()):
            _plot(panel, place, method, group, f"C{number % 10}")
        if outcomes[0].target:
            panel.axhline(outcomes[0].target, color="0.6", linewidth=0.8, linestyle=":")
        panel.set_xlabel(label)
        panel.grid(visible=True, alpha=0.25)
        limits = panel.dataLim
        if is_wide and limits.minposx < math.inf and limits.x1 >= _WIDE * limits.minposx:
            logarithmic(panel)
        else:
            panel.xaxis.get_major_locator().set_params(nbins=LABELS, integer=label == "rounds")
    what = "loss" if outcomes[0].by_loss else "accuracy"
    panels[0].set_ylabel(f"{what} on the held-out set")
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
