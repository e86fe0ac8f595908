"""The public functions: values survive, in caller-owned buffers of all sizes."""

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import example, given, settings
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
from fsl_codecs.formats import FORMATS
from fsl_codecs.quantised import dequantise, quantise, write_escaped
from fsl_codecs.scales import write_scales

UNHURRIED = settings(deadline=None, max_examples=60)
NAMES = ["fp32", "bf16", "e4m3", "e5m2", "uniform"]
LENGTHS = [0, 1, 2, 15, 16, 17, 127, 128, 129, 1000, 16383, 16384, 16385, 32_769, 40_001]
SPECS = st.builds(
    lambda name, block, blocks, entropy, step_log2: CodecSpec(
        name, block, block * blocks, entropy, step_log2
    ),
    st.sampled_from(NAMES),
    st.sampled_from([16, 32, 128, 1024]),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([0, 8, 14, 20, 40]),
)
ANY_VALUES = hnp.arrays(np.float32, st.integers(0, 700), elements=st.floats(width=32))


def gaussian(count, seed=0):
    values = np.random.default_rng(seed).standard_normal(count) * 1e-3
    return values.astype(np.float32)


def same_bits(left, right):
    return left.view(np.uint32).tolist() == right.view(np.uint32).tolist()


def rounded(values, spec):
    """Return a lossy format's rounding of values, chunk by chunk, without a frame."""
    kind = FORMATS[spec.format]
    result = values.copy()
    for start in range(0, len(values), spec.chunk_values):
        part = values[start : start + spec.chunk_values]
        magnitudes = part.view(np.uint32) & np.uint32(0x7FFFFFFF)
        if spec.format == "fp32" or magnitudes.max() >= kind.escape_magnitude:
            continue
        out = result[start : start + len(part)]
        if spec.format == "bf16":
            out[:] = torch.from_numpy(part).bfloat16().float().numpy()
            continue
        if spec.format == "uniform" and same_bits(part, np.full_like(part, part[0])):
            continue
        blocks = quantise(part, kind, spec.block_values, spec.step_log2)
        if raw_codes_bytes(blocks, kind) <= 4 * part.size or not leaves_out(part, spec):
            for at, block in enumerate(blocks):
                inner = out[at * 16384 : (at + 1) * 16384]
                dequantise(block, kind, spec.block_values, inner)
    return result


def raw_codes_bytes(blocks, kind):
    """Return the size of a chunk in mode raw codes; only uniform's can exceed that of raw fp32."""
    pieces = []
    for block in blocks:
        if block.scales is not None:
            write_scales(block.scales, kind, pieces)
        write_escaped(block, pieces)
    return sum(map(len, pieces)) + sum(block.words.size for block in blocks)


def leaves_out(part, spec):
    """Return whether a chunk of mostly escaped values is sent as raw fp32; coding may still make it
    smaller.
    """
    return info(encode(part, evolve(spec, chunk_values=1 << 20))).raw_fp32_chunks == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("entropy", [True, False])
def test_lengths_around_every_boundary(name, entropy):
    """Blocks, inner blocks and chunks end at different places; 0 and 1 value are lengths, too."""
    spec = CodecSpec(name, 128, 32_768, entropy)
    for count in LENGTHS:
        values = gaussian(count, seed=count)
        frame = encode(values, spec)
        assert len(frame) <= bound(count, spec)
        assert same_bits(decode(frame), rounded(values, spec))
        seen = info(frame)
        assert (seen.values, seen.format, seen.frame_bytes) == (count, name, len(frame))
        assert seen.chunks == -(-count // 32_768)


@UNHURRIED
@given(values=ANY_VALUES, spec=SPECS)
@example(values=np.full(300, -0.0, np.float32), spec=CodecSpec("e4m3", 16, 64))
@example(values=np.array([np.inf, 1.0], np.float32), spec=CodecSpec("bf16"))
def test_arbitrary_values_and_grids(values, spec):
    """Any fp32 bits through any grid: lossless or rounded, never larger than bound(), flagged when
    not finite.
    """
    frame = encode(values, spec)
    assert len(frame) <= bound(values.size, spec)
    assert same_bits(decode(frame), rounded(values, spec))
    assert info(frame).nonfinite == (not np.isfinite(values).all())


@UNHURRIED
@given(
    bits=hnp.arrays(np.uint32, st.integers(1, 400), elements=st.integers(0, 0xFFFFFFFF)),
    spec=SPECS,
)
def test_chunks_with_nonfinite_values_keep_every_bit(bits, spec):
    """NaN payloads, also signaling ones, infinities and their neighbors survive every format."""
    bits[0] = 0x7F800001
    values = bits.view(np.float32)
    spec = evolve(spec, chunk_values=1024)
    frame = encode(values, spec)
    assert same_bits(decode(frame), values)
    assert info(frame).nonfinite


@pytest.mark.parametrize("name", ["fp32", "bf16", "e4m3", "e5m2"])
def test_negative_zero_survives(name):
    """The sign of zero counts: digests are over bits."""
    values = gaussian(5000)
    values[::3] = -0.0
    values[1::3] = 0.0
    back = decode(encode(values, CodecSpec(name)))
    assert np.signbit(back).tolist() == np.signbit(values).tolist()
    alone = np.full(200, -0.0, np.float32)
    assert same_bits(decode(encode(alone, CodecSpec(name))), alone)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, 1.0, -3e-5, 3.4e38, np.inf, np.nan, 1e-42])
def test_constant_chunks_cost_a_few_bytes(name, value):
    """Untouched weights are common; they round as elsewhere, and exact values stay."""
    values = np.full(300_000, value, np.float32)
    frame = encode(values, CodecSpec(name))
    assert info(frame).constant_chunks == 3
    assert len(frame) == 28 + 3 * (16 + 4)
    assert same_bits(decode(frame), rounded(values, CodecSpec(name)))


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_subnormals_survive_where_the_document_says_so(name):
    """Also next to normal numbers, and in constant chunks."""
    bits = np.random.default_rng(1).integers(0, 128, 3000, dtype=np.uint32) << np.uint32(16)
    bits[::7] = 0x80010000
    bits[::9] = 0x3F800000
    values = bits.view(np.float32)
    assert same_bits(decode(encode(values, CodecSpec(name))), values)
    assert same_bits(decode(encode(values[:1], CodecSpec(name))), values[:1])


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


def test_a_bad_frame_leaves_the_accumulator_alone():
    """A damaged last chunk leaves no half-added delta."""
    frame = bytearray(encode(gaussian(40_000), CodecSpec("e4m3", chunk_values=16_384)))
    frame[-1] ^= 1
    accumulator = gaussian(40_000, seed=4)
    before = accumulator.copy()
    with pytest.raises(Exception, match="checksum of chunk 2"):
        decode_accumulate(frame, accumulator, 0.5)
    assert same_bits(accumulator, before)


@pytest.mark.parametrize("weight", [np.nan, np.inf, 1e39])
def test_a_weight_that_is_no_number_is_our_mistake(weight):
    """It would destroy the accumulator."""
    with pytest.raises(CodecUsageError, match="weight"):
        decode_accumulate(encode(gaussian(3)), np.zeros(3, np.float32), weight)


def test_outputs_belong_to_the_caller():
    """Nothing outside the announced values is touched, at any alignment of the frame."""
    values = gaussian(1000)
    room = bytearray(b"\xaa" * (3 + bound(1000, CodecSpec("e4m3"))))
    size = encode_into(values, memoryview(room)[3:], CodecSpec("e4m3"))
    assert room[:3] == b"\xaa" * 3
    assert bytes(room[3 : 3 + size]) == encode(values, CodecSpec("e4m3"))
    out = np.full(1010, 7, np.float32)
    assert decode_into(memoryview(room)[3 : 3 + size], out[5:]) == 1000
    assert set(out[:5].tolist() + out[1005:].tolist()) == {7.0}


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(4),
        np.zeros((2, 2), np.float32),
        np.zeros(8, np.float32)[::2],
        np.zeros(4, ">f4"),
        [0.0],
    ],
)
def test_values_of_another_kind_are_refused(values):
    """A silent conversion would hide a copy, or a byte order."""
    with pytest.raises(CodecUsageError):
        encode(values)
    with pytest.raises(CodecUsageError):
        decode_into(encode(gaussian(2)), values)


def test_outputs_that_are_too_small_or_read_only_are_refused():
    """Checked before the first byte is written."""
    values = gaussian(100)
    with pytest.raises(CodecUsageError, match="writable"):
        encode_into(values, bytearray(bound(100) - 1))
    with pytest.raises(CodecUsageError, match="writable"):
        encode_into(values, bytes(bound(100)))
    frozen = np.zeros(100, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(CodecUsageError, match="read-only"):
        decode_into(encode(values), frozen)
    for receive in (decode_into, lambda frame, out: decode_accumulate(frame, out, 1.0)):
        with pytest.raises(LimitError):
            receive(encode(values), np.zeros(99, np.float32))
    with pytest.raises(LimitError):
        decode_into(encode(values), np.zeros(99, np.float32), Limits())
    with pytest.raises(LimitError):
        decode_accumulate(encode(values), np.zeros(99, np.float32), 1.0, Limits())
    with pytest.raises(CodecUsageError):
        bound(-1)
    with pytest.raises(CodecUsageError, match="bytes-like"):
        decode("text")
    with pytest.raises(CodecUsageError, match="bytes-like"):
        decode(memoryview(encode(values))[::2])


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
        {"step_log2": -1},
        {"step_log2": 14.0},
    ],
)
def test_impossible_settings_are_refused(settings_):
    """They are refused where they are written, not at the first frame."""
    with pytest.raises(CodecUsageError):
        CodecSpec(**settings_)
