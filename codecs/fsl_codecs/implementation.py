"""What every implementation of the codec can do: the NumPy reference (`codec`) and the native one (`native`). All give the same bytes and values."""

from typing import Final, Protocol

from .formats import Float32Array, Values
from .frame import Buffer, CodecSpec, FrameInfo, Limits

DEFAULT_SPEC: Final = CodecSpec()


class Implementation(Protocol):
    """Frames from values, and back. Methods of implementations have their documentation from here."""

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
        """Encode values (n,), float32 or the uint16 bits of bf16, into the writable buffer `out`; returns the frame's size in bytes.

        With a reference (n,) float32, `values - reference` is encoded. With a residual (n,) float32 (error feedback; Seide et al.,
        "1-bit stochastic gradient descent", 2014), the residual is added first and then holds what the frame fails to give. `out` must hold
        bound(n, spec) bytes; nothing may overlap. CodecUsageError otherwise.
        The chunks of the frame are shared out among up to `threads` threads; the bytes are the same.
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
        """Decode a frame into the first n values of out, 1-D of at least n; returns n.

        `out` is float32, or uint16 for bf16 bits: then values are rounded to nearest, ties to even. FrameError for bytes that are no valid frame,
        LimitError when `out` or `limits` is too small; what `out` then holds is undefined. CodecUsageError when frame and `out` overlap.
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
        """accumulator[:n] += float32(weight) * decoded: one fp32 multiplication, then one fp32 addition, never fused.

        Returns n. A bad frame leaves the accumulator as it was. Errors as in `decode_into`; CodecUsageError for a weight that is no
        finite fp32 number.
        """
        ...

    def info(self, frame: Buffer, limits: Limits | None = None) -> FrameInfo:
        """What a frame holds, from its headers; all checksums are verified, payloads are not decoded."""
        ...
