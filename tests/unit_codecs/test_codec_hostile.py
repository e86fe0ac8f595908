"""Bytes from the network: damaged, cut, swapped or forged, they raise CodecError or decode; nothing else."""

import struct

import numpy as np
import pytest
from sealed_frames import sealed

from fsl_codecs import (
    Codebook,
    CodecError,
    CodecSpec,
    FrameError,
    LimitError,
    Limits,
    available,
    codebooks_of,
    decode,
    decode_accumulate,
    encode,
    info,
)
from fsl_codecs.dispatch import implementation_named
from fsl_codecs.formats import FORMATS_BY_WIRE_ID
from fsl_codecs.lanes import write_stream
from fsl_codecs.planes import read_plan
from fsl_codecs.reader import Reader

HEADER, HEAD = 28, 16
LIMITS = Limits(max_values=50_000, max_frame_bytes=1 << 22)
NAMES = ["fp32", "bf16", "e4m3", "e5m2", "uniform"]


def forged(name, payload, values, mode=3, flags=0):
    """A one-chunk frame around a payload written by hand."""
    header = bytearray(encode(np.zeros(0, np.float32), CodecSpec(name)))
    struct.pack_into("<Q", header, 16, values)
    return sealed(header + struct.pack("<IIBBHI", len(payload), 0, mode, flags, 0, 0) + payload)


def digest(number):
    return BOOKS[number].digest.to_bytes(8, "little")


def coded_by(number, symbols):
    """The stream of a plane by that book, and its size before it."""
    stream = write_stream(BOOKS[number].code, np.array(symbols, np.uint8))
    return struct.pack("<I", len(stream)) + stream


def shared_books():
    """What this receiver holds: books of one plane width, with and without escape, and of another."""
    return (
        Codebook(6, 2, bytes([0] * 28 + [2, 2, 3, 4, 4, 0, 0] + [0] * 29)),
        Codebook(6, 0, bytes([6] * 64)),
        Codebook(8, 0, bytes([8] * 256)),
    )


BOOKS = shared_books()


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
    yield encode(values[:200], CodecSpec("uniform"), books=BOOKS)
    # Two of the four symbols are numbers 1 and 2 of those without a code; there are 59, so that a number has six bits.
    listed = b"\2\0" + b"\0\0\0\0\2\1"
    stream = coded_by(0, [30, 1, 2, 29])
    yield forged("e4m3", b"\0\4" + digest(0) + b"\0" + stream + b"\x78\0" + listed + b"\x0a\x03", 4)


SEEDS = list(seeds())


def survives(frame):
    """Decode; True when that works, False when CodecError says why not. Any other error fails the test."""
    accumulator = np.zeros(LIMITS.max_values, np.float32)
    try:
        values = decode(frame, LIMITS, books=BOOKS)
    except CodecError:
        with pytest.raises(CodecError):
            decode_accumulate(frame, accumulator, 1.0, books=BOOKS)
        assert not accumulator.any(), "a refused frame was added"
        return False
    assert info(frame).nonfinite == (not np.isfinite(values).all())
    codebooks_of(frame, books=BOOKS)
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
    plans = [
        read_plan(Reader(np.frombuffer(frame[HEADER + HEAD :], np.uint8)), number_format, BOOKS)
        for frame in SEEDS
        if frame[HEADER + 8 : HEADER + 9] == b"\3"
        for number_format in [FORMATS_BY_WIRE_ID[frame[5]]]
    ]
    assert {plane.kind for plan in plans for plane in plan.planes} == {0, 1, 2, 3, 4}
    assert {plan.split_index for plan in plans} == {0, 1, 2}


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
                decode(sealed(longer), books=BOOKS)


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
        (4, b"\4", "version 4"),
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
        (HEADER + 9, b"\1", "quantised"),
        (HEADER + 8, b"\0", "too early"),
        (HEADER + 8, b"\1", "too many"),
        (HEADER + HEAD, b"\3", "unknown split 3"),
    ],
)
def test_each_field_is_checked(offset, value, message):
    """Right checksums do not make a frame right."""
    frame = bytearray(encode(np.linspace(-1, 1, 500, dtype=np.float32), CodecSpec("e4m3")))
    frame[offset : offset + len(value)] = value
    with pytest.raises(FrameError, match=message):
        decode(sealed(frame))


@pytest.mark.parametrize(
    ("name", "payload", "message"),
    [
        ("e4m3", "03", "unknown split 3"),
        ("uniform", "02", "unknown split 2"),
        ("fp32", "01", "unknown split 1"),
        ("bf16", "01", "unknown split 1"),
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
        ("e4m3", "00 02 00 01 ff 21", "codes of up to 255"),
        ("e4m3", "00 01 00 02 00 03 02 22 33", "an escape where every symbol has a code"),
        ("e4m3", "00 02 00 01 00 1d", "codes of up to 13"),
        ("e4m3", "00 02 07 07 00 01", "1 codes"),
        ("e4m3", "00 02 00 01 00 01", "nibbles"),
        ("e4m3", "00 02 00 01 00 10", "nibbles"),
        ("e4m3", "00 02 07 07 01 11", "nibbles"),
        ("e4m3", "00 02 00 03 01 00 00", "nibbles"),
        ("e4m3", "00 02 00 01", "too early"),
        ("e4m3", "00 02 00 03 00 22", "too early"),
        ("fp32", "00 02 00 ff 0c" + "88" * 128, "codes"),
        ("e4m3", "00 03 02", "no book 0x2 "),
        ("e4m3", "00 03 08", "no book 0x8 "),
        ("e4m3", "00 00 03 00", "no book 0x0 for planes of 2 bits"),
        ("e4m3", "02 03 00", "no book 0x0 for planes of 8 bits"),
        ("e5m2", "00 03 00", "no book 0x0 "),
        ("uniform", "00 03 03", "no book 0x3 "),
        ("bf16", "00 03 00", "no book 0x0 "),
        ("e4m3", "00 04 0123456789abcdef", "no book 0xefcdab8967452301"),
        ("e4m3", "00 04 01234567", "too early"),
        ("e4m3", "00 03", "too early"),
        ("e4m3", "", "too early"),
        # The scales follow.
        ("e4m3", "00 01 00 01 00", "too early"),
        ("e4m3", "00 01 00 01 00 78", "too early"),
        ("e4m3", "00 01 00 01 00 78 09", "scales of 9 bits"),
        ("e4m3", "00 01 00 01 00 09 00", "scale"),
        ("e4m3", "00 01 00 01 00 f8 00", "scale"),
        ("e4m3", "00 01 00 01 00 f7 01 01 00", "scale"),
        ("e4m3", "02 01 7f 78 00", "NaN"),
        ("uniform", "00 01 20 01 00 00 02", "too early"),
        ("uniform", "00 01 20 01 00 00 02 0b", "scales of 11 bits"),
        ("uniform", "00 01 20 01 00 07 00 00", "scale"),
        ("uniform", "00 01 20 01 00 e1 03 00", "scale"),
        ("uniform", "00 01 20 01 00 00 80 00", "scale"),
        ("uniform", "00 01 20 01 00 e0 03 01 01 00", "scale"),
        ("uniform", "00 01 20 01 00 08 00 0a" + "01 00" * 10, "scale"),
        # Then the planes, and what was escaped.
        ("e4m3", "00 00 01 00 78 00" + "00" * 95, "too early"),
        ("uniform", "01 01 00 00 02 00", "too early"),
        ("uniform", "01 01 00 00 02 00" + "00" * 511, "too early"),
        ("uniform", "01 01 00 00 02 00" + "00" * 513, "1 bytes too many"),
        ("uniform", "01 01 00 00 02 00" + "00" * 510 + "807f", "NaN"),
        ("uniform", "01 01 80 00 02 00" + "00" * 4, "4 bytes too many"),
    ],
)
def test_forged_coded_chunks_are_refused(name, payload, message):
    """Each way in which heads, books, scales and planes of 128 values can lie."""
    frame = forged(name, bytes.fromhex(payload), 128 if "scale" not in message else 9 * 128)
    with pytest.raises(FrameError, match=message):
        decode(frame, books=BOOKS)


# Half of the code is symbol 0, the other half the escape leaf of the 63 others, or of three in the lower plane, whose other plane is 0.
UPPER, LOWER = "00 02 00 00 01 01 01 00", "00 01 00 02 00 00 01 01"
BOTH = "00 02 00 00 01 01 02 00 00 01 01"
LOWS, SECONDS = "00" * 16, "80" * 16
ZEROS = "20000000" + LOWS + SECONDS
"""The stream of 128 times symbol 0: each lane holds the bits of seven codes, and its last symbol."""
MARKED = "20000000" + "00" * 15 + "01" + SECONDS
"""The last one has no code."""
SCALES = "78 00"
WRONG_LIST = "a list of symbols without a code is too short or too long"
NONE = "00 00"
ONE = "01 00"
"""How many are in a list."""
LAST = " 00 00 00 00 00 01"
"""The number 1 of 63, in six bit planes."""


def readings(frame):
    """What each implementation makes of a frame: the bytes of its values, or the text of its refusal."""
    for name in available():
        out = np.zeros(128, np.float32)
        try:
            read = implementation_named(name).decode_into(frame, out)
        except FrameError as error:
            yield str(error)
        else:
            yield out[:read].tobytes()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (UPPER, "payload ends too early"),
        (UPPER + "20 00 00", "payload ends too early"),
        (UPPER + "ffffffff" + LOWS + SECONDS, "payload ends too early"),
        (UPPER + "21000000" + LOWS + SECONDS, "payload ends too early"),
        (UPPER + "00000000", "a stream ends before its symbols do"),
        (UPPER + "1f000000" + LOWS + SECONDS, "a stream ends before its symbols do"),
        (
            UPPER + "20000000" + LOWS + "80" * 15 + "40" + SCALES + NONE,
            "a stream ends before its symbols do",
        ),
        (UPPER + "20000000" + LOWS + "80" * 15 + "00", "a lane holds no bits"),
        (UPPER + "20000000" + LOWS + "00" + "80" * 15, "a lane holds no bits"),
        (
            UPPER + "21000000" + LOWS + SECONDS + "00" + SCALES + NONE,
            "a stream goes on after its symbols",
        ),
        (
            UPPER + "21000000" + LOWS + "80" * 15 + "4000" + SCALES + NONE,
            "a lane holds bits after its last code word",
        ),
        (
            UPPER + "20000000" + "00" * 15 + "40" + SECONDS + SCALES + NONE,
            "a lane ends with no symbol of a plane of 6 bits",
        ),
        (
            UPPER + "20000000" + "ff" + "00" * 15 + SECONDS + SCALES + NONE,
            "a lane ends with no symbol of a plane of 6 bits",
        ),
        (
            LOWER + "20000000" + "04" + "00" * 15 + SECONDS + SCALES + NONE,
            "a lane ends with no symbol of a plane of 2 bits",
        ),
        # Lists that end too early, or name more symbols than there are.
        (UPPER + ZEROS, "payload ends too early"),
        (UPPER + ZEROS + SCALES, "payload ends too early"),
        (UPPER + ZEROS + SCALES + "00", "payload ends too early"),
        (UPPER + ZEROS + SCALES + NONE + "00", "1 bytes too many in a payload"),
        (UPPER + ZEROS + SCALES + "81 00", "129 symbols without a code among 128"),
        (UPPER + ZEROS + SCALES + "ff ff", "65535 symbols without a code among 128"),
        (UPPER + ZEROS + SCALES + "80 00" + "00" * 95, "payload ends too early"),
        (UPPER + MARKED + SCALES + ONE, "payload ends too early"),
        (UPPER + MARKED + SCALES + ONE + "01" * 5, "payload ends too early"),
        (
            UPPER + MARKED + SCALES + ONE + "01" * 6,
            "a listed symbol is none of the 63 without a code",
        ),
        (UPPER + MARKED + SCALES + ONE + LAST + "00", "1 bytes too many in a payload"),
        (LOWER + MARKED + SCALES + ONE + "01", "payload ends too early"),
        (
            LOWER + MARKED + SCALES + ONE + "01 01",
            "a listed symbol is none of the 3 without a code",
        ),
        (LOWER + MARKED + SCALES + ONE + "01 00 00", "1 bytes too many in a payload"),
        # And lists of fewer or more than the stream has.
        (UPPER + MARKED + SCALES + NONE, WRONG_LIST),
        (UPPER + MARKED + SCALES + "02 00" + LAST, WRONG_LIST),
        (UPPER + MARKED + SCALES + "80 00" + "00" * 96, WRONG_LIST),
        (UPPER + ZEROS + SCALES + ONE + LAST, WRONG_LIST),
        (UPPER + "20000000" + "01 00" * 8 + SECONDS + SCALES + "07 00" + LAST, WRONG_LIST),
        (UPPER + "20000000" + "01 00" * 8 + SECONDS + SCALES + "09 00" + "00" * 12, WRONG_LIST),
        (LOWER + MARKED + SCALES + NONE, WRONG_LIST),
        (LOWER + ZEROS + SCALES + ONE + "00 00", WRONG_LIST),
        # Of two bad streams, the first is told.
        (
            "00 02 00000101 02 00000101" + "00000000" + "ffffffff",
            "a stream ends before its symbols do",
        ),
        # Heads, then lanes, then the scales of an inner block, the lists of its planes, its symbols, and whether a list is used up.
        (UPPER + "21000000" + LOWS + "00" * 17, "a lane holds no bits"),
        (UPPER + "21000000" + LOWS + SECONDS + "00" + "78 09", "scales of 9 bits"),
        (UPPER + "21000000" + LOWS + SECONDS + "00" + SCALES + "00", "payload ends too early"),
        (
            UPPER + "21000000" + LOWS + SECONDS + "00" + SCALES + "81 00",
            "129 symbols without a code among 128",
        ),
        (
            UPPER + "21000000" + LOWS + SECONDS + "00" + SCALES + ONE + "ff" * 6,
            "a listed symbol is none of the 63 without a code",
        ),
        (
            UPPER + "21000000" + LOWS + SECONDS + "00" + SCALES + ONE + LAST,
            "a stream goes on after its symbols",
        ),
        (BOTH + ZEROS + ZEROS + SCALES + ONE + LAST + "00", "payload ends too early"),
        (
            BOTH + ZEROS + ZEROS + SCALES + ONE + LAST + "81 00",
            "129 symbols without a code among 128",
        ),
        (
            BOTH + ZEROS + "21000000" + LOWS + SECONDS + "00" + SCALES + ONE + LAST + NONE,
            "a stream goes on after its symbols",
        ),
        (
            BOTH + MARKED + "21000000" + LOWS + SECONDS + "00" + SCALES + NONE + NONE,
            WRONG_LIST,
        ),
    ],
)
def test_forged_streams_and_lists_are_refused(payload, message):
    """Each way in which the streams of 128 values, and the lists of what has no code, can lie; on every path in the same words."""
    frame = forged("e4m3", bytes.fromhex(payload), 128)
    assert dict(zip(available(), readings(frame), strict=True)) == dict.fromkeys(
        available(), message
    )


@pytest.mark.parametrize(
    ("payload", "at", "value"),
    [
        (UPPER + ZEROS + SCALES + NONE, 127, 0.0),
        (UPPER + MARKED + SCALES + ONE + "01" * 5 + "00", 127, 448 / 128),
        (UPPER + MARKED + SCALES + ONE + "ff" * 5 + "fe", 127, 448 / 128),
        (UPPER + MARKED + SCALES + ONE + "00" * 6, 127, 2**-8 / 128),
        # A lane may end with a symbol that has no code and is not the lowest such: it is in no list.
        (UPPER + "20000000" + "00" * 15 + "3f" + SECONDS + SCALES + NONE, 127, 448 / 128),
        (UPPER + "20000000" + "3f" + "00" * 15 + SECONDS + SCALES + NONE, 112, 448 / 128),
        # Nor is any where there is no escape.
        ("00 02 00 01 00 11 01 00" + "20000000" + "02" * 16 + SECONDS + SCALES, 127, 2**-7 / 128),
        ("00 02 00 01 00 11 01 00" + "20000000" + "3f" * 16 + SECONDS + SCALES, 127, 448 / 128),
    ],
)
def test_streams_that_have_one_meaning_are_taken(payload, at, value):
    """Bits in the padding of a list, and last symbols that no encoder would leave to a lane."""
    for values in readings(forged("e4m3", bytes.fromhex(payload), 128)):
        assert np.frombuffer(values, np.float32)[[0, at]].tolist() == [0, np.float32(value)]


def test_a_lane_without_a_symbol_may_end_with_any():
    """Nine values have sixteen lanes; the others are checked, too, but nobody sees what they hold."""
    for unseen in ("00", "01", "3f"):
        stream = "20000000" + "00" * 9 + unseen * 7 + "01" * 16
        frame = forged("e4m3", bytes.fromhex(UPPER + stream + SCALES + NONE), 9)
        assert set(readings(frame)) == {bytes(36)}


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
def test_what_has_one_meaning_is_taken(name, payload, value):
    """Wide scales, bits in padding, an escaped value that need not be: other decoders must take them, too."""
    assert decode(forged(name, bytes.fromhex(payload), 128))[0] == np.float32(value)


@pytest.mark.parametrize("mode", [2, 3])
def test_values_missing_from_the_escaped_ones_are_noticed(mode):
    """As many follow as there are escape codes, in raw codes too, and each inner block has its own."""
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
    with pytest.raises(FrameError, match="quantised"):
        decode(forged("uniform", nan, 20_000, mode, 1))


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


@pytest.mark.parametrize(
    ("name", "lowest", "highest"), [("e4m3", 10, 247), ("e5m2", 17, 240), ("uniform", 8, 992)]
)
def test_scales_end_where_the_format_says(name, lowest, highest):
    """Just outside, codes would decode to subnormal or infinite numbers, which receivers may treat differently."""

    def payload(scale):
        return scale.to_bytes(2 if name == "uniform" else 1, "little") + b"\0\1\2"

    for scale in (lowest, highest):
        assert decode(forged(name, payload(scale), 2, 2)).size == 2
    for scale in (lowest - 1, highest + 1):
        with pytest.raises(FrameError, match="a scale is not from"):
            decode(forged(name, payload(scale), 2, 2))


def test_a_book_of_another_width_is_not_taken_for_its_digest():
    """The receiver holds it, but for planes of 8 bits."""
    payload = b"\x00\4" + digest(2) + b"\0"
    with pytest.raises(FrameError, match="for planes of 6 bits"):
        decode(forged("e4m3", payload, 128), books=BOOKS)
