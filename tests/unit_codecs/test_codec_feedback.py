"""Encoder inputs: the difference to a reference, the residual of the last encoding, and bf16 on
either side.
"""

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
    bound,
    decode,
    decode_accumulate,
    decode_into,
    encode,
    encode_into,
    info,
)
from fsl_codecs.formats import FORMATS

UNHURRIED = settings(deadline=None, max_examples=40)
NAMES = ["fp32", "bf16", "e4m3", "e5m2", "uniform"]
ANY = st.floats(width=32)
COUNT = 20_000


def gaussian(count, seed=0, scale=1e-3):
    values = np.random.default_rng(seed).standard_normal(count) * scale
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_values", [16, 128])
def test_the_difference_to_a_reference_is_encoded(name, block_values):
    """One fp32 subtraction per value, then the frame that the difference alone would give."""
    spec = CodecSpec(name, block_values, 8192)
    values, reference = gaussian(COUNT), gaussian(COUNT, 1)
    untouched = values.copy(), reference.copy()
    assert coded(values, spec, reference) == encode(values - reference, spec)
    assert same_bits(values, untouched[0])
    assert same_bits(reference, untouched[1])
    assert coded(values, spec, np.zeros(COUNT, np.float32)) == encode(values, spec)
    assert info(coded(values, spec, values)).constant_chunks == 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_reference", [False, True])
def test_the_residual_is_what_the_frame_fails_to_give(name, with_reference):
    """Three fp32 operations: rounded after the subtraction, after the addition, minus the decoded
    value.
    """
    spec = CodecSpec(name, 128, 8192)
    values, residual = gaussian(COUNT), gaussian(COUNT, 2, 1e-4)
    reference = gaussian(COUNT, 1, 1e-2) if with_reference else None
    x = (values - reference if with_reference else values) + residual
    frame = coded(values, spec, reference, residual)
    assert frame == encode(x, spec)
    assert same_bits(residual, x - decode(frame))
    assert residual.any() == (name != "fp32")


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


def test_lossless_chunks_leave_nothing_also_of_what_is_not_finite():
    """Infinity minus infinity is NaN, which a residual would keep."""
    values, residual = gaussian(3000), np.zeros(3000, np.float32)
    values[::700] = np.inf
    values[1::700] = np.nan
    frame = coded(values, CodecSpec("fp32"), None, residual)
    assert info(frame).coded_chunks == 1
    assert not residual.view(np.uint32).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1.0, 3e-5, 1.23456789, 3e38, 1e-42, -0.0, np.inf, np.nan])
def test_constants_leave_what_rounding_took(name, value):
    """A constant is rounded like other values; infinity leaves 0."""
    values = np.full(1000, value, np.float32)
    residual = np.full(1000, -0.0, np.float32)  # which changes nothing, not even -0.0
    frame = coded(values, CodecSpec(name), None, residual)
    assert info(frame).constant_chunks == 1
    expected = values - decode(frame) if np.isfinite(value) else np.zeros(1000, np.float32)
    assert same_bits(residual, expected)


def test_raw_chunks_leave_nothing():
    """A chunk with one huge value is sent as fp32; its neighbors keep their errors."""
    for name in ("bf16", "e4m3", "e5m2", "uniform"):
        values = gaussian(3000)
        values[1500] = 3.4e38
        residual = gaussian(3000, 1)
        frame = coded(values, CodecSpec(name, 128, 1024), None, residual)
        assert info(frame).raw_fp32_chunks == 1
        assert same_bits(residual[1024:2048], np.zeros(1024, np.float32))
        assert residual[:1024].any()
        assert residual[2048:].any()


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


def test_references_and_residuals_of_another_kind_are_refused():
    """Before anything is written: broadcasting would encode other values."""
    values, spec = gaussian(100), CodecSpec("e4m3")
    frozen = gaussian(100)
    frozen.flags.writeable = False
    out = bytearray(bound(100, spec))
    for wrong in (
        gaussian(99),
        gaussian(1),
        gaussian(100).astype(np.float64),
        gaussian(200)[::2],
        gaussian(100).view(np.uint32),
        as_bfloat16(gaussian(100)),
        gaussian(100).tolist(),
    ):
        for keyword in ("reference", "residual"):
            with pytest.raises(CodecUsageError):
                encode_into(values, out, spec, **{keyword: wrong})
    with pytest.raises(CodecUsageError, match="read-only"):
        encode_into(values, out, spec, residual=frozen)
    assert not any(out)
    assert encode_into(values, out, spec, reference=frozen)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_input_counts_as_the_fp32_it_is(name):
    """In all formats: weights in bf16 are sent without an fp32 copy."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    values = codes.astype(np.uint32) << np.uint32(16)
    spec = CodecSpec(name, 128, 1024)
    assert encode(codes, spec) == encode(values.view(np.float32), spec)
    finite = as_bfloat16(gaussian(COUNT))
    wide = torch.from_numpy(finite.view(np.int16)).view(torch.bfloat16).float().numpy()
    reference, residual = gaussian(COUNT, 1), gaussian(COUNT, 2)
    again = residual.copy()
    frame = coded(finite, spec, reference, residual)
    assert frame == coded(wide, spec, reference, again)
    assert same_bits(residual, again)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_bfloat16_survives_where_the_format_holds_it(name):
    """Unchanged after encoding and decoding, with -0.0, subnormals and quiet NaN."""
    codes = np.random.default_rng(0).permutation(np.arange(1 << 16, dtype=np.uint16))
    out = np.zeros(1 << 16, np.uint16)
    assert decode_into(encode(codes, CodecSpec(name)), out) == 1 << 16
    is_nan = (codes & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(out, np.where(is_nan, codes | 0x40, codes))


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


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_output_is_that_of_the_fp32_output(name):
    """All formats and modes, over several chunks, into the front of a larger array."""
    values = gaussian(COUNT)
    values[5000:8000] = 1.23456789
    values[9000] = 3e38
    frame = encode(values, CodecSpec(name, 16, 1024))
    out = np.full(COUNT + 7, 0x4040, np.uint16)
    assert decode_into(frame, out[3:]) == COUNT
    np.testing.assert_array_equal(out[3 : COUNT + 3], as_bfloat16(decode(frame)))
    assert set(out[:3].tolist() + out[COUNT + 3 :].tolist()) == {0x4040}


def test_bfloat16_is_no_accumulator_and_no_other_16_bits():
    """Sums in bf16 lose bits; fp16 would be read as other numbers."""
    frame = encode(gaussian(10))
    with pytest.raises(CodecUsageError):
        decode_accumulate(frame, np.zeros(10, np.uint16), 1.0)
    for dtype in (np.int16, np.float16, np.uint32, ">u2"):
        with pytest.raises(CodecUsageError):
            encode(np.zeros(10, dtype))
        with pytest.raises(CodecUsageError):
            decode_into(frame, np.zeros(10, dtype))
    with pytest.raises(LimitError):
        decode_into(frame, np.zeros(9, np.uint16))


def test_every_format_is_tested_here():
    """A new format must be added to the list above."""
    assert set(FORMATS) == set(NAMES)
