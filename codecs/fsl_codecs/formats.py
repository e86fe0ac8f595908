"""Number formats: fp32 values to codes and back, as pure integer and exactly rounded arithmetic.

    fp32   the 32 bits themselves, lossless
    bf16   the upper 16 bits after rounding to nearest, ties to even
    e4m3   OCP 8-bit float with 4 exponent and 3 mantissa bits (e4m3fn: no infinities, largest 448)
    e5m2   OCP 8-bit float with 5 exponent and 2 mantissa bits (IEEE-like, largest finite 57344)
    uniform  integers times a step (module `uniform`)

The two 8-bit floats have one scale per run of values, a power of two stored as an E8M0 byte b, for
2**(b - 127)
(OCP Microscaling Formats v1.0, section 5.4.1). The scale is the smallest one that brings the run's
largest magnitude to at most the format's largest finite value, but never so small that the smallest
code would decode to a subnormal fp32 number. Dividing by it and multiplying with it are exact in
fp32 (quotients that underflow are far below half of the smallest code). So the only rounding is the
cast to 8 bits, and decoding gives the same bits where subnormals are flushed to zero.

Functions here take finite values below the format's `escape_magnitude`; the codec sends any other
value as raw fp32.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from .errors import CodecUsageError

Float32Array = npt.NDArray[np.float32]
Values = Float32Array | npt.NDArray[np.uint16]
"""fp32 values, or the 16 bits of bf16 ones."""
ByteArray = npt.NDArray[np.uint8]
WordArray = npt.NDArray[np.unsignedinteger[Any]]

MAGNITUDE_MASK: Final = np.uint32(0x7FFFFFFF)
FIRST_NONFINITE: Final = 0x7F800000
FP32_MANTISSA_BITS: Final = 23
FP32_BIAS: Final = 127


@frozen
class Float8:
    """An 8-bit float format: sign, exponent, mantissa. The largest significand is 1.75."""

    mantissa_bits: int
    exponent_bias: int
    largest_exponent: int
    special_code: int
    """First magnitude code that is not a finite number."""

    @property
    def lowest_scale(self) -> int:
        """Smallest E8M0 byte in use: with it, the smallest subnormal code means 2**-126."""
        return self.exponent_bias + self.mantissa_bits

    @property
    def highest_scale(self) -> int:
        """Largest E8M0 byte in use, that of a block with a value of almost 2**128."""
        return 255 - self.largest_exponent


@frozen
class Split:
    """The division of a code word into planes of at most 8 bits, from the top bit down.

    `rotate` first moves the sign below the other bits, so that exponents stand at the top.
    `group` consecutive codes become one symbol of the only plane (`groups`). Of a `sparse` split
    these are the planes of the codes that are not zero (`sparse`); it is a format's last.
    """

    rotate: bool
    widths: tuple[int, ...]
    group: int = 1
    sparse: bool = False


@frozen
class Format:
    """One number format of the frame."""

    name: str
    wire_id: int
    code_bits: int
    splits: tuple[Split, ...]
    escape_magnitude: int
    """fp32 bits of the smallest magnitude that would decode to infinity or NaN.

    2**31, which no value reaches, for the lossless format.
    """
    float8: Float8 | None = field(default=None)

    @property
    def zero_code(self) -> int:
        """The code word of +0.0."""
        return 128 if self.name == "uniform" else 0

    @property
    def code_bytes(self) -> int:
        """Bytes of one code."""
        return self.code_bits // 8


# The sign is the last bit of the raw plane, or the first of the coded one, or all is one alphabet.
_SPARSE: Final = Split(False, (8,), sparse=True)
_FP8_SPLITS: Final = (Split(True, (6, 2)), Split(False, (6, 2)), Split(False, (8,)), _SPARSE)
_UNIFORM_SPLITS: Final = (
    Split(False, (6, 2)), Split(False, (8,)), Split(False, (6,), 2), Split(False, (8,), 4), _SPARSE,
)  # fmt: skip
_WORD_SPLITS: Final = {
    planes: (Split(True, (8,) * planes), Split(True, (8,) * planes, sparse=True))
    for planes in (2, 4)
}

FORMATS: Final = {
    "fp32": Format("fp32", 0, 32, _WORD_SPLITS[4], 1 << 31),
    "bf16": Format("bf16", 1, 16, _WORD_SPLITS[2], 0x7F7F8000),
    "e4m3": Format("e4m3", 2, 8, _FP8_SPLITS, 0x7F780000, Float8(3, 7, 8, 0x7F)),
    "e5m2": Format("e5m2", 3, 8, _FP8_SPLITS, 0x7F700000, Float8(2, 15, 15, 0x7C)),
    "uniform": Format("uniform", 4, 8, _UNIFORM_SPLITS, 0x7B800000),
}
FORMATS_BY_WIRE_ID: Final = {
    number_format.wire_id: number_format for number_format in FORMATS.values()
}


def format_named(name: str) -> Format:
    """The format of that name; CodecUsageError lists the known ones."""
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        raise CodecUsageError(f"unknown format {name!r}: use one of {', '.join(FORMATS)}") from None


def bfloat16_codes(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """Round fp32 bits (n,) of finite values to bf16 codes (n,), to nearest, ties to even."""
    ties_to_even = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + ties_to_even) >> np.uint32(16)).astype(np.uint16)


def bfloat16_bits(codes: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    """fp32 bit patterns (n,) of bf16 codes (n,); exact for all 65,536 codes."""
    return codes.astype(np.uint32) << np.uint32(16)


def float8_codes(scaled: Float32Array, kind: Float8) -> ByteArray:
    """Round fp32 values, already divided by their scale, to 8-bit codes of the same shape.

    To nearest, ties to even. Magnitudes must not round beyond the largest finite code.
    """
    bits = scaled.view(np.uint32)
    magnitude = bits & MAGNITUDE_MASK
    shift = FP32_MANTISSA_BITS - kind.mantissa_bits
    # Normal results: add just under half a step, plus the last kept bit so that ties go to even,
    # and drop the rest.
    ties_to_even = (magnitude >> np.uint32(shift)) & np.uint32(1)
    rounded = (magnitude + np.uint32((1 << (shift - 1)) - 1) + ties_to_even) >> np.uint32(shift)
    rounded -= np.uint32((FP32_BIAS - kind.exponent_bias) << kind.mantissa_bits)
    # Subnormal results are multiples of one step: adding the power of two whose last mantissa bit
    # is worth that step lets the fp32 adder do the rounding.
    smallest_exponent = 1 - kind.exponent_bias
    adder = np.float32(2.0 ** (smallest_exponent - kind.mantissa_bits + FP32_MANTISSA_BITS))
    stepped = (magnitude.view(np.float32) + adder).view(np.uint32) - adder.view(np.uint32)
    is_normal = magnitude >= np.uint32((FP32_BIAS + smallest_exponent) << FP32_MANTISSA_BITS)
    codes = np.where(is_normal, rounded, stepped)
    codes |= (bits >> np.uint32(24)) & np.uint32(0x80)
    return codes.astype(np.uint8)


def float8_values(kind: Float8) -> Float32Array:
    """The fp32 value of each of the 256 codes, before scaling; NaN or infinity if not finite."""
    magnitudes = np.arange(128)
    exponents = magnitudes >> kind.mantissa_bits
    mantissas = magnitudes & ((1 << kind.mantissa_bits) - 1)
    significands = np.where(exponents > 0, mantissas + (1 << kind.mantissa_bits), mantissas)
    powers = np.maximum(exponents, 1) - kind.exponent_bias - kind.mantissa_bits
    values = np.ldexp(significands.astype(np.float32), powers).astype(np.float32)
    values[kind.special_code :] = np.nan
    if kind.special_code & ((1 << kind.mantissa_bits) - 1) == 0:
        values[kind.special_code] = np.inf
    return np.concatenate([values, -values])


_FLOAT8_VALUES: Final = {
    number_format.name: float8_values(number_format.float8)
    for number_format in FORMATS.values()
    if number_format.float8 is not None
}


def run_scales(magnitudes: npt.NDArray[np.uint32], kind: Float8) -> ByteArray:
    """E8M0 bytes (runs,) for runs of fp32 magnitude bit patterns (runs, run_values).

    With the run's largest magnitude m * 2**x, 1 <= m < 2, the scale is 2**(x - largest_exponent),
    or twice that if m > 1.75, but at least the format's lowest.
    """
    largest = magnitudes.max(axis=1)
    # Adding 0x1FFFFF carries into the exponent exactly when the significand is above 1.75.
    exponents = (largest + np.uint32(0x1FFFFF)) >> np.uint32(FP32_MANTISSA_BITS)
    offset = kind.largest_exponent
    lowest = np.uint32(kind.lowest_scale + offset)
    scales: ByteArray = (np.maximum(exponents, lowest) - np.uint32(offset)).astype(np.uint8)
    return scales


def scale_values(scales: ByteArray) -> Float32Array:
    """fp32 values 2**(b - 127) of E8M0 bytes b, 1 <= b <= 254."""
    return (scales.astype(np.uint32) << np.uint32(FP32_MANTISSA_BITS)).view(np.float32)


def rows_of(values: Float32Array, run_values: int) -> Float32Array:
    """Values (n,) as runs (ceil(n / run_values), run_values), the last padded with zeros."""
    runs = -(-values.size // run_values)
    if values.size == runs * run_values:
        return values.reshape(runs, run_values)
    padded = np.zeros(runs * run_values, dtype=np.float32)
    padded[: values.size] = values
    return padded.reshape(runs, run_values)


def quantise_float8(
    values: Float32Array, number_format: Format, run_values: int
) -> tuple[ByteArray, ByteArray]:
    """Codes (n,) and E8M0 scales (ceil(n / run_values),) of finite values (n,)."""
    assert number_format.float8 is not None
    rows = rows_of(values, run_values)
    scales = run_scales(rows.view(np.uint32) & MAGNITUDE_MASK, number_format.float8)
    # The byte 254 - b stands for 1 / 2**(b - 127).
    inverse = scale_values(np.uint8(254) - scales)
    with np.errstate(under="ignore"):
        scaled = rows * inverse[:, None]
        codes = float8_codes(scaled, number_format.float8)
    return codes.reshape(-1)[: values.size], scales


def dequantise_float8(
    codes: ByteArray, scales: ByteArray, number_format: Format, run_values: int, out: Float32Array
) -> None:
    """Write scale * value of codes (n,) into out (n,): one exact fp32 multiplication per value."""
    np.take(_FLOAT8_VALUES[number_format.name], codes, out=out, mode="clip")
    scale_runs(out, scale_values(scales), run_values)


def scale_runs(values: Float32Array, factors: Float32Array, run_values: int) -> None:
    """Multiply each run of values (n,), in place, by its factor (ceil(n / run_values),)."""
    whole = values.size - values.size % run_values
    # Hostile scales may overflow; the caller checks the result for finite values.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rows = values[:whole].reshape(-1, run_values)
        rows *= factors[: len(rows), None]
        if whole < values.size:
            values[whole:] *= factors[-1]
