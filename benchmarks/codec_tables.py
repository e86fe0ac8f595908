"""The rows of benchmarks/codec.py as tables for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fsl_async.tools.bench.tables import CODEC, Section

_EXACT = (
    ("entropy", "entropy_bits"),
    ("over %", "over_entropy_percent"),
    ("exact", "bit_exact"),
)
_KIND, _TITLE, _COLUMNS = CODEC[0]

SECTIONS: Sequence[Section] = (
    (_KIND, _TITLE, (*_COLUMNS, *_EXACT)),
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
    *CODEC[1:],
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
