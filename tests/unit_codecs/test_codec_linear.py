"""Time that a hostile frame may take: it goes with the frame's length and its values, whatever the
frame is made of.

Not a benchmark: sixteen times as much may take up to 96 times the processor time of this thread,
where what goes with the square takes 256 times.
"""

import time

import numpy as np
import pytest
from forged_frames import with_checksums

from fsl_codecs import CodecError, CodecSpec, available, encode
from fsl_codecs.dispatch import implementation_named

FACTOR, MOST = 16, 96
REPEATS = 3


def bell(count):
    return np.random.default_rng(count).standard_normal(count).astype(np.float32)


def refused_late(frame):
    """With right checksums, but a byte too many: all of it is read before that is found."""
    return with_checksums(frame) + b"\0"


def tiny_chunks(count):
    """As many chunks as values allow: a head and a few codes each."""
    return refused_late(encode(bell(16 * count), CodecSpec("e4m3", 16, 16)))


def constant_chunks(count):
    """Twenty bytes each."""
    values = np.repeat(bell(count), 16)
    return refused_late(encode(values, CodecSpec("fp32", 16, 16)))


def listed(count):
    """One chunk, about a fifth of whose symbols are in lists: its table is made from runs that show
    two values only.
    """
    index = np.arange(8 * count)
    is_sampled = (index // 16 % 17 == 0) | (index // 16 % 29 == 0)
    values = np.where(is_sampled | (index % 5 > 0), 1 + index % 2, bell(8 * count))
    return refused_late(encode(values.astype(np.float32), CodecSpec("e4m3", 128, 1 << 20)))


def escaped(count):
    """One chunk of uniform codes, of which one in eight is followed by an fp32 value, and with a
    scale for every 16.
    """
    values = bell(8 * count) * np.where(np.arange(8 * count) % 8 == 0, 1e6, 1)
    return refused_late(encode(values.astype(np.float32), CodecSpec("uniform", 16, 1 << 20)))


def processor_time(read, frame):
    """The least of several readings, in seconds of this thread: other programs on the machine do
    not count.
    """
    found = []
    for _ in range(REPEATS):
        before = time.thread_time()
        with pytest.raises(CodecError, match="bytes after"):
            read(frame)
        found.append(time.thread_time() - before)
    return min(found)


@pytest.mark.parametrize("made", [tiny_chunks, constant_chunks, listed, escaped])
@pytest.mark.parametrize("name", available())
def test_time_goes_with_the_length(name, made):
    """A frame of a megabyte that took a minute would stop a server with a few peers of bad will."""
    codec = implementation_named(name)
    # Native paths store 131072 values and more otherwise: both frames are so large.
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
