"""How a delta of mostly zeros is coded: a JSON row for each share of values that are not zero.

coded_bytes      of one frame in the format uniform, as a client sends it
entropy_bytes    the order-0 entropy of the quantizer's symbols
list_bytes       4-byte indices and fp32 values of the nonzero values: a sparse format
coded_over_entropy, coded_over_list    the ratios

python benchmarks/sparse.py [--values 1000000] [--shares 0.01 0.05 0.3]
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from fsl_codecs import CodecSpec, bound, encode_into
from fsl_codecs.uniform import quantise


def row(values: int, share: float) -> dict[str, float]:
    """Code `values` numbers: a scattered `share` is Gaussian, the rest zero; fixed seed."""
    rng = np.random.default_rng(0)
    vector = np.zeros(values, np.float32)
    chosen = rng.choice(values, int(values * share), replace=False)
    vector[chosen] = rng.standard_normal(len(chosen), np.float32)
    spec = CodecSpec(format="uniform")
    coded = bytearray(bound(values, spec))
    size = encode_into(vector, coded, spec)
    codes, _ = quantise(vector, spec.block_values, spec.step_log2)
    _, counts = np.unique(codes, return_counts=True)
    entropy = float(-(counts * np.log2(counts / len(codes))).sum()) / 8
    listed = 8 * len(chosen)
    return {
        "values": values,
        "share": share,
        "coded_bytes": size,
        "entropy_bytes": round(entropy),
        "list_bytes": listed,
        "coded_over_entropy": round(size / entropy, 2),
        "coded_over_list": round(size / listed, 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1_000_000)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.05, 0.3])
    given = parser.parse_args()
    for share in given.shares:
        print(json.dumps(row(given.values, share)), flush=True)
