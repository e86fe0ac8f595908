"""Frames of scalars: small, exact, and refused where one bit is wrong."""

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_codecs import (
    MOST_SCALARS,
    CodecError,
    CodecUsageError,
    FrameError,
    LimitError,
    decode_seeds,
    direction_keys,
    encode_seeds,
    is_seeds,
)


def forged(steps, probes, rounds, first, payload=b""):
    head = struct.pack("<4sHHIQ", b"FSZ1", steps, probes, rounds, first)
    return head + struct.pack("<I", zlib.crc32(head + payload)) + payload


def test_a_frame_is_24_bytes_and_the_scalars():
    scalars = np.array([[[1.5, -2.0, 3.0, np.inf, 0.1]]], np.float32)
    frame = encode_seeds(41, scalars)
    assert frame == forged(1, 5, 1, 41, struct.pack("<5f", *scalars.ravel()))
    assert len(frame) == 24 + 20
    found = decode_seeds(frame)
    assert found.first == 41
    assert found.scalars.tobytes() == scalars.tobytes()
    assert is_seeds(frame)
    assert not is_seeds(b"FSLC")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**39))
def test_round_trip(rounds, steps, probes, first):
    scalars = np.random.default_rng(rounds).standard_normal((rounds, steps, probes)).astype("f4")
    found = decode_seeds(memoryview(encode_seeds(first, scalars)))
    assert found.first == first
    assert found.scalars.tobytes() == scalars.tobytes()
    assert found.scalars.shape == scalars.shape


def test_every_changed_bit_and_every_other_length_is_refused():
    frame = encode_seeds(3, np.arange(6, dtype=np.float32).reshape(1, 2, 3))
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CodecError):
            decode_seeds(damaged)
    for end in range(len(frame)):
        with pytest.raises(FrameError):
            decode_seeds(frame[:end])
    with pytest.raises(FrameError):
        decode_seeds(frame + b"\0")


@pytest.mark.parametrize(
    ("steps", "probes", "rounds", "first"),
    [
        (0, 5, 1, 0),
        (1, 0, 1, 0),
        (1, 5, 0, 0),
        (1025, 1, 1, 0),
        (1, 1025, 1, 0),
        (1, 1, 1, 1 << 40),
        (1, 1, 2, (1 << 40) - 1),
        (1, 1, 1, (1 << 64) - 1),
    ],
)
def test_impossible_numbers_are_refused(steps, probes, rounds, first):
    payload = bytes(4 * steps * probes * rounds)
    with pytest.raises(FrameError):
        decode_seeds(forged(steps, probes, rounds, first, payload))


def test_limits_come_before_allocation():
    frame = forged(1024, 1024, (1 << 32) - 1, 0)
    tracemalloc.start()
    with pytest.raises(LimitError):
        decode_seeds(frame)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20_000


@pytest.mark.parametrize(
    "scalars",
    [
        np.zeros((1, 5), np.float32),
        np.zeros((1, 1, 5)),
        np.zeros((1, 0, 5), np.float32),
        np.zeros((0, 1, 5), np.float32),
        np.zeros((MOST_SCALARS + 1, 1, 1), np.float32),
    ],
)
def test_scalars_that_fit_no_frame_are_refused(scalars):
    with pytest.raises(CodecUsageError):
        encode_seeds(0, scalars)


def test_keys_are_seed_and_round_step_probe():
    keys = direction_keys(2**62, 7, 2, 2, 3)
    assert set(keys[:, 0].tolist()) == {2**62}
    expected = [n << 24 | k << 12 | p for n in (7, 8) for k in (0, 1) for p in (0, 1, 2)]
    assert keys[:, 1].tolist() == expected
