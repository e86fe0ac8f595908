"""Sizes: close to the entropy, small overhead, escapes that pay, and a bound that holds."""

import numpy as np
import pytest
import torch

from fsl_codecs import CodecSpec, CodecUsageError, bound, decode, encode, info
from fsl_codecs.code_tables import CodeTable
from fsl_codecs.formats import FORMATS
from fsl_codecs.planes import ChunkPlan, PlanePlan, write_words
from fsl_codecs.quantised import Quantised, quantise, write_escaped
from fsl_codecs.scales import write_scales

NAMES = ["fp32", "bf16", "e4m3", "e5m2", "uniform"]
COUNT = 131_072


def gaussian(count=COUNT, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def entropy_bits(symbols):
    counts = np.unique(symbols, return_counts=True)[1]
    return float((counts * np.log2(symbols.size / counts)).sum())


def drawn(draw, count):
    generator = np.random.default_rng(0)
    if draw == "laplace":
        return generator.laplace(size=count).astype(np.float32)
    if draw == "uniform":
        return generator.uniform(-1, 1, count).astype(np.float32)
    return generator.standard_normal(count).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "draw", "over", "bits"),
    [
        ("e4m3", "gauss", 1.013, 6.58),
        ("e4m3", "laplace", 1.012, 6.90),
        ("e4m3", "uniform", 1.0145, 6.13),
        ("e5m2", "gauss", 1.018, 5.61),
        ("e5m2", "laplace", 1.0145, 5.91),
        ("e5m2", "uniform", 1.025, 5.21),
        ("uniform", "gauss", 1.0135, 5.63),
        ("uniform", "laplace", 1.0185, 5.56),
        ("uniform", "uniform", 1.0305, 5.49),
        ("bf16", "gauss", 1.0155, 10.62),
        ("bf16", "laplace", 1.011, 10.89),
        ("bf16", "uniform", 1.006, 10.06),
    ],
)
def test_frames_are_close_to_the_entropy(name, draw, over, bits):
    """The order-0 entropy of the codes, times this factor, has room for scales, tables, heads and
    escapes.
    """
    values = drawn(draw, 4 * COUNT)
    codes = np.concatenate([block.words for block in quantise(values, FORMATS[name], 128, 14)])
    size = 8 * len(encode(values, CodecSpec(name)))
    assert size <= over * entropy_bits(codes)
    assert size <= bits * values.size


def test_fp32_frames_of_bfloat16_weights_drop_the_empty_half():
    """Initial weights are often bf16 values: one lower byte is constant; the escape in the last
    plane's table, of signs alone, costs half a bit.
    """
    values = torch.from_numpy(gaussian()).bfloat16().float().numpy()
    frame = encode(values)
    assert info(frame).bits_per_value < 11.2
    assert decode(frame).tobytes() == values.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_coding_that_does_not_pay_is_left_out(name):
    """Random bits cannot shrink; raw codes keep them at their size."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, COUNT, dtype=np.uint32)
    if name != "fp32":
        bits = (bits & np.uint32(0x87FFFFFF)) | np.uint32(0x38000000)
    frame = encode(bits.view(np.float32), CodecSpec(name))
    plain = encode(bits.view(np.float32), CodecSpec(name, entropy=False))
    assert len(frame) <= len(plain)


def adversaries(count):
    """Return values that make scales wide, codes uniform, code tables long, or chunks escape."""
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
    sparse = np.zeros(count, np.float32)
    sparse[::150] = generator.standard_t(1.5, sparse[::150].size)
    yield sparse


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("entropy", [True, False])
def test_bound_is_a_bound(name, entropy):
    """encode_into relies on it; the worst inputs at awkward sizes stay below."""
    for block_values, chunk_values in [(16, 16), (16, 48), (128, 1024), (128, 131_072)]:
        spec = CodecSpec(name, block_values, chunk_values, entropy)
        for count in (1, 2, 3, 15, 17, 33, 100, 257, min(5000, 20 * chunk_values + 1)):
            for values in adversaries(count):
                frame = encode(values, spec)
                assert len(frame) <= 28 + 16 * -(-count // chunk_values) + 4 * count
                raw = encode(values, CodecSpec(name, block_values, chunk_values, False))
                assert len(frame) <= len(raw)


def worst_inner_block(name, split_index):
    """Return the bytes of one inner block with few coded symbols, where uniform escapes every value
    with the widest scales.
    """
    number_format = FORMATS[name]
    # All but two symbols share the escape leaf; the highest one, last in the list, takes the most
    # bits with few low bits.
    low_bits = {2: 0, 6: 2, 8: 4}
    table = {w: CodeTable(w, 2, b"\1\2" + bytes((1 << w) - 2), low_bits[w]) for w in low_bits}
    for width, low in low_bits.items():
        assert int(table[width].uncoded[-1]) == (1 << width) - 1
        with pytest.raises(CodecUsageError):
            CodeTable(width, 2, table[width].lengths, low - 1)
    planes = tuple(
        PlanePlan(width, b"\2" + table[width].packed, 0, table[width])
        for width in number_format.splits[split_index].widths
    )
    words = np.full(16384, (1 << number_format.code_bits) - 1).astype(
        f"u{number_format.code_bytes}"
    )
    pieces = []
    write_words(words, number_format, ChunkPlan(split_index, planes), pieces)
    if number_format.code_bits == 8:
        scales = np.arange(1024, dtype=np.int64) % 1000
        if name != "uniform":
            scales %= 230
        escaped = np.ones(16384, np.float32) if name == "uniform" else None
        block = Quantised(words, scales, escaped)
        write_scales(block.scales, number_format, pieces)
        write_escaped(block, pieces)
    return sum(map(len, pieces))


def test_bound_leaves_room_for_an_inner_block_at_its_worst():
    """An encoder may find only then that coding does not pay, and starts again in the same
    buffer.
    """
    worst = [
        worst_inner_block(name, index)
        for name in NAMES
        for index in range(len(FORMATS[name].splits))
    ]
    assert max(worst) == 155_656, "as in the document"
    heads = 1 + 4 * (1 + 3 + 128)
    stream_heads, vector = 4 * (4 + 2 * 128), 64
    for spec in (CodecSpec(), CodecSpec("e4m3", 16, 16)):
        for count in (0, 1, 131_072, 1_000_000):
            frame = 28 + 16 * -(-count // spec.chunk_values) + 4 * count
            assert bound(count, spec) == frame + 196_608
            assert bound(count, spec) - frame >= max(worst) + heads + stream_heads + vector
