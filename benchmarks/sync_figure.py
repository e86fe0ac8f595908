"""Draw a whole sync beside its peers, from rows of sync.py and sync_peers.py. Needs matplotlib.

    python benchmarks/sync_figure.py results/sync.jsonl results/sync_peers.jsonl --out sync.png

Two panels, a line for each format or peer and number of clients:
  * seconds of a sync by parameters, medians with the smallest and the largest of `sync_s_each`;
  * the largest model whose sync takes at most a tenth of a period of 10 minutes, by the rate of
    each client's line. Computed: the bits of one delta and one update over that line, plus the
    seconds of the largest measured size, scaled by parameters. A line for each format or peer, with
    the most clients that all of them were measured with.
Of several rows of the same size the last one counts; skipped and other rows do not.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import click

BUDGET_S = 60.0
LINES_MBIT_S = (10, 100, 1000, 10_000)
CAPTION = (
    "Left: on loopback of one machine; whiskers are the fastest and the slowest sync. gloo and"
    " Flower keep nothing on disk.\n"
    "Right: computed, not measured. One delta up and one update down over each client's own line,"
    " one after the other (gloo: both at once),\nplus the seconds of the left panel's largest"
    " model, scaled by parameters. The server's line is taken to be wide enough."
)
Row = Mapping[str, Any]
Series = dict[tuple[str, int], list[Row]]
"""Rows by format or peer and clients, the smallest model first."""


def series_of(rows: Iterable[Row]) -> Series:
    """The lines of the left panel: fsl-async first, then peers by name; few clients first."""
    found: dict[tuple[str, int], dict[int, Row]] = {}
    for row in rows:
        if row.get("bench") in {"sync", "sync_peer"} and "skipped" not in row:
            name = f"fsl-async {row['format']}" if row["bench"] == "sync" else row["peer"]
            found.setdefault((name, row["clients"]), {})[row["parameters"]] = row
    ordered = sorted(found, key=lambda key: (not key[0].startswith("fsl-async"), key))
    return {key: [found[key][size] for size in sorted(found[key])] for key in ordered}


def line_bits(row: Row) -> float:
    """Bits a value that pass a client's line in sequence; ranks of a ring do both at once."""
    if row["bench"] == "sync":
        return float(row["bits_up"] + row["bits_down"])
    bits = [8 * row[name] / row["parameters"] for name in ("bytes_up", "bytes_down")]
    return float(max(bits) if row["peer"] == "gloo" else sum(bits))


def largest_model(row: Row, mbit_s: float) -> float:
    """The most parameters whose sync takes at most BUDGET_S on such a line."""
    seconds = statistics.median(row["sync_s_each"])
    return float(BUDGET_S / (line_bits(row) / (mbit_s * 1e6) + seconds / row["parameters"]))


def comparable(series: Series) -> dict[str, Row]:
    """The largest row of each format or peer with most clients, but not more than all others."""
    limit = min(max(count for one, count in series if one == name) for name, _ in series)
    chosen: dict[str, Row] = {}
    for (name, count), rows in series.items():  # few clients first
        if count <= limit or name not in chosen:
            chosen[name] = rows[-1]
    return chosen


def count_text(parameters: float) -> str:
    """A number of parameters as people write it."""
    for unit, text in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if parameters >= unit:
            return f"{parameters / unit:g}{text}"
    return f"{parameters:g}"


def draw(series: Series, path: Path) -> None:
    """Write the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    measured, computed = figure.subplots(1, 2)
    # Okabe and Ito's colors, which color-blind readers tell apart.
    palette = ("#0072B2", "#D55E00", "#CC79A7", "#555555", "#009E73", "#56B4E9", "#000000")
    names = list(dict.fromkeys(name for name, _ in series))
    colors = {name: palette[n % len(palette)] for n, name in enumerate(names)}
    counts = sorted({count for _, count in series})
    for (name, count), rows in series.items():
        style = ("--", ":", "-", "-.")[counts.index(count) % 4]
        middle = [statistics.median(row["sync_s_each"]) for row in rows]
        each = list(zip(middle, (row["sync_s_each"] for row in rows), strict=True))
        measured.errorbar(
            [row["parameters"] for row in rows], middle,
            ([mid - min(all_s) for mid, all_s in each], [max(all_s) - mid for mid, all_s in each]),
            capsize=2.5, color=colors[name], marker="o", linestyle=style,
            label=f"{name}, {count} client{'s' if count > 1 else ''}",
        )  # fmt: skip
    for name, row in comparable(series).items():
        models = [largest_model(row, rate) for rate in LINES_MBIT_S]
        label = f"{name}, {row['clients']} clients"
        computed.plot(LINES_MBIT_S, models, color=colors[name], marker="o", label=label)
    sizes = sorted({row["parameters"] for rows in series.values() for row in rows})
    title = f"Largest model whose sync takes at most {BUDGET_S:g} s of every {10 * BUDGET_S:g} s"
    for panel, head, xlabel, ylabel in (
        (measured, "A whole sync, median and range", "parameters", "seconds"),
        (computed, title, "Mbit/s of each client's line", "parameters"),
    ):
        panel.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
        panel.set_title(head, loc="left", fontsize=10.5)
        panel.grid(axis="y", color="0.9", linewidth=0.8)
        panel.minorticks_off()
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=8.5, frameon=False)
    measured.set_xticks(sizes, [count_text(size) for size in sizes])
    measured.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    computed.set_xticks(LINES_MBIT_S, [f"{rate:,}" for rate in LINES_MBIT_S])
    computed.yaxis.set_major_formatter(lambda value, _: count_text(value))
    figure.supxlabel(CAPTION, fontsize=8, color="0.35", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


@click.command()
@click.argument("files", nargs=-1, type=click.File(), required=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("sync.png"))
def main(files: tuple[IO[str], ...], out: Path) -> None:
    """Read rows from FILES and draw them into a PNG."""
    series = series_of(json.loads(line) for file in files for line in file if line.strip())
    if not series:
        raise click.UsageError("no rows of sync.py or sync_peers.py")
    draw(series, out)


if __name__ == "__main__":
    main()
