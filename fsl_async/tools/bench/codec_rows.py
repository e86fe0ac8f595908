"""Rows about one tensor: the codec in a format, the codec beside a peer, the codec on two threads.

The codec works as in the runtime: a frame for each chunk of 131,072 values, encoded into one buffer that is used again and again, decoded
into its place of a vector that no cache holds. Speeds are those of the loop over all chunks, with what Python adds to each call.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np

from fsl_async.tools.bench import codec_peers
from fsl_async.tools.bench.codec_exact import CodeCounter, code_bytes, entropy_of, expected, pieces
from fsl_async.tools.bench.codec_fused import FusedVariants
from fsl_codecs import CodecSpec, bound, info

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from fsl_async.tools.bench.codec_peers import Pipeline
    from fsl_async.tools.bench.limits import MemoryLimits
    from fsl_async.tools.bench.timing import Action, Rounds
    from fsl_codecs.dispatch import Implementation

    Vector = NDArray[np.float32]

    class Measure(Protocol):
        """Runs actions in turns (`timing.in_turns` with its settings)."""

        def __call__(  # noqa: D102
            self, actions: Mapping[str, Action], *, by_wall_clock: bool = False
        ) -> Rounds: ...


Call = TypeVar("Call", bound="Callable[..., int]")
FORMATS = ("fp32", "bf16", "e4m3", "e5m2", "uniform")
_WEIGHT = 1.0
"""Of decode_accumulate. Sums grow from pass to pass and stay far from overflow."""


def _on_threads(function: Call, threads: int) -> Call:
    # One thread is what calls have that say nothing of it, and a word of it takes Python a microsecond of a chunk's eighteen.
    return function if threads == 1 else cast("Call", partial(function, threads=threads))


class Chunks:
    """A vector (n,) cut into frames of one or more chunks, and room for what they decode to and are added to."""

    def __init__(
        self,
        codec: Implementation,
        values: Vector,
        rooms: tuple[Vector, Vector],
        spec: CodecSpec,
        *,
        chunks_in_frame: int = 1,
        threads: int = 1,
    ) -> None:
        self.codec, self.values, self.spec = codec, values, spec
        self.out, accumulator = rooms
        self._encode_into = _on_threads(codec.encode_into, threads)
        self._decode_into = _on_threads(codec.decode_into, threads)
        self._decode_accumulate = _on_threads(codec.decode_accumulate, threads)
        step = chunks_in_frame * spec.chunk_values
        starts = range(0, values.size, step)
        self._values, self._outs, self._accumulators = (
            [vector[start : start + step] for start in starts]
            for vector in (values, self.out, accumulator)
        )
        self._buffer = bytearray(bound(min(step, values.size), spec))
        self.frames = []
        for part in self._values:
            size = codec.encode_into(part, self._buffer, spec)
            self.frames.append(bytes(memoryview(self._buffer)[:size]))

    def encode(self) -> None:
        """All chunks into the one buffer."""
        encode_into, buffer, spec = self._encode_into, self._buffer, self.spec
        for part in self._values:
            encode_into(part, buffer, spec)

    def decode(self) -> None:
        """All frames, stored to the vector `out`."""
        decode_into = self._decode_into
        for frame, part in zip(self.frames, self._outs, strict=True):
            decode_into(frame, part)

    def accumulate(self) -> None:
        """All frames, added to the accumulator."""
        decode_accumulate = self._decode_accumulate
        for frame, part in zip(self.frames, self._accumulators, strict=True):
            decode_accumulate(frame, part, _WEIGHT)

    @property
    def frame_bytes(self) -> int:
        """Of all frames, with headers, scales and code tables."""
        return sum(map(len, self.frames))

    def modes(self) -> dict[str, int]:
        """How many chunks went which way."""
        infos = [info(frame) for frame in self.frames]
        counts = {
            "coded": sum(one.coded_chunks for one in infos),
            "raw_codes": sum(one.raw_code_chunks for one in infos),
            "raw_fp32": sum(one.raw_fp32_chunks for one in infos),
            "constant": sum(one.constant_chunks for one in infos),
        }
        return {mode: count for mode, count in counts.items() if count}

    def is_quantised(self) -> NDArray[np.bool_]:
        """Whether each chunk is made of codes."""
        infos = [info(frame) for frame in self.frames]
        return np.array([one.coded_chunks + one.raw_code_chunks > 0 for one in infos])


def quality(chunks: Chunks) -> dict[str, Any]:
    """Size, exact entropy, error, and whether each decoded value is the one that torch's cast gives; decodes to `out`."""
    chunks.decode()
    spec, values, out = chunks.spec, chunks.values, chunks.out
    counter = CodeCounter(spec.format)
    squares, errors = 0.0, 0.0
    exact: bool | None = True
    quantised = np.repeat(chunks.is_quantised(), spec.chunk_values)
    for part in pieces(values, spec):
        want = expected(values[part], spec)
        counter.add(want.codes)
        true = values[part].astype(np.float64)
        squares += float(true @ true)
        true -= out[part]
        errors += float(true @ true)
        if want.values is None:
            exact = None
        elif exact:
            differs = want.values.view(np.uint32) != out[part].view(np.uint32)
            exact = not (differs & quantised[part]).any()
    bits = 8 * chunks.frame_bytes / values.size
    entropy = counter.entropy_bits
    return {
        "bits_per_value": round(bits, 4),
        "ratio_to_fp32": round(32 / bits, 3),
        "entropy_bits": round(entropy, 4),
        "entropy_of": entropy_of(spec.format),
        "over_entropy_percent": round(100 * (bits / entropy - 1), 3) if entropy else None,
        "relative_l2": float(f"{(errors / squares) ** 0.5:.4g}") if squares else 0.0,
        "bit_exact": exact,
        "chunks": chunks.modes(),
    }


class TensorBench:
    """Measures one tensor. Vectors (n,) for decoding are given, because they are large and used for every tensor."""

    def __init__(
        self,
        tensor: str,
        values: Vector,
        rooms: tuple[Vector, Vector],
        limits: MemoryLimits,
        codec: Implementation,
        *,
        measure: Measure,
    ) -> None:
        self.tensor, self.values = tensor, values
        self._rooms, self._codec = rooms, codec
        self._limits, self._in_turns = limits, measure

    def chunks(self, number_format: str, *, chunks_in_frame: int = 1, threads: int = 1) -> Chunks:
        """Encode once."""
        self._rooms[1].fill(0)
        return Chunks(
            self._codec,
            self.values,
            self._rooms,
            CodecSpec(format=number_format),
            chunks_in_frame=chunks_in_frame,
            threads=threads,
        )

    def row(self, number_format: str) -> dict[str, Any]:
        """The codec and the machine's limits in turns."""
        chunks = self.chunks(number_format)
        facts = quality(chunks)
        rounds = self._in_turns(
            {
                **self._limits.actions(),
                "encode": chunks.encode,
                "decode": chunks.decode,
                "accumulate": chunks.accumulate,
            }
        )
        size, symbol_share = self.values.nbytes, code_bytes(number_format) / 4
        row: dict[str, Any] = {
            **self._head("tensor", number_format),
            "implementation": self._codec.name,
        }
        for name in ("encode", "decode", "accumulate"):
            speed = rounds.gb_s(name, size)
            row[f"{name}_gb_s"] = speed
            row[f"{name}_symbols_gb_s"] = None if speed is None else round(speed * symbol_share, 3)
            row[f"{name}_over_memcpy"] = rounds.ratio(name, "memcpy")
            row[f"{name}_spread"] = rounds.spread(name)
        row["encode_over_read"] = rounds.ratio("encode", "read")
        row["decode_over_stream_store"] = rounds.ratio("decode", "stream_store")
        row["accumulate_over_add"] = rounds.ratio("accumulate", "add")
        spreads = [row[f"{name}_spread"] for name in ("encode", "decode", "accumulate")]
        row |= self._limits.fields(rounds) | facts
        return row | {
            "spread": max(spreads),
            "memcpy_spread": rounds.spread("memcpy"),
            **self._tail(rounds),
        }

    def peer_row(self, name: str, make: Callable[[int], Pipeline] | None) -> dict[str, Any]:
        """The codec's e4m3 and a peer's pipeline in turns."""
        row = self._head("peer", "e4m3") | {"peer": name}
        if make is None:
            return row | {"note": f"not installed: {codec_peers.INSTALL}"}
        chunks = self.chunks("e4m3")
        peer = codec_peers.PeerRun(make, self.values, self._rooms[1])
        rounds = self._in_turns(
            {
                "encode": chunks.encode,
                "decode": chunks.decode,
                "peer encode": peer.encode,
                "peer decode": peer.decode,
            }
        )
        size = self.values.nbytes
        error = self.values.astype(np.float64) - self._rooms[1]
        norm = float(np.linalg.norm(self.values.astype(np.float64)))
        return row | {
            "encode_gb_s": rounds.gb_s("encode", size),
            "decode_gb_s": rounds.gb_s("decode", size),
            "peer_encode_gb_s": rounds.gb_s("peer encode", size),
            "peer_decode_gb_s": rounds.gb_s("peer decode", size),
            "encode_over_peer": rounds.ratio("encode", "peer encode"),
            "decode_over_peer": rounds.ratio("decode", "peer decode"),
            "bits_per_value": round(8 * chunks.frame_bytes / self.values.size, 4),
            "peer_bits_per_value": round(peer.bits_per_value, 4),
            "peer_relative_l2": float(f"{float(np.linalg.norm(error)) / norm:.4g}"),
            "peer_pieces_values": peer.pieces_values,
            "peer_encode_spread": rounds.spread("peer encode"),
            "peer_decode_spread": rounds.spread("peer decode"),
            **self._tail(rounds),
        }

    def fused_rows(self, number_format: str) -> list[dict[str, Any]]:
        """Subtracting, carrying a residual, bf16 in and out: in the codec's pass, and in passes before and after it, in turns."""
        variants = FusedVariants(self._codec, self.values, CodecSpec(format=number_format))
        rounds = self._in_turns(variants.actions())
        head, tail = self._head("fused", number_format), self._tail(rounds)
        return [
            {**head, **fields, **tail} for fields in variants.fields(rounds, self.values.nbytes)
        ]

    def threads_row(self, number_format: str) -> dict[str, Any]:
        """The codec's own threads, two and one in turns, on one frame of the whole vector; by the clock on the wall. Beside them a plain copy."""
        whole = -(-self.values.size // CodecSpec().chunk_values)
        one, two = (
            self.chunks(number_format, chunks_in_frame=whole, threads=threads) for threads in (1, 2)
        )
        rounds = self._in_turns(
            {
                "encode": one.encode,
                "encode two": two.encode,
                "decode": one.decode,
                "decode two": two.decode,
                **self._limits.copies(),
            },
            by_wall_clock=True,
        )
        size = self.values.nbytes
        row = self._head("threads", number_format)
        for name in ("encode", "decode", "memcpy"):
            row[f"{name}_one_gb_s"] = rounds.gb_s(name, size)
            row[f"{name}_two_gb_s"] = rounds.gb_s(f"{name} two", size)
            row[f"{name}_two_over_one"] = rounds.ratio(f"{name} two", name)
            row[f"{name}_two_spread"] = rounds.spread(f"{name} two")
        return row | self._tail(rounds)

    def _head(self, kind: str, number_format: str) -> dict[str, Any]:
        return {
            "bench": "codec",
            "row": kind,
            "tensor": self.tensor,
            "format": number_format,
            "values": self.values.size,
        }

    @staticmethod
    def _tail(rounds: Rounds) -> dict[str, Any]:
        return {
            "repeats": rounds.count,
            "waited_share": rounds.waited_share,
            "core_rate": rounds.core_rate,
            "undisturbed_share": rounds.undisturbed_share,
            "rounds_left_out": rounds.left_out,
            "load_1m": round(os.getloadavg()[0], 2),
        }
