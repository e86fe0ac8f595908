"""The tables of `quality.py`, as markdown, from the rows that exist."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from quality_grid import (
    BUDGET_STEPS,
    COARSE,
    COUNTS,
    FORMATS,
    INNER_RATES,
    OUTER,
    PERIODS,
    UNEQUAL,
    WEIGHTINGS,
    Spec,
    alone,
    coarse,
    equal,
    outer,
    unequal,
)


class Tables:
    """The tables, from the rows that exist."""

    def __init__(self, rows: Mapping[str, Mapping[str, Any]], seeds: tuple[int, ...]) -> None:
        self.rows = rows
        self.seeds = seeds

    def found(self, specs: list[Spec]) -> list[Mapping[str, Any]]:
        """The rows that exist."""
        return [self.rows[spec.key] for spec in specs if spec.key in self.rows]

    def line(self, label: list[str], specs: list[Spec]) -> str:
        """One line: label, mean and spread of the loss, against alone with the same seeds, bits."""
        rows = self.found(specs)
        if not rows:
            return "| " + " | ".join([*label, *["-"] * 5]) + " |"
        losses = [float(row["eval_loss"]) for row in rows]
        base = [self.rows.get(alone(int(row["spec"]["seed"])).key) for row in rows]
        change = [
            100 * (loss / float(one["eval_loss"]) - 1)
            for loss, one in zip(losses, base, strict=True)
            if one is not None
        ]
        bits = [
            f"{statistics.fmean(float(row[name]) for row in rows):.2f}" if name in rows[0] else ""
            for name in ("bits_up", "bits_down")
        ]
        cells = [*label, spread(losses, ".3f"), spread(change, "+.1f"), *bits, str(len(rows))]
        return "| " + " | ".join(cells) + " |"

    def head(self, labels: list[str]) -> str:
        """The two lines above a table."""
        names = [*labels, "loss", "against alone, %", "bits up", "bits down", "seeds"]
        rule = ["---"] * len(labels) + ["---:"] * 5
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (names, rule))

    def each_seed(self, make: Any) -> list[Spec]:
        """`make(seed)` for every seed."""
        return [make(seed) for seed in self.seeds]

    def text(self) -> str:
        """All tables, as markdown."""
        parts = ["### Clients, formats and periods\n", self.head(["clients", "format", "steps"])]
        parts.append(self.line(["alone", "", ""], self.each_seed(alone)))
        for count in COUNTS:
            label = [f"alone, batch x {count}", "", ""]
            parts.append(self.line(label, [alone(s, times_batch=count) for s in self.seeds]))
        parts += [
            self.line([str(c), f, str(h)], [equal(c, h, f, s) for s in self.seeds])
            for c in COUNTS
            for f in FORMATS
            for h in PERIODS
        ]
        parts += ["\n### Alone, stopped early (what one client would reach with its own share)\n"]
        parts += ["| steps | loss | seeds |", "| ---: | ---: | ---: |"]
        rows = self.found(self.each_seed(alone))
        for share in (4, 2, 1):
            step = str(BUDGET_STEPS // share)
            early = [float(row["eval_loss_at_step"][step]) for row in rows]
            parts.append(f"| {step} | {spread(early, '.3f')} | {len(early)} |")
        parts += ["\n### Outer optimizer (50 steps, fp32)\n", self.head(["clients", "outer"])]
        for count, rule, changed in OUTER:
            specs = [outer(count, changed, seed) for seed in self.seeds]
            parts.append(self.line([str(count), rule], specs))
        parts += [
            (
                f"\n### Weighting (4 clients with {'/'.join(map(str, UNEQUAL))} steps in a round, "
                "e4m3)\n"
            ),
            self.head(["weighting"]),
            self.line(["equal speed, 50 steps"], [equal(4, 50, "e4m3", s) for s in self.seeds]),
        ]
        parts += [self.line([n], [unequal(n, s) for s in self.seeds]) for n in WEIGHTINGS]
        parts += [
            "\n### Coarser formats and error feedback (2 clients, 20 steps)\n",
            self.head(["format"]),
        ]
        parts += [
            self.line([label], [coarse(changed, seed) for seed in self.seeds])
            for label, changed in COARSE
        ]
        parts += [
            "\n### Inner learning rate, alone, seed 0\n",
            "| rate | loss |",
            "| ---: | ---: |",
        ]
        for rate in INNER_RATES:
            rows = self.found([alone(0, rate=rate)])
            parts += [f"| {rate:g} | {float(row['eval_loss']):.3f} |" for row in rows]
        return "\n".join(parts)


def spread(values: list[float], form: str) -> str:
    """Mean, and the sample standard deviation where there are two or more."""
    if not values:
        return "-"
    mean = format(statistics.fmean(values), form)
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values):{form.removeprefix('+')}}"
