"""Bytes from the network: damaged, cut, swapped or forged, they raise CodecError or decode; nothing else."""

import struct
import zlib

import numpy as np
import pytest

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

HEADER, HEAD = 28, 16
LIMITS = Limits(max_values=50_000, max_frame_bytes=1 << 22)
NAMES = ["fp32", "bf16", "e4m3", "e5m2"]


def sealed(frame):
    """The frame with all checksums made right again, as far as its lengths allow; an attacker can do that."""
    frame = bytearray(frame)
    if len(frame) < HEADER:
        return bytes(frame)
    frame[24:28] = struct.pack("<I", zlib.crc32(frame[:24]))
    seed, position = zlib.crc32(frame[:24]), HEADER
    while position + HEAD <= len(frame):
        (size,) = struct.unpack_from("<I", frame, position)
        payload = frame[position + HEAD : position + HEAD + size]
        checksum = zlib.crc32(payload, zlib.crc32(frame[position : position + 12], seed))
        frame[position + 12 : position + 16] = struct.pack("<I", checksum)
        position += HEAD + size
    return bytes(frame)


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


SEEDS = list(seeds())


def survives(frame):
    """Decode; True when that works, False when CodecError says why not. Any other error fails the test."""
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


def mutated(frame, generator):
    frame = bytearray(frame)
    for _ in range(int(generator.integers(1, 4))):
        at = int(
            generator.integers(0, min(len(frame), 160) if generator.random() < 0.7 else len(frame))
        )
        kind = generator.integers(0, 4)
        if kind == 0:
            frame[at] ^= 1 << int(generator.integers(0, 8))
        elif kind == 1:
            frame[at] = int(generator.choice([0, 1, 2, 3, 127, 128, 255]))
        elif kind == 2:
            del frame[at : at + int(generator.integers(1, 9))]
        else:
            frame[at:at] = generator.bytes(int(generator.integers(1, 9)))
        if not frame:
            break
    return bytes(frame)


def test_the_seeds_cover_every_mode():
    """Mutations of frames that lack a mode would test nothing of it."""
    infos = [info(frame) for frame in SEEDS]
    for count in ("raw_fp32_chunks", "constant_chunks", "raw_code_chunks", "coded_chunks"):
        assert any(getattr(seen, count) for seen in infos)
    assert all(survives(frame) for frame in SEEDS)


def test_damage_is_always_noticed():
    """CRC-32 finds every burst of up to 32 bits, so no flipped bit may pass."""
    generator = np.random.default_rng(1)
    for frame in SEEDS:
        for at in {*range(min(len(frame), 60)), *generator.integers(0, len(frame), 20).tolist()}:
            damaged = bytearray(frame)
            damaged[at] ^= 1 << int(generator.integers(0, 8))
            with pytest.raises(CodecError):
                decode(damaged, LIMITS)
            with pytest.raises(CodecError):
                info(damaged)


def test_forged_frames_raise_or_decode():
    """With checksums made right, mutations reach every parser; some still decode, none may do harm."""
    generator = np.random.default_rng(2)
    decoded = 0
    for _ in range(160):
        for frame in SEEDS:
            decoded += survives(sealed(mutated(frame, generator)))
    assert 100 < decoded < 4000, decoded


def test_every_truncation_is_refused():
    """A stream that ends early must never look complete, with old checksums or new ones."""
    generator = np.random.default_rng(3)
    for frame in SEEDS:
        for size in {*range(min(len(frame), 80)), *generator.integers(0, len(frame), 20).tolist()}:
            assert not survives(frame[:size])
            assert not survives(sealed(frame[:size]))


def test_bytes_left_over_are_refused():
    """After the last chunk, and inside a chunk's payload."""
    for frame in SEEDS:
        assert not survives(frame + b"\0")
        if len(frame) > HEADER:
            (size,) = struct.unpack_from("<I", frame, HEADER)
            longer = bytearray(frame)
            longer[HEADER + HEAD + size : HEADER + HEAD + size] = b"\0"
            struct.pack_into("<I", longer, HEADER, size + 1)
            with pytest.raises(FrameError, match="too many"):
                decode(sealed(longer))


def test_chunks_cannot_change_places_or_frames():
    """Equal sizes make swapping easy; the index and the header's checksum tell."""
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
        decode(sealed(frame))
    with pytest.raises(FrameError, match="cannot hold"):
        info(sealed(frame))
    frame = bytearray(encode(np.zeros(10, np.float32)))
    struct.pack_into("<I", frame, HEADER, 0xFFFFFFFF)
    with pytest.raises(FrameError, match="ends inside chunk 0"):
        decode(sealed(frame))


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"X", "magic"),
        (4, b"\2", "version 2"),
        (5, b"\4", "unknown format 4"),
        (6, b"\1", "reserved"),
        (8, struct.pack("<I", 100), "block_values"),
        (8, struct.pack("<I", 0), "block_values"),
        (12, struct.pack("<I", 0), "chunk_values"),
        (12, struct.pack("<I", 130), "chunk_values"),
        (12, struct.pack("<I", 1 << 21), "chunk_values"),
        (HEADER + 4, b"\1", "head of chunk 0"),
        (HEADER + 8, b"\4", "head of chunk 0"),
        (HEADER + 9, b"\2", "head of chunk 0"),
        (HEADER + 10, b"\1", "head of chunk 0"),
        (HEADER + 9, b"\1", "quantised"),
        (HEADER + 8, b"\0", "too early"),
        (HEADER + 8, b"\1", "too many"),
        (HEADER + HEAD, b"\0", "block scale"),
        (HEADER + HEAD, b"\x09", "block scale"),
        (HEADER + HEAD, b"\xf8", "block scale"),
        (HEADER + HEAD, b"\xff", "block scale"),
        (HEADER + HEAD + 1, b"\x09", "scales of 9 bits"),
    ],
)
def test_each_field_is_checked(offset, value, message):
    """Right checksums do not make a frame right."""
    frame = bytearray(encode(np.linspace(-1, 1, 500, dtype=np.float32), CodecSpec("e4m3")))
    frame[offset : offset + len(value)] = value
    with pytest.raises(FrameError, match=message):
        decode(sealed(frame))


def forged(name, payload, values, mode=3, flags=0):
    """A one-chunk frame around a payload written by hand."""
    header = bytearray(encode(np.zeros(0, np.float32), CodecSpec(name)))
    struct.pack_into("<Q", header, 16, values)
    return sealed(header + struct.pack("<IIBBHI", len(payload), 0, mode, flags, 0, 0) + payload)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\3", "unknown split 3"),
        (b"\0\3", "unknown plane kind"),
        (b"\0\1\x20", "does not fit"),
        (b"\0\2\5\5\x01\0", "alphabet"),
        (b"\0\2\0\x20" + bytes(17), "alphabet"),
        (b"\0\2\0\2\x21\x03\0", "code space"),
        (b"\0\2\0\1\x1d\0", "code lengths"),
        (b"\0\2\0\1\x11\0", "too early"),
        (b"\2\1\x7f", "NaN"),
    ],
)
def test_forged_planes_are_refused(payload, message):
    """Each way in which the coded part can lie."""
    with pytest.raises(FrameError, match=message):
        decode(forged("e4m3", b"\x78\0" + payload, 128))


def test_flags_and_modes_cannot_lie():
    """Receivers rely on the flag to know that a delta is finite."""
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


@pytest.mark.parametrize(("name", "lowest", "highest"), [("e4m3", 10, 247), ("e5m2", 17, 240)])
def test_scales_end_where_the_format_says(name, lowest, highest):
    """Just outside, codes would decode to subnormal or infinite numbers, which receivers may treat differently."""
    for scale in (lowest, highest):
        assert decode(forged(name, bytes((scale, 0, 1, 2)), 2, 2)).size == 2
    for scale in (lowest - 1, highest + 1):
        with pytest.raises(FrameError, match="block scale"):
            decode(forged(name, bytes((scale, 0, 1, 2)), 2, 2))
