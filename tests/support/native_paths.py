"""Helpers for tests that compare the native codec with its NumPy reference."""

import numpy as np
import pytest

from fsl_codecs import CodecError, available, bound
from fsl_codecs.codec import _rounded_to_bfloat16
from fsl_codecs.dispatch import implementation_named

REFERENCE = implementation_named("numpy")
PATHS = [name for name in available() if name != "numpy"]
FORMATS = ["fp32", "bf16", "e4m3", "e5m2", "uniform"]
BLOCK = 16384
CHUNK = 131072
needs_native = pytest.mark.skipif(not PATHS, reason="the native codec is not built here")
on_every_path = pytest.mark.parametrize("path", PATHS or ["none"])
with_every_format = pytest.mark.parametrize("name", FORMATS)


def values_of(kind, count, seed=0):
    """Vectors that bring out the modes, tables and escapes."""
    generator = np.random.default_rng([seed, count])
    bell = generator.standard_normal(count)
    if kind == "bell":
        values = bell * 1e-3
    elif kind == "heavy":
        values = bell * np.exp(3 * generator.standard_normal(count))
    elif kind == "sparse":
        values = np.where(generator.random(count) < 0.02, bell, 0)
    elif kind == "signed zeros":
        values = np.where(generator.random(count) < 0.5, 0.0, -0.0)
    elif kind == "relu":
        values = np.maximum(bell, 0)
    elif kind == "subnormal":
        values = bell * 1e-39
    elif kind == "few":
        values = generator.integers(0, 3, count) - 1.0
    elif kind == "bits":
        return generator.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    elif kind == "huge":
        values = bell * 2.0**119
    elif kind == "constant":
        values = np.full(count, 0.3)
    elif kind == "nan":
        values = np.where(np.arange(count) == count // 2, np.nan, bell)
    else:
        assert kind == "zero blocks"
        values = np.where(np.arange(count) // 128 % 3 == 0, 0, bell)
    return values.astype(np.float32)


KINDS = [
    "bell",
    "heavy",
    "sparse",
    "signed zeros",
    "relu",
    "subnormal",
    "few",
    "bits",
    "huge",
    "constant",
    "nan",
    "zero blocks",
]


def encoded_by(codec, values, spec, **options):
    """The frame that an implementation writes."""
    out = np.full(bound(values.size, spec), 0xA5, np.uint8)
    return out[: codec.encode_into(values, out, spec, **options)].tobytes()


def decoded_by(codec, frame, count, dtype=np.float32, **options):
    """The values that an implementation reads."""
    out = np.full(count, 7, dtype)
    assert codec.decode_into(frame, out, **options) == count
    return out


def bfloat16_of(values):
    """The bf16 bits (n,) of values that the reference decoded to fp32, as it rounds them."""
    return _rounded_to_bfloat16(values)


def sums_of(before, weight, values):
    """Before + weight * values, each operation in fp32."""
    with np.errstate(all="ignore"):
        return before + np.float32(weight) * values


def assert_agree(values, spec, **options):
    """Every path writes the reference's frame of these values and reads it as the reference does.

    Returns the frame. The reference is slow, so it decodes once: bf16 and sums follow from fp32
    (test_codec_roundtrip.py checks that it does the same).
    """
    frame = encoded_by(REFERENCE, values, spec, **options)
    decoded = decoded_by(REFERENCE, frame, values.size)
    halves = bfloat16_of(decoded)
    ramp = np.arange(values.size, dtype=np.float32)
    summed = sums_of(ramp, 0.3, decoded)
    described = REFERENCE.info(frame)
    for path in PATHS:
        codec = implementation_named(path)
        assert encoded_by(codec, values, spec, **options) == frame, path
        assert decoded_by(codec, frame, values.size).tobytes() == decoded.tobytes(), path
        ours = decoded_by(codec, frame, values.size, np.uint16)
        assert ours.tobytes() == halves.tobytes(), path
        total = ramp.copy()
        codec.decode_accumulate(frame, total, 0.3)
        assert total.tobytes() == summed.tobytes(), path
        assert codec.info(frame) == described, path
    return frame


def outcome(read, *arguments):
    """What a reading gives: the bytes of its output, or the class and text of its refusal."""
    try:
        return read(*arguments)
    except CodecError as error:
        return type(error), str(error)


def assert_same_reading(frame, count, limits=None):
    """All paths read the frame as the reference does, or refuse it in the same words.

    A refused frame adds nothing. Returns the number of values, or the class and text of the
    refusal.
    """

    def decode(implementation):
        out = np.zeros(count, np.float32)
        read = implementation.decode_into(frame, out, limits)
        return read, out.tobytes()

    def accumulate(implementation):
        total = np.ones(count, np.float32)
        try:
            read = implementation.decode_accumulate(frame, total, 1.5, limits)
        except CodecError:
            assert (total == 1).all()
            raise
        return read, total.tobytes()

    def info(implementation):
        return implementation.info(frame)

    decoded, described = outcome(decode, REFERENCE), outcome(info, REFERENCE)
    is_refused = isinstance(decoded[0], type)
    added = decoded
    if not is_refused:
        read, values = decoded
        total = np.ones(count, np.float32)
        total[:read] = sums_of(total[:read], 1.5, np.frombuffer(values, np.float32)[:read])
        added = read, total.tobytes()
    for path in PATHS:
        codec = implementation_named(path)
        assert outcome(info, codec) == described, path
        assert outcome(decode, codec) == decoded, path
        assert outcome(accumulate, codec) == added, path
    return decoded if is_refused else decoded[0]
