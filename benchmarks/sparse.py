"""How a delta of mostly zeros is coded: a JSON row for each share of values that are not zero.

kind             scattered, in rows of 1,024 (embeddings), or bf16: scattered changes of weights in
                 bf16 by one or two units in the last place
coded_bits       of a value in one frame, as a client sends it
order0_bits      order-0 entropy of a value's code, of the codes that the frame holds
relative_error   root mean square error over that of the values
coded_over_order0, coded_over_list    ratios; a list has a 4-byte index and fp32 for each nonzero

python benchmarks/sparse.py [--values 1048576] [--shares 0.01 0.05 0.3] [--formats uniform fp32]
                            [--step-log2 14]
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import numpy.typing as npt

from fsl_codecs import CodecSpec, Limits, decode, encode, info
from fsl_codecs.frame import CODED, frame_bytes_view, iterate_chunks, parse_header
from fsl_codecs.quantised import quantise

ROW = 1024
KINDS = ("scattered", "rows", "bf16")


def delta(kind: str, values: int, share: float) -> npt.NDArray[np.float32]:
    """Return a delta (values,) of which a share is not zero; fixed seed."""
    rng = np.random.default_rng(0)
    width = ROW if kind == "rows" else 1
    chosen = np.zeros((values // width, width), bool)
    chosen[rng.choice(len(chosen), int(len(chosen) * share), replace=False)] = True
    drawn = rng.standard_normal(values, np.float32)
    if kind == "bf16":
        # A unit in the last place of a weight is 2**-7 times its power of two.
        drawn = np.exp2(np.floor(np.log2(np.abs(drawn))) - 7) * rng.choice([-2, -1, 1, 2], values)
    return np.where(chosen.reshape(-1), drawn, 0).astype(np.float32)


def row(kind: str, values: int, share: float, spec: CodecSpec) -> dict[str, float | str]:
    """Code a delta, and compare its size."""
    vector = delta(kind, values, share)
    frame = encode(vector, spec)
    data = frame_bytes_view(frame)
    header = parse_header(data, Limits())
    codes = []
    for chunk in iterate_chunks(data, header):
        part = vector[chunk.index * spec.chunk_values :][: chunk.values]
        splits = header.number_format.splits
        is_sparse = chunk.mode == CODED and splits[chunk.payload[0]].sparse
        blocks = quantise(
            part, header.number_format, spec.block_values, spec.step_log2, sparse=is_sparse
        )
        codes += [block.words for block in blocks]
    _, counts = np.unique(np.concatenate(codes), return_counts=True)
    order0 = float(-(counts * np.log2(counts / values)).sum()) / values
    bits = info(frame).bits_per_value
    error = np.linalg.norm(decode(frame) - vector) / np.linalg.norm(vector)
    return {
        "kind": kind,
        "share": share,
        "format": spec.format,
        "step_log2": spec.step_log2,
        "coded_bits": round(bits, 4),
        "order0_bits": round(order0, 4),
        "coded_over_order0": round(bits / order0, 2),
        "coded_over_list": round(bits / (64 * np.count_nonzero(vector) / values), 2),
        "relative_error": round(float(error), 4),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1 << 20)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.05, 0.3])
    parser.add_argument("--formats", nargs="+", default=["uniform", "fp32"])
    parser.add_argument("--step-log2", type=int, default=14)
    given = parser.parse_args()
    for name in given.formats:
        for kind in KINDS:
            for share in given.shares:
                spec = CodecSpec(format=name, step_log2=given.step_log2)
                print(json.dumps(row(kind, given.values, share, spec)), flush=True)
