"""The metric against bytes and rounds, as a PNG. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from fsl_async.tools.compare.outcome import Point
from fsl_async.tools.compare.plot import LABELS
from fsl_async.tools.compare.tuning.outcome import Result, by_method

_AXES: tuple[tuple[str, Callable[[Point], float]], ...] = (
    ("MB on the wire, both directions, all sites", lambda p: p.bytes / 1e6),
    ("rounds", lambda p: p.round),
)


def draw(results: Sequence[Result], path: Path, title: str) -> None:
    """Write the picture: two panels with a line for each run, and what needs no network dashed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_loss = all(point.accuracy is None for one in results for point in one.points)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(_AXES), sharey=True)
    groups = by_method(results)
    for panel, (label, place) in zip(panels, _AXES, strict=True):
        for number, (method, group) in enumerate(groups.items()):
            color = f"C{number % 10}"
            if not any(one.sites for one in group):
                ends = [(one.last, one) for one in group if one.last is not None]
                heights = [
                    h for last, _ in ends if (h := _height(last, by_loss=by_loss)) is not None
                ]
                if heights:
                    panel.axhline(
                        fmean(heights), color=color, linestyle="--", linewidth=1.0, label=method
                    )
                continue
            for count, one in enumerate(group):
                points = [p for p in one.points if _height(p, by_loss=by_loss) is not None]
                panel.plot(
                    [place(p) for p in points],
                    [_height(p, by_loss=by_loss) for p in points],
                    marker=".",
                    color=color,
                    linewidth=1.2,
                    label=None if count else method,
                )
        panel.set_xlabel(label)
        panel.grid(visible=True, alpha=0.25)
    panels[0].xaxis.get_major_locator().set_params(nbins=LABELS)
    panels[1].xaxis.get_major_locator().set_params(nbins=LABELS, integer=True)
    panels[0].set_ylabel("loss on held-out records" if by_loss else "accuracy on held-out records")
    panels[-1].legend(fontsize=8)
    readable = title.encode(errors="replace").decode()  # a path may be no valid text
    figure.suptitle(readable, fontsize=10, parse_math=False)
    figure.savefig(path, dpi=130)


def _height(point: Point, *, by_loss: bool) -> float | None:
    return point.loss if by_loss else point.accuracy
