"""Uniform codes: integers q = round(x / step), with a step per run from its root mean square.

With an entropy coder, a uniform grid needs fewer bits than a floating-point one at the same mean
square error (entropy-coded scalar quantization; Gish and Pierce, "Asymptotically efficient
quantizing", 1968). Steps are powers of 2**(1/4), numbered by k: step 2**(k/4). A value more than
127 steps from zero gets the code `ESCAPE` and is sent as fp32.

The sum of squares is taken in a fixed order, so that every implementation finds the same step;
docs/WIRE.md has the arithmetic.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from .formats import (
    FP32_BIAS,
    FP32_MANTISSA_BITS,
    MAGNITUDE_MASK,
    ByteArray,
    Float32Array,
    rows_of,
    scale_runs,
)

ESCAPE: Final = 0
"""The code of values in the list of escaped values."""
ZERO_CODE: Final = 128
LARGEST: Final = 127
LOWEST_STEP: Final = -504
HIGHEST_STEP: Final = 480
STEP_OFFSET: Final = 512
"""Added to k on the wire."""
MAXIMUM_STEP_LOG2: Final = 40
MINIMUM_STEP_LOG2: Final = -8

_LANES: Final = 16
_QUARTER_POWERS: Final = np.array([0x3F800000, 0x3F9837F0, 0x3FB504F3, 0x3FD744FD], dtype=np.int64)
# Mantissas of 2**(1/4) and 2**(3/4): between them a sum of squares rounds up to the next half
# octave.
_FIRST_QUARTER: Final = 0x1837F0
_THIRD_QUARTER: Final = 0x5744FD

StepArray = npt.NDArray[np.int64]


def power_values(quarters: StepArray) -> Float32Array:
    """fp32 values 2**(k / 4), as the table rounds them, for k (runs,) from -504 to 504."""
    bits: StepArray = _QUARTER_POWERS[quarters & 3] + ((quarters >> 2) << FP32_MANTISSA_BITS)
    values: Float32Array = bits.astype(np.uint32).view(np.float32)
    return values


def _mean_square_quarters(rows: Float32Array, exponents: npt.NDArray[np.int64]) -> StepArray:
    """4 * log2 of each run's root mean square, rounded.

    exponents: of the runs' largest magnitudes.
    """
    to_one = ((254 - exponents) << FP32_MANTISSA_BITS).astype(np.uint32).view(np.float32)
    lanes = np.zeros((len(rows), _LANES), dtype=np.float32)
    for start in range(0, rows.shape[1], _LANES):
        scaled = rows[:, start : start + _LANES] * to_one[:, None]
        lanes += scaled * scaled
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    bits = lanes[:, 0].view(np.uint32).astype(np.int64)
    mantissas = bits & ((1 << FP32_MANTISSA_BITS) - 1)
    log2_squares = (bits >> FP32_MANTISSA_BITS) - FP32_BIAS
    log2_run_values = rows.shape[1].bit_length() - 1
    quarters: StepArray = 4 * (exponents - FP32_BIAS) + 2 * (log2_squares - log2_run_values)
    return quarters + (mantissas >= _FIRST_QUARTER) + (mantissas >= _THIRD_QUARTER)


def quantise(
    values: Float32Array, run_values: int, step_log2: int, *, sparse: bool = False
) -> tuple[ByteArray, StepArray]:
    """Codes (n,) and k (runs,) of values (n,), which are finite and below 2**120.

    In a sparse chunk, a run of which c of B values are not zero has a step that is larger by
    sqrt(B / c), about: that of the root mean square of these values.
    """
    rows = rows_of(values, run_values)
    largest = (rows.view(np.uint32) & MAGNITUDE_MASK).max(axis=1).astype(np.int64)
    exponents = np.maximum(largest >> FP32_MANTISSA_BITS, 1)
    with np.errstate(under="ignore"):
        quarters = _mean_square_quarters(rows, exponents)
        steps = np.clip(quarters - step_log2, LOWEST_STEP, HIGHEST_STEP)
        if sparse:
            steps = np.minimum(steps + _coarser_by(rows), HIGHEST_STEP)
        rounded = np.rint(rows * power_values(-steps)[:, None]).reshape(-1)[: values.size]
    codes = np.where(np.abs(rounded) <= LARGEST, rounded + ZERO_CODE, ESCAPE).astype(np.uint8)
    return codes, steps


def _coarser_by(rows: Float32Array) -> StepArray:
    """The largest d (runs,) with c * c * 2**d <= B * B, of rows (runs, B) with c nonzero values."""
    counts = np.maximum(np.count_nonzero(rows, axis=1), 1)
    # frexp gives the number of bits of an integer.
    more: StepArray = 2 * (rows.shape[1].bit_length() - 1) - np.frexp(counts * counts - 1)[1]
    return more


def dequantise(codes: ByteArray, steps: StepArray, run_values: int, out: Float32Array) -> None:
    """Write (code - 128) * step for codes (n,) into out (n,).

    The caller replaces the values of escaped ones.
    """
    np.subtract(codes, np.float32(ZERO_CODE), out=out, dtype=np.float32)
    scale_runs(out, power_values(steps), run_values)
