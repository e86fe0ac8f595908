"""The rows of benchmarks/codec.py as tables, and the ratios that the codec must reach. Pure.

Every target is for one core and e4m3. The tensor that counts is `pseudo_gradients`, because that is
what clients send; `worst` is the least favorable of all tensors of the run, so that one lucky
tensor cannot hide the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen
from codec_rows import HEADLINE_TENSOR
from row_tables import Column, Row, aligned

SECTIONS: Sequence[tuple[str, str, Sequence[Column]]] = (
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
            ("entropy", "entropy_bits"),
            ("over %", "over_entropy_percent"),
            ("exact", "bit_exact"),
        ),
    ),
    (
        "fused",
        "Done in the same pass: GB/s of fp32, whatever is read or written, one core",
        (
            ("format", "format"),
            ("in the same pass", "variant"),
            ("plain GB/s", "plain_gb_s"),
            ("fused GB/s", "fused_gb_s"),
            ("in passes GB/s", "passes_gb_s"),
            ("fused / plain", "fused_over_plain"),
            ("fused / passes", "fused_over_passes"),
            ("quiet", "undisturbed_share"),
        ),
    ),
    (
        "entropy_stage",
        "Entropy stage alone, in the cache: 10^9 symbols/s",
        (
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
        ),
    ),
    (
        "peer",
        "Whole pipelines of others: GB/s of fp32, one core",
        (
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
    (
        "summary",
        "Against the targets",
        (
            ("what", "what"),
            ("ratio", "ratio"),
            ("must", "must"),
            ("aim", "aim"),
            ("met", "met"),
            ("worst", "worst"),
            ("of", "worst_tensor"),
            ("met", "worst_met"),
        ),
    ),
)
"""The rows' kind, a title, and the columns."""


def codec_tables(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """All sections that have rows, without columns that have no value."""
    parts = []
    for kind, title, columns in SECTIONS:
        chosen = [row for row in rows if row["row"] == kind]
        if chosen:
            shown = [one for one in columns if any(row.get(one[1]) is not None for row in chosen)]
            lines = aligned(shown, chosen, markdown=markdown)
            parts.append("\n".join([f"### {title}\n" if markdown else title, *lines]))
    return "\n\n".join(parts)


# --- the targets ---


@frozen
class Target:
    """A line of the table: `field` of the rows that `select` takes, and what it must reach."""

    what: str
    field: str
    select: Callable[[Row], bool]
    must: float
    aim: float
    lower_is_better: bool = False


def _rows(kind: str, **wanted: object) -> Callable[[Row], bool]:
    def select(row: Row) -> bool:
        return row["row"] == kind and all(row.get(name) == value for name, value in wanted.items())

    return select


_E4M3 = _rows("tensor", format="e4m3")
_STAGE = _rows("entropy_stage", format="e4m3", is_main_path=True)
_STAGE_AVX2 = _rows("entropy_stage", format="e4m3", path="avx2")
_ZIPNN = _rows("peer", peer="bf16+zipnn")
_THREADS = _rows("threads", format="e4m3")

TARGETS = (
    Target("encode into a reused chunk buffer / memcpy", "encode_over_memcpy", _E4M3, 0.8, 1.05),
    Target("decode to fp32 / memcpy", "decode_over_memcpy", _E4M3, 1.2, 1.5),
    Target("decode-accumulate / in-place add", "accumulate_over_add", _E4M3, 0.6, 0.85),
    Target("entropy stage, encode / zstd -1", "encode_over_zstd", _STAGE, 5.0, 8.0),
    Target("entropy stage, decode / zstd -1", "decode_over_zstd", _STAGE, 6.0, 9.0),
    Target("pipeline, encode / torch bf16 + zipnn", "encode_over_peer", _ZIPNN, 7.0, 10.0),
    Target("pipeline, decode / torch bf16 + zipnn", "decode_over_peer", _ZIPNN, 5.0, 8.0),
    Target("size over order-0 entropy, %", "over_entropy_percent", _E4M3, 1.2, 0.5,
           lower_is_better=True),
    Target("AVX2 entropy stage, encode / zstd -1", "encode_over_zstd", _STAGE_AVX2, 1.0, 2.0),
    Target("AVX2 entropy stage, decode / zstd -1", "decode_over_zstd", _STAGE_AVX2, 1.0, 2.0),
    Target("two threads / one, encode", "encode_two_over_one", _THREADS, 1.8, 1.95),
    Target("two threads / one, decode", "decode_two_over_one", _THREADS, 1.8, 1.95),
)  # fmt: skip


def verdict(target: Target, reached: float | None) -> str:
    """Which of the two was reached: "aim", "must", or "missed"; or "not measured"."""
    if reached is None:
        return "not measured"
    sign = -1 if target.lower_is_better else 1
    if sign * reached >= sign * target.aim:
        return "aim"
    return "must" if sign * reached >= sign * target.must else "missed"


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A row for each target, computed from the rows of one run."""
    return [_summary_row(target, rows) for target in TARGETS]


def _summary_row(target: Target, rows: Sequence[Row]) -> dict[str, Any]:
    chosen = [row for row in rows if target.select(row) and row.get(target.field) is not None]
    headline = next((row for row in chosen if row["tensor"] == HEADLINE_TENSOR), None)
    pick = max if target.lower_is_better else min
    worst = pick(chosen, key=lambda row: float(row[target.field]), default=None)
    reached = None if headline is None else float(headline[target.field])
    least = None if worst is None else float(worst[target.field])
    return {
        "bench": "codec",
        "row": "summary",
        "what": target.what,
        "ratio": reached,
        "must": target.must,
        "aim": target.aim,
        "met": verdict(target, reached),
        "worst": least,
        "worst_tensor": None if worst is None else worst["tensor"],
        "worst_met": verdict(target, least),
    }
