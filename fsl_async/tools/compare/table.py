"""The table of a comparison: drawn by rich where that is installed (extra `live`), aligned text
elsewhere. 80 columns.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from fsl_async.tools.compare.outcome import HEAD, Outcome, categories, cells

WIDTH = 80


def lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines printed at the end."""
    rows = cells(outcomes)
    shown = drawn(HEAD, rows)
    shown += [
        "",
        "MB by category, all clients, to the target, or else to the end:",
    ]
    for outcome in outcomes:
        parts = [f"{name} {size:,.3f}" for name, size in categories(outcome)]
        shown += wrapped(f"  {outcome.method}: ", parts)
        if outcome.problem:
            shown.append(f"  {outcome.method}: {outcome.problem}"[:WIDTH])
    return shown


def drawn(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table, its first column to the left, the others to the right."""
    every = [head, *rows]
    return _drawn(every) or _aligned(every)


def _drawn(every: Sequence[Sequence[str]]) -> list[str]:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for number, name in enumerate(every[0]):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for one in every[1:]:
        table.add_row(*one)
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _aligned(every: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in every
    ]


def wrapped(begin: str, parts: Sequence[str]) -> list[str]:
    """Return parts with commas between them, on as many lines as they need."""
    found, line = [], begin
    for number, part in enumerate(parts):
        piece = part + ("," if number + 1 < len(parts) else "")
        if len(line) + len(piece) > WIDTH and line.strip():
            found.append(line.rstrip())
            line = "      "
        line += piece + " "
    return [*found, line.rstrip()]
