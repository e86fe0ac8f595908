"""Signs are bits of NumPy's Philox stream, with random access, on every implementation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fsl_codecs
from fsl_codecs import CodecUsageError, implementation, signs

WORDS = st.integers(0, 2**64 - 1)
needs_native = pytest.mark.skipif(implementation() == "numpy", reason="there is no native codec")


@pytest.mark.parametrize("of", [signs, fsl_codecs], ids=["numpy", "chosen"])
def test_words_of_the_published_vector(of):
    expected = [5705853004827290377, 6584680345644299050, 680768428710196683]
    assert of.sign_words(1, 2, 0, 3).tolist() == expected


@pytest.mark.parametrize("of", [signs, fsl_codecs], ids=["numpy", "chosen"])
@settings(max_examples=30, deadline=None)
@given(WORDS, WORDS, st.integers(0, 300), st.integers(0, 40))
def test_words_are_those_of_numpy_from_any_place_on(of, seed, stream, first, count):
    # A list of both would become float64.
    generator = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=0)
    whole = generator.random_raw(first + count)
    assert of.sign_words(seed, stream, first, count).tolist() == whole[first:].tolist()


def test_words_far_into_a_stream_are_those_after_as_many_blocks():
    block = 2**40
    generator = np.random.Philox(key=[3, 4], counter=[block, 0, 0, 0])
    found = fsl_codecs.sign_words(3, 4, 4 * block + 1, 6)
    assert found.tolist() == generator.random_raw(7)[1:].tolist()
    assert found.tolist() == signs.sign_words(3, 4, 4 * block + 1, 6).tolist()


@pytest.mark.parametrize("of", [signs, fsl_codecs], ids=["numpy", "chosen"])
def test_a_step_adds_plus_for_a_set_bit_and_minus_for_another(of):
    """Closed form, bit by bit, with an offset inside a word."""
    values = np.linspace(-1, 1, 200, dtype=np.float32)
    keys, steps = np.array([[1, 2], [7, 8]], np.uint64), np.array([0.1, -3e-5], np.float32)
    expected = []
    for i, value in enumerate(values):
        total = value
        for (seed, stream), step in zip(keys.tolist(), steps, strict=True):
            place = 37 + i
            word = int(np.random.Philox(key=[seed, stream], counter=0).random_raw(4)[place // 64])
            total = np.float32(total + (step if word >> (place % 64) & 1 else -step))
        expected.append(total)
    of.add_signs(values, 37, keys, steps)
    assert values.tobytes() == np.array(expected, np.float32).tobytes()


@needs_native
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9000), st.integers(0, 2**45), st.integers(0, 6), st.integers(0, 2**32))
def test_native_adds_the_same_bits(count, offset, directions, seed):
    generator = np.random.default_rng(seed)
    values = (generator.standard_normal(count) * 10.0 ** generator.integers(-42, 3)).astype("f4")
    keys = generator.integers(0, 2**63, (directions, 2)).astype(np.uint64)
    steps = generator.standard_normal(directions).astype(np.float32)
    steps[:1] = 1e-41  # subnormal
    same = values.copy()
    fsl_codecs.add_signs(values, offset, keys, steps)
    signs.add_signs(same, offset, keys, steps)
    assert values.tobytes() == same.tobytes()


@pytest.mark.parametrize("of", [signs, fsl_codecs], ids=["numpy", "chosen"])
def test_parts_added_alone_are_those_of_the_whole(of):
    keys, steps = np.array([[5, 6]], np.uint64), np.array([0.25], np.float32)
    whole = np.zeros(70_000, np.float32)
    of.add_signs(whole, 0, keys, steps)
    parts = np.zeros(70_000, np.float32)
    for start, stop in ((33_001, 70_000), (0, 11), (11, 33_001)):
        of.add_signs(parts[start:stop], start, keys, steps)
    assert parts.tobytes() == whole.tobytes()
    assert abs(whole.mean()) < 4 * 0.25 / np.sqrt(len(whole))


@pytest.mark.parametrize("of", [signs, fsl_codecs], ids=["numpy", "chosen"])
@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        (np.zeros((1, 2), np.uint64), np.zeros(2, np.float32)),
        (np.zeros((2, 1), np.uint64), np.zeros(2, np.float32)),
        (np.zeros((1, 2), np.int64), np.zeros(1, np.float32)),
        (np.zeros((1, 2), np.uint64), np.zeros(1, np.float64)),
    ],
)
def test_keys_and_steps_that_do_not_fit_are_refused(of, keys, steps):
    with pytest.raises(CodecUsageError):
        of.add_signs(np.zeros(8, np.float32), 0, keys, steps)


@needs_native
def test_native_refuses_values_that_it_cannot_write():
    keys, steps = np.zeros((1, 2), np.uint64), np.zeros(1, np.float32)
    for values in (np.zeros(8), np.zeros(16, np.float32)[::2], np.zeros((2, 2), np.float32)):
        with pytest.raises(CodecUsageError):
            fsl_codecs.add_signs(values, 0, keys, steps)
