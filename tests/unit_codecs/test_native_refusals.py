"""The native codec against the NumPy package: the same refusals, of a peer's frames and of our own
misuse, on every path.
"""

import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forged_frames import with_checksums
from native_paths import (
    BLOCK,
    FORMATS,
    PATHS,
    REFERENCE,
    assert_same_reading,
    encoded_by,
    needs_native,
    on_every_path,
    outcome,
    values_of,
)

from fsl_codecs import CodecSpec, CodecUsageError, FrameError, LimitError, Limits, available, bound
from fsl_codecs.dispatch import implementation_named

pytestmark = needs_native


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "uniform"])
def test_every_code_of_a_byte(name):
    """Raw frames of all 256 codes under many scales: the same values, or the same refusal of a code
    or scale.
    """
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
            frame = with_checksums(
                base[:28] + struct.pack("<IIBBHI", len(payload), 0, 2, 0, 0, 0) + payload
            )
            assert_same_reading(frame, 256)


def test_mutated_frames(tmp_path):
    """Bytes changed, cut and added in golden vectors and other frames, with wrong or correct
    checksums.

    All paths refuse with the same text, and a refused frame adds nothing. The script reads 100,000
    frames in minutes.
    """
    script = Path(__file__).with_name("mutated_frames.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script), "1500", "5"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    frames, refused, paths, whole, threads = re.match(
        r"(\d+) frames, (\d+) refused, read alike by numpy ([a-z0-9 ]+), \d+ s; "
        r"(\d+) of 131072 values and more, (\d+) by several threads;",
        done.stdout,
    ).groups()
    assert paths.split() == PATHS
    assert int(frames) == 1500
    assert 400 < int(refused) < 1300
    assert int(whole) > 10
    assert int(threads) > 300


@on_every_path
def test_a_late_fault_adds_nothing(path):
    """The last of several chunks is bad: no chunk before it is added, on one thread or more."""
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
@pytest.mark.parametrize("name", FORMATS)
def test_a_wrong_checksum_comes_first(path, name):
    """With a flipped bit the checksum is reported, whether the chunk would decode or not, and
    nothing is added.
    """
    codec, count = implementation_named(path), 2 * BLOCK + 300
    values = values_of("bell", count)
    frame = encoded_by(codec, values, CodecSpec(name))
    begin, harmless, harmful = 28 + 16, 0, 0
    for place in range(begin, len(frame), max(1, (len(frame) - begin) // 120)):
        damaged = bytearray(frame)
        damaged[place] ^= 1 << place % 8
        try:
            codec.decode_into(with_checksums(damaged), np.empty(count, np.float32))
            harmless += 1
        except FrameError:
            harmful += 1
        total = values.copy()
        with pytest.raises(FrameError, match=r"^checksum of chunk 0 does not match$"):
            codec.decode_accumulate(damaged, total, 1.0)
        with pytest.raises(FrameError, match=r"^checksum of chunk 0 does not match$"):
            codec.decode_into(damaged, np.empty(count, np.float32))
        assert total.tobytes() == values.tobytes()
    assert harmless > 10
    assert harmful > (0 if name == "fp32" else 3)


def test_limits():
    """Limits are refused with the same text."""
    frame = encoded_by(REFERENCE, values_of("bell", 500), CodecSpec("e4m3"))
    for limits in (Limits(499, 1 << 20), Limits(500, len(frame) - 1), Limits(1 << 70, 1 << 70)):
        assert_same_reading(frame, 500, limits)
    assert_same_reading(frame, 499)
    for path in PATHS:
        with pytest.raises(LimitError, match="frame of 500 values, the output holds 499"):
            implementation_named(path).decode_into(frame, np.zeros(499, np.float32), Limits())


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
def test_outputs_share_no_memory_with_inputs(path):
    """Our own mistake: a frame that changes while it is read would look like a peer's bad one."""
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
    # Neighbors do not overlap, and inputs may.
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
