"""The rows of `fsl-node bench codec` as tables for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Column = tuple[str, str]
"""Heading, and the field that stands below it."""

_TENSOR: Sequence[Column] = (
    ("tensor", "tensor"),
    ("format", "format"),
    ("enc GB/s", "encode_gb_s"),
    ("/memcpy", "encode_over_memcpy"),
    ("dec GB/s", "decode_gb_s"),
    ("/memcpy", "decode_over_memcpy"),
    ("acc GB/s", "accumulate_gb_s"),
    ("/add", "accumulate_over_add"),
    ("bits", "bits_per_value"),
    ("entropy", "entropy_bits"),
    ("over %", "over_entropy_percent"),
    ("rel. L2", "relative_l2"),
    ("exact", "bit_exact"),
    ("spread", "spread"),
    ("waited", "waited_share"),
    ("quiet", "undisturbed_share"),
)
_FUSED: Sequence[Column] = (
    ("format", "format"),
    ("in the same pass", "variant"),
    ("plain GB/s", "plain_gb_s"),
    ("fused GB/s", "fused_gb_s"),
    ("in passes GB/s", "passes_gb_s"),
    ("fused / plain", "fused_over_plain"),
    ("fused / passes", "fused_over_passes"),
    ("quiet", "undisturbed_share"),
)
_STAGE: Sequence[Column] = (
    ("tensor", "tensor"),
    ("format", "format"),
    ("path", "path"),
    ("enc Gsym/s", "encode_symbols_gb_s"),
    ("/zstd", "encode_over_zstd"),
    ("dec Gsym/s", "decode_symbols_gb_s"),
    ("/zstd", "decode_over_zstd"),
    ("bits", "bits_per_symbol"),
    ("zstd enc", "zstd_encode_symbols_gb_s"),
    ("zstd dec", "zstd_decode_symbols_gb_s"),
    ("zstd bits", "zstd_bits_per_symbol"),
    ("quiet", "undisturbed_share"),
)
_PEER: Sequence[Column] = (
    ("tensor", "tensor"),
    ("peer", "peer"),
    ("its enc GB/s", "peer_encode_gb_s"),
    ("ours / its", "encode_over_peer"),
    ("its dec GB/s", "peer_decode_gb_s"),
    ("ours / its", "decode_over_peer"),
    ("its bits", "peer_bits_per_value"),
    ("our bits", "bits_per_value"),
    ("quiet", "undisturbed_share"),
    ("", "note"),
)
_THREADS: Sequence[Column] = (
    ("tensor", "tensor"),
    ("format", "format"),
    ("enc GB/s, one", "encode_one_gb_s"),
    ("two", "encode_two_gb_s"),
    ("two / one", "encode_two_over_one"),
    ("dec GB/s, one", "decode_one_gb_s"),
    ("two", "decode_two_gb_s"),
    ("two / one", "decode_two_over_one"),
    ("memcpy GB/s, one", "memcpy_one_gb_s"),
    ("two", "memcpy_two_gb_s"),
    ("two / one", "memcpy_two_over_one"),
)
_SUMMARY: Sequence[Column] = (
    ("what", "what"),
    ("ratio", "ratio"),
    ("must", "must"),
    ("aim", "aim"),
    ("met", "met"),
    ("worst", "worst"),
    ("of", "worst_tensor"),
    ("met", "worst_met"),
)
_SECTIONS: Sequence[tuple[str, str, Sequence[Column]]] = (
    ("tensor", "Tensors: GB/s of fp32, large buffers, one core", _TENSOR),
    ("fused", "Done in the same pass: GB/s of fp32, whatever is read or written, one core", _FUSED),
    ("entropy_stage", "Entropy stage alone, in the cache: 10^9 symbols/s", _STAGE),
    ("peer", "Whole pipelines of others: GB/s of fp32, one core", _PEER),
    ("threads", "Two threads against one", _THREADS),
    ("summary", "Against the targets", _SUMMARY),
)


def cell(value: object) -> str:
    """A value as a person reads it."""
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


def tables(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """All sections that have rows."""
    parts = []
    for kind, title, columns in _SECTIONS:
        chosen = [row for row in rows if row["row"] == kind]
        if chosen:
            lines = aligned(columns, chosen, markdown=markdown)
            parts.append("\n".join([f"### {title}\n" if markdown else title, *lines]))
    return "\n\n".join(parts)
