"""The rows of benchmarks/codec.py as tables for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

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
