"""The public functions: buffers of the caller, limits, residuals, and bf16 output."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fsl_codecs import (
    CodecSpec,
    CodecUsageError,
    LimitError,
    Limits,
    bound,
    decode,
    decode_accumulate,
    decode_into,
    encode,
    encode_into,
    info,
)

UNHURRIED = settings(deadline=None, max_examples=40)
NAMES = ["fp32", "bf16", "e4m3", "e5m2", "uniform"]
ANY = st.floats(width=32)


def gaussian(count, seed=0):
    values = np.random.default_rng(seed).standard_normal(count) * 1e-3
    return values.astype(np.float32)


def coded(values, spec, reference=None, residual=None):
    out = bytearray(bound(values.size, spec))
    size = encode_into(values, out, spec, reference=reference, residual=residual)
    return bytes(out[:size])


def same_bits(left, right):
    return left.view(np.uint32).tolist() == right.view(np.uint32).tolist()


def as_bfloat16(values):
    """Return the bits of torch's cast."""
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize(("share", "bits"), [(0.01, 0.19), (0.05, 0.64), (0.3, 2.65)])
def test_mostly_zeros_cost_little_and_have_the_error_of_dense_values(share, bits):
    """Steps are from the values that are not zero, which saves bits; the residual knows them."""
    values = np.where(np.random.default_rng(1).random(131_072) < share, gaussian(131_072), 0)
    values, residual = values.astype(np.float32), np.zeros(131_072, np.float32)
    frame = coded(values, CodecSpec("uniform"), residual=residual)
    assert info(frame).bits_per_value < bits
    assert same_bits(residual, values - decode(frame))
    assert 0.02 < np.linalg.norm(residual) / np.linalg.norm(values) < 0.027


@pytest.mark.parametrize("name", NAMES)
def test_accumulate_is_one_multiplication_and_one_addition(name):
    """All nodes get the same bits, so the order of roundings is part of the interface."""
    frame = encode(gaussian(40_000), CodecSpec(name, chunk_values=16_384))
    accumulator = gaussian(40_003, seed=9)
    weight = 0.1
    product = decode(frame) * np.float32(weight)
    expected = accumulator.copy()
    expected[:40_000] = accumulator[:40_000] + product
    assert decode_accumulate(frame, accumulator, weight) == 40_000
    assert same_bits(accumulator, expected)


@pytest.mark.parametrize("weight", [np.nan, np.inf, 1e39])
def test_a_weight_that_is_no_number_is_our_mistake(weight):
    """It would destroy the accumulator."""
    with pytest.raises(CodecUsageError, match="weight"):
        decode_accumulate(encode(gaussian(3)), np.zeros(3, np.float32), weight)


def test_limits_hold_before_anything_is_allocated():
    """Twenty bytes can announce a million equal values, so the caller sets a limit."""
    frame = encode(np.zeros(1 << 20, np.float32))
    with pytest.raises(LimitError, match="1048576 values, 1000 allowed"):
        decode(frame, Limits(max_values=1000))
    with pytest.raises(LimitError, match="bytes"):
        decode(frame, Limits(max_frame_bytes=50))
    with pytest.raises(LimitError):
        info(frame, Limits(max_values=1000))
    assert info(frame).values == 1 << 20


@pytest.mark.parametrize(
    "settings_",
    [
        {"format": "fp16"},
        {"format": None},
        {"block_values": 8},
        {"block_values": 100},
        {"block_values": 2048},
        {"block_values": 128.0},
        {"chunk_values": 0},
        {"chunk_values": 130},
        {"chunk_values": 1 << 21},
        {"chunk_values": "131072"},
        {"step_log2": 41},
        {"step_log2": -9},
        {"step_log2": 14.0},
    ],
)
def test_impossible_settings_are_refused(settings_):
    """They are refused where they are written, not at the first frame."""
    with pytest.raises(CodecUsageError):
        CodecSpec(**settings_)


@UNHURRIED
@given(
    hnp.arrays(np.float32, (3, 100), elements=ANY),
    st.sampled_from(NAMES),
    st.integers(0, 2),
    st.booleans(),
)
def test_arbitrary_values_and_residuals(rows, name, finite, entropy):
    """Any bits, chunk by chunk: zero where the chunk is exact, never NaN where the frame has a
    number.
    """
    spec = CodecSpec(name, 16, 48, entropy)
    rows = rows.copy()
    if finite:
        rows = np.where(np.abs(rows) < 2.0**100, rows, np.float32(finite))
    values, reference, residual = rows
    with np.errstate(all="ignore"):
        x = values - reference + residual
    frame = coded(values, spec, reference, residual)
    assert frame == encode(x, spec)
    decoded = decode(frame)
    for start in (0, 48, 96):
        part = slice(start, start + 48)
        alone = info(encode(x[part], spec))
        if name == "fp32" or alone.raw_fp32_chunks or not np.isfinite(decoded[part]).all():
            assert same_bits(residual[part], np.zeros_like(x[part]))
        else:
            assert same_bits(residual[part], x[part] - decoded[part])


@pytest.mark.parametrize("name", ["bf16", "e4m3", "e5m2", "uniform"])
def test_error_feedback_keeps_the_sum(name):
    """The sum over all rounds differs by one round's error instead of the sum of all."""
    spec = CodecSpec(name, step_log2=4)
    rounds, count = 60, 4096
    drift = gaussian(count, 9) * np.float32(0.02)
    total, sent, sent_without = (np.zeros(count) for _ in range(3))
    residual = np.zeros(count, np.float32)
    for at in range(rounds):
        values = gaussian(count, at) + drift
        total += values
        sent += decode(coded(values, spec, None, residual))
        sent_without += decode(encode(values, spec))
    # The difference is the residual, up to the roundings of its own additions.
    assert np.abs(total - sent - residual).max() < 1e-7
    one_round = float(np.abs(gaussian(count) - decode(encode(gaussian(count), spec))).max())
    assert np.abs(total - sent).max() < 3 * one_round
    errors = [float(((total - each) ** 2).mean()) ** 0.5 for each in (sent, sent_without)]
    assert errors[0] < errors[1] / 4


@UNHURRIED
@given(hnp.arrays(np.uint32, st.integers(1, 300), elements=st.integers(0, 0xFFFFFFFF)))
def test_bfloat16_output_is_rounded_as_torch_rounds(bits):
    """To nearest, ties to even, overflow to infinity; a NaN keeps sign and upper bits and becomes
    quiet.
    """
    bits = np.concatenate([bits, bits & 0xFFFF8000, bits | 0x7FFF, bits | 0x7F7F0000])
    bits = bits.astype(np.uint32)
    out = np.zeros(bits.size, np.uint16)
    decode_into(encode(bits.view(np.float32)), out)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    expected = np.where(is_nan, bits >> 16 | 0x40, as_bfloat16(bits.view(np.float32)))
    np.testing.assert_array_equal(out, expected)
    assert np.isnan(out[is_nan].astype(np.uint32).__lshift__(16).view(np.float32)).all()
