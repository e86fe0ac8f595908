"""The ratios that the codec core must reach, beside what a run reached. Pure.

Every number is for one core and e4m3. The tensor that counts is `pseudo_gradients`, because that is
what clients send; `worst` is the least favorable of all tensors of the run, so that one lucky
tensor cannot hide the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen
from codec_bench import HEADLINE_TENSOR

Row = Mapping[str, Any]


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
