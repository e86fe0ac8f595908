"""The rows of `fsl-node bench` as tables for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Column = tuple[str, str]
"""Heading, and the field that stands below it."""
Section = tuple[str, str, Sequence[Column]]
"""The rows' kind, a title, and the columns."""

CODEC: Sequence[Section] = (
    (
        "tensor",
        "Tensors: GB/s of fp32, large buffers, one core",
        (
            ("tensor", "tensor"),
            ("format", "format"),
            ("enc GB/s", "encode_gb_s"),
            ("/memcpy", "encode_over_memcpy"),
            ("dec GB/s", "decode_gb_s"),
            ("/memcpy", "decode_over_memcpy"),
            ("acc GB/s", "accumulate_gb_s"),
            ("/add", "accumulate_over_add"),
            ("bits", "bits_per_value"),
            ("fp32 / size", "ratio_to_fp32"),
            ("rel. L2", "relative_l2"),
            ("spread", "spread"),
            ("waited", "waited_share"),
            ("quiet", "undisturbed_share"),
        ),
    ),
    (
        "threads",
        "Several threads against one: GB/s of fp32",
        (
            ("tensor", "tensor"),
            ("format", "format"),
            *(
                column
                for name, field in (("enc", "encode"), ("dec", "decode"), ("memcpy", "memcpy"))
                for column in (
                    (f"{name}, one", f"{field}_one_gb_s"),
                    ("two", f"{field}_two_gb_s"),
                    ("two / one", f"{field}_two_over_one"),
                    ("all", f"{field}_all_gb_s"),
                )
            ),
            ("all: threads", "all_threads"),
        ),
    ),
)
_WAY: Sequence[Column] = (
    ("way", "way"),
    ("chunk KiB", "chunk_kib"),
    ("stripes", "stripes"),
    ("CURVE", "curve"),
)
_LOOPBACK: Sequence[Column] = (*_WAY, ("GB/s", "gb_s"))
_LINK: Sequence[Column] = (
    ("net", "net"),
    *_WAY,
    ("Mbit/s", "mbit_s"),
    ("with warm-up", "whole_mbit_s"),
)
_AROUND: Sequence[Column] = (
    ("spread", "spread"),
    ("control ms", "control_worst_ms"),
    ("load", "load_1m"),
)


def cell(value: object) -> str:
    """Format a value for people."""
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


def codec_tables(
    rows: Sequence[Row], sections: Sequence[Section] = CODEC, *, markdown: bool = False
) -> str:
    """All sections that have rows, without columns that have no value."""
    parts = []
    for kind, title, columns in sections:
        chosen = [row for row in rows if row["row"] == kind]
        if chosen:
            measured = [
                one for one in columns if any(row.get(one[1]) is not None for row in chosen)
            ]
            lines = aligned(measured, chosen, markdown=markdown)
            parts.append("\n".join([f"### {title}\n" if markdown else title, *lines]))
    return "\n\n".join(parts)


def transport_tables(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """Loopback in GB/s, links of the laboratory in Mbit/s.

    "control ms" is the longest that a control message took beside the chunks.
    """
    shown: list[dict[str, Any]] = []
    for row in rows:
        if row["row"] == "way":
            worst = row.get("control_worst_s")
            shown.append(
                {
                    **row,
                    "stripes": None if row["stripes"] is None else str(row["stripes"]),
                    "control_worst_ms": None if worst is None else round(1e3 * worst),
                }
            )
    over = dict.fromkeys(name for row in shown for name in row if name.startswith("over_"))
    ratios = [(f"/{name.removeprefix('over_')}", name) for name in over]
    parts = []
    for is_loopback, columns in ((True, _LOOPBACK), (False, _LINK)):
        chosen = [row for row in shown if (row["net"] == "loopback") is is_loopback]
        if chosen:
            lines = aligned((*columns, *ratios, *_AROUND), chosen, markdown=markdown)
            parts.append("\n".join(lines))
    return "\n\n".join(parts)
