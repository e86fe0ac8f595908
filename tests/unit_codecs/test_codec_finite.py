"""Codes that are no numbers, and values beyond fp32, are found anywhere in a chunk, by every
implementation.
"""

import struct

import numpy as np
import pytest
from forged_frames import with_checksums
from native_paths import PATHS

from fsl_codecs import CodecSpec, FrameError, available, encode
from fsl_codecs.code_tables import CodeTable
from fsl_codecs.dispatch import implementation_named
from fsl_codecs.formats import FORMATS
from fsl_codecs.planes import ChunkPlan, PlanePlan, write_plan, write_streams, write_words
from fsl_codecs.scales import write_scales

RUN = 64
BLOCK = 16384
HIGHEST = {"e4m3": 247, "e5m2": 240}
SPECIAL = {"e4m3": 0x7F, "e5m2": 0x7C}
OVERFLOWING = 0x78
"""The lowest code of either 8-bit float format that means 2**128 or more with the highest scale."""
TABLE = CodeTable(6, 0, bytes([6]) * 64)


def coded(codes, name, scales):
    """Return the payload of codes (n,): the upper six bits by a table, the others as bit planes."""
    number_format = FORMATS[name]
    plan = ChunkPlan(0, (PlanePlan(6, b"\2" + TABLE.packed, 0, TABLE), PlanePlan(2, b"\0", 0)))
    pieces = []
    write_plan(plan, pieces)
    write_streams(codes, number_format, plan, pieces)
    for start in range(0, codes.size, BLOCK):
        runs = scales[start // RUN : (start + BLOCK) // RUN]
        write_scales(runs, number_format, pieces)
        write_words(codes[start : start + BLOCK], number_format, plan, pieces)
    return b"".join(pieces)


def framed(codes, name, scales, chunk_values):
    """Return a frame of codes (n,) in chunks of that size."""
    frame = bytearray(encode(np.zeros(0, np.float32), CodecSpec(name, RUN, chunk_values)))
    struct.pack_into("<Q", frame, 16, codes.size)
    for index, start in enumerate(range(0, codes.size, chunk_values)):
        part = codes[start : start + chunk_values]
        payload = coded(part, name, scales[start // RUN :][: -(-part.size // RUN)])
        frame += struct.pack("<IIBBHI", len(payload), index, 3, 0, 0, 0) + payload
    return with_checksums(frame)


def is_refused(codes, name, scales, chunk_values=1 << 17):
    """Return whether all implementations refuse the codes in every way of decoding; all must
    agree.
    """
    frame = framed(codes, name, scales, chunk_values)
    refusals = set()
    # NumPy is slow, and reads all pieces of a chunk in the same way: short chunks are enough for
    # it.
    for path in available() if codes.size < 5000 or not PATHS else PATHS:
        codec = implementation_named(path)
        for out in (np.zeros(codes.size, np.float32), np.zeros(codes.size, np.uint16)):
            refusals.add(refusal(codec.decode_into, frame, out))
        sums = np.zeros(codes.size, np.float32)
        refusals.add(refusal(codec.decode_accumulate, frame, sums, 1.0))
        if None not in refusals:
            assert not sums.any()
    assert len(refusals) == 1
    return refusals.pop() is not None


def refusal(decode, *arguments):
    """Return the text of the refusal, None without one."""
    try:
        decode(*arguments)
    except FrameError as error:
        return str(error)
    return None


def ordinary(count, name):
    """Return codes of numbers near one, (count,), and middling scales of their runs."""
    codes = (0x38 + np.arange(count) % 5).astype(np.uint8)
    return codes, np.full(-(-count // RUN), HIGHEST[name] - 100)


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 144, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 20_000])
def test_a_code_that_is_no_number_is_found_in_every_kind_of_place(name, count):
    """Last symbols of each lane, remainders of vectors, pieces of 4096, and places within them."""
    codes, scales = ordinary(count, name)
    assert not is_refused(codes, name, scales)
    around = [0, 1, 127, 128, 4095, 4096, BLOCK - 1, BLOCK, count // 2]
    from_the_end = [1, 2, 15, 16, 17, 127, 128, 129, 135, 136, 144]
    places = {
        place for place in [*around, *(count - back for back in from_the_end)] if 0 <= place < count
    }
    for place in sorted(places):
        bad = codes.copy()
        bad[place] = SPECIAL[name] | (0x80 if place % 2 else 0)
        assert is_refused(bad, name, scales), place
        if count > BLOCK:
            assert is_refused(bad, name, scales, BLOCK), place


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("run", [0, 63, 64, 100, 255, 256, 300])
def test_a_value_beyond_fp32_is_found_in_every_piece(name, run):
    """Only where its own run has the highest scale."""
    codes, scales = ordinary(20_000, name)
    scales[run] = HIGHEST[name]
    codes[run * RUN + 5] = OVERFLOWING - 1
    assert not is_refused(codes, name, scales)
    for other in {0, 1, 63, 64, 99, 254, 255, 256, 257, 311} - {run}:
        codes[other * RUN] = OVERFLOWING
    assert not is_refused(codes, name, scales)
    codes[run * RUN + 63] = OVERFLOWING | 0x80
    assert is_refused(codes, name, scales)
    assert is_refused(codes, name, scales, BLOCK)
