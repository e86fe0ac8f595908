"""The time for a hostile frame is proportional to its length and its values.

Not a benchmark: sixteen times as much may take up to 96 times this thread's processor time;
quadratic work would take 256 times.
"""

import time

import numpy as np
import pytest
from forged_frames import with_checksums

from fsl_codecs import CodecError, CodecSpec, available, encode
from fsl_codecs.dispatch import implementation_named

FACTOR, MOST = 16, 96
REPEATS = 2


def bell(count):
    return np.random.default_rng(count).standard_normal(count).astype(np.float32)


def refused_late(frame):
    """Add a byte at the end, with correct checksums, so that everything is read before the
    refusal.
    """
    return with_checksums(frame) + b"\0"


def tiny_chunks(count):
    """Make as many chunks as values allow: a head and a few codes each."""
    return refused_late(encode(bell(16 * count), CodecSpec("e4m3", 16, 16)))


def constant_chunks(count):
    """Make constant chunks of twenty bytes each."""
    values = np.repeat(bell(count), 16)
    return refused_late(encode(values, CodecSpec("fp32", 16, 16)))


def listed(count):
    """Make one chunk with about a fifth of its symbols in lists: its table is made from runs with
    two values only.
    """
    index = np.arange(8 * count)
    is_sampled = (index // 16 % 17 == 0) | (index // 16 % 29 == 0)
    values = np.where(is_sampled | (index % 5 > 0), 1 + index % 2, bell(8 * count))
    return refused_late(encode(values.astype(np.float32), CodecSpec("e4m3", 128, 1 << 20)))


def escaped(count):
    """Make one chunk of uniform codes: one in eight is followed by an fp32 value, and every 16 have
    a scale.
    """
    values = bell(8 * count) * np.where(np.arange(8 * count) % 8 == 0, 1e6, 1)
    return refused_late(encode(values.astype(np.float32), CodecSpec("uniform", 16, 1 << 20)))


def processor_time(read, frame):
    """Return the least of several readings, in seconds of this thread's processor time."""
    found = []
    for _ in range(REPEATS):
        before = time.thread_time()
        with pytest.raises(CodecError, match="bytes after"):
            read(frame)
        found.append(time.thread_time() - before)
    return min(found)


@pytest.mark.parametrize("made", [tiny_chunks, constant_chunks, listed, escaped])
@pytest.mark.parametrize("name", sorted({available()[0], "numpy"}))
def test_time_goes_with_the_length(name, made):
    """A frame of a megabyte that takes a minute would let a few hostile peers stop a server."""
    codec = implementation_named(name)
    # Native paths store 131072 values and more differently, so both frames are that large.
    few = 200 if name == "numpy" else 8192
    frames = [made(few), made(FACTOR * few)]
    values = [codec.info(frame[:-1]).values for frame in frames]
    assert 0.6 * FACTOR < len(frames[1]) / len(frames[0]) < 1.1 * FACTOR
    assert values[1] == FACTOR * values[0]
    out = np.zeros(values[1], np.float32)
    for read in (
        lambda frame: codec.decode_into(frame, out),
        lambda frame: codec.decode_accumulate(frame, out, 0.5),
        codec.info,
    ):
        short, long = (processor_time(read, frame) for frame in frames)
        assert long < MOST * max(short, 1e-5), (short, long)
