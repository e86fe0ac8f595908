"""The tables and plots of `quality.py`, and its summary, from the rows that exist."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quality_grid import (
    EXPERIMENTS,
    FINE,
    REPORTED_ON,
    Experiment,
    Line,
    Make,
    clients,
    parallel,
    stepped,
)
from quality_spec import Spec, code_digest

Rows = Mapping[str, Mapping[str, Any]]
IN_DOCS = ("goals", "formats", "steps")
"""Experiments whose tables are in docs/BENCHMARKS.md; `quality.py --table` has all."""


def loss_of(rows: Rows, spec: Spec) -> float | None:
    """The loss of a row, None where it is missing."""
    row = rows.get(spec.key)
    return None if row is None else float(row["eval_loss"])


def percents(rows: Rows, make: Make, base: Make, seeds: Sequence[int]) -> list[float]:
    """The loss against that of the base with the same seed, in percent."""
    pairs = [(loss_of(rows, make(seed)), loss_of(rows, base(seed))) for seed in seeds]
    return [
        100 * (one / other - 1) for one, other in pairs if one is not None and other is not None
    ]


def spread(values: Sequence[float], form: str) -> str:
    """Mean, and the sample standard deviation where there are two or more."""
    if not values:
        return "-"
    mean = format(statistics.fmean(values), form)
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values):{form.removeprefix('+')}}"


def table(rows: Rows, experiment: Experiment) -> str:
    """One table, as markdown, of the lines that have rows."""
    compared = [f"against {experiment.against}, %"] if experiment.against else []
    names = [*experiment.columns, "loss", *compared, *_sizes(experiment), "seeds"]
    rule = ["---"] * len(experiment.columns)
    rule += ["---:"] * (len(names) - len(rule))
    lines = [f"### {experiment.title}\n", _cells(names), _cells(rule)]
    lines += [
        _line(rows, experiment, line)
        for line in experiment.lines
        if any(line.make(seed).key in rows for seed in experiment.seeds)
    ]
    return "\n".join(lines)


def _line(rows: Rows, experiment: Experiment, line: Line) -> str:
    found = [rows.get(line.make(seed).key) for seed in experiment.seeds]
    have = [row for row in found if row is not None]
    cells = [*line.label, spread([float(row["eval_loss"]) for row in have], ".3f")]
    if experiment.against:
        base = line.base
        against = [] if base is None else percents(rows, line.make, base, experiment.seeds)
        cells.append(spread(against, "+.1f") if base is not None else "")
    for name in _sizes(experiment):
        bits = [float(row[name.replace(" ", "_")]) for row in have if name.replace(" ", "_") in row]
        cells.append(f"{statistics.fmean(bits):.2f}" if bits else "")
    return _cells([*cells, str(len(have))])


def _sizes(experiment: Experiment) -> tuple[str, ...]:
    """Columns of sizes: where formats or their steps are compared."""
    return ("bits up", "bits down") if experiment.against in {"fp32", FINE} else ()


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def tables(rows: Rows, names: Iterable[str] = tuple(EXPERIMENTS)) -> str:
    """The tables of these experiments of which there are rows with clients."""
    chosen = [EXPERIMENTS[name] for name in names]
    return "\n\n".join(table(rows, one) for one in chosen if _has_rows(rows, one))


def _has_rows(rows: Rows, experiment: Experiment) -> bool:
    specs = (line.make(seed) for line in experiment.lines for seed in experiment.seeds)
    return any(spec.mode == "clients" and spec.key in rows for spec in specs)


def summary(rows: Rows) -> dict[str, Any]:
    """The goals: defaults against data parallel with the same inner optimizer, mean of the seeds.

    rows_of_other_code: how many of these rows were made by another version of the code.
    """
    found: dict[str, Any] = {}
    used: list[Mapping[str, Any]] = []
    for count in (2, 4, 8):
        make, base = stepped(1.0, count), parallel(count)
        values = percents(rows, make, base, REPORTED_ON)
        found[f"k{count}_percent"] = round(statistics.fmean(values), 2) if values else None
        found[f"k{count}_seeds"] = len(values)
        keys = [one(seed).key for one in (make, base) for seed in REPORTED_ON]
        used += [rows[key] for key in keys if key in rows]
    others = sum(row.get("code") != code_digest(row["spec"]["mode"]) for row in used)
    return {**found, "rows": len(used), "rows_of_other_code": others}


def plot(rows: Rows, folder: Path) -> list[Path]:
    """Draw loss against tokens, against bytes sent, and against the steps of a round, as SVG."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    seed = REPORTED_ON[0]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    by_tokens, by_bytes, by_steps = figure.subplots(1, 3)
    curves = {
        "data parallel x 4": parallel(4)(seed),
        "2 clients": clients(2)(seed),
        "4 clients": clients(4)(seed),
        "8 clients": clients(8)(seed),
    }
    for name, spec in curves.items():
        row = rows.get(spec.key)
        if row is None:
            continue
        steps, losses = zip(*row["curve"], strict=True)
        tokens = [step * spec.batch * 64 for step in steps]
        by_tokens.plot(tokens, losses, label=name)
        if "bits_up" in row:
            a_round = row["parameters"] / 8 * (row["bits_up"] + row["bits_down"])
            sent = [step / spec.total_steps * row["rounds"] * a_round / 1e6 for step in steps]
            by_bytes.plot(sent, losses, label=name)
    rules: dict[str, list[tuple[int, float]]] = {}
    for line in EXPERIMENTS["rounds"].lines:
        inner, _, every, rule = line.label
        loss = loss_of(rows, line.make(0))
        if loss is not None:
            rules.setdefault(f"{inner}, {rule}", []).append((int(every), loss))
    for name, points in rules.items():
        by_steps.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    for axes, label in (
        (by_tokens, "tokens"),
        (by_bytes, "MB a client, up and down"),
        (by_steps, "steps of a client in a round"),
    ):
        axes.set_xlabel(label)
        axes.set_ylabel("held-out loss, nats a byte")
        axes.legend(fontsize="x-small")
    by_steps.set_xscale("log")
    path = folder / "quality.svg"
    figure.savefig(path, metadata={"Date": None})
    return [path]
