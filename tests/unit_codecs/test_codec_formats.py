"""Quantized codes against torch's casts, bit for bit."""

import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fsl_codecs import CodecSpec, decode, encode, info
from fsl_codecs.formats import (
    FORMATS,
    bfloat16_bits,
    bfloat16_codes,
    float8_codes,
    float8_values,
    scale_values,
)
from fsl_codecs.quantised import quantise

UNHURRIED = settings(deadline=None, max_examples=60)
TORCH_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FP8 = ["e4m3", "e5m2"]
FINITE = hnp.arrays(
    np.float32,
    st.integers(1, 300),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def torch_codes(scaled, name):
    return torch.from_numpy(scaled).to(TORCH_TYPES[name]).view(torch.uint8).numpy()


def quantised(values, name, block_values):
    """Return codes (n,) and scales of all inner blocks."""
    blocks = quantise(values, FORMATS[name], block_values, 14)
    codes = np.concatenate([block.words for block in blocks])
    return codes, np.concatenate([block.scales for block in blocks])


def expected_scales(values, name, block_values):
    """Return the scales by their definition, in exact double arithmetic, one inner block at a
    time.
    """
    starts = range(0, len(values), 16384)
    inner = [inner_scales(values[at : at + 16384], name, block_values) for at in starts]
    return np.concatenate(inner)


def inner_scales(values, name, block_values):
    kind = FORMATS[name].float8
    largest_code = 1.75 * 2.0**kind.largest_exponent
    scales, zeros = [], []
    for start in range(0, len(values), block_values):
        largest = max(abs(float(value)) for value in values[start : start + block_values])
        scale = {"e4m3": 10, "e5m2": 17}[name]
        while math.ldexp(largest, 127 - scale) > largest_code:
            scale += 1
        scales.append(scale)
        zeros.append(largest == 0)
    smallest = min(
        (s for s, zero in zip(scales, zeros, strict=True) if not zero), default=scales[0]
    )
    scales = [smallest if zero else s for s, zero in zip(scales, zeros, strict=True)]
    return np.array(scales, dtype=np.uint8)


def assert_like_torch(values, name, block_values=128):
    codes, scales = quantised(values, name, block_values)
    np.testing.assert_array_equal(scales, expected_scales(values, name, block_values))
    per_value = np.repeat(scale_values(scales.astype(np.uint8)), block_values)[: len(values)]
    np.testing.assert_array_equal(codes, torch_codes(values / per_value, name))


@pytest.mark.parametrize("name", FP8)
def test_every_code_decodes_as_in_torch(name):
    """A wrong table entry would corrupt every model silently."""
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(TORCH_TYPES[name]).float().numpy()
    values = float8_values(FORMATS[name].float8)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(values), ~numbers)
    np.testing.assert_array_equal(
        values[numbers].view(np.uint32), expected[numbers].view(np.uint32)
    )


def test_every_bfloat16_code_decodes_as_in_torch():
    """All 65,536 codes are tried."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(bfloat16_bits(codes), expected.view(np.uint32))


@pytest.mark.parametrize("name", FP8)
def test_rounding_at_and_around_every_boundary(name):
    """Codes, midpoints between them, and the fp32 neighbors of both."""
    kind = FORMATS[name].float8
    codes = float8_values(kind)[: kind.special_code]
    middles = (codes[1:] + codes[:-1]) / np.float32(2)
    points = np.concatenate([codes, middles])
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(1e9))]
    )
    points = points[points <= codes[-1]]
    points = np.concatenate([points, -points])
    np.testing.assert_array_equal(float8_codes(points, kind), torch_codes(points, name))


@pytest.mark.parametrize("name", FP8)
def test_rounding_of_random_bit_patterns(name):
    """Every fp32 exponent occurs, with subnormals, not only those near the format's range."""
    kind = FORMATS[name].float8
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.abs(values) <= float8_values(kind)[kind.special_code - 1]]
    assert values.size > 500_000
    np.testing.assert_array_equal(float8_codes(values, kind), torch_codes(values, name))


def test_bfloat16_rounding_of_random_bit_patterns_and_ties():
    """bf16 is the upper half of fp32, so the tie patterns 0x8000 and their neighbors matter."""
    generator = np.random.default_rng(2)
    bits = generator.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    low = generator.choice(np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), 1 << 20)
    bits = np.concatenate([bits, (bits & np.uint32(0xFFFF0000)) | low])
    bits = bits[(bits & np.uint32(0x7FFFFFFF)) < FORMATS["bf16"].escape_magnitude]
    expected = torch.from_numpy(bits.view(np.float32)).bfloat16().view(torch.int16).numpy()
    np.testing.assert_array_equal(bfloat16_codes(bits), expected.view(np.uint16))


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("exponent", [-149, -140, -127, -126, -118, -110, -20, 0, 40, 100, 126])
def test_blocks_of_every_size_class_quantise_as_in_torch(name, exponent):
    """From the smallest subnormal to the largest block: clamped scales are exact too."""
    normal = np.random.default_rng(exponent + 200).standard_normal(10_000)
    values = np.ldexp(np.clip(normal, -1.99, 1.99), exponent).astype(np.float32)
    assert_like_torch(values, name)


@pytest.mark.parametrize("name", FP8)
@UNHURRIED
@given(values=FINITE, block_values=st.sampled_from([16, 64, 128]))
def test_arbitrary_finite_blocks_quantise_as_in_torch(name, values, block_values):
    """Hypothesis searches for a block that breaks the scale rule or the rounding."""
    magnitudes = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    values = values[magnitudes < FORMATS[name].escape_magnitude]
    if values.size:
        assert_like_torch(values, name, block_values)


@pytest.mark.parametrize("name", FP8)
@UNHURRIED
@given(values=FINITE)
def test_decoded_values_are_scale_times_code(name, values):
    """A decoded value is torch's value of the code times the scale, in fp32, and never
    subnormal.
    """
    magnitudes = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    values = values[magnitudes < FORMATS[name].escape_magnitude]
    if not values.size:
        return
    decoded = decode(encode(values, CodecSpec(format=name)))
    scales = np.repeat(scale_values(expected_scales(values, name, 128)), 128)[: len(values)]
    quotients = torch.from_numpy(values / scales).to(TORCH_TYPES[name]).float().numpy()
    np.testing.assert_array_equal(decoded.view(np.uint32), (quotients * scales).view(np.uint32))
    nonzero = decoded[decoded != 0]
    assert (np.abs(nonzero) >= np.float32(2.0**-126)).all()
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("name", FP8)
def test_runs_of_zeros_widen_no_inner_block(name):
    """Zeros fit any scale; theirs is the smallest of their own inner block, so that blocks are
    independent.
    """
    values = np.ones(3 * 16384 + 200, np.float32)
    values[:16384] *= 2.0**20
    values[100 * 128 : 110 * 128] = -0.0
    values[16384 : 2 * 16384] *= 2.0**-20
    values[16384 + 128 : 16384 + 3 * 128] = 0.0
    values[2 * 16384 : 3 * 16384] = 0.0
    values[3 * 16384 : 3 * 16384 + 128] = 0.0
    assert_like_torch(values, name)
    scales = quantised(values, name, 128)[1]
    offset = 127 - FORMATS[name].float8.largest_exponent
    expected = [offset + 20] * 128 + [offset - 20] * 128
    expected += [FORMATS[name].float8.lowest_scale] * 128 + [offset] * 2
    assert scales.tolist() == expected


@pytest.mark.parametrize(
    ("name", "limit"), [("bf16", 0x7F7F8000), ("e4m3", 0x7F780000), ("e5m2", 0x7F700000)]
)
def test_values_that_would_round_to_infinity_escape(name, limit):
    """The largest fp32 values survive a lossy format."""
    limit = np.uint32(limit)
    bits = np.array([limit, limit - np.uint32(1), 0x7F7FFFFF, 0x3F800000], np.uint32)
    values = bits.view(np.float32)
    np.testing.assert_array_equal(decode(encode(values, CodecSpec(format=name))), values)
    below = decode(encode(values[[1, 3]], CodecSpec(format=name)))
    assert np.isfinite(below).all()
    assert below[0] != values[1], "just below the limit the format's rounding applies"


def test_subnormals_flushed_at_the_receiver_change_nothing():
    """A training process may flush subnormals to zero; its digest stays the same."""
    values = np.ldexp(np.random.default_rng(5).standard_normal(5000), -118).astype(np.float32)
    for name in [*FP8, "uniform"]:
        frame = encode(values, CodecSpec(format=name))
        assert info(frame).coded_chunks
        before = zlib.crc32(decode(frame))
        if torch.set_flush_denormal(True):
            try:
                assert zlib.crc32(decode(frame)) == before
            finally:
                torch.set_flush_denormal(False)
