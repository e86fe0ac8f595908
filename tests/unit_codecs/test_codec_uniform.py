"""Uniform codes: steps, rounding and escapes."""

import math
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_codecs import CodecSpec, decode, encode, info
from fsl_codecs.uniform import power_values, quantise

UNHURRIED = settings(deadline=None, max_examples=60)


def single(number):
    """Return a double rounded to fp32, as a double."""
    return struct.unpack("<f", struct.pack("<f", number))[0]


def power(quarters):
    """Return 2**(quarters / 4): the fractional part rounded to fp32, the rest exact."""
    return math.ldexp(single(2.0 ** (quarters % 4 / 4)), quarters // 4)


def test_steps_are_rounded_quarter_powers_of_two():
    """The table is part of the wire format: every step of a frame, and its inverse."""
    quarters = np.arange(-504, 505)
    expected = [power(k) for k in quarters.tolist()]
    assert power_values(quarters).tolist() == expected
    assert np.array([power(k) for k in range(4)], np.float32).view(np.uint32).tolist() == [
        0x3F800000,
        0x3F9837F0,
        0x3FB504F3,
        0x3FD744FD,
    ]


def gaussian(count):
    return np.random.default_rng(count).standard_normal(count).astype(np.float32)


def test_steps_end_where_the_format_says():
    """A step below 2**-126 would be subnormal; one above 2**120 cannot be chosen."""
    tiny = np.array([3e-45, 1e-45, 0, 2.0**-127], np.float32)
    assert quantise(tiny, 16, 14)[1].tolist() == [-504]
    assert decode(encode(tiny, CodecSpec("uniform", 16))).tolist() == [0, 0, 0, 0]
    below = np.float32(2.0**120) - np.float32(2.0**96)
    large = np.array([below, -below] * 8, np.float32)
    assert quantise(large, 16, 0)[1].tolist() == [480]


def test_values_from_two_to_the_120_on_go_as_they_are():
    """One such value, of either sign, makes its chunk raw fp32, and no other."""
    values = gaussian(3000)
    limit = np.float32(2.0**120)
    for large, raw in ((np.nextafter(limit, np.float32(0)), 0), (limit, 1), (-limit, 1)):
        values[1500] = large
        frame = encode(values, CodecSpec("uniform", 128, 1024))
        assert info(frame).raw_fp32_chunks == raw
        assert not info(frame).nonfinite
        back = decode(frame)
        assert back[1500] == large
        assert (back[1024:2048].tobytes() == values[1024:2048].tobytes()) == bool(raw)


def test_zero_is_positive_and_runs_of_zeros_follow_their_inner_block():
    """Only a constant chunk keeps -0.0; the step of a run of zeros widens nothing."""
    values = np.ones(16384 * 2, np.float32)
    values[1::2] = -1
    values[:256] = 0
    values[128:192] = -0.0
    values[16384:] = np.tile(np.array([0.0, -0.0], np.float32), 8192)
    codes, steps = quantise(values[:16384], 128, 14)
    assert set(codes.tolist()) == {128 - 11, 128, 128 + 11}
    assert steps[2:].tolist() == [-14] * 126
    back = decode(encode(values, CodecSpec("uniform")))
    assert not np.signbit(back[back == 0]).any()
    alone = np.full(100, -0.0, np.float32)
    assert np.signbit(decode(encode(alone, CodecSpec("uniform")))).all()


@pytest.mark.parametrize(
    ("quotient", "code"),
    [
        (0.5, 128),
        (1.5, 130),
        (2.5, 130),
        (-0.5, 128),
        (-1.5, 126),
        (126.5, 254),
        (127.0, 255),
        (127.49999, 255),
        (127.5, 0),
        (128.0, 0),
        (-127.0, 1),
        (-127.49999, 1),
        (-127.5, 0),
        (-128.0, 0),
    ],
)
def test_halves_go_to_even_and_127_is_the_last_code(quotient, code):
    """Ties, and both sides of the first escape: the rounded quotient decides."""
    values = np.ones(1024, np.float32)
    # Steps of exactly 1/16, since the root mean square is nearest to 1.
    values[1] = quotient / 16
    values[2:130] = 0
    codes, steps = quantise(values, 1024, 16)
    assert steps.tolist() == [-16]
    assert codes[:3].tolist() == [144, code, 128]


@UNHURRIED
@given(st.integers(0, 2**32 - 1), st.integers(-100, 100), st.integers(0, 20))
def test_steps_follow_the_root_mean_square(seed, exponent, step_log2):
    """Within an eighth of an octave of rms * 2**(-step_log2 / 4), for complete runs."""
    values = np.random.default_rng(seed).standard_t(3, 256)
    values = np.ldexp(values, exponent).astype(np.float32)
    root_mean_square = math.sqrt(float((values.astype(np.float64) ** 2).mean()))
    (k,) = quantise(values, 256, step_log2)[1].tolist()
    assert abs(k + step_log2 - 4 * math.log2(root_mean_square)) < 0.5001


def test_finer_steps_cost_bits_and_save_error():
    """One more means a step smaller by 2**(1/4): a quarter of a bit, and an error smaller by the
    same factor.
    """
    values = gaussian(131_072)
    sizes, errors = [], []
    for step_log2 in (10, 14, 18):
        frame = encode(values, CodecSpec("uniform", step_log2=step_log2))
        sizes.append(info(frame).bits_per_value)
        error = decode(frame).astype(np.float64) - values
        errors.append(float((error**2).mean()) ** 0.5)
    assert all(0.9 < finer - coarser < 1.1 for coarser, finer in pairwise(sizes))
    assert all(0.45 < fine / rough < 0.55 for rough, fine in pairwise(errors))
    # The error of a uniform step of about rms * 2**-3.5 is that step over the root of 12.
    assert errors[1] == pytest.approx(2**-3.5 / math.sqrt(12), rel=0.05)
