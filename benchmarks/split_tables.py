"""The tables of `split_methods.py`, as markdown, from the rows that exist."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def text_of(rows: Sequence[Row]) -> str:
    """All tables."""
    parts: list[str] = []
    for data, target in _tasks(rows, "formats"):
        found = _of(rows, "formats", data, target)
        parts += [f"### Formats at the cut: {data}, to {target:.0%}\n", *_formats(found), ""]
    for data, target in _tasks(rows, "methods"):
        found = _of(rows, "methods", data, target)
        title = f"### FSL-SAGE against SplitFed V1: {data}, to {target:.0%}\n"
        parts += [title, *_methods(found), ""]
    idle = [r for r in rows if r["kind"] == "idle" and r["net"] == "transatlantic"]
    if idle:
        parts += ["### Idle clients behind a long line\n", *_idle(idle), ""]
    return "\n".join(parts).rstrip()


def _tasks(rows: Sequence[Row], kind: str) -> list[tuple[str, float]]:
    found = {(r["choices"]["data"], r["target"]): None for r in rows if r["kind"] == kind}
    return list(found)


def _of(rows: Sequence[Row], kind: str, data: str, target: float) -> list[Row]:
    return [
        r for r in rows if (r["kind"], r["choices"]["data"], r["target"]) == (kind, data, target)
    ]


def _formats(rows: Sequence[Row]) -> list[str]:
    names = {(r["choices"]["up"], r["choices"]["step_log2"]): None for r in rows}
    up = "activations up"
    base = [r for r in rows if r["choices"]["up"] == "fp32" and r["reached"]]
    raw = _mean(r["reached"]["payload"][up] for r in base)
    coded = _mean(r["reached"]["coded"][up] for r in base)
    lines = [
        (
            "| activations as | seeds | rounds to it | MB up to it | bits a value | of fp32 | "
            "of fp32, coded | accuracy there |"
        ),
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, step_log2 in names:
        mine = [
            r
            for r in rows
            if (r["choices"]["up"], r["choices"]["step_log2"]) == (name, step_log2) and r["reached"]
        ]
        if not mine:
            continue
        label = f"uniform, step 2^-{step_log2 / 4:g} rms" if name == "uniform" else name
        size = _mean(r["reached"]["coded"][up] for r in mine)
        bits = _mean(8 * r["reached"]["coded"][up] / _values(r) for r in mine)
        lines.append(
            f"| {label} | {len(mine)} | {_spread([r['reached']['round'] for r in mine], '.1f')} | "
            f"{size / 1e6:.2f} |"
            f" {bits:.2f} | {size / raw:.3f} | {size / coded:.3f} |"
            f" {_spread([100 * r['reached']['accuracy'] for r in mine], '.1f')} % |"
        )
    return lines


def _values(row: Row) -> float:
    """Values at the cut up to the target: every one had a gradient, which is bf16 in all rows."""
    return float(row["reached"]["payload"]["gradients down"]) / 2


def _methods(rows: Sequence[Row]) -> list[str]:
    rounds = rows[0]["rounds"]
    lines = [
        (
            f"| method | seeds | accuracy after {rounds} rounds | each seed | MB, all rounds |"
            " reached by | rounds to it | MB to it | of SplitFed V1 |"
        ),
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    base = 0.0
    for label, mine in _variants(rows):
        last = [100 * r["points"][-1]["accuracy"] for r in mine]
        there = [r["reached"] for r in mine if r["reached"]]
        size = _mean(r["bytes"] for r in there)
        base = base or size
        each = ", ".join(f"{one:.1f}" for one in last)
        lines.append(
            f"| {label} | {len(mine)} | **{_spread(last, '.1f')} %** | {each} | "
            f"{_mean(r['points'][-1]['bytes'] for r in mine) / 1e6:.1f} | {len(there)} | "
            f"{_spread([r['round'] for r in there], '.1f')} | {size / 1e6:.1f} |"
            f" {size / base:.3f} |"
        )
    return lines


def _variants(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {"SplitFed V1, true gradients": []}
    for row in sorted(rows, key=lambda one: one["choices"]["seed"]):
        label = "FSL-SAGE" if row["choices"]["align_every"] else "FSL-SAGE, never aligned"
        if row["method"] == "splitfed-v1":
            label = "SplitFed V1, true gradients"
        found.setdefault(label, []).append(row)
    return [(label, mine) for label, mine in found.items() if mine]


def _idle(rows: Sequence[Row]) -> list[str]:
    rows = sorted(rows, key=lambda r: (r["net"], r["method"], r["choices"]["samples"]))
    lines = [
        (
            "| method | batches a round | line | at the cut | models as | ms a batch computes | "
            "idle | s a round |"
        ),
        "| --- | ---: | --- | --- | --- | ---: | ---: | ---: |",
    ]
    for r in rows:
        chosen, points = r["choices"], r["points"]
        batches = chosen["samples"] // chosen["batch"]
        last = points[-1]
        work = (last["trained"] - last["waited"]) / (chosen["clients"] * batches * last["round"])
        lines.append(
            f"| {r['method']} | {batches} | {r['net']} | {chosen['up']} | {chosen['models']} | "
            f"{1e3 * work:.0f} | **{last['idle_share']:.1%}** |"
            f" {last['trained'] / chosen['clients'] / last['round']:.1f} |"
        )
    return lines


def _mean(values: Any) -> float:
    found = [float(value) for value in values]
    return statistics.fmean(found) if found else float("nan")


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    mean = format(statistics.fmean(values), form)
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):{form}}"
