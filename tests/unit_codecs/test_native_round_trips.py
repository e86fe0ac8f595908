"""Round trips of drawn sizes, settings and addresses: every native path against the NumPy package,
beyond a chunk's size.
"""

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from native_paths import (
    CHUNK,
    FORMATS,
    KINDS,
    PATHS,
    REFERENCE,
    encoded_by,
    needs_native,
    values_of,
)

from fsl_codecs import CodecSpec, bound
from fsl_codecs.dispatch import implementation_named

pytestmark = needs_native

# Pieces of values, inner blocks, half a chunk, and a chunk: streams have 128 lanes from 16384
# values, all pieces of 4096 but the last are read in one pass, and fp32 is written past the cache
# from 131072 values.
BOUNDARIES = (4096, 16_384, 20_480, 32_768, 65_536, CHUNK)
SIZES = st.one_of(
    st.integers(0, 700),
    st.builds(lambda at, by: at + by, st.sampled_from(BOUNDARIES), st.integers(-70, 70)),
    st.integers(CHUNK, 140_000),
)
SPECS = st.builds(
    CodecSpec,
    st.sampled_from(FORMATS),
    st.sampled_from([16, 128, 1024]),
    st.sampled_from([16_384, 33 * 1024, CHUNK // 2, CHUNK, 1 << 20]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([0, 8, 14, 30]),
)
PLACES = st.integers(0, 17)
"""Values, or bytes of frames, by which a buffer begins after a cache line."""
GUARD = 0xA5
MARGIN = 128


def placed(count, dtype, place):
    """Return space (count,) that begins `place` values after a cache line, and the bytes around it,
    which must stay.
    """
    size = np.dtype(dtype).itemsize
    raw = np.full((count + place) * size + 2 * MARGIN, GUARD, np.uint8)
    first = -raw.ctypes.data % 64 + place * size
    last = first + count * size
    return raw[first:last].view(dtype), (raw[:first], raw[last:])


def untouched(around):
    return all((part == GUARD).all() for part in around)


def copy_placed(values, place):
    """Copy values to such a place."""
    room, _ = placed(values.size, values.dtype, place)
    room[:] = values
    return room


def read_by(codec, frame, count, places, **options):
    """Return the bytes of the values as fp32, as bf16, and of the sums; nothing around them is
    written.
    """
    found = []
    for dtype, place in ((np.float32, places[0]), (np.uint16, places[1])):
        out, around = placed(count, dtype, place)
        assert codec.decode_into(frame, out, **options) == count
        assert untouched(around), codec.name
        found.append(out.tobytes())
    total, around = placed(count, np.float32, places[2])
    total[:] = np.arange(count)
    assert codec.decode_accumulate(frame, total, 0.3, **options) == count
    assert untouched(around), codec.name
    return [*found, total.tobytes()]


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(KINDS),
    count=SIZES,
    seed=st.integers(0, 1000),
    spec=SPECS,
    threads=st.sampled_from([1, 1, 2, 3]),
    places=st.tuples(*[PLACES] * 6),
)
@example(
    kind="bell", count=CHUNK, seed=0, spec=CodecSpec("e4m3"), threads=1, places=(0, 0, 0, 0, 0, 0)
)
@example(
    kind="bell",
    count=CHUNK + 4096,
    seed=0,
    spec=CodecSpec("uniform"),
    threads=2,
    places=(3, 1, 5, 8, 3, 7),
)
@example(
    kind="sparse",
    count=CHUNK + 3,
    seed=0,
    spec=CodecSpec("uniform"),
    threads=2,
    places=(3, 1, 5, 8, 3, 7),
)
@example(
    kind="heavy",
    count=CHUNK - 1,
    seed=0,
    spec=CodecSpec("e5m2"),
    threads=1,
    places=(2, 5, 3, 1, 7, 3),
)
def test_any_size_at_any_place(*, kind, count, seed, spec, threads, places):
    """Frames are parts of messages and vectors parts of larger ones; paths choose loads and stores
    by size and address.
    """
    values = values_of(kind, count, seed)
    frame = encoded_by(REFERENCE, values, spec)
    expected = read_by(REFERENCE, frame, count, (0, 0, 0))
    given_values, held = copy_placed(values, places[0]), np.frombuffer(frame, np.uint8)
    held = copy_placed(held, places[1])
    for path in PATHS:
        codec = implementation_named(path)
        room, around = placed(bound(count, spec), np.uint8, places[2])
        size = codec.encode_into(given_values, room, spec, threads=threads)
        assert room[:size].tobytes() == frame, path
        assert untouched(around), path
        assert read_by(codec, held, count, places[3:], threads=threads) == expected


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(KINDS),
    count=SIZES,
    spec=SPECS,
    is_bfloat16=st.booleans(),
    subtracts=st.booleans(),
    places=st.tuples(*[PLACES] * 3),
)
@example(
    kind="bell",
    count=CHUNK + 100,
    spec=CodecSpec("e4m3"),
    is_bfloat16=False,
    subtracts=True,
    places=(1, 2, 3),
)
def test_feedback_of_any_size_at_any_place(*, kind, count, spec, is_bfloat16, subtracts, places):
    """The same for encoder inputs: bf16, references and residuals, each with its own address."""
    values = values_of(kind, count)
    if is_bfloat16:
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    reference = values_of("bell", count, seed=1) if subtracts else None
    before = values_of("bell", count, seed=2) * np.float32(0.01)
    kept = before.copy()
    frame = encoded_by(REFERENCE, values, spec, reference=reference, residual=kept)
    given_values = copy_placed(values, places[0])
    subtracted = None if reference is None else copy_placed(reference, places[1])
    for path in PATHS:
        residual, around = placed(count, np.float32, places[2])
        residual[:] = before
        codec = implementation_named(path)
        assert (
            encoded_by(codec, given_values, spec, reference=subtracted, residual=residual) == frame
        ), path
        assert residual.tobytes() == kept.tobytes(), path
        assert untouched(around), path
