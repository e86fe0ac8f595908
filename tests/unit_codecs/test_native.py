"""The native codec against the NumPy package, which is the reference: same bytes, same values, same refusals, on every path."""

import os
import re
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fsl_codecs import (
    Codebook,
    CodecError,
    CodecSpec,
    CodecUsageError,
    FrameError,
    LimitError,
    Limits,
    available,
    bound,
    codebooks_of,
)
from fsl_codecs.dispatch import implementation_named
from fsl_codecs.static_books import static_books
from fsl_codecs.treebitmap import Reader, read_block

REFERENCE = implementation_named("numpy")
PATHS = [name for name in available() if name != "numpy"]
FORMATS = ["fp32", "bf16", "e4m3", "e5m2", "uniform"]
BLOCK = 16384
CHUNK = 131072

needs_native = pytest.mark.skipif(not PATHS, reason="the native codec is not built here")
on_every_path = pytest.mark.parametrize("path", PATHS or ["none"])
with_every_format = pytest.mark.parametrize("name", FORMATS)
pytestmark = needs_native


def values_of(kind, count, seed=0):
    """Vectors that bring out the modes, books and escapes."""
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


def assert_agrees(path, values, spec, **options):
    """The path writes the reference's frame of these values and reads it as the reference does; returns the frame."""
    codec = implementation_named(path)
    frame = encoded_by(REFERENCE, values, spec, **options)
    assert encoded_by(codec, values, spec, **options) == frame
    books = {"books": options["books"]} if "books" in options else {}
    for dtype in (np.float32, np.uint16):
        ours = decoded_by(codec, frame, values.size, dtype, **books)
        theirs = decoded_by(REFERENCE, frame, values.size, dtype, **books)
        assert ours.tobytes() == theirs.tobytes()
    sums = [np.arange(values.size, dtype=np.float32) for _ in range(2)]
    for implementation, total in zip((codec, REFERENCE), sums, strict=True):
        implementation.decode_accumulate(frame, total, 0.3, **books)
    assert sums[0].tobytes() == sums[1].tobytes()
    assert codec.info(frame) == REFERENCE.info(frame)
    return frame


@on_every_path
@with_every_format
@pytest.mark.parametrize("kind", KINDS)
def test_small_vectors(path, name, kind):
    """Every size at which a loop, a run or a vector ends, in frames of one and of several chunks."""
    for count in (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1000):
        values = values_of(kind, count)
        assert_agrees(path, values, CodecSpec(name, block_values=32, chunk_values=256))
        assert_agrees(path, values, CodecSpec(name))
        assert_agrees(path, values, CodecSpec(name, entropy=False))


@on_every_path
@with_every_format
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_several_blocks(path, name, kind):
    """Inner blocks that are full, short or single, and plans made from samples."""
    for count in (BLOCK, BLOCK + 1, 3 * BLOCK + 777):
        assert_agrees(path, values_of(kind, count), CodecSpec(name))


@on_every_path
@with_every_format
@pytest.mark.parametrize("block_values", [16, 64, 256, 1024])
def test_block_sizes(path, name, block_values):
    """Runs shorter and longer than a vector and than those of a sample."""
    for kind in ("bell", "heavy", "zero blocks"):
        for count in (1000, 5 * BLOCK // 2):
            assert_agrees(path, values_of(kind, count), CodecSpec(name, block_values=block_values))


@on_every_path
@pytest.mark.parametrize("fineness", [0, 5, 14, 22, 31, 40])
def test_fineness(path, fineness):
    """Coarse steps give constant planes, fine ones escape nearly everything."""
    for kind in ("bell", "heavy", "sparse"):
        for count in (700, 2 * BLOCK):
            assert_agrees(path, values_of(kind, count), CodecSpec("uniform", fineness=fineness))


@on_every_path
@with_every_format
def test_the_usual_chunk(path, name):
    """What the runtime sends, whole frames of it on several threads included."""
    values = values_of("bell", 2 * CHUNK + 5000)
    frame = assert_agrees(path, values, CodecSpec(name))
    codec = implementation_named(path)
    for threads in (2, 3, 64):
        assert encoded_by(codec, values, CodecSpec(name), threads=threads) == frame
        out = np.empty_like(values)
        codec.decode_into(frame, out, threads=threads)
        assert out.tobytes() == decoded_by(REFERENCE, frame, values.size).tobytes()
        totals = [np.ones_like(values), np.ones_like(values)]
        codec.decode_accumulate(frame, totals[0], -2.5, threads=threads)
        REFERENCE.decode_accumulate(frame, totals[1], -2.5)
        assert totals[0].tobytes() == totals[1].tobytes()


@on_every_path
@with_every_format
@pytest.mark.parametrize("kind", ["bell", "heavy", "constant", "nan", "bits", "zero blocks"])
@pytest.mark.parametrize("count", [1, 1000, 2 * BLOCK + 100])
def test_what_is_encoded(path, name, kind, count):
    """References, residuals and bf16 input: the same frames, and the same residual afterwards."""
    values = values_of(kind, count)
    reference = values_of("bell", count, seed=1)
    before = values_of("bell", count, seed=2) * np.float32(0.01)
    bfloat16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    codec = implementation_named(path)
    spec = CodecSpec(name)
    for given in (values, bfloat16):
        assert_agrees(path, given, spec)
        assert_agrees(path, given, spec, reference=reference)
        for other in (None, reference):
            residuals = [before.copy(), before.copy()]
            frames = [
                encoded_by(implementation, given, spec, reference=other, residual=residual)
                for implementation, residual in zip((codec, REFERENCE), residuals, strict=True)
            ]
            assert frames[0] == frames[1]
            assert residuals[0].tobytes() == residuals[1].tobytes()


@on_every_path
def test_every_bfloat16(path):
    """All 65,536 codes, in frames of bf16 and of fp32."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    finite = codes[(codes & 0x7F80) != 0x7F80]
    for given in (codes, finite):
        values = (given.astype(np.uint32) << 16).view(np.float32)
        for name in ("bf16", "fp32"):
            for entropy in (True, False):
                frame = assert_agrees(path, values, CodecSpec(name, entropy=entropy))
                out = decoded_by(implementation_named(path), frame, given.size, np.uint16)
                # A signalling NaN becomes quiet.
                is_nan = (given & 0x7FFF) > 0x7F80
                assert np.array_equal(out, np.where(is_nan, given | 0x40, given))


@on_every_path
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "uniform"])
def test_every_code_of_a_byte(path, name):
    """Raw frames of all 256 codes under many scales: the same values, or the same refusal where a code or a scale is not allowed."""
    codec = implementation_named(path)
    spec = CodecSpec(name, block_values=256, chunk_values=256, entropy=False)
    base = bytearray(encoded_by(REFERENCE, values_of("bell", 256), spec))
    scale_bytes = 3 if name == "uniform" else 2
    for scale in [*range(0, 256, 5), 10, 17, 239, 240, 241, 246, 247, 248, 255]:
        head = struct.pack("<HB", 4 * scale, 0) if name == "uniform" else bytes((scale, 0))
        for banned in (None, 0, 0x7F, 0xFF, 0x7C):
            codes = bytes(0x40 if code == banned else code for code in range(256))
            escaped = b"" if 0 not in codes or name != "uniform" else struct.pack("<f", 1.5)
            payload = head + codes + escaped
            assert len(head) == scale_bytes
            frame = sealed(
                base[:28] + struct.pack("<IIBBHI", len(payload), 0, 2, 0, 0, 0) + payload
            )
            assert_same_reading(codec, frame, 256)


def sealed(frame):
    """The frame with its checksums made right again, as far as its lengths allow."""
    frame = bytearray(frame)
    frame[24:28] = struct.pack("<I", zlib.crc32(frame[:24]))
    seed, position = zlib.crc32(frame[:24]), 28
    while position + 16 <= len(frame):
        (size,) = struct.unpack_from("<I", frame, position)
        payload = frame[position + 16 : position + 16 + size]
        checksum = zlib.crc32(payload, zlib.crc32(frame[position : position + 12], seed))
        frame[position + 12 : position + 16] = struct.pack("<I", checksum)
        position += 16 + size
    return bytes(frame)


def outcome(read, *arguments):
    """What a reading gives: the bytes of its output, or the class and text of its refusal."""
    try:
        return read(*arguments)
    except CodecError as error:
        return type(error), str(error)


def assert_same_reading(codec, frame, count, limits=None, books=()):
    """Both read the frame alike, or refuse it in the same words; a refused frame adds nothing."""

    def decode(implementation):
        out = np.zeros(count, np.float32)
        read = implementation.decode_into(frame, out, limits, books=books)
        return read, out.tobytes()

    def accumulate(implementation):
        total = np.ones(count, np.float32)
        try:
            read = implementation.decode_accumulate(frame, total, 1.5, limits, books=books)
        except CodecError:
            assert (total == 1).all()
            raise
        return read, total.tobytes()

    for read in (decode, accumulate):
        ours, theirs = outcome(read, codec), outcome(read, REFERENCE)
        assert ours == theirs
    assert outcome(codec.info, frame) == outcome(REFERENCE.info, frame)
    return theirs


def test_mutated_frames(tmp_path):
    """Bytes changed, cut and added, with checksums left wrong or made right: the same refusals, nothing half done. By hand, the script takes
    100,000 frames in about a minute.
    """
    script = Path(__file__).with_name("mutated_frames.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script), "4000", "5"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    frames, refused, paths = re.match(
        r"(\d+) frames, (\d+) refused, read alike by numpy ([a-z0-9 ]+), ", done.stdout
    ).groups()
    assert paths.split() == PATHS
    assert int(frames) == 4000
    assert 1000 < int(refused) < 3500


@on_every_path
@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("escape", ["last", "first"])
def test_one_leaf_more_than_the_plane_has_symbols(path, split, escape):
    """Books of every symbol and an escape: no encoder needs that escape, but a frame may use it, and the last rank takes a bit more."""
    codec = implementation_named(path)
    head = b"\x03\x00" if escape == "last" else b"\x02\x00\x3f\x01" + bytes([0x77] * 32)
    book = static_books("e4m3")[0][1] if escape == "last" else Codebook(6, 1, bytes([7] * 64))
    generator = np.random.default_rng(1)
    base = encoded_by(REFERENCE, values_of("bell", 200), CodecSpec("e4m3"))
    for _ in range(20):
        # Nearly all go right, to the last ranks; listed symbols are below 64.
        bits = generator.random((4000, 8)) < [0.95] * 6 + [0.0] * 2
        data = np.packbits(bits, axis=1, bitorder="little").ravel()
        reader = Reader(data)
        assert read_block(book.tree, reader, 200).max() == 63
        tree = data[: reader._position].tobytes()
        # The upper bit of the low plane is 0: no code is NaN.
        low = bytes(25) + generator.bytes(25)
        payload = bytes([split]) + head + b"\x00\x78\x00" + tree + low
        frame = sealed(base[:28] + struct.pack("<IIBBHI", len(payload), 0, 3, 0, 0, 0) + payload)
        read, _ = assert_same_reading(codec, frame, 200)
        assert read == 200


@on_every_path
def test_a_late_fault_adds_nothing(path):
    """The last of several chunks is bad: no chunk before it may have been added, on one thread or more."""
    codec = implementation_named(path)
    values = values_of("bell", 5 * BLOCK)
    for name in FORMATS:
        frame = bytearray(encoded_by(codec, values, CodecSpec(name, chunk_values=BLOCK)))
        frame[-1] ^= 1
        for cut in (bytes(frame), bytes(frame[:-1]), bytes(frame) + b"x"):
            for threads in (1, 4):
                total = values.copy()
                with pytest.raises(FrameError):
                    codec.decode_accumulate(cut, total, 1.0, threads=threads)
                assert total.tobytes() == values.tobytes()


@on_every_path
@with_every_format
def test_samples_that_mislead(path, name):
    """What the sample shows as constant, as rare or as small is not so in the rest of the chunk."""
    count = 3 * BLOCK
    seen = np.arange(count) // 128 % 16 == 0
    rest = values_of("bell", count)
    bits = values_of("bits", count).view(np.uint32) & np.uint32(0x7EFFFFFF)
    wild = bits.view(np.float32)
    few = values_of("few", count)
    for in_sample in (0.0, 1.0, few, rest):
        for elsewhere in (rest, wild, few, 100 * rest, np.float32(2.0**121)):
            values = np.where(seen, in_sample, elsewhere).astype(np.float32)
            assert_agrees(path, values, CodecSpec(name))
            # Only the very last value disagrees.
            values = np.where(np.arange(count) < count - 1, in_sample, elsewhere)
            assert_agrees(path, values.astype(np.float32), CodecSpec(name))


@on_every_path
def test_a_misleading_constant_behind_a_payload_that_is_too_long(path):
    """The plan of the sample is dropped for the constant, found last, and not for the size, found first."""
    count = 4 * BLOCK
    generator = np.random.default_rng(3)
    seen = np.arange(count) // 128 % 16 == 0
    words = generator.integers(0, 1 << 32, count, dtype=np.uint32) & np.uint32(0xFFFFFF00)
    words[seen] = np.where(generator.random(seen.sum()) < 0.5, 0x3F800000, 0x40490F00)
    words[-1] |= np.uint32(1 << 5)
    assert_agrees(path, words.view(np.float32), CodecSpec("fp32"))


@on_every_path
@pytest.mark.parametrize("name", ["bf16", "e4m3", "e5m2", "uniform"])
def test_shared_books(path, name):
    """Frames that name the books of an earlier one, and refusals of those who do not have them."""
    codec = implementation_named(path)
    spec = CodecSpec(name)
    books = codebooks_of(encoded_by(REFERENCE, values_of("relu", 60_000), spec))
    assert books
    frame = assert_agrees(path, values_of("relu", 1500, seed=4), spec, books=books)
    out = np.zeros(1500, np.float32)
    with pytest.raises(FrameError, match="no book"):
        codec.decode_into(frame, out)
    assert_same_reading(codec, frame, 1500)


@on_every_path
def test_a_book_without_escape_is_not_trusted_beyond_the_sample(path):
    """A shared book that lacks symbols and has no escape fits the sample; the rest of the chunk has those symbols."""
    codec, spec = implementation_named(path), CodecSpec("e4m3")

    def clipped(count, seed):
        bell = np.clip(np.random.default_rng(seed).standard_normal(count), -1, 1)
        return (np.sign(bell) * np.maximum(np.abs(bell), 0.05)).astype(np.float32)

    books = codebooks_of(encoded_by(codec, clipped(BLOCK, 0), spec))
    assert [book.escape for book in books] == [0]
    values = clipped(3 * BLOCK, 1)
    values[(np.arange(values.size) // 128 % 16 != 0) & (np.arange(values.size) % 100 == 7)] = 0.001
    frame = encoded_by(codec, values, spec, books=books)
    decoded = decoded_by(codec, frame, values.size, books=books)
    assert np.abs(decoded - values).max() < 0.04


@on_every_path
def test_limits(path):
    """The same limits are told in the same words."""
    codec = implementation_named(path)
    frame = encoded_by(codec, values_of("bell", 500), CodecSpec("e4m3"))
    for limits in (Limits(499, 1 << 20), Limits(500, len(frame) - 1), Limits(1 << 70, 1 << 70)):
        assert_same_reading(codec, frame, 500, limits)
    assert_same_reading(codec, frame, 499)
    with pytest.raises(LimitError, match="frame of 500 values, the output holds 499"):
        codec.decode_into(frame, np.zeros(499, np.float32), Limits())


@on_every_path
def test_misuse(path):
    """Wrong arrays, buffers and numbers are refused as the reference refuses them."""
    codec = implementation_named(path)
    good = np.ones(8, np.float32)
    frame = encoded_by(codec, good, CodecSpec())
    read_only = good.copy()
    read_only.flags.writeable = False
    unaligned = np.zeros(33, np.uint8)[1:].view(np.float32)
    wrong = [
        [1.0, 2.0],
        np.ones(8),
        np.ones(8, np.float16),
        np.ones((2, 4), np.float32),
        np.ones(16, np.float32)[::2],
        np.ones(8, ">f4"),
        unaligned,
        memoryview(good),
        None,
    ]
    room = np.zeros(bound(8, CodecSpec()), np.uint8)
    calls = [
        *[lambda one, x=x: one.encode_into(x, room) for x in wrong],
        *[lambda one, x=x: one.encode_into(good, room, reference=x) for x in wrong[1:-1]],
        *[lambda one, x=x: one.encode_into(good, room, residual=x) for x in wrong[1:-1]],
        *[lambda one, x=x: one.decode_into(frame, x) for x in [*wrong, read_only]],
        *[lambda one, x=x: one.decode_accumulate(frame, x, 1.0) for x in [*wrong, read_only]],
        lambda one: one.encode_into(good, room, residual=read_only),
        lambda one: one.encode_into(good, room, reference=good[:7]),
        lambda one: one.encode_into(good, room[:-1]),
        lambda one: one.encode_into(good, bytes(room)),
        lambda one: one.encode_into(good, np.zeros(2 * room.size, np.uint8)[::2]),
        lambda one: one.encode_into(good, "text"),
        *[lambda one, n=n: one.encode_into(good, room, threads=n) for n in (0, -1, 65)],
        lambda one: one.decode_into(frame, good, threads=0),
        lambda one: one.decode_accumulate(frame, good, float("nan")),
        lambda one: one.decode_accumulate(frame, good, 1e39),
        lambda one: one.decode_accumulate(frame, good.astype(np.uint16), 1.0),
        lambda one: one.decode_into(np.zeros(64, np.uint8)[::2], good),
        lambda one: one.decode_into("text", good),
    ]
    for number, call in enumerate(calls):
        for one in (codec, REFERENCE):
            assert outcome(call, one)[0] is CodecUsageError, (number, one.name)


@pytest.mark.parametrize("path", available())
def test_what_is_written_shares_no_memory_with_what_is_read(path):
    """Our own mistake, named as such: a frame that changes while it is read would look like a peer's bad one."""
    codec = implementation_named(path)
    memory = np.zeros(300_000, np.uint8)
    values = memory[:4000].view(np.float32)
    values[:] = values_of("bell", 1000)
    other = values_of("bell", 1000, seed=1)
    room = memory[3999 : 3999 + bound(1000)]
    apart = memory[4000 : 4000 + bound(1000)]
    for call, message in (
        (lambda: codec.encode_into(values, room), "values and output"),
        (lambda: codec.encode_into(other, room, reference=values), "reference and output"),
        (lambda: codec.encode_into(other, room, residual=values), "residual and output"),
        (lambda: codec.encode_into(values, apart, residual=values), "values and residual"),
        (
            lambda: codec.encode_into(other, apart, reference=values, residual=values),
            "reference and residual",
        ),
    ):
        with pytest.raises(CodecUsageError, match=f"{message} overlap"):
            call()
    # Neighbours are no overlap, and what is only read may be one.
    size = codec.encode_into(values, apart, reference=values)
    frame = memory[4000 : 4000 + size]
    for start in (3996, 4000, 4000 + size // 8 * 4):
        out = memory[start : start + 4000].view(np.float32)
        with pytest.raises(CodecUsageError, match="frame and output overlap"):
            codec.decode_into(frame, out)
        with pytest.raises(CodecUsageError, match="frame and accumulator overlap"):
            codec.decode_accumulate(frame, out, 1.0)
    assert codec.decode_into(frame, values) == 1000
    assert not values.any()


@on_every_path
def test_buffers_of_all_kinds(path):
    """Frames are read from, and written to, whatever gives a contiguous buffer, at any address."""
    codec = implementation_named(path)
    values = values_of("bell", 2000)
    frame = encoded_by(codec, values, CodecSpec("e4m3"))
    expected = decoded_by(REFERENCE, frame, 2000).tobytes()
    for held in (bytearray(frame), memoryview(frame), np.frombuffer(frame, np.uint8)):
        assert decoded_by(codec, held, 2000).tobytes() == expected
    for offset in range(1, 9):
        shifted = memoryview(bytes(offset) + frame)[offset:]
        assert decoded_by(codec, shifted, 2000).tobytes() == expected
        # The last byte of the buffer is the last of the frame.
        room = np.zeros(4 * 2000 + 200_000, np.uint8)
        size = codec.encode_into(values, room[offset:], CodecSpec("e4m3"))
        assert room[offset : offset + size].tobytes() == frame
        out = np.zeros(2100, np.float32)
        codec.decode_into(frame, out[offset : offset + 2000])
        assert out[offset : offset + 2000].tobytes() == expected
        assert not out[:offset].any()
        assert not out[offset + 2000 :].any()


@on_every_path
@with_every_format
def test_nothing_is_written_behind_the_output(path, name):
    """Decoders may not touch a value behind the last, for any length; vectors would like to."""
    codec = implementation_named(path)
    for count in range(1, 140, 3):
        frame = encoded_by(codec, values_of("bell", count), CodecSpec(name))
        for dtype in (np.float32, np.uint16):
            out = np.full(count + 64, 3, dtype)
            codec.decode_into(frame, out[:count])
            assert (out[count:] == 3).all()
        total = np.full(count + 64, 3, np.float32)
        codec.decode_accumulate(frame, total[:count], 1.0)
        assert (total[count:] == 3).all()
        residual = np.full(count + 64, 3, np.float32)
        out = np.zeros(bound(count, CodecSpec(name)), np.uint8)
        codec.encode_into(values_of("bell", count), out, CodecSpec(name), residual=residual[:count])
        assert (residual[count:] == 3).all()


@on_every_path
def test_flushed_subnormals_change_nothing(path):
    """A thread that trains may have subnormals flushed to zero; frames and values stay the same, and so does the setting."""
    torch = pytest.importorskip("torch")
    codec = implementation_named(path)
    values = values_of("subnormal", 3000)
    frames = [encoded_by(REFERENCE, values, CodecSpec(name)) for name in FORMATS]
    expected = [decoded_by(REFERENCE, frame, 3000).tobytes() for frame in frames]
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    try:
        for name, frame, decoded in zip(FORMATS, frames, expected, strict=True):
            assert encoded_by(codec, values, CodecSpec(name)) == frame
            assert decoded_by(codec, frame, 3000).tobytes() == decoded
        assert torch.tensor([1e-39]).mul(1).item() == 0
    finally:
        torch.set_flush_denormal(False)


@on_every_path
def test_calls_at_the_same_time(path):
    """Several Python threads in the codec at once, with pools of their own choice."""
    codec = implementation_named(path)
    inputs = [values_of("bell", 3 * BLOCK + 100 * i, seed=i) for i in range(6)]
    spec = CodecSpec("e4m3", chunk_values=BLOCK)
    expected = [encoded_by(REFERENCE, values, spec) for values in inputs]

    def work(number):
        values = inputs[number % len(inputs)]
        frame = encoded_by(codec, values, spec, threads=1 + number % 4)
        out = np.empty_like(values)
        codec.decode_into(frame, out, threads=1 + number % 3)
        return frame, out.tobytes()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(48)))
    for number, (frame, decoded) in enumerate(results):
        assert frame == expected[number % len(inputs)]
        if number < len(inputs):
            assert decoded == decoded_by(REFERENCE, frame, inputs[number].size).tobytes()


def python(code, **variables):
    """A fresh interpreter's exit code, output and errors."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork():
    """The pool's threads do not survive a fork; the child gets its own."""
    code = """
import os, numpy as np
from fsl_codecs import CodecSpec, bound
from fsl_codecs.dispatch import available, implementation_named
codec, spec = implementation_named(available()[0]), CodecSpec("e4m3", chunk_values=16384)
values = np.ones(1 << 18, np.float32); values[::3] = 2
out = np.zeros(bound(values.size, spec), np.uint8)
def frame():
    return out[:codec.encode_into(values, out, spec, threads=3)].tobytes()
before = frame()
child = os.fork()
if child == 0:
    os._exit(0 if frame() == before and frame() == before else 1)
assert frame() == before
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code, FSL_CODECS_PATH="auto") == (0, "0", "")


SHOW = "import fsl_codecs; print(fsl_codecs.implementation(), *fsl_codecs.available())"


def test_the_variable_chooses():
    """FSL_CODECS_PATH names the implementation; auto, empty and absent mean the best."""
    for name in available():
        assert python(SHOW, FSL_CODECS_PATH=name)[1].split()[0] == name
    for name in ("auto", ""):
        assert python(SHOW, FSL_CODECS_PATH=name)[1].split() == [available()[0], *available()]


def test_an_unknown_name_is_one_clear_line():
    """A typing error in the variable must not fall back to something slow in silence."""
    code, _, errors = python(SHOW, FSL_CODECS_PATH="avx1024")
    assert code == 1
    assert errors.splitlines()[-1].endswith(
        "CodecUsageError: FSL_CODECS_PATH=avx1024: no codec implementation 'avx1024': "
        "use one of avx512, avx2, scalar, numpy"
    )
