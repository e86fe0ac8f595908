"""The interface of the codec's implementations: the NumPy reference (`codec`) and `native`.

All give the same bytes and values.
"""

from typing import Final, Protocol

from .formats import Float32Array, Values
from .frame import Buffer, CodecSpec, FrameInfo, Limits

DEFAULT_SPEC: Final = CodecSpec()


class Implementation(Protocol):
    """Encodes and decodes frames. Implementations' methods are documented here."""

    name: str

    def encode_into(
        self,
        values: Values,
        out: Buffer,
        spec: CodecSpec = DEFAULT_SPEC,
        *,
        reference: Float32Array | None = None,
        residual: Float32Array | None = None,
        threads: int = 1,
    ) -> int:
        """Encode values (n,) into the writable buffer `out`; returns the frame's size in bytes.

        values: float32, or uint16 with the bits of bf16. With a reference (n,) float32,
        `values - reference` is encoded. With a residual (n,) float32 (error feedback; Seide et al.,
        "1-bit stochastic gradient descent", 2014), the residual is added before encoding and then
        holds the encoding error. `out` must hold bound(n, spec) bytes, and no two arrays may
        overlap; CodecUsageError otherwise. Up to `threads` threads share the frame's chunks; the
        bytes are the same.
        """
        ...

    def decode_into(
        self,
        frame: Buffer,
        out: Values,
        limits: Limits | None = None,
        *,
        threads: int = 1,
    ) -> int:
        """Decode a frame into the first n values of `out`, 1-D of at least n; returns n.

        `out` is float32, or uint16 for bf16 bits, rounded to nearest, ties to even. FrameError for
        an invalid frame, LimitError if `out` or `limits` is too small; `out` is then undefined.
        CodecUsageError if frame and `out` overlap.
        """
        ...

    def decode_accumulate(
        self,
        frame: Buffer,
        accumulator: Float32Array,
        weight: float,
        limits: Limits | None = None,
        *,
        threads: int = 1,
    ) -> int:
        """accumulator[:n] += float32(weight) * decoded; returns n.

        One fp32 multiplication, then one fp32 addition, never fused. A refused frame leaves the
        accumulator unchanged. Errors as in `decode_into`; CodecUsageError for a weight that is not
        a finite fp32 number.
        """
        ...

    def info(self, frame: Buffer, limits: Limits | None = None) -> FrameInfo:
        """A frame's header and modes. Verifies all checksums and does not decode payloads."""
        ...
