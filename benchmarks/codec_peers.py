"""Other libraries for the same job: zstd -1, zipnn, and torch in front of them.

None of them is a dependency; the extra `bench` installs them. Each pipeline starts from fp32 in
memory and ends there, in one thread.

    bf16+zipnn    torch's cast to bf16, then zipnn (Hershcovitch et al., arXiv:2411.05239), which is
                  lossless; and back
    e4m3+zstd     torch: the largest magnitude of each run of 128, a scale, the cast to e4m3; then
                  zstd -1 of codes and scales; and back

They may work on pieces of any size; the fastest of three is used, for each direction. Their output
is kept, as they cannot reuse an output buffer.
"""

from __future__ import annotations

import importlib
import time
import warnings
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from codec_rows import TensorBench
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

MODULES = ("zstandard", "zipnn")
INSTALL = "pip install 'fsl-async[bench]'"
_RUN_VALUES = 128
_LARGEST_E4M3 = 448.0
_PIECES_VALUES = (1 << 17, 1 << 19, 1 << 21)


def installed(name: str) -> Any:
    """The module of a peer; None when it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def missing() -> list[str]:
    """Peers that are not installed."""
    return [name for name in MODULES if installed(name) is None]


class Pipeline(Protocol):
    """From fp32 to what would be sent, and back; for one piece size, used by one thread."""

    name: str

    def encode(self, values: Vector) -> Sequence[bytes]:
        """What would be sent for values (n,)."""

    def decode(self, sent: Sequence[bytes], out: Vector) -> None:
        """Fill out (n,) from it."""


class Bfloat16ThenZipnn:
    """Holds a bf16 buffer for one piece, which zipnn may overwrite."""

    name = "bf16+zipnn"

    def __init__(self, zipnn: Any, piece_values: int) -> None:
        self._words = torch.empty(piece_values, dtype=torch.bfloat16)
        self._zipnn = zipnn.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)

    def encode(self, values: Vector) -> Sequence[bytes]:
        """Cast, then compress."""
        words = self._words[: values.size].copy_(torch.from_numpy(values))
        return [self._zipnn.compress(words.view(torch.uint8).numpy().data)]

    def decode(self, sent: Sequence[bytes], out: Vector) -> None:
        """Decompress, then widen."""
        words = torch.frombuffer(self._zipnn.decompress(sent[0]), dtype=torch.bfloat16)
        torch.from_numpy(out).copy_(words)


class E4m3ThenZstd:
    """Piece sizes are multiples of 128."""

    name = "e4m3+zstd"

    def __init__(self, zstandard: Any) -> None:
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()
        with warnings.catch_warnings():
            # torch warns once that bytes are read-only. We only read them.
            warnings.simplefilter("ignore")
            torch.frombuffer(b"0", dtype=torch.uint8)

    def encode(self, values: Vector) -> Sequence[bytes]:
        """Scale, cast, compress."""
        runs = torch.from_numpy(values).view(-1, _RUN_VALUES)
        scales = runs.abs().amax(1, keepdim=True).div_(_LARGEST_E4M3).clamp_(min=1e-30)
        codes = (runs / scales).to(torch.float8_e4m3fn).view(torch.uint8)
        return [self._compressor.compress(part.numpy()) for part in (codes, scales)]

    def decode(self, sent: Sequence[bytes], out: Vector) -> None:
        """Decompress, widen, scale."""
        codes, scales = map(self._decompressor.decompress, sent)
        runs = torch.from_numpy(out).view(-1, _RUN_VALUES)
        runs.copy_(torch.frombuffer(codes, dtype=torch.float8_e4m3fn).view(-1, _RUN_VALUES))
        runs.mul_(torch.frombuffer(scales, dtype=torch.float32).view(-1, 1))


class PeerRun:
    """A pipeline over a complete vector, in the pieces that are fastest for each direction."""

    def __init__(self, make: Callable[[int], Pipeline], values: Vector, out: Vector) -> None:
        self._values, self._out = values, out
        sizes = [min(size, values.size) for size in _PIECES_VALUES]
        self._pipelines = {size: make(size) for size in sizes}
        self.name = self._pipelines[sizes[0]].name
        seconds: dict[str, dict[int, float]] = {"encode": {}, "decode": {}}
        for size in self._pipelines:
            self._encode_pieces = self._decode_pieces = size
            for direction, action in (("encode", self.encode), ("decode", self.decode)):
                if direction == "decode":
                    self._sent = self._encoded(size)
                action()
                begun = time.process_time()
                action()
                seconds[direction][size] = time.process_time() - begun
        self._encode_pieces = min(seconds["encode"], key=seconds["encode"].__getitem__)
        self._decode_pieces = min(seconds["decode"], key=seconds["decode"].__getitem__)
        self._sent = self._encoded(self._decode_pieces)

    @property
    def pieces_values(self) -> tuple[int, int]:
        """Sizes of the pieces, encoding and decoding."""
        return self._encode_pieces, self._decode_pieces

    @property
    def bits_per_value(self) -> float:
        """Of what would be sent."""
        return 8 * sum(len(part) for sent in self._sent for part in sent) / self._values.size

    def encode(self) -> None:
        """One pass over the vector."""
        self._encoded(self._encode_pieces)

    def decode(self) -> None:
        """One pass over what was sent, into `out`."""
        size = self._decode_pieces
        for index, sent in enumerate(self._sent):
            self._pipelines[size].decode(sent, self._out[index * size : (index + 1) * size])

    def _encoded(self, size: int) -> list[Sequence[bytes]]:
        pipeline, values = self._pipelines[size], self._values
        starts = range(0, values.size, size)
        return [pipeline.encode(values[start : start + size]) for start in starts]


def pipelines() -> dict[str, Callable[[int], Pipeline] | None]:
    """How to make each, by name; None where a library is not installed."""
    zipnn, zstandard = installed("zipnn"), installed("zstandard")
    return {
        Bfloat16ThenZipnn.name: zipnn and (lambda size: Bfloat16ThenZipnn(zipnn, size)),
        E4m3ThenZstd.name: zstandard and (lambda _: E4m3ThenZstd(zstandard)),
    }


def peer_row(
    bench: TensorBench, name: str, make: Callable[[int], Pipeline] | None
) -> dict[str, Any]:
    """The codec's e4m3 and a peer's pipeline in turns."""
    row = bench.head("peer", "e4m3") | {"peer": name}
    if make is None:
        return row | {"note": f"not installed: {INSTALL}"}
    values, back = bench.values, bench.outputs[1]
    chunks = bench.chunks("e4m3")
    peer = PeerRun(make, values, back)
    rounds = bench.measure(
        {
            "encode": chunks.encode,
            "decode": chunks.decode,
            "peer encode": peer.encode,
            "peer decode": peer.decode,
        }
    )
    size = values.nbytes
    error = float(np.linalg.norm(values.astype(np.float64) - back))
    norm = float(np.linalg.norm(values.astype(np.float64)))
    return row | {
        "encode_gb_s": rounds.gb_s("encode", size),
        "decode_gb_s": rounds.gb_s("decode", size),
        "peer_encode_gb_s": rounds.gb_s("peer encode", size),
        "peer_decode_gb_s": rounds.gb_s("peer decode", size),
        "encode_over_peer": rounds.ratio("encode", "peer encode"),
        "decode_over_peer": rounds.ratio("decode", "peer decode"),
        "bits_per_value": round(8 * chunks.frame_bytes / values.size, 4),
        "peer_bits_per_value": round(peer.bits_per_value, 4),
        "peer_relative_l2": float(f"{error / norm:.4g}"),
        "peer_pieces_values": peer.pieces_values,
        "peer_encode_spread": rounds.spread("peer encode"),
        "peer_decode_spread": rounds.spread("peer decode"),
        **bench.tail(rounds),
    }
