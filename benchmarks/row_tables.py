"""Rows of benchmarks/codec.py and benchmarks/transport.py: printed, kept, and as tables."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

Row = Mapping[str, Any]
Column = tuple[str, str]
"""Heading, and the field that stands below it."""
Function = TypeVar("Function", bound=Callable[..., None])


def output_options(command: Function) -> Function:
    """Add the options `save`, `markdown` and `as_json` to a command."""
    for add in (
        click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each row."),
        click.option("--markdown", is_flag=True, help="Tables for a document."),
        click.option(
            "--save", type=click.Path(path_type=Path, dir_okay=False, writable=True),
            metavar="FILE", help="Also write the rows to this file, one JSON object a line.",
        ),
    ):  # fmt: skip
        command = add(command)
    return command


def measured(
    run: Callable[[Callable[[str], None]], Iterable[Row]],
    save: Path | None,
    mode: str = "a",
    *,
    as_json: bool,
) -> list[Row]:
    """Return the rows of a benchmark, which reports its progress on standard error.

    With JSON each row is printed as it comes. Rows go to the file `save`, opened with `mode`.
    """
    begun = time.monotonic()

    def progress(text: str) -> None:
        click.echo(f"{time.monotonic() - begun:6.1f} s  {text}", err=True)

    rows = []
    for row in run(progress):
        rows.append(row)
        if as_json:
            click.echo(json.dumps(row))
    if save is not None:
        with save.open(mode, encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


def cell(value: object) -> str:
    """Format a value for a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 0.1 and value else f"{value:.2f}"
    return str(value)


def aligned(columns: Sequence[Column], rows: Sequence[Row], *, markdown: bool = False) -> list[str]:
    """Lines of a table with a heading; text to the left, numbers to the right."""
    headings = [heading for heading, _ in columns]
    cells = [[cell(row.get(field)) for _, field in columns] for row in rows]
    if markdown:
        rule = ["---"] * len(columns)
        return ["| " + " | ".join(line) + " |" for line in (headings, rule, *cells)]
    is_text = [
        all(row.get(field) is None or isinstance(row.get(field), str) for row in rows)
        for _, field in columns
    ]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    lines = []
    for line in (headings, *cells):
        padded = [
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(line, widths, is_text, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
