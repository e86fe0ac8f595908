"""Sizes: close to the entropy, small overhead, escapes that pay, and a bound that holds."""

import numpy as np
import pytest
import torch

from fsl_codecs import CodecSpec, bound, decode, encode, info
from fsl_codecs.formats import FORMATS, quantise_blocks

NAMES = ["fp32", "bf16", "e4m3", "e5m2"]
COUNT = 131_072


def gaussian(count=COUNT, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def entropy_bits(symbols):
    counts = np.unique(symbols, return_counts=True)[1]
    return float((counts * np.log2(symbols.size / counts)).sum())


@pytest.mark.parametrize(("name", "limit"), [("e4m3", 1.015), ("e5m2", 1.015), ("bf16", 1.015)])
def test_gaussian_frames_are_close_to_the_entropy(name, limit):
    """The point of the entropy stage: within 1.5 % of order-0 entropy plus scales, all heads included."""
    values = gaussian(4 * COUNT)
    if name == "bf16":
        bits = values.view(np.uint32) >> np.uint32(16)
        ideal = entropy_bits(bits)
    else:
        codes, scales = quantise_blocks(values, FORMATS[name], 128)
        ideal = entropy_bits(codes) + 8 * scales.size
    assert 8 * len(encode(values, CodecSpec(name))) <= limit * ideal


def test_fp32_frames_save_the_exponents_redundancy():
    """Lossless: mantissas do not shrink, exponents of Gaussian values take about 2.6 of 8 bits."""
    assert info(encode(gaussian())).bits_per_value < 26.7


def test_fp32_frames_of_bfloat16_weights_drop_the_empty_half():
    """Initial weights often were bf16 once; their lower bytes are constant planes."""
    values = torch.from_numpy(gaussian()).bfloat16().float().numpy()
    frame = encode(values)
    assert info(frame).bits_per_value < 10.7
    assert decode(frame).tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("name", "split"), [("gaussian", 0), ("gelu", 1), ("positive", 0), ("sparse", 2)]
)
def test_each_split_is_chosen_where_it_pays(name, split):
    """A split nobody chooses is dead weight on the wire format."""
    values = gaussian()
    if name == "gelu":
        values = torch.nn.functional.gelu(torch.from_numpy(values)).numpy()
    elif name == "positive":
        values = np.abs(values)
    elif name == "sparse":
        values *= np.random.default_rng(1).random(COUNT) < 0.05
    frame = encode(values, CodecSpec("e4m3"))
    scales_width = frame[28 + 16 + 1]
    assert frame[28 + 16 + 2 + scales_width * (COUNT // 128 // 8)] == split


@pytest.mark.parametrize("name", NAMES)
def test_overhead_of_a_one_chunk_frame(name):
    """The runtime sends one frame per chunk, so heads may cost 64 bytes at most."""
    number_format = FORMATS[name]
    frame = encode(gaussian(), CodecSpec(name, entropy=False))
    scales = COUNT // 128 if number_format.float8 else 0
    assert len(frame) <= 64 + scales + number_format.code_bytes * COUNT


@pytest.mark.parametrize("name", NAMES)
def test_coding_that_does_not_pay_is_left_out(name):
    """Uniform bits cannot shrink; the escape keeps them at their raw size."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, COUNT, dtype=np.uint32)
    if name != "fp32":
        bits = (bits & np.uint32(0x87FFFFFF)) | np.uint32(0x38000000)
    frame = encode(bits.view(np.float32), CodecSpec(name))
    plain = encode(bits.view(np.float32), CodecSpec(name, entropy=False))
    assert len(frame) <= len(plain)


def adversaries(count):
    """Values chosen to make scales wide, codes uniform, codebooks long, or chunks escape."""
    generator = np.random.default_rng(count)
    exponents = generator.integers(-140, 127, count)
    yield np.ldexp(generator.choice([-1.5, 1.5], count), exponents).astype(np.float32)
    bits = generator.integers(0, 1 << 32, count, dtype=np.uint32)
    yield bits.view(np.float32)
    yield np.ldexp(np.float32(1), np.minimum(np.arange(count) % 256 - 140, 120)).astype(np.float32)
    yield (np.arange(count) % 256).astype(np.float32)
    yield np.minimum(generator.geometric(0.5, count), 60).astype(np.float32)
    nearly_constant = np.ones(count, np.float32)
    nearly_constant[-1:] = 2
    yield nearly_constant


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("entropy", [True, False])
def test_bound_is_a_bound(name, entropy):
    """encode_into trusts it; the worst inputs at awkward sizes must stay below."""
    for block_values, chunk_values in [(16, 16), (16, 48), (128, 1024), (128, 131_072)]:
        spec = CodecSpec(name, block_values, chunk_values, entropy)
        for count in (1, 2, 3, 15, 17, 33, 100, 257, min(5000, 20 * chunk_values + 1)):
            for values in adversaries(count):
                frame = encode(values, spec)
                assert len(frame) <= bound(count, spec)
                raw = encode(values, CodecSpec(name, block_values, chunk_values, False))
                assert len(frame) <= len(raw)


def test_blocks_of_zeros_do_not_widen_the_scales():
    """Embedding rows that were not used leave whole blocks of zeros; their scales must not cost the others bits."""
    values = gaussian()
    values[: COUNT // 2] = 0
    frame = encode(values, CodecSpec("e4m3"))
    assert frame[28 + 16 + 1] <= 2
    assert frame[28 + 16] > 100
