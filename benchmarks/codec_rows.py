"""Rows about one tensor: the codec in a format, and the codec on several threads.

The codec works as in the runtime: a frame for each chunk of 131,072 values, encoded into one buffer
that is used again and again, decoded into its place of a vector that no cache holds. Speeds are
those of the loop over all chunks, with what Python adds to each call.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np

from fsl_async.config.load import cores
from fsl_codecs import CodecSpec, bound, info
from fsl_codecs.codec import MAXIMUM_THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from codec_timing import Action, MemoryLimits, Rounds
    from numpy.typing import NDArray

    from fsl_codecs.dispatch import Implementation

    Vector = NDArray[np.float32]

    class Measure(Protocol):
        """Runs actions in turns (`timing.in_turns` with its settings)."""

        def __call__(  # noqa: D102
            self, actions: Mapping[str, Action], *, by_wall_clock: bool = False
        ) -> Rounds: ...


Call = TypeVar("Call", bound="Callable[..., int]")
CHUNK_VALUES = 131072
HEADLINE_TENSOR = "pseudo_gradients"
"""Clients of a pretraining run send these; their rows come first."""
NUMPY = "numpy"
"""The path that has one thread only."""
FORMATS = ("fp32", "bf16", "e4m3", "e5m2", "uniform")
_CODE_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of one code before the entropy stage; one where a format is not named."""
_WEIGHT = 1.0
"""Of decode_accumulate. Sums grow from pass to pass and stay far from overflow."""
_PIECE_VALUES = 1 << 20


def _on_threads(function: Call, threads: int) -> Call:
    # One thread is the default of the calls, and naming it costs Python a microsecond of a chunk's
    # eighteen.
    return function if threads == 1 else cast("Call", partial(function, threads=threads))


def pieces(values: Vector, spec: CodecSpec) -> Iterator[slice]:
    """Slices of a vector (n,) that end where chunks end, so that runs are those of the frames."""
    step = max(1, _PIECE_VALUES // spec.chunk_values) * spec.chunk_values
    for start in range(0, values.size, step):
        yield slice(start, min(start + step, values.size))


class Chunks:
    """A vector (n,) cut into frames of one or more chunks.

    `outputs` are two vectors (n,): what the frames decode to, and what they are added to.
    """

    def __init__(
        self,
        codec: Implementation,
        values: Vector,
        outputs: tuple[Vector, Vector],
        spec: CodecSpec,
        *,
        chunks_in_frame: int = 1,
        threads: int = 1,
    ) -> None:
        self.codec, self.values, self.spec = codec, values, spec
        self.out, accumulator = outputs
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
        """Return the number of chunks in each mode."""
        infos = [info(frame) for frame in self.frames]
        counts = {
            "coded": sum(one.coded_chunks for one in infos),
            "raw_codes": sum(one.raw_code_chunks for one in infos),
            "raw_fp32": sum(one.raw_fp32_chunks for one in infos),
            "constant": sum(one.constant_chunks for one in infos),
        }
        return {mode: count for mode, count in counts.items() if count}


def quality(chunks: Chunks) -> dict[str, Any]:
    """Size and error; decodes to `out`."""
    chunks.decode()
    values, out = chunks.values, chunks.out
    squares, errors = 0.0, 0.0
    for part in pieces(values, chunks.spec):
        true = values[part].astype(np.float64)
        squares += float(true @ true)
        true -= out[part]
        errors += float(true @ true)
    bits = 8 * chunks.frame_bytes / values.size
    return {
        "bits_per_value": round(bits, 4),
        "ratio_to_fp32": round(32 / bits, 3),
        "relative_l2": float(f"{(errors / squares) ** 0.5:.4g}") if squares else 0.0,
        "chunks": chunks.modes(),
    }


class TensorBench:
    """Measures one tensor. `outputs` are two vectors (n,), given because every tensor uses them."""

    def __init__(
        self,
        tensor: str,
        values: Vector,
        outputs: tuple[Vector, Vector],
        limits: MemoryLimits,
        codec: Implementation,
        *,
        measure: Measure,
    ) -> None:
        self.tensor, self.values, self.codec = tensor, values, codec
        self.outputs, self.limits, self.measure = outputs, limits, measure

    def chunks(self, number_format: str, *, chunks_in_frame: int = 1, threads: int = 1) -> Chunks:
        """Encode once."""
        self.outputs[1].fill(0)
        return Chunks(
            self.codec,
            self.values,
            self.outputs,
            CodecSpec(format=number_format),
            chunks_in_frame=chunks_in_frame,
            threads=threads,
        )

    def row(self, number_format: str) -> dict[str, Any]:
        """The codec and the machine's limits in turns."""
        chunks = self.chunks(number_format)
        facts = quality(chunks)
        rounds = self.measure(
            {
                **self.limits.actions(),
                "encode": chunks.encode,
                "decode": chunks.decode,
                "accumulate": chunks.accumulate,
            }
        )
        size, symbol_share = self.values.nbytes, _CODE_BYTES.get(number_format, 1) / 4
        row: dict[str, Any] = {
            **self.head("tensor", number_format),
            "implementation": self.codec.name,
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
        row |= self.limits.fields(rounds) | facts
        return row | {
            "spread": max(spreads),
            "memcpy_spread": rounds.spread("memcpy"),
            **self.tail(rounds),
        }

    def threads_row(self, number_format: str) -> dict[str, Any]:
        """The codec's own threads in turns: one, two, and `all_threads` where there are more cores.

        On one frame of the whole vector, by the clock on the wall, and beside them a plain copy.
        """
        whole = -(-self.values.size // CodecSpec().chunk_values)
        counts = {"one": 1, "two": 2}
        if cores() > 2:
            counts["all"] = min(cores(), MAXIMUM_THREADS)
        actions: dict[str, Action] = {}
        for word, threads in counts.items():
            chunks = self.chunks(number_format, chunks_in_frame=whole, threads=threads)
            actions[f"encode {word}"], actions[f"decode {word}"] = chunks.encode, chunks.decode
            actions[f"memcpy {word}"] = self.limits.copy_by(threads)
        rounds = self.measure(actions, by_wall_clock=True)
        size = self.values.nbytes
        row = self.head("threads", number_format) | {"all_threads": max(counts.values())}
        for name in ("encode", "decode", "memcpy"):
            row[f"{name}_one_gb_s"] = rounds.gb_s(f"{name} one", size)
            for word in list(counts)[1:]:
                row[f"{name}_{word}_gb_s"] = rounds.gb_s(f"{name} {word}", size)
                row[f"{name}_{word}_over_one"] = rounds.ratio(f"{name} {word}", f"{name} one")
                row[f"{name}_{word}_spread"] = rounds.spread(f"{name} {word}")
        return row | self.tail(rounds)

    def head(self, kind: str, number_format: str) -> dict[str, Any]:
        """Return the first fields of every row of this tensor."""
        return {
            "bench": "codec",
            "row": kind,
            "tensor": self.tensor,
            "format": number_format,
            "values": self.values.size,
        }

    @staticmethod
    def tail(rounds: Rounds) -> dict[str, Any]:
        """Return the last fields of every row: about the rounds."""
        return {
            "repeats": rounds.count,
            "waited_share": rounds.waited_share,
            "core_rate": rounds.core_rate,
            "undisturbed_share": rounds.undisturbed_share,
            "rounds_left_out": rounds.left_out,
            "load_1m": round(os.getloadavg()[0], 2),
        }
