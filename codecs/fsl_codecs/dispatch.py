"""Chooses the implementation once, at import, and offers the package's public functions on it.

    avx512, avx2, scalar   the native codec with the kernels of an instruction set
    numpy                  the reference, always available

The environment variable FSL_CODECS_PATH names one. "auto", the default, takes the first that this
machine and this install have. All give the same bytes and values.
"""

import os
from typing import Any, Final

import numpy as np
from attrs import frozen

from .codec import NumpyCodec, bound, check_values
from .errors import CodecUsageError
from .formats import Float32Array, Values
from .frame import Buffer, CodecSpec, Limits, frame_bytes_view, parse_header
from .implementation import DEFAULT_SPEC, Implementation
from .native import NativeCodec, load
from .signs import Words, check_steps
from .signs import add_signs as numpy_add_signs
from .signs import sign_words as numpy_sign_words

VARIABLE: Final = "FSL_CODECS_PATH"
NAMES: Final = ("avx512", "avx2", "scalar", "numpy")
_AUTO: Final = "auto"
_DEFAULT_LIMITS: Final = Limits()


@frozen
class Choice:
    """The implementation in use, and the reason, in one sentence."""

    chosen: Implementation
    reason: str


_module, _missing = load()


def available() -> tuple[str, ...]:
    """The implementations that this machine and this install have, best first."""
    native: tuple[str, ...] = () if _module is None else _module.paths()
    return (*native, "numpy")


def implementation_named(name: str) -> Implementation:
    """An implementation other than the chosen one, for tests and measurements.

    CodecUsageError if this machine or install lacks it.
    """
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
    """The choice for FSL_CODECS_PATH = wanted; CodecUsageError if it is impossible here."""
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
_is_native: Final = _chosen.name != "numpy"


def implementation() -> str:
    """The name of the implementation in use: "avx512", "avx2", "scalar" or "numpy"."""
    return _chosen.name


def choice() -> Choice:
    """The implementation in use, and the reason."""
    return _choice


encode_into = _chosen.encode_into
decode_into = _chosen.decode_into
decode_accumulate = _chosen.decode_accumulate
info = _chosen.info


def encode(values: Values, spec: CodecSpec = DEFAULT_SPEC) -> bytes:
    """`encode_into` new bytes."""
    check_values(values, allow_bfloat16=True)
    out: Any = np.empty(bound(values.size, spec), dtype=np.uint8)
    size = encode_into(values, out, spec)
    encoded: bytes = out[:size].tobytes()
    return encoded


def decode(frame: Buffer, limits: Limits = _DEFAULT_LIMITS) -> Float32Array:
    """`decode_into` a new float32 array (n,), allocated after `limits` were checked."""
    header = parse_header(frame_bytes_view(frame), limits)
    out = np.empty(header.values, dtype=np.float32)
    decode_into(frame, out, limits)
    return out


def sign_words(seed: int, stream: int, first: int, count: int) -> Words:
    """Words `first` to `first + count` of the stream of a key: uint64 (count,).

    seed, stream: the key, 64 bits each. See `fsl_codecs.signs`.
    """
    if not _is_native:
        return numpy_sign_words(seed, stream, first, count)
    words = np.empty(count, np.uint64)
    _module.sign_words(seed, stream, first, words)
    return words


def add_signs(values: Float32Array, offset: int, keys: Words, steps: Float32Array) -> None:
    """Add each step times the signs of its key to `values`, in place, one step after the other.

    values: float32 (n,), the coordinates from `offset` on. keys: uint64 (steps, 2), pairs of seed
    and stream. steps: float32 (steps,). Raises CodecUsageError. See `fsl_codecs.signs`.
    """
    if not _is_native:
        numpy_add_signs(values, offset, keys, steps)
        return
    check_steps(keys, steps)
    _module.add_signs(values, offset, np.ascontiguousarray(keys), np.ascontiguousarray(steps))


__all__ = [
    "Choice",
    "Implementation",
    "add_signs",
    "available",
    "bound",
    "choice",
    "choose",
    "decode",
    "decode_accumulate",
    "decode_into",
    "encode",
    "encode_into",
    "implementation",
    "implementation_named",
    "info",
    "sign_words",
]
