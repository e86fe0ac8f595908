"""Rows about what the codec does in the same pass as coding.

It subtracts a reference, carries a residual, reads and writes bf16. Beside each stands the same
work without it, chunk by chunk with temporaries of a chunk, which stay in the cache: NumPy's
arithmetic, torch's cast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fsl_codecs import CodecSpec, bound, new_vector

if TYPE_CHECKING:
    from collections.abc import Mapping

    from codec_rows import TensorBench
    from codec_timing import Action, Rounds
    from numpy.typing import NDArray

    from fsl_codecs.dispatch import Implementation

    Vector = NDArray[np.float32]

VARIANTS = ("reference", "residual", "reference and residual", "from bf16", "to bf16")


class FusedVariants:
    """The coded values (n,): the difference of a minuend and a reference, rounded."""

    def __init__(self, codec: Implementation, values: Vector, spec: CodecSpec) -> None:
        self._codec, self._spec = codec, spec
        reference = new_vector(values.size)
        reference[:] = np.random.default_rng(0).standard_normal(values.size, np.float32)
        self._starts = range(0, values.size, spec.chunk_values)
        self._values = self._cut(values)
        self._references = self._cut(reference)
        self._minuends = self._cut(values + reference)
        self.residuals = self._cut(np.zeros_like(values))
        self._outs = self._cut(new_vector(values.size))
        self._narrow = self._cut(
            torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
        )
        self.narrow_outs = self._cut(np.zeros(values.size, np.uint16))
        largest = min(spec.chunk_values, values.size)
        self._temporary, self._other = (new_vector(largest) for _ in range(2))
        self.buffer = bytearray(bound(largest, spec))
        self._frames = []
        for part in self._values:
            size = codec.encode_into(part, self.buffer, spec)
            self._frames.append(bytes(memoryview(self.buffer)[:size]))

    def actions(self) -> Mapping[str, Action]:
        """One pass each: plain coding, each variant, and the variant in several passes."""
        return {
            "encode": self._encode,
            "reference": self._with_reference,
            "reference, passes": self._with_reference_by_passes,
            "residual": self._with_residual,
            "residual, passes": self._with_residual_by_passes,
            "reference and residual": self._with_both,
            "reference and residual, passes": self._with_both_by_passes,
            "from bf16": self._from_bfloat16,
            "from bf16, passes": self._from_bfloat16_by_passes,
            "decode": self._decode,
            "to bf16": self._to_bfloat16,
            "to bf16, passes": self._to_bfloat16_by_passes,
        }

    def fields(self, rounds: Rounds, fp32_bytes: int) -> list[dict[str, Any]]:
        """GB/s of fp32, whatever is read: each variant, plain coding, and the passes."""
        found = []
        for variant in VARIANTS:
            plain = "decode" if variant == "to bf16" else "encode"
            found.append(
                {
                    "variant": variant,
                    "plain_gb_s": rounds.gb_s(plain, fp32_bytes),
                    "fused_gb_s": rounds.gb_s(variant, fp32_bytes),
                    "passes_gb_s": rounds.gb_s(f"{variant}, passes", fp32_bytes),
                    "fused_over_plain": rounds.ratio(variant, plain),
                    "fused_over_passes": rounds.ratio(variant, f"{variant}, passes"),
                    "spread": rounds.spread(variant),
                }
            )
        return found

    def _cut(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        return [vector[start : start + self._spec.chunk_values] for start in self._starts]

    def _encode(self) -> None:
        for part in self._values:
            self._codec.encode_into(part, self.buffer, self._spec)

    def _with_reference(self) -> None:
        for part, reference in zip(self._minuends, self._references, strict=True):
            self._codec.encode_into(part, self.buffer, self._spec, reference=reference)

    def _with_reference_by_passes(self) -> None:
        for part, reference in zip(self._minuends, self._references, strict=True):
            difference = self._temporary[: part.size]
            np.subtract(part, reference, out=difference)
            self._codec.encode_into(difference, self.buffer, self._spec)

    def _with_residual(self) -> None:
        for part, residual in zip(self._values, self.residuals, strict=True):
            self._codec.encode_into(part, self.buffer, self._spec, residual=residual)

    def _with_residual_by_passes(self) -> None:
        for part, residual in zip(self._values, self.residuals, strict=True):
            wanted = self._temporary[: part.size]
            np.add(part, residual, out=wanted)
            self._leave(wanted, residual)

    def _with_both(self) -> None:
        parts = zip(self._minuends, self._references, self.residuals, strict=True)
        for part, reference, residual in parts:
            self._codec.encode_into(
                part, self.buffer, self._spec, reference=reference, residual=residual
            )

    def _with_both_by_passes(self) -> None:
        parts = zip(self._minuends, self._references, self.residuals, strict=True)
        for part, reference, residual in parts:
            wanted = self._temporary[: part.size]
            np.subtract(part, reference, out=wanted)
            np.add(wanted, residual, out=wanted)
            self._leave(wanted, residual)

    def _leave(self, wanted: Vector, residual: Vector) -> None:
        size = self._codec.encode_into(wanted, self.buffer, self._spec)
        got = self._other[: wanted.size]
        self._codec.decode_into(memoryview(self.buffer)[:size], got)
        np.subtract(wanted, got, out=residual)

    def _from_bfloat16(self) -> None:
        for part in self._narrow:
            self._codec.encode_into(part, self.buffer, self._spec)

    def _from_bfloat16_by_passes(self) -> None:
        for part in self._narrow:
            wide = self._temporary[: part.size]
            torch.from_numpy(wide).copy_(torch.from_numpy(part).view(torch.bfloat16))
            self._codec.encode_into(wide, self.buffer, self._spec)

    def _decode(self) -> None:
        for frame, part in zip(self._frames, self._outs, strict=True):
            self._codec.decode_into(frame, part)

    def _to_bfloat16(self) -> None:
        for frame, part in zip(self._frames, self.narrow_outs, strict=True):
            self._codec.decode_into(frame, part)

    def _to_bfloat16_by_passes(self) -> None:
        for frame, part in zip(self._frames, self.narrow_outs, strict=True):
            wide = self._temporary[: part.size]
            self._codec.decode_into(frame, wide)
            torch.from_numpy(part).view(torch.bfloat16).copy_(torch.from_numpy(wide))


def fused_rows(bench: TensorBench, number_format: str) -> list[dict[str, Any]]:
    """Each variant in the codec's pass, and in passes before and after it, in turns."""
    variants = FusedVariants(bench.codec, bench.values, CodecSpec(format=number_format))
    rounds = bench.measure(variants.actions())
    head, tail = bench.head("fused", number_format), bench.tail(rounds)
    return [{**head, **fields, **tail} for fields in variants.fields(rounds, bench.values.nbytes)]
