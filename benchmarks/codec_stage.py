"""The entropy stage alone, beside zstd -1 on the same bytes; and what the codec must make.

What it must make are codes, their entropy, and the decoded values, computed with torch and NumPy.
The codes of e4m3, e5m2 and bf16 are torch's casts of values divided by the scales of docs/WIRE.md,
section "Codes". Torch has no uniform cast; its codes are those of the codec's NumPy code.

Codes to streams and back, for one chunk that stays in the cache. Planning (counting a sample,
choosing split and code tables) is included, as building tables is for zstd.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from attrs import frozen
from codec_peers import installed
from codec_rows import CHUNK_VALUES, NUMPY, pieces
from codec_timing import native_module

from fsl_codecs import CodecSpec, info, uniform
from fsl_codecs.formats import format_named
from fsl_codecs.planes import (
    BlockReader,
    plan_chunk,
    read_plan,
    read_streams,
    sample_of,
    write_plan,
    write_streams,
    write_words,
)
from fsl_codecs.quantised import BLOCK_SYMBOLS
from fsl_codecs.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from codec_rows import Chunks, TensorBench
    from codec_timing import Action, Rounds
    from numpy.typing import NDArray

    Codes = NDArray[np.uint8]

FORMATS = ("e4m3", "e5m2", "uniform")
NATIVE_PATHS = ("avx512", "avx2", "scalar")
_SLACK_BYTES = 64


class Stage(Protocol):
    """The entropy stage on one path."""

    path: str
    payload: bytes
    decoded: Codes

    def encode(self) -> None:
        """All codes, to its own buffer."""

    def decode(self) -> None:
        """`payload`, to `decoded`."""


class NumpyStage:
    """The readable twin."""

    path = NUMPY

    def __init__(self, codes: Codes, number_format: str) -> None:
        self._codes, self._format = codes, format_named(number_format)
        self.decoded = np.empty_like(codes)
        self.payload = self._encoded()

    def encode(self) -> None:
        """Plan, write the streams, then inner block by inner block."""
        self._encoded()

    def _encoded(self) -> bytes:
        pieces: list[bytes] = []
        plan = plan_chunk(sample_of(self._codes), self._format)
        write_plan(plan, pieces)
        write_streams(self._codes, self._format, plan, pieces)
        for start in range(0, self._codes.size, BLOCK_SYMBOLS):
            block = self._codes[start : start + BLOCK_SYMBOLS]
            write_words(block, self._format, plan, pieces)
        return b"".join(pieces)

    def decode(self) -> None:
        """Read the plan, the streams, then inner block by inner block."""
        reader = Reader(np.frombuffer(self.payload, np.uint8))
        plan = read_plan(reader, self._format)
        streams = read_streams(reader, self._format, plan, self.decoded.size)
        for start in range(0, self._codes.size, BLOCK_SYMBOLS):
            part = self.decoded[start : start + BLOCK_SYMBOLS]
            block = BlockReader(reader, self._format, plan, streams, part.size)
            part[:] = block.read(part.size)
            block.finish()


class NativeStage:
    """One of the native paths; ValueError where this machine or this build lacks it."""

    def __init__(self, native: Any, path: str, codes: Codes, number_format: str) -> None:
        self.path = path
        self._native = native
        self._codes = np.append(codes, np.zeros(_SLACK_BYTES, dtype=np.uint8))
        self._format = format_named(number_format).wire_id
        self._out = np.empty(native.stage_bound(codes.size), dtype=np.uint8)
        self._room = np.empty(codes.size + _SLACK_BYTES, dtype=np.uint8)
        self.decoded = self._room[: codes.size]
        size = native.stage_encode(path, self._format, self._codes, self._out)
        self._payload = self._out[:size].copy()
        self.payload = self._payload.tobytes()

    def encode(self) -> None:
        """Plan and write."""
        self._native.stage_encode(self.path, self._format, self._codes, self._out)

    def decode(self) -> None:
        """Read."""
        self._native.stage_decode(self.path, self._format, self._payload, self._room)


def stages(codes: Codes, number_format: str) -> list[Stage]:
    """Every path that runs here; NumPy's alone without a native module."""
    native = native_module()
    found: list[Stage] = []
    if hasattr(native, "stage_encode"):
        for path in NATIVE_PATHS:
            try:
                found.append(NativeStage(native, path, codes, number_format))
            except ValueError:
                continue
    return found or [NumpyStage(codes, number_format)]


class ZstdStage:
    """zstd -1 on the same bytes, with contexts that are reused."""

    def __init__(self, zstandard: Any, codes: Codes) -> None:
        self._codes = codes
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()
        self.payload: bytes = self._compressor.compress(codes.data)

    def encode(self) -> None:
        """Compress."""
        self._compressor.compress(self._codes.data)

    def decode(self) -> None:
        """Decompress."""
        self._decompressor.decompress(self.payload)


class StageComparison:
    """All stages and zstd on one chunk of codes (n,), each called `calls` times in an action."""

    def __init__(self, codes: Codes, number_format: str, calls: int) -> None:
        self.codes, self.number_format, self.calls = codes, number_format, calls
        self.stages = stages(codes, number_format)
        zstandard = installed("zstandard")
        self.zstd = ZstdStage(zstandard, codes) if zstandard else None

    def actions(self) -> Mapping[str, Action]:
        """Encode and decode of each, by name."""
        actions: dict[str, Action] = {}
        for stage in self.stages:
            actions[f"{stage.path} encode"] = _repeated(stage.encode, self.calls)
            actions[f"{stage.path} decode"] = _repeated(stage.decode, self.calls)
        if self.zstd is not None:
            actions["zstd encode"] = _repeated(self.zstd.encode, self.calls)
            actions["zstd decode"] = _repeated(self.zstd.decode, self.calls)
        return actions

    def rows(self, tensor: str, rounds: Rounds, main_path: str) -> list[dict[str, Any]]:
        """A row for each path."""
        symbols = self.codes.size * self.calls
        zstd_bits = None
        if self.zstd is not None:
            zstd_bits = round(8 * len(self.zstd.payload) / self.codes.size, 4)
        return [
            {
                "bench": "codec",
                "row": "entropy_stage",
                "tensor": tensor,
                "format": self.number_format,
                "path": stage.path,
                "is_main_path": stage.path == main_path,
                "symbols": self.codes.size,
                "encode_symbols_gb_s": rounds.gb_s(f"{stage.path} encode", symbols),
                "decode_symbols_gb_s": rounds.gb_s(f"{stage.path} decode", symbols),
                "zstd_encode_symbols_gb_s": rounds.gb_s("zstd encode", symbols),
                "zstd_decode_symbols_gb_s": rounds.gb_s("zstd decode", symbols),
                "encode_over_zstd": rounds.ratio(f"{stage.path} encode", "zstd encode"),
                "decode_over_zstd": rounds.ratio(f"{stage.path} decode", "zstd decode"),
                "bits_per_symbol": round(8 * len(stage.payload) / self.codes.size, 4),
                "zstd_bits_per_symbol": zstd_bits,
                "round_trip": bool((stage.decoded == self.codes).all()),
                "spread": max(
                    rounds.spread(f"{stage.path} {direction}") or 0.0
                    for direction in ("encode", "decode")
                ),
                "repeats": rounds.count,
                "waited_share": rounds.waited_share,
            }
            for stage in self.stages
        ]


def _repeated(action: Action, calls: int) -> Action:
    def run() -> None:
        for _ in range(calls):
            action()

    return run


def stage_rows(bench: TensorBench, calls: int) -> Iterator[dict[str, Any]]:
    """The entropy stage on the chunk in the middle of the vector."""
    start = bench.values.size // CHUNK_VALUES // 2 * CHUNK_VALUES
    chunk = bench.values[start : start + CHUNK_VALUES]
    for number_format in FORMATS:
        codes = expected(chunk, CodecSpec(format=number_format)).codes.astype(np.uint8)
        comparison = StageComparison(codes, number_format, calls)
        rounds = bench.measure(comparison.actions())
        for row in comparison.rows(bench.tensor, rounds, bench.codec.name):
            yield row | {
                "core_rate": rounds.core_rate,
                "undisturbed_share": rounds.undisturbed_share,
                "load_1m": round(os.getloadavg()[0], 2),
            }


# --- what the codec must make ---


_MAGNITUDE = 0x7FFFFFFF
_FLOAT8 = {"e4m3": (torch.float8_e4m3fn, 8, 10), "e5m2": (torch.float8_e5m2, 15, 17)}
"""torch's type, largest exponent and lowest scale byte."""


@frozen(eq=False)
class Expected:
    """Codes (n,) of a piece of a vector, and the fp32 values (n,) that a decoder gives.

    `values` is None for a format without a cast.
    """

    codes: NDArray[np.integer]
    values: NDArray[np.float32] | None


def entropy_bits(counts: NDArray[np.int64]) -> float:
    """Order-0 entropy, in bits a symbol, of symbols that occur `counts` times."""
    present = counts[counts > 0].astype(np.float64)
    total = present.sum()
    return float((present * (np.log2(total) - np.log2(present))).sum() / total) if total else 0.0


def entropy_of(number_format: str) -> str:
    """Name the symbols whose entropy is taken.

    fp32 has more words than any tensor has values, so its bytes are counted plane by plane.
    """
    return "the four bytes of the word, rotated left by one" if number_format == "fp32" else "codes"


def expected(values: NDArray[np.float32], spec: CodecSpec) -> Expected:
    """Return the codes and values of a frame of values (n,): finite, at most a chunk."""
    if spec.format == "fp32":
        return Expected(values.view(np.uint32), values)
    x = torch.from_numpy(values)
    if spec.format == "bf16":
        cast = x.to(torch.bfloat16)
        return Expected(cast.view(torch.int16).numpy().view(np.uint16), cast.float().numpy())
    if spec.format == "uniform":
        codes = np.empty(values.size, dtype=np.uint8)
        for start in range(0, values.size, spec.block_values * 128):
            part = slice(start, start + spec.block_values * 128)
            codes[part], _ = uniform.quantise(values[part], spec.block_values, spec.step_log2)
        return Expected(codes, None)
    kind, largest_exponent, lowest = _FLOAT8[spec.format]
    short = -values.size % spec.block_values
    runs = torch.nn.functional.pad(x, (0, short)).view(-1, spec.block_values)
    largest = (runs.view(torch.int32) & _MAGNITUDE).amax(1, keepdim=True)
    scale_bytes = ((largest + 0x1FFFFF) >> 23).sub(largest_exponent).clamp(min=lowest)
    scales = (scale_bytes << 23).view(torch.float32)
    cast = (runs / scales).to(kind)
    decoded = (cast.float() * scales).flatten()[: values.size]
    return Expected(
        cast.view(torch.uint8).flatten()[: values.size].numpy(), decoded.contiguous().numpy()
    )


class CodeCounter:
    """Counts the symbols of a tensor, piece by piece, for the exact entropy of all of it."""

    def __init__(self, number_format: str) -> None:
        self._format = number_format
        planes = 4 if number_format == "fp32" else 1
        symbols = 1 << 16 if number_format == "bf16" else 256
        self._counts = np.zeros((planes, symbols), dtype=np.int64)

    def add(self, codes: NDArray[np.integer]) -> None:
        """Count codes (n,)."""
        if self._format == "fp32":
            words = (codes << np.uint32(1)) | (codes >> np.uint32(31))
            planes = [(words >> np.uint32(shift)).astype(np.uint8) for shift in (24, 16, 8, 0)]
        else:
            planes = [codes]  # type: ignore[list-item]
        symbols = self._counts.shape[1]
        for index, plane in enumerate(planes):
            self._counts[index] += np.bincount(plane, minlength=symbols)

    @property
    def entropy_bits(self) -> float:
        """Bits a value."""
        return sum(map(entropy_bits, self._counts))


def exact_fields(chunks: Chunks) -> dict[str, Any]:
    """Exact entropy, and whether each decoded value is torch's cast; decodes to `out`."""
    chunks.decode()
    spec, values, out = chunks.spec, chunks.values, chunks.out
    counter = CodeCounter(spec.format)
    exact: bool | None = True
    infos = [info(frame) for frame in chunks.frames]
    is_quantised = np.array([one.coded_chunks + one.raw_code_chunks > 0 for one in infos])
    quantised = np.repeat(is_quantised, spec.chunk_values)
    for part in pieces(values, spec):
        want = expected(values[part], spec)
        counter.add(want.codes)
        if want.values is None:
            exact = None
        elif exact:
            differs = want.values.view(np.uint32) != out[part].view(np.uint32)
            exact = not (differs & quantised[part]).any()
    bits = 8 * chunks.frame_bytes / values.size
    entropy = counter.entropy_bits
    return {
        "entropy_bits": round(entropy, 4),
        "entropy_of": entropy_of(spec.format),
        "over_entropy_percent": round(100 * (bits / entropy - 1), 3) if entropy else None,
        "bit_exact": exact,
    }
