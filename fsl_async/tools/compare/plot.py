"""Accuracy against bytes, rounds and seconds, as a PNG. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from fsl_async.errors import UsageError
from fsl_async.tools.compare.outcome import Outcome, Point


def check_plot(path: Path) -> None:
    """Raise UsageError, before anything is trained, when the picture could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--png needs matplotlib, which is not installed: pip install 'fsl-async[plot]'"
        )
    if path.suffix.lower() != ".png":
        raise UsageError(
            f"--png {path}: the picture is a PNG; call it {path.name or 'compare'}.png"
        )


_AXES: tuple[tuple[str, Callable[[Point], float], bool], ...] = (
    ("MB on the wire, both directions, all clients", lambda p: p.bytes / 1e6, True),
    ("rounds", lambda p: p.round, False),
    ("seconds of training and transfers", lambda p: p.seconds, False),
)


def draw(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Write the picture: three panels side by side with one line for each method, and the
    target.
    """
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
        if label == "rounds":
            panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(visible=True, alpha=0.25)
        if is_wide and panel.dataLim.minposx < math.inf:  # a method with a point to draw
            panel.set_xscale("log")  # methods differ by more than ten times
    panels[0].set_ylabel("accuracy on the held-out set")
    panels[-1].legend(loc="lower right", fontsize=8)
    readable = title.encode(errors="replace").decode()  # a path may be no valid text
    figure.suptitle(readable, fontsize=10, parse_math=False)
    figure.savefig(path, dpi=130)
