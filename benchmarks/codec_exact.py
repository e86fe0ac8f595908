"""What the codec must make of a vector, computed with torch and NumPy.

Codes, their entropy, and the decoded values. The codes of e4m3, e5m2 and bf16 are torch's casts of
values divided by the scales of docs/WIRE.md, section "Codes". Torch has no uniform cast; its codes
are those of the codec's NumPy code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen
from codec_rows import pieces

from fsl_codecs import info, uniform

if TYPE_CHECKING:
    from codec_rows import Chunks
    from numpy.typing import NDArray

    from fsl_codecs import CodecSpec

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
    """What counts as a symbol.

    fp32 has more words than any tensor has values, so its bytes are counted plane by plane.
    """
    return "the four bytes of the word, rotated left by one" if number_format == "fp32" else "codes"


def expected(values: NDArray[np.float32], spec: CodecSpec) -> Expected:
    """What a frame of values (n,) must hold; n at most a chunk, all values finite and moderate."""
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
