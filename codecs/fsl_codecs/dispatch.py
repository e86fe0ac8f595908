"""Which implementation does the work, decided once, at import; and the package's public functions on top of it.

    avx512, avx2, scalar   the native codec with the kernels of an instruction set
    numpy                  the reference, always there

The environment variable FSL_CODECS_PATH names one; "auto", like leaving it out, takes the first that this machine and this install
have. All give the same bytes and values.
"""

import os
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
from attrs import frozen

from . import codec
from .books import Codebook
from .codec import Values, bound, check_values, codebooks_of
from .errors import CodecUsageError
from .formats import Float32Array
from .frame import Buffer, CodecSpec, FrameInfo, Limits, frame_bytes_view, parse_header
from .native import NativeCodec, load

VARIABLE: Final = "FSL_CODECS_PATH"
NAMES: Final = ("avx512", "avx2", "scalar", "numpy")
MAXIMUM_THREADS: Final = 64
_AUTO: Final = "auto"
_DEFAULT_SPEC: Final = CodecSpec()
_DEFAULT_LIMITS: Final = Limits()


class Implementation(Protocol):
    """What every implementation can do; the functions below document it."""

    name: str

    def encode_into(
        self,
        values: Values,
        out: Buffer,
        spec: CodecSpec = _DEFAULT_SPEC,
        *,
        reference: Float32Array | None = None,
        residual: Float32Array | None = None,
        books: Sequence[Codebook] = (),
        threads: int = 1,
    ) -> int:
        """Write a frame, return its size in bytes."""

    def decode_into(
        self,
        frame: Buffer,
        out: Values,
        limits: Limits | None = None,
        *,
        books: Sequence[Codebook] = (),
        threads: int = 1,
    ) -> int:
        """Write a frame's values, return their number."""

    def decode_accumulate(
        self,
        frame: Buffer,
        accumulator: Float32Array,
        weight: float,
        limits: Limits | None = None,
        *,
        books: Sequence[Codebook] = (),
        threads: int = 1,
    ) -> int:
        """Add weight times a frame's values, return their number."""

    def info(self, frame: Buffer, limits: Limits | None = None) -> FrameInfo:
        """Say what a frame holds."""


class NumpyCodec:
    """The reference, on one thread however many are allowed."""

    name = "numpy"

    def encode_into(
        self,
        values: Values,
        out: Buffer,
        spec: CodecSpec = _DEFAULT_SPEC,
        *,
        reference: Float32Array | None = None,
        residual: Float32Array | None = None,
        books: Sequence[Codebook] = (),
        threads: int = 1,
    ) -> int:
        """See `fsl_codecs.encode_into`."""
        _check_threads(threads)
        return codec.encode_into(
            values, out, spec, reference=reference, residual=residual, books=books
        )

    def decode_into(
        self,
        frame: Buffer,
        out: Values,
        limits: Limits | None = None,
        *,
        books: Sequence[Codebook] = (),
        threads: int = 1,
    ) -> int:
        """See `fsl_codecs.decode_into`."""
        _check_threads(threads)
        return codec.decode_into(frame, out, limits, books=books)

    def decode_accumulate(
        self,
        frame: Buffer,
        accumulator: Float32Array,
        weight: float,
        limits: Limits | None = None,
        *,
        books: Sequence[Codebook] = (),
        threads: int = 1,
    ) -> int:
        """See `fsl_codecs.decode_accumulate`."""
        _check_threads(threads)
        return codec.decode_accumulate(frame, accumulator, weight, limits, books=books)

    def info(self, frame: Buffer, limits: Limits | None = None) -> FrameInfo:
        """See `fsl_codecs.info`."""
        return codec.info(frame, limits)


def _check_threads(threads: int) -> None:
    if not 1 <= threads <= MAXIMUM_THREADS:
        raise CodecUsageError(f"threads is {threads}: it must be from 1 to {MAXIMUM_THREADS}")


@frozen
class Choice:
    """The implementation in use, and why this one, in one sentence."""

    chosen: Implementation
    reason: str


_module, _missing = load()


def available() -> tuple[str, ...]:
    """The implementations that this machine and this install have, best first."""
    native: tuple[str, ...] = () if _module is None else _module.paths()
    return (*native, "numpy")


def implementation_named(name: str) -> Implementation:
    """An implementation to be used beside the chosen one, for tests and measurements; CodecUsageError when it is not there."""
    if name == "numpy":
        return NumpyCodec()
    if name not in NAMES:
        raise CodecUsageError(f"no codec implementation {name!r}: use one of {', '.join(NAMES)}")
    if _module is None:
        raise CodecUsageError(f"no codec implementation {name}: {_missing}")
    if name not in available():
        raise CodecUsageError(
            f"no codec implementation {name} on this machine, only {', '.join(available())}"
        )
    return NativeCodec(_module, name)


def choose(wanted: str) -> Choice:
    """What FSL_CODECS_PATH = wanted means here; CodecUsageError names the variable when that is impossible."""
    if wanted not in {"", _AUTO}:
        try:
            return Choice(implementation_named(wanted), f"{VARIABLE}={wanted}")
        except CodecUsageError as error:
            raise CodecUsageError(f"{VARIABLE}={wanted}: {error}") from None
    best = available()[0]
    reason = _missing if _module is None else "the best that this machine has"
    return Choice(implementation_named(best), reason)


_choice: Final = choose(os.environ.get(VARIABLE, _AUTO))
_chosen: Final = _choice.chosen


def implementation() -> str:
    """The name of the implementation in use: "avx512", "avx2", "scalar" or "numpy"."""
    return _chosen.name


def choice() -> Choice:
    """The implementation in use, and why."""
    return _choice


def encode_into(
    values: Values,
    out: Buffer,
    spec: CodecSpec = _DEFAULT_SPEC,
    *,
    reference: Float32Array | None = None,
    residual: Float32Array | None = None,
    books: Sequence[Codebook] = (),
    threads: int = 1,
) -> int:
    """Encode values (n,), float32 or the uint16 bits of bf16, into the writable buffer `out`; returns the frame's size in bytes.

    With a reference (n,) float32, `values - reference` is encoded. With a residual (n,) float32 (error feedback; Seide et al.,
    "1-bit stochastic gradient descent", 2014), the residual is added first and then holds what the frame fails to give. `books` are those that
    the frame may refer to by digest. `out` must hold bound(n, spec) bytes; nothing may overlap. CodecUsageError otherwise.
    The chunks of the frame are shared out among up to `threads` threads; the bytes are the same.
    """
    return _chosen.encode_into(
        values, out, spec, reference=reference, residual=residual, books=books, threads=threads
    )


def encode(
    values: Values, spec: CodecSpec = _DEFAULT_SPEC, *, books: Sequence[Codebook] = ()
) -> bytes:
    """`encode_into` into fresh bytes."""
    check_values(values, allow_bfloat16=True)
    out: Any = np.empty(bound(values.size, spec), dtype=np.uint8)
    size = encode_into(values, out, spec, books=books)
    encoded: bytes = out[:size].tobytes()
    return encoded


def decode_into(
    frame: Buffer,
    out: Values,
    limits: Limits | None = None,
    *,
    books: Sequence[Codebook] = (),
    threads: int = 1,
) -> int:
    """Decode a frame into the first n values of out, 1-D of at least n; returns n.

    `out` is float32, or uint16 for bf16 bits: then values are rounded to nearest, ties to even. FrameError for bytes that are no valid frame,
    LimitError when `out` or `limits` is too small; what `out` then holds is undefined. CodecUsageError when frame and `out` overlap.
    """
    return _chosen.decode_into(frame, out, limits, books=books, threads=threads)


def decode(
    frame: Buffer, limits: Limits = _DEFAULT_LIMITS, *, books: Sequence[Codebook] = ()
) -> Float32Array:
    """`decode_into` into a fresh float32 array (n,), allocated after `limits` were checked."""
    header = parse_header(frame_bytes_view(frame), limits)
    out = np.empty(header.values, dtype=np.float32)
    decode_into(frame, out, limits, books=books)
    return out


def decode_accumulate(
    frame: Buffer,
    accumulator: Float32Array,
    weight: float,
    limits: Limits | None = None,
    *,
    books: Sequence[Codebook] = (),
    threads: int = 1,
) -> int:
    """accumulator[:n] += float32(weight) * decoded: one fp32 multiplication, then one fp32 addition, never fused.

    Returns n. A bad frame leaves the accumulator as it was. Errors as in `decode_into`; CodecUsageError for a weight that is no
    finite fp32 number.
    """
    return _chosen.decode_accumulate(
        frame, accumulator, weight, limits, books=books, threads=threads
    )


def info(frame: Buffer, limits: Limits | None = None) -> FrameInfo:
    """What a frame holds, from its headers; all checksums are verified, payloads are not decoded."""
    return _chosen.info(frame, limits)


__all__ = [
    "Choice",
    "Implementation",
    "available",
    "bound",
    "choice",
    "choose",
    "codebooks_of",
    "decode",
    "decode_accumulate",
    "decode_into",
    "encode",
    "encode_into",
    "implementation",
    "implementation_named",
    "info",
]
