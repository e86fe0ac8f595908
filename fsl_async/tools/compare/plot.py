"""Accuracy against bytes, rounds and seconds, as a PNG. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsl_async.errors import UsageError
from fsl_async.process.program import to_install
from fsl_async.tools.compare.outcome import Outcome, Point

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
    """Write the picture: three panels side by side with one line for each method, and the
    target.
    """
    figure_of(outcomes, title).savefig(path, dpi=130)


def figure_of(outcomes: Sequence[Outcome], title: str) -> Figure:
    """Make the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(_AXES), sharey=True)
    for panel, (label, place, is_wide) in zip(panels, _AXES, strict=True):
        for outcome in outcomes:
            points = [p for p in outcome.points if p.accuracy is not None]
            heights = [p.accuracy for p in points]
            panel.plot(
                [place(p) for p in points], heights, marker=".", label=outcome.method, linewidth=1.4
            )
        panel.axhline(outcomes[0].target, color="0.6", linewidth=0.8, linestyle="--")
        panel.set_xlabel(label)
        panel.grid(visible=True, alpha=0.25)
        limits = panel.dataLim
        if is_wide and limits.minposx < math.inf and limits.x1 >= _WIDE * limits.minposx:
            logarithmic(panel)
        else:
            panel.xaxis.get_major_locator().set_params(nbins=LABELS, integer=label == "rounds")
    panels[0].set_ylabel("accuracy on the held-out set")
    panels[-1].legend(loc="lower right", fontsize=8)
    readable = title.encode(errors="replace").decode()  # a path may be no valid text
    figure.suptitle(readable, fontsize=10, parse_math=False)
    return figure


def logarithmic(panel: Axes) -> None:
    """Make its x axis logarithmic, with few plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_xscale("log")
    decades = math.log10(panel.dataLim.x1 / panel.dataLim.minposx)
    subs = (1.0, 3.0) if decades < LABELS / 2 else (1.0,)
    panel.xaxis.set_major_locator(LogLocator(subs=subs, numticks=LABELS))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
