"""The rows of `fsl-node bench transport` as tables for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsl_async.tools.bench.codec_table import Column, aligned

_LOCAL: Sequence[Column] = (
    ("way", "way"),
    ("chunk KiB", "chunk_kib"),
    ("stripes", "stripes"),
    ("CURVE", "curve"),
    ("GB/s", "gb_s"),
    ("/pyzmq", "over_pyzmq"),
    ("/tcp", "over_tcp"),
    ("spread", "spread"),
    ("control ms", "control_worst_ms"),
    ("load", "load_1m"),
)
_LINE: Sequence[Column] = (
    ("net", "net"),
    ("way", "way"),
    ("chunk KiB", "chunk_kib"),
    ("stripes", "stripes"),
    ("CURVE", "curve"),
    ("Mbit/s", "mbit_s"),
    ("with warm-up", "whole_mbit_s"),
    ("/tcp", "over_tcp"),
    ("spread", "spread"),
    ("control ms", "control_worst_ms"),
    ("load", "load_1m"),
)


def tables(rows: Sequence[Mapping[str, Any]], *, markdown: bool = False) -> str:
    """Loopback in GB/s, links of the laboratory in Mbit/s. "control ms" is the longest that a control message took beside the chunks."""
    shown = []
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
    local = [row for row in shown if row["net"] == "loopback"]
    lines = [row for row in shown if row["net"] != "loopback"]
    parts = []
    for chosen, columns in ((local, _LOCAL), (lines, _LINE)):
        if chosen:
            parts.append("\n".join(aligned(columns, chosen, markdown=markdown)))
    return "\n\n".join(parts)
