"""The native codec against the NumPy package, the reference: the same frames of the same values, on
every path.
"""

import numpy as np
import pytest
from native_paths import (
    BLOCK,
    CHUNK,
    KINDS,
    PATHS,
    REFERENCE,
    assert_agree,
    decoded_by,
    encoded_by,
    needs_native,
    values_of,
    with_every_format,
)

from fsl_codecs import CodecSpec
from fsl_codecs.dispatch import implementation_named

pytestmark = needs_native


@with_every_format
@pytest.mark.parametrize("kind", KINDS)
def test_small_vectors(name, kind):
    """Every size at which a loop, a run or a vector ends, in frames of one and of several
    chunks.
    """
    for count in (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1000):
        values = values_of(kind, count)
        assert_agree(values, CodecSpec(name, block_values=32, chunk_values=256))
        assert_agree(values, CodecSpec(name))
        assert_agree(values, CodecSpec(name, entropy=False))


@with_every_format
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_several_blocks(name, kind):
    """Full and short inner blocks, and plans made from samples."""
    for count in (BLOCK, BLOCK + 1, 2 * BLOCK + 777):
        assert_agree(values_of(kind, count), CodecSpec(name))


@with_every_format
def test_the_usual_chunk(name):
    """The runtime's chunks, also whole frames of them on several threads."""
    values = values_of("bell", 2 * CHUNK + 5000)
    frame = assert_agree(values, CodecSpec(name))
    decoded = decoded_by(REFERENCE, frame, values.size).tobytes()
    summed = np.ones_like(values)
    REFERENCE.decode_accumulate(frame, summed, -2.5)
    for path in PATHS:
        codec = implementation_named(path)
        for threads in (2, 3, 64):
            assert encoded_by(codec, values, CodecSpec(name), threads=threads) == frame, path
            out = np.empty_like(values)
            codec.decode_into(frame, out, threads=threads)
            assert out.tobytes() == decoded, path
            total = np.ones_like(values)
            codec.decode_accumulate(frame, total, -2.5, threads=threads)
            assert total.tobytes() == summed.tobytes(), path


@with_every_format
@pytest.mark.parametrize("kind", ["bell", "heavy", "constant", "nan", "bits", "zero blocks"])
@pytest.mark.parametrize("count", [1, 1000, 2 * BLOCK + 100])
def test_what_is_encoded(name, kind, count):
    """References, residuals and bf16 input: the same frames, and the same residual afterwards."""
    values = values_of(kind, count)
    reference = values_of("bell", count, seed=1)
    before = values_of("bell", count, seed=2) * np.float32(0.01)
    bfloat16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    spec = CodecSpec(name)
    for given in (values, bfloat16):
        assert_agree(given, spec)
        assert_agree(given, spec, reference=reference)
        for other in (None, reference):
            kept = before.copy()
            frame = encoded_by(REFERENCE, given, spec, reference=other, residual=kept)
            for path in PATHS:
                codec, residual = implementation_named(path), before.copy()
                assert (
                    encoded_by(codec, given, spec, reference=other, residual=residual) == frame
                ), path
                assert residual.tobytes() == kept.tobytes(), path


@with_every_format
def test_samples_that_mislead(name):
    """What is constant, rare or small in the sample is not so in the rest of the chunk."""
    count = BLOCK + 1000
    seen = np.arange(count) // 16 % 17 == 0
    rest = values_of("bell", count)
    bits = values_of("bits", count).view(np.uint32) & np.uint32(0x7EFFFFFF)
    wild = bits.view(np.float32)
    few = values_of("few", count)
    for in_sample in (0.0, 1.0, few, rest):
        for elsewhere in (rest, wild, few, 100 * rest, np.float32(2.0**121)):
            values = np.where(seen, in_sample, elsewhere).astype(np.float32)
            assert_agree(values, CodecSpec(name))
            # Only the very last value disagrees.
            values = np.where(np.arange(count) < count - 1, in_sample, elsewhere)
            assert_agree(values.astype(np.float32), CodecSpec(name))


def test_a_misleading_constant_behind_a_payload_that_is_too_long():
    """The plan of the sample is dropped for the constant, found last, not for the size, found
    first.
    """
    count = 4 * BLOCK
    generator = np.random.default_rng(3)
    seen = np.arange(count) // 16 % 17 == 0
    words = generator.integers(0, 1 << 32, count, dtype=np.uint32) & np.uint32(0xFFFFFF00)
    words[seen] = np.where(generator.random(seen.sum()) < 0.5, 0x3F800000, 0x40490F00)
    words[-1] |= np.uint32(1 << 5)
    assert_agree(words.view(np.float32), CodecSpec("fp32"))
