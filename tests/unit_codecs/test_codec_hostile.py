"""Damaged, cut, swapped or forged frames raise CodecError or decode; nothing else."""

import struct

import numpy as np
import pytest
from forged_frames import forged, with_checksums

from fsl_codecs import (
    CodecError,
    CodecSpec,
    FrameError,
    LimitError,
    Limits,
    decode,
    decode_accumulate,
    encode,
    info,
)
from fsl_codecs.code_tables import CodeTable
from fsl_codecs.lanes import write_stream

HEADER, HEAD = 28, 16
LIMITS = Limits(max_values=50_000, max_frame_bytes=1 << 22)
NAMES = ["fp32", "bf16", "e4m3", "e5m2", "uniform"]


def seeds():
    """One frame of each kind: every format, mode, split and plane kind occurs."""
    generator = np.random.default_rng(0)
    values = (generator.standard_normal(3000) * 1e-3).astype(np.float32)
    gelu = np.where(values > 0, values, values / 32)
    sparse = np.where(generator.random(3000) < 0.1, values, 0)
    wide = np.ldexp(values, generator.integers(-100, 100, 3000))
    for name in NAMES:
        spec = CodecSpec(name, 64, 1024)
        for data in (values, gelu, sparse, wide):
            yield encode(data.astype(np.float32), spec)
        yield encode(values, CodecSpec(name, 64, 1024, entropy=False))
        yield encode(np.append(values[:100], np.float32(np.nan)), spec)
        yield encode(np.ones(2000, np.float32), spec)
        yield encode(values[:0], spec)
    for name in NAMES:
        large = (generator.standard_normal(17_000) * 1e-3).astype(np.float32)
        large[200:300] *= 100
        yield encode(large, CodecSpec(name))
    yield encode((values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))
    heavy = generator.standard_t(1.5, 1000).astype(np.float32)
    yield encode(heavy, CodecSpec("uniform"))
    yield encode(heavy, CodecSpec("uniform", entropy=False))
    for step_log2 in (0, -8):  # groups of two, and of four
        yield encode(heavy, CodecSpec("uniform", step_log2=step_log2))
        yield encode(large[:16_999], CodecSpec("uniform", step_log2=step_log2))
    # Two of the four symbols are numbers 52 and 50 of those without a code: with two low bits, 0
    # above rank 13 and 2 above 12, of 14.
    listed = b"\2\0" + b"\2\0" + b"\xff\xff\xff\1"
    table = CodeTable(6, 2, bytes([0] * 28 + [2, 2, 3, 4, 4, 0, 0] + [0] * 29), 2)
    stream = write_stream(table.code, np.array([30, 1, 2, 29], np.uint8))
    heads = b"\0\2" + table.packed + b"\0" + struct.pack("<I", len(stream))
    yield forged("e4m3", heads + stream + b"\x78\0" + listed + b"\x0a\x03", 4)


SEEDS = list(seeds())


def survives(frame):
    """Decode; returns False for a CodecError. Any other error fails the test."""
    accumulator = np.zeros(LIMITS.max_values, np.float32)
    try:
        values = decode(frame, LIMITS)
    except CodecError:
        with pytest.raises(CodecError):
            decode_accumulate(frame, accumulator, 1.0)
        assert not accumulator.any(), "a refused frame was added"
        return False
    assert info(frame).nonfinite == (not np.isfinite(values).all())
    return True


def test_damage_is_always_found():
    """CRC-32 finds every burst of up to 32 bits, so every flipped bit is found."""
    generator = np.random.default_rng(1)
    for frame in SEEDS:
        for at in {*range(min(len(frame), 60)), *generator.integers(0, len(frame), 20).tolist()}:
            damaged = bytearray(frame)
            damaged[at] ^= 1 << int(generator.integers(0, 8))
            with pytest.raises(CodecError):
                decode(damaged, LIMITS)
            with pytest.raises(CodecError):
                info(damaged)


def test_every_truncation_is_refused():
    """A stream that ends early never looks complete, with old checksums or new ones."""
    generator = np.random.default_rng(3)
    for frame in SEEDS:
        for size in {*range(min(len(frame), 80)), *generator.integers(0, len(frame), 20).tolist()}:
            assert not survives(frame[:size])
            assert not survives(with_checksums(frame[:size]))


def test_bytes_left_over_are_refused():
    """After the last chunk, and within a chunk's payload."""
    for frame in SEEDS:
        assert not survives(frame + b"\0")
        if len(frame) > HEADER:
            (size,) = struct.unpack_from("<I", frame, HEADER)
            longer = bytearray(frame)
            longer[HEADER + HEAD + size : HEADER + HEAD + size] = b"\0"
            struct.pack_into("<I", longer, HEADER, size + 1)
            with pytest.raises(FrameError, match="too many"):
                decode(with_checksums(longer))


def test_chunks_cannot_change_places_or_frames():
    """Chunks of equal size are distinguished by their index and the header's checksum."""
    values = np.arange(64, dtype=np.float32)
    frame = encode(values, CodecSpec("fp32", 16, 32, entropy=False))
    half = (len(frame) - HEADER) // 2
    swapped = frame[:HEADER] + frame[HEADER + half :] + frame[HEADER : HEADER + half]
    with pytest.raises(FrameError, match="head of chunk 0"):
        decode(swapped)
    other = encode(values, CodecSpec("bf16", 16, 32, entropy=False))
    with pytest.raises(FrameError, match="checksum of chunk 0"):
        decode(other[:HEADER] + frame[HEADER:])


def test_huge_announcements_cost_nothing():
    """A header alone can claim 2**64 - 1 values or a chunk of 4 GiB."""
    frame = bytearray(encode(np.zeros(10, np.float32)))
    frame[16:24] = b"\xff" * 8
    with pytest.raises(LimitError):
        decode(with_checksums(frame))
    with pytest.raises(FrameError, match="cannot hold"):
        info(with_checksums(frame))
    frame = bytearray(encode(np.zeros(10, np.float32)))
    struct.pack_into("<I", frame, HEADER, 0xFFFFFFFF)
    with pytest.raises(FrameError, match="ends inside chunk 0"):
        decode(with_checksums(frame))


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"X", "magic"),
        (4, b"\3", "version 3"),
        (4, b"\4", "version 4"),
        (4, b"\7", "version 7"),
        (5, b"\5", "unknown format 5"),
        (6, b"\1", "reserved"),
        (8, struct.pack("<I", 8), "block_values"),
        (8, struct.pack("<I", 2048), "block_values"),
        (8, struct.pack("<I", 100), "block_values"),
        (8, struct.pack("<I", 0), "block_values"),
        (12, struct.pack("<I", 0), "chunk_values"),
        (12, struct.pack("<I", 130), "chunk_values"),
        (12, struct.pack("<I", 1 << 21), "chunk_values"),
        (HEADER + 4, b"\1", "head of chunk 0"),
        (HEADER + 8, b"\4", "head of chunk 0"),
        (HEADER + 9, b"\2", "head of chunk 0"),
        (HEADER + 10, b"\1", "head of chunk 0"),
        (HEADER + 9, b"\1", "quantized"),
        (HEADER + 8, b"\0", "too early"),
        (HEADER + 8, b"\1", "too many"),
        (HEADER + HEAD, b"\4", "unknown split 4"),
    ],
)
def test_each_field_is_checked(offset, value, message):
    """Correct checksums do not make a frame correct."""
    frame = bytearray(encode(np.linspace(-1, 1, 500, dtype=np.float32), CodecSpec("e4m3")))
    frame[offset : offset + len(value)] = value
    with pytest.raises(FrameError, match=message):
        decode(with_checksums(frame))


@pytest.mark.parametrize(
    ("name", "payload", "message"),
    [
        ("e4m3", "04", "unknown split 4"),
        ("uniform", "05", "unknown split 5"),
        ("fp32", "02", "unknown split 2"),
        ("bf16", "02", "unknown split 2"),
        ("e4m3", "00 05", "unknown plane kind 5"),
        ("e4m3", "00 ff", "unknown plane kind 255"),
        ("e4m3", "00 01 40", "constant 64 does not fit"),
        ("e4m3", "00 00 01 04", "constant 4 does not fit"),
        ("uniform", "00 01 40", "constant 64 does not fit"),
        ("e4m3", "00 02 05 04 00 11", "covers symbols 5 to 4"),
        ("e4m3", "00 02 00 40 00" + "00" * 33, "covers symbols 0 to 64"),
        ("e4m3", "00 02 00 02 00 21 03", "code space"),
        ("e4m3", "00 02 00 02 00 11 01", "code space"),
        ("e4m3", "00 02 00 01 01 11", "code space"),
        ("e4m3", "00 02 00 01 0d 21", "codes of up to 13"),
        ("e4m3", "00 02 00 01 09 21", "codes of up to 9"),
        ("e4m3", "00 02 00 01 0f 21", "codes of up to 15"),
        ("e4m3", "00 02 00 01 ff 21", "codes of up to 15"),
        ("e4m3", "00 01 00 02 00 03 02 22 33", "an escape where every symbol has a code"),
        # Low bits that leave more than 16 ranks, that no number has, or where nothing is listed.
        ("e4m3", "00 02 00 00 01 01", "numbers up to 62 with 0 low bits"),
        ("e4m3", "00 02 00 00 11 01", "numbers up to 62 with 1 low bits"),
        ("e4m3", "00 02 00 00 71 01", "numbers up to 62 with 7 low bits"),
        ("e4m3", "00 02 00 00 f1 01", "numbers up to 62 with 15 low bits"),
        ("e4m3", "00 01 00 02 00 00 31 01", "numbers up to 2 with 3 low bits"),
        ("e4m3", "00 01 00 02 00 02 12 22 02", "numbers up to 0 with 1 low bits"),
        ("e4m3", "00 02 00 01 10 11", "numbers up to 0 with 1 low bits"),
        ("e4m3", "00 02 00 01 f0 11", "numbers up to 0 with 15 low bits"),
        ("bf16", "00 02 00 00 31 01", "numbers up to 254 with 3 low bits"),
        ("bf16", "00 02 00 00 91 01", "numbers up to 254 with 9 low bits"),
        ("e4m3", "00 02 00 01 00 1d", "codes of up to 13"),
        ("e4m3", "00 02 07 07 00 01", "1 codes"),
        ("e4m3", "00 02 00 01 00 01", "nibbles"),
        ("e4m3", "00 02 00 01 00 10", "nibbles"),
        ("e4m3", "00 02 07 07 01 11", "nibbles"),
        ("e4m3", "00 02 00 03 01 00 00", "nibbles"),
        ("e4m3", "00 02 00 01", "too early"),
        ("e4m3", "00 02 00 03 00 22", "too early"),
        ("fp32", "00 02 00 ff 0c" + "88" * 128, "codes"),
        # Tables from outside the frame, which earlier encoders named by number or by digest.
        ("e4m3", "00 03 00", "unknown plane kind 3"),
        ("e4m3", "00 04 0123456789abcdef", "unknown plane kind 4"),
        ("uniform", "00 00 04", "unknown plane kind 4"),
        ("e4m3", "", "too early"),
        # The scales follow.
        ("e4m3", "00 01 00 01 00", "too early"),
        ("e4m3", "00 01 00 01 00 78", "too early"),
        ("e4m3", "00 01 00 01 00 78 09", "unknown form of scales 9$"),
        ("e4m3", "00 01 00 01 00 09 00", "a scale is not from 10 to 247"),
        ("e4m3", "00 01 00 01 00 f8 00", "a scale is not from 10 to 247"),
        ("e4m3", "00 01 00 01 00 f7 01 01 00", "a scale is not from 10 to 247"),
        ("e4m3", "00 01 00 01 00 f7 41 01 00", "a scale is not from 10 to 247"),
        ("e4m3", "00 01 00 01 00 0a 81 01 00", "a scale is not from 10 to 247"),
        ("e4m3", "02 01 7f 78 00", "NaN"),
        ("uniform", "00 01 20 01 00 00 02", "too early"),
        ("uniform", "00 01 20 01 00 00 02 0b", "unknown form of scales 11$"),
        ("uniform", "00 01 20 01 00 07 00 00", "a scale is not from 8 to 992"),
        ("uniform", "00 01 20 01 00 e1 03 00", "a scale is not from 8 to 992"),
        ("uniform", "00 01 20 01 00 00 80 00", "a scale is not from 8 to 992"),
        ("uniform", "00 01 20 01 00 e0 03 01 01 00", "a scale is not from 8 to 992"),
        ("uniform", "00 01 20 01 00 08 00 0a" + "01 00" * 10, "a scale is not from 8 to 992"),
        # Then the planes, and the escaped values.
        ("e4m3", "00 00 01 00 78 00" + "00" * 95, "too early"),
        ("uniform", "01 01 00 00 02 00", "too early"),
        ("uniform", "01 01 00 00 02 00" + "00" * 511, "too early"),
        ("uniform", "01 01 00 00 02 00" + "00" * 513, "1 bytes too many"),
        ("uniform", "01 01 00 00 02 00" + "00" * 510 + "807f", "NaN"),
        ("uniform", "01 01 80 00 02 00" + "00" * 4, "4 bytes too many"),
    ],
)
def test_forged_coded_chunks_are_refused(name, payload, message):
    """Every error of heads, tables, scales and planes of 128 values."""
    frame = forged(name, bytes.fromhex(payload), 128 if "scale" not in message else 9 * 128)
    with pytest.raises(FrameError, match=message):
        decode(frame)


@pytest.mark.parametrize(
    ("name", "payload", "value"),
    [
        ("e4m3", "02 01 38 78 00", 1 / 128),
        ("e4m3", "02 01 38 78 08" + "00" * 8, 1 / 128),
        ("e4m3", "02 01 38 78 08" + "fe" * 8, 1 / 128),
        ("uniform", "01 01 81 00 02 00", 1.0),
        ("uniform", "01 01 81 00 02 0a" + "fe" * 10, 1.0),
        ("uniform", "01 01 00 00 02 00" + "0000803f" * 128, 1.0),
        ("uniform", "01 01 81 08 00 00", 2.0**-126),
        ("uniform", "01 01 81 e0 03 00", 2.0**120),
        ("uniform", "01 01 ff e0 03 00", 127 * 2.0**120),
    ],
)
def test_unusual_frames_with_one_meaning_are_read(name, payload, value):
    """Wide scales, bits in padding, an unneeded escaped value: other decoders accept them too."""
    assert decode(forged(name, bytes.fromhex(payload), 128))[0] == np.float32(value)


@pytest.mark.parametrize("mode", [2, 3])
def test_missing_escaped_values_are_found(mode):
    """There are as many as escape codes, in raw codes too, and each inner block has its own."""
    heavy = np.random.default_rng(1).standard_t(1.5, 20_000).astype(np.float32)
    frame = encode(heavy, CodecSpec("uniform", entropy=mode == 3))
    payload = frame[HEADER + HEAD :]
    assert frame[HEADER + 8] == mode
    assert decode(forged("uniform", payload, 20_000, mode)).tobytes() == decode(frame).tobytes()
    with pytest.raises(FrameError, match="too early"):
        decode(forged("uniform", payload[:-4], 20_000, mode))
    with pytest.raises(FrameError, match="4 bytes too many"):
        decode(forged("uniform", payload + bytes(4), 20_000, mode))
    nan = payload[:-4] + struct.pack("<f", np.nan)
    with pytest.raises(FrameError, match="flag"):
        decode(forged("uniform", nan, 20_000, mode))
    with pytest.raises(FrameError, match="quantized"):
        decode(forged("uniform", nan, 20_000, mode, 1))


def test_flags_and_modes_cannot_lie():
    """Receivers rely on the flag for a finite delta."""
    infinity, one = struct.pack("<f", np.inf), struct.pack("<f", 1.0)
    for mode, payload, values in [(1, infinity, 9), (0, infinity + one, 2)]:
        assert info(forged("fp32", payload, values, mode, 1)).nonfinite
        assert decode(forged("fp32", payload, values, mode, 1)).size == values
        with pytest.raises(FrameError, match="flag"):
            decode(forged("fp32", payload, values, mode, 0))
    with pytest.raises(FrameError, match="flag"):
        decode(forged("fp32", one, 9, 1, 1))
    with pytest.raises(FrameError, match="lossless"):
        decode(forged("fp32", one + one, 2, 2, 0))
    with pytest.raises(FrameError, match="NaN"):
        decode(forged("bf16", struct.pack("<HH", 0x7F80, 1), 2, 2, 0))
    with pytest.raises(FrameError, match="NaN"):
        decode(forged("e4m3", b"\xf7\0\x7e\x01", 2, 2, 0))
