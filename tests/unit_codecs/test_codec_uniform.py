"""Uniform codes: steps, rounding and escapes, computed a second time in doubles.

There every fp32 product and sum is exact before it is rounded once.
"""

import math
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fsl_codecs import CodecSpec, decode, encode, info
from fsl_codecs.uniform import power_values, quantise

UNHURRIED = settings(deadline=None, max_examples=60)
HEADS = 28 + 16
FIRST_QUARTER = 1 + 0x1837F0 / 2**23
THIRD_QUARTER = 1 + 0x5744FD / 2**23
VALUES = hnp.arrays(
    np.float32,
    st.integers(2, 400),
    elements=st.floats(-(2.0**119), 2.0**119, width=32) | st.floats(-4, 4, width=32),
)


def single(number):
    """Return a double rounded to fp32, as a double."""
    return struct.unpack("<f", struct.pack("<f", number))[0]


def power(quarters):
    """Return 2**(quarters / 4): the fractional part rounded to fp32, the rest exact."""
    return math.ldexp(single(2.0 ** (quarters % 4 / 4)), quarters // 4)


def sum_in_lanes(squares):
    lanes = [0.0] * 16
    for at, square in enumerate(squares):
        lanes[at % 16] = single(lanes[at % 16] + square)
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [single(a + b) for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


def sum_in_sequence(squares):
    total = 0.0
    for square in squares:
        total = single(total + square)
    return total


def step_of(run, block_values, step_log2, summed=sum_in_lanes):
    """Return the k of a run of Python floats, None when it is zero throughout."""
    largest = max(abs(value) for value in run)
    if not largest:
        return None
    exponent = max(math.frexp(largest)[1] - 1, -126)
    scaled = [single(math.ldexp(value, -exponent)) for value in run]
    total = summed([single(value * value) for value in scaled])
    significand, log2_total = math.frexp(total)
    significand, log2_total = 2 * significand, log2_total - 1
    nearest = (significand >= FIRST_QUARTER) + (significand >= THIRD_QUARTER)
    quarters = 4 * exponent + 2 * log2_total - 2 * int(math.log2(block_values)) + nearest
    return min(max(quarters - step_log2, -504), 480)


def planes_of(numbers, width):
    data = b""
    for bit in reversed(range(width)):
        for start in range(0, len(numbers), 8):
            part = numbers[start : start + 8]
            data += bytes([sum((n >> bit & 1) << at for at, n in enumerate(part))])
    return data


def ranks_of(ranks):
    """Return numbers as ranks up to the highest of them."""
    bits = [int(rank > below) for below in range(max(ranks)) for rank in ranks if rank >= below]
    return planes_of(bits, 1)


def scales_of(steps):
    """Return the bytes of steps: in bit planes, or around the most frequent one where that is
    shorter.
    """
    lowest, spread = min(steps), max(steps) - min(steps)
    width = spread.bit_length()
    planes = struct.pack("<HB", lowest + 512, width) + planes_of([k - lowest for k in steps], width)
    if not 1 <= spread <= 7:
        return planes
    common = max(sorted(set(steps)), key=steps.count)
    is_upward = sum(k > common for k in steps) >= sum(k < common for k in steps)
    ways = [k - common if is_upward else common - k for k in steps]
    ranks = [2 * way - 1 if way > 0 else -2 * way for way in ways]
    form = (64 if is_upward else 128) + max(ranks)
    return min(planes, struct.pack("<HB", common + 512, form) + ranks_of(ranks), key=len)


def inner_block(values, block_values, step_log2):
    """Return the bytes of raw codes and the decoded values."""
    runs = [values[at : at + block_values] for at in range(0, len(values), block_values)]
    steps = [step_of(run, block_values, step_log2) for run in runs]
    lowest = min((k for k in steps if k is not None), default=-504)
    steps = [lowest if k is None else k for k in steps]
    codes, escaped, decoded = [], [], []
    for run, k in zip(runs, steps, strict=True):
        for value in run:
            number = round(single(value * power(-k)))
            fits = abs(number) <= 127
            codes.append(number + 128 if fits else 0)
            escaped += [] if fits else [value]
            decoded.append(single(number * power(k)) if fits else value)
    data = scales_of(steps) + bytes(codes)
    return data + struct.pack(f"<{len(escaped)}f", *escaped), decoded


def assert_like_document(values, block_values=128, step_log2=14):
    """Check a frame without coding against the document's bytes and values.

    For values below 2**120, two at least.
    """
    spec = CodecSpec("uniform", block_values, 1 << 20, entropy=False, step_log2=step_log2)
    frame = encode(values, spec)
    coded = encode(values, CodecSpec("uniform", block_values, 1 << 20, step_log2=step_log2))
    assert len(coded) <= len(frame)
    if info(frame).raw_code_chunks:
        assert decode(coded).tobytes() == decode(frame).tobytes()
    if info(frame).constant_chunks:
        assert decode(frame).tobytes() == values.tobytes()
        return
    starts = range(0, values.size, 16384)
    blocks = [
        inner_block(values[at : at + 16384].tolist(), block_values, step_log2) for at in starts
    ]
    data = b"".join(data for data, _ in blocks)
    if len(data) > 4 * values.size:
        assert info(frame).raw_fp32_chunks == 1
        assert decode(frame).tobytes() == values.tobytes()
        return
    assert frame[HEADS:] == data
    decoded = np.array([value for _, part in blocks for value in part], np.float32)
    # A product that is rounded to -0.0 has the code of zero.
    assert decode(frame).tobytes() == (decoded + np.float32(0)).tobytes()


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


def drawn(draw, count):
    generator = np.random.default_rng(count)
    if draw == "laplace":
        return generator.laplace(size=count)
    if draw == "student":
        return generator.standard_t(1.5, count)
    if draw == "sparse":
        return generator.standard_normal(count) * (generator.random(count) < 0.02)
    if draw == "rows":
        return (
            generator.standard_normal(count)
            * 2.0 ** np.repeat(generator.integers(-60, 60, -(-count // 97)), 97)[:count]
        )
    return generator.standard_normal(count)


@pytest.mark.parametrize("draw", ["gauss", "laplace", "student", "sparse", "rows"])
@pytest.mark.parametrize(("block_values", "count"), [(16, 1001), (128, 3001), (1024, 17_500)])
def test_codes_are_those_of_the_document(draw, block_values, count):
    """Bells, heavy tails, zeros and rows of all sizes; the last run is short."""
    assert_like_document(drawn(draw, count).astype(np.float32), block_values)


@pytest.mark.parametrize("step_log2", [0, 1, 7, 8, 14, 23, 31, 40])
def test_every_step_log2_follows_the_document(step_log2):
    """From steps of the root mean square itself to steps with which most values escape."""
    values = drawn("gauss", 2000).astype(np.float32)
    assert_like_document(values, 128, step_log2)
    values[:1000] = 0
    assert_like_document(values, 64, step_log2)


@UNHURRIED
@given(values=VALUES, block=st.sampled_from([16, 64, 1024]), step_log2=st.integers(0, 40))
@example(values=np.array([0, -0.0, 0], np.float32), block=16, step_log2=14)
@example(values=np.array([0, 1e-45, -1e-45], np.float32), block=16, step_log2=40)
def test_arbitrary_values_follow_the_document(values, block, step_log2):
    """Hypothesis searches for a run with a wrong step."""
    assert_like_document(values, block, step_log2)


@pytest.mark.parametrize("exponent", [-149, -148, -140, -130, -127, -126, -125, -110, 0, 100, 117])
def test_every_size_of_values_follows_the_document(exponent):
    """From the smallest subnormals, whose steps end at 2**-126, to just below the limit."""
    values = np.ldexp(np.clip(drawn("gauss", 1500), -3.9, 3.9), exponent).astype(np.float32)
    assert_like_document(values)
    back = decode(encode(values, CodecSpec("uniform")))
    nonzero = np.abs(back[back != 0])
    assert (nonzero >= np.float32(2.0**-126)).all()


def test_steps_end_where_the_format_says():
    """A step below 2**-126 would be subnormal; one above 2**120 cannot be chosen."""
    tiny = np.array([3e-45, 1e-45, 0, 2.0**-127], np.float32)
    assert quantise(tiny, 16, 14)[1].tolist() == [-504]
    assert decode(encode(tiny, CodecSpec("uniform", 16))).tolist() == [0, 0, 0, 0]
    below = np.float32(2.0**120) - np.float32(2.0**96)
    large = np.array([below, -below] * 8, np.float32)
    assert quantise(large, 16, 0)[1].tolist() == [480]
    assert_like_document(large, 16, 0)
    assert_like_document(large * np.float32(0.9), 16, 0)


def test_values_from_two_to_the_120_on_go_as_they_are():
    """One such value, of either sign, makes its chunk raw fp32, and no other."""
    values = drawn("gauss", 3000).astype(np.float32)
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
    assert_like_document(values)
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
    assert_like_document(values, 1024, 16)


def near_threshold(seed, quarter):
    """Return a run (256,) whose sum of squares is within rounding of quarter times a power of two.

    Its largest value is in [1, 2).
    """
    generator = np.random.default_rng(seed)
    run = generator.uniform(0.3, 1.0, 256)
    run[0] = 1.5
    target = quarter * 2.0 ** math.floor(math.log2((run**2).sum() / quarter))
    run = (run * math.sqrt((target - 1) / (run**2).sum())).astype(np.float32)
    run[0] = 1.0
    run[255] = 0
    run[255] = math.sqrt(target - float((run.astype(np.float64) ** 2).sum()))
    return run


@pytest.mark.parametrize("quarter", [FIRST_QUARTER, THIRD_QUARTER])
def test_the_order_of_the_sum_decides_and_is_kept(quarter):
    """Within a few units in the last place of a threshold another order gives another step: the
    order is part of the format.
    """
    differ = 0
    for seed in range(60):
        run = near_threshold(seed, quarter)
        assert 1 <= run.max() < 2
        k = step_of(run.tolist(), 256, 14)
        assert quantise(run, 256, 14)[1].tolist() == [k]
        differ += k != step_of(run.tolist(), 256, 14, sum_in_sequence)
    assert differ > 5


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
    values = drawn("gauss", 131_072).astype(np.float32)
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


@pytest.mark.parametrize("step_log2", [-1, 41, 14.0, "14", None])
def test_impossible_step_log2_is_refused(step_log2):
    """It is refused where it is written."""
    with pytest.raises(Exception, match="step_log2"):
        CodecSpec("uniform", step_log2=step_log2)
