"""Draw a whole sync beside its peers, from rows of sync.py and sync_peers.py. Needs matplotlib.

    python benchmarks/sync_figure.py results/sync.jsonl results/sync_peers.jsonl --out sync.png
    python benchmarks/sync_peers.py | python benchmarks/sync_figure.py --out peers.png

Two panels, a line for each format or peer and number of clients:
  * seconds of a sync by parameters, medians with the smallest and the largest of `sync_s_each`;
  * the largest model whose sync takes at most a tenth of a period of 10 minutes, by the rate of
    each client's line. Computed: the bits of one delta and one update over that line, plus the
    seconds of the largest measured size, scaled by parameters. A line for each format or peer, with
    the most clients that all of them were measured with.
Of several rows of the same size the last one counts; skipped and other rows do not.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import click
from attrs import define

PERIOD_S = 600.0
SHARE = 0.1
LINES_MBIT_S = (10, 100, 1000, 10_000)

# Okabe and Ito's colors, which color-blind readers tell apart.
COLORS = {
    "Flower": "#D55E00",
    "gloo": "#CC79A7",
    "bare copy": "#555555",
}
OUR_COLORS = ("#0072B2", "#009E73", "#56B4E9", "#000000")
PEER_NAMES = {"flower": "Flower", "copy": "bare copy"}
STYLES = ("--", "-", ":", "-.")
LABEL_GAP = 0.055
"""Least distance of two labels, in heights of the panel."""

CAPTION = (
    "Left: on loopback of one machine; whiskers are the fastest and the slowest sync. gloo and"
    " Flower keep nothing on disk.\n"
    "Right: computed, not measured. One delta up and one update down over each client's own line,"
    " one after the other (gloo: both at once),\nplus the seconds of the left panel's largest"
    " model, scaled by parameters. The server's line is taken to be wide enough."
)


@define(frozen=True)
class Point:
    """One measured size. `line_bits`: bits a value that pass the client's line in sequence."""

    parameters: int
    median_s: float
    low_s: float
    high_s: float
    line_bits: float


@define(frozen=True)
class Series:
    """All sizes of one format or peer with one number of clients, the smallest model first."""

    who: str
    clients: int
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        """What stands beside the line."""
        return f"{self.who}, {self.clients} client{'s' if self.clients > 1 else ''}"

    def largest_model(self, mbit_s: float) -> float:
        """The most parameters whose sync takes at most SHARE of PERIOD_S on such a line."""
        last = self.points[-1]
        s_per_value = last.line_bits / (mbit_s * 1e6) + last.median_s / last.parameters
        return SHARE * PERIOD_S / s_per_value


def point_of(row: Mapping[str, Any]) -> tuple[str, Point]:
    """Who a row is about, and its point."""
    each = row["sync_s_each"]
    if row["bench"] == "sync":
        who, bits = f"fsl-async {row['format']}", (row["bits_up"], row["bits_down"])
    else:
        who = PEER_NAMES.get(row["peer"], row["peer"])
        bits = tuple(8 * row[name] / row["parameters"] for name in ("bytes_up", "bytes_down"))
    # Ranks of a ring send and receive at the same time.
    line_bits = max(bits) if who == "gloo" else sum(bits)
    point = Point(row["parameters"], statistics.median(each), min(each), max(each), line_bits)
    return who, point


def series_of(rows: Iterable[Mapping[str, Any]]) -> list[Series]:
    """The lines of the left panel: fsl-async first, then peers by name; few clients first."""
    found: dict[tuple[str, int], dict[int, Point]] = {}
    for row in rows:
        if row.get("bench") in {"sync", "sync_peer"} and "skipped" not in row:
            who, point = point_of(row)
            found.setdefault((who, row["clients"]), {})[point.parameters] = point
    ordered = sorted(found, key=lambda key: (key[0] in COLORS, key))
    return [
        Series(who, clients, tuple(found[who, clients][size] for size in sorted(sizes)))
        for (who, clients), sizes in ((key, found[key]) for key in ordered)
    ]


def comparable(series: Sequence[Series]) -> list[Series]:
    """The lines of the right panel: of each format or peer the one with most clients, but not more
    than every other one has.
    """
    most: dict[str, int] = {}
    for one in series:
        most[one.who] = max(one.clients, most.get(one.who, 0))
    limit = min(most.values())
    chosen: dict[str, Series] = {}
    for one in series:  # few clients first
        if one.clients <= limit or one.who not in chosen:
            chosen[one.who] = one
    return list(chosen.values())


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights in [0, 1] apart until neighbors are `gap` away, in the same order."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    up, down = list(heights), list(heights)
    for below, above in itertools.pairwise(order):
        up[above] = max(up[above], up[below] + gap)
    for above, below in itertools.pairwise(reversed(order)):
        down[below] = min(down[below], down[above] - gap)
    # Neighbors are far enough apart in both, and so they are in the mean.
    moved = [(high + low) / 2 for high, low in zip(up, down, strict=True)]
    for steps, index in enumerate(order):
        moved[index] = max(moved[index], steps * gap)
    for steps, index in enumerate(reversed(order)):
        moved[index] = min(moved[index], 1 - steps * gap)
    return moved


def count_text(parameters: float) -> str:
    """A number of parameters as people write it."""
    for unit, text in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if parameters >= unit:
            return f"{parameters / unit:g}{text}"
    return f"{parameters:g}"


def draw(series: Sequence[Series], path: Path) -> None:
    """Write the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    measured, computed = figure.subplots(1, 2)
    ours = sorted({one.who for one in series} - set(COLORS))
    colors = COLORS | {who: OUR_COLORS[n % len(OUR_COLORS)] for n, who in enumerate(ours)}
    counts = sorted({one.clients for one in series})

    def look(one: Series) -> dict[str, Any]:
        rank = counts.index(one.clients) % len(STYLES)
        face = colors[one.who] if rank == 1 or len(counts) == 1 else "white"
        return {
            "color": colors[one.who],
            "linestyle": STYLES[rank] if len(counts) > 1 else "-",
            "linewidth": 1.5,
            "marker": "o",
            "markersize": 5,
            "markerfacecolor": face,
        }

    ends = []
    for one in series:
        sizes = [point.parameters for point in one.points]
        medians = [point.median_s for point in one.points]
        whiskers = (
            [point.median_s - point.low_s for point in one.points],
            [point.high_s - point.median_s for point in one.points],
        )
        measured.errorbar(sizes, medians, whiskers, elinewidth=1, capsize=2.5, **look(one))
        ends.append((sizes[-1], medians[-1]))
    finish(measured, "A whole sync, median and range", "parameters", "seconds")
    sizes = sorted({point.parameters for one in series for point in one.points})
    measured.set_xticks(sizes, [count_text(size) for size in sizes])
    measured.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
    measured.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    label(measured, series, ends, colors)

    chosen, ends = comparable(series), []
    for one in chosen:
        models = [one.largest_model(rate) for rate in LINES_MBIT_S]
        computed.plot(LINES_MBIT_S, models, **look(one))
        ends.append((LINES_MBIT_S[-1], models[-1]))
    title = f"Largest model whose sync takes at most {SHARE * PERIOD_S:g} s of every {PERIOD_S:g} s"
    finish(computed, title, "Mbit/s of each client's line", "parameters")
    computed.set_xticks(LINES_MBIT_S, [f"{rate:,}" for rate in LINES_MBIT_S])
    computed.yaxis.set_major_formatter(lambda value, _: count_text(value))
    label(computed, chosen, ends, colors)
    figure.supxlabel(CAPTION, fontsize=8, color="0.35", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def finish(panel: Any, title: str, xlabel: str, ylabel: str) -> None:
    """What both panels have in common."""
    panel.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    panel.set_title(title, loc="left", fontsize=10.5)
    panel.grid(axis="y", color="0.9", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.minorticks_off()
    panel.spines[["top", "right"]].set_visible(False)


def label(
    panel: Any,
    series: Sequence[Series],
    ends: Sequence[tuple[float, float]],
    colors: Mapping[str, str],
) -> None:
    """Write each line's label beside its end, moved up or down where two would overlap."""
    to_panel = panel.transData + panel.transAxes.inverted()
    heights = spread([float(to_panel.transform(end)[1]) for end in ends], LABEL_GAP)
    for one, end, height in zip(series, ends, heights, strict=True):
        panel.annotate(
            one.label,
            xy=end,
            xytext=(1.03, height),
            textcoords="axes fraction",
            color=colors[one.who],
            fontsize=8.5,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "linestyle": ":",
                "linewidth": 0.8,
                "color": colors[one.who],
                "relpos": (0, 0.5),
                "shrinkA": 0,
                "shrinkB": 4,
            },
        )


@click.command()
@click.argument("files", nargs=-1, type=click.File())
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("sync.png"))
def main(files: tuple[IO[str], ...], out: Path) -> None:
    """Read rows from FILES, or from standard input, and draw them into a PNG."""
    streams = files or (sys.stdin,)
    series = series_of(json.loads(line) for file in streams for line in file if line.strip())
    if not series:
        raise click.UsageError("no rows of sync.py or sync_peers.py")
    draw(series, out)


if __name__ == "__main__":
    main()
