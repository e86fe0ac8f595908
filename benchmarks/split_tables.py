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
        parts += [
            f"### FSL-SAGE against SplitFed V1: {data}, to {target:.0%}\n",
            *_methods(found),
            "",
        ]
    idle = [row for row in rows if row["kind"] == "idle"]
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
    lines = [
        "| method | learning rate | rounds to it, seed 0 | MB to it, seed 0 | best accuracy |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    tuned: dict[str, Any] = {}
    for method in ("splitfed-v1", "fsl-sage"):
        for rate in sorted({r["choices"]["learning_rate"] for r in rows}):
            mine = [r for r in _with(rows, method, rate) if r["choices"]["seed"] == 0]
            for r in mine:
                reached = r["reached"]
                cells = (
                    (f"{reached['round']}", f"{reached['bytes'] / 1e6:.2f}")
                    if reached
                    else ("-", "-")
                )
                lines.append(
                    f"| {method} | {rate:g} | {cells[0]} | {cells[1]} | {r['best_accuracy']:.1%} |"
                )
                if reached and reached["bytes"] < tuned.get(method, (float("inf"),))[0]:
                    tuned[method] = (reached["bytes"], rate)
    lines += [
        "",
        (
            "| method | rate | seeds | rounds to it | MB to it | of SplitFed V1 | activations up | "
            "gradients down | labels up | auxiliary down | client model, both |"
        ),
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    base = 0.0
    for method in ("splitfed-v1", "fsl-sage"):
        if method not in tuned:
            continue
        rate = tuned[method][1]
        mine = [r for r in _with(rows, method, rate) if r["reached"]]
        size = _mean(r["reached"]["bytes"] for r in mine)
        base = base or size
        kinds = [
            _mean(sum(r["reached"]["coded"].get(k, 0) for k in names) for r in mine)
            for names in (
                ("activations up",),
                ("gradients down",),
                ("labels up",),
                ("auxiliary down",),
                ("client model up", "client model down"),
            )
        ]
        lines.append(
            f"| {method} | {rate:g} | {len(mine)} | "
            f"{_spread([r['reached']['round'] for r in mine], '.1f')} | {size / 1e6:.2f} |"
            f" **{size / base:.3f}** | " + " | ".join(f"{k / 1e6:.3f}" for k in kinds) + " |"
        )
    return lines


def _with(rows: Sequence[Row], method: str, rate: float) -> list[Row]:
    return [r for r in rows if r["method"] == method and r["choices"]["learning_rate"] == rate]


def _idle(rows: Sequence[Row]) -> list[str]:
    rows = sorted(rows, key=lambda r: (r["net"], r["method"], r["choices"]["samples"]))
    lines = [
        (
            "| method | batches a round | line | at the cut | models as | ms a batch computes | "
            "idle, all | idle without the first round | s a round |"
        ),
        "| --- | ---: | --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        chosen, points = r["choices"], r["points"]
        batches = chosen["samples"] // chosen["batch"]
        last, first = points[-1], points[0]
        work = (last["trained"] - last["waited"]) / (chosen["clients"] * batches * last["round"])
        later = last["trained"] - first["trained"]
        rest = (last["waited"] - first["waited"]) / later if later else float("nan")
        lines.append(
            f"| {r['method']} | {batches} | {r['net']} | {chosen['up']} | {chosen['models']} | "
            f"{1e3 * work:.0f} | **{last['idle_share']:.1%}** | {rest:.1%} |"
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
