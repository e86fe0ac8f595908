"""Scales: their forms on the wire, computed a second time from docs/WIRE.md, for every
implementation.
"""

import math

import numpy as np
import pytest
from forged_frames import forged
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_codecs import CodecSpec, FrameError, available, bound
from fsl_codecs.dispatch import implementation_named
from fsl_codecs.formats import FORMATS
from fsl_codecs.reader import Reader
from fsl_codecs.scales import read_scales, write_scales

UNHURRIED = settings(deadline=None, max_examples=150)
PAYLOAD = 28 + 16
RUN = 16
RAW_CODES = 2
RANGES = {"e4m3": (10, 247), "e5m2": (17, 240), "uniform": (8, 992)}
NAMES = list(RANGES)
WIDTHS = {"e4m3": 8, "e5m2": 8, "uniform": 10}
UPWARD, DOWNWARD = 64, 128
LASTS = range(1, 16)
ONE = {"e4m3": 0x38, "e5m2": 0x3C, "uniform": 129}
"""The code of 1, which decodes to the scale."""


def forms_of(name):
    """Return all forms."""
    return [*range(WIDTHS[name] + 1), *(way + last for way in (UPWARD, DOWNWARD) for last in LASTS)]


def bytes_of(bits):
    """Pack bits, the first in the lowest of the first byte, padded with zeros."""
    parts = [bits[at : at + 8] for at in range(0, len(bits), 8)]
    return bytes(sum(bit << at for at, bit in enumerate(part)) for part in parts)


def in_form(name, one, form, numbers):
    """Write scales by their differences to the smallest, or by their ranks, as `form` says."""
    data = one.to_bytes(2 if name == "uniform" else 1, "little") + bytes([form])
    if form < UPWARD:
        planes = [[n >> bit & 1 for n in numbers] for bit in reversed(range(form))]
        return data + b"".join(map(bytes_of, planes))
    last = form % 64
    bits = [int(rank > below) for below in range(last) for rank in numbers if rank >= below]
    return data + bytes_of(bits)


def meant(one, form, numbers):
    """Return the scales that `in_form` writes."""
    if form < UPWARD:
        return [one + number for number in numbers]
    sign = 1 if form < DOWNWARD else -1
    ways = [0] + [sign * way for distance in range(1, 9) for way in (distance, -distance)]
    return [one + ways[rank] for rank in numbers]


def documented(name, scales):
    """Return an encoder's bytes, and their form."""
    smallest, range_ = min(scales), max(scales) - min(scales)
    width = len(format(range_, "b")) if range_ else 0
    planes = in_form(name, smallest, width, [scale - smallest for scale in scales])
    if range_ == 0 or range_ > 7:
        return planes, width
    most = max(scales.count(scale) for scale in scales)
    common = min(scale for scale in scales if scales.count(scale) == most)
    above, below = (sum(way * (s - common) > 0 for s in scales) for way in (1, -1))
    way = UPWARD if above >= below else DOWNWARD
    rank_of = {scale: rank for rank, scale in enumerate(meant(common, way, range(17)))}
    ranks = [rank_of[scale] for scale in scales]
    ranked = in_form(name, common, way + max(ranks), ranks)
    return (ranked, way + max(ranks)) if len(ranked) < len(planes) else (planes, width)


def written(name, scales):
    pieces = []
    write_scales(np.array(scales, np.int64), FORMATS[name], pieces)
    return b"".join(pieces)


def scale_values(name, scales):
    """Return the value of a code of 1."""
    if name == "uniform":
        steps = [np.float32(2 ** (scale % 4 / 4)) for scale in scales]
        return [
            math.ldexp(step, scale // 4 - 128) for step, scale in zip(steps, scales, strict=True)
        ]
    return [2.0 ** (scale - 127) for scale in scales]


def readings(name, data, runs, codes=None):
    """Return by implementation: the value of a code of 1 in each run behind these scales, or the
    refusal.
    """
    payload = data + (bytes([ONE[name]]) * RUN * runs if codes is None else codes)
    frame = forged(name, payload, RUN * runs, RAW_CODES, block_values=RUN, chunk_values=16384)
    found = {}
    for path in available():
        out = np.zeros(RUN * runs, np.float32)
        sums = np.zeros(RUN * runs, np.float32)
        codec = implementation_named(path)
        try:
            codec.decode_into(frame, out)
        except FrameError as error:
            found[path] = str(error)
            with pytest.raises(FrameError):
                codec.decode_accumulate(frame, sums, 1.0)
            assert not sums.any()
        else:
            found[path] = out[::RUN].tolist()
    return found


def same(found):
    """Return the common reading of all implementations."""
    return dict.fromkeys(available(), found)


def out_of_range(name):
    return "a scale is not from {} to {}".format(*RANGES[name])


@st.composite
def names_and_scales(draw):
    """Draw scales of a format, close together or anywhere, one of them often frequent."""
    name = draw(st.sampled_from(NAMES))
    lowest, highest = RANGES[name]
    spread = draw(st.integers(0, 9) | st.integers(0, highest - lowest))
    smallest = draw(st.integers(lowest, highest - spread))
    usual = draw(st.integers(0, spread))
    differences = st.integers(0, spread) | st.just(usual) | st.just(usual)
    return name, [smallest + d for d in draw(st.lists(differences, min_size=1, max_size=90))]


@st.composite
def names_and_forms(draw):
    """Draw any form of any format with any numbers: many are written by no encoder, some are out of
    range.
    """
    name = draw(st.sampled_from(NAMES))
    form = draw(st.sampled_from(forms_of(name)))
    lowest, highest = RANGES[name]
    near = st.integers(max(0, lowest - 9), lowest + 9) | st.integers(highest - 9, highest + 8)
    one = draw(near | st.integers(0, 65535 if name == "uniform" else 255))
    largest = (1 << form) - 1 if form < UPWARD else form % 64
    numbers = st.integers(0, largest) | st.integers(0, min(3, largest))
    return name, one, form, draw(st.lists(numbers, min_size=1, max_size=40))


@UNHURRIED
@given(names_and_scales())
def test_scales_survive_in_the_documented_form(given_):
    """The shorter form is written, and read completely."""
    name, scales = given_
    data = written(name, scales)
    assert data == documented(name, scales)[0]
    source = Reader(np.frombuffer(data, np.uint8))
    assert read_scales(source, FORMATS[name], len(scales)).tolist() == scales
    source.finish()


@UNHURRIED
@given(names_and_forms())
def test_every_form_is_read_by_its_meaning(given_):
    """Also forms that no encoder writes, if the scales are in range; the reference scale may be
    outside. All implementations agree.
    """
    name, one, form, numbers = given_
    scales = meant(one, form, numbers)
    lowest, highest = RANGES[name]
    data = in_form(name, one, form, numbers)
    if lowest <= min(scales) and max(scales) <= highest:
        source = Reader(np.frombuffer(data, np.uint8))
        assert read_scales(source, FORMATS[name], len(scales)).tolist() == scales
        source.finish()
        assert readings(name, data, len(scales)) == same(scale_values(name, scales))
    else:
        assert readings(name, data, len(scales)) == same(out_of_range(name))


A, B, C = 120, 121, 122
COMMON = [A] * 20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("scales", "one", "form"),
    [
        ([A] * 40, A, 0),
        # Ranks up to 1 are as long as planes of width 1: only what is shorter counts.
        ([*COMMON, B], A, 1),
        # Of 23 runs, planes of width 2 are six bytes, these ranks 23 and 3 bits.
        ([*COMMON, B, B, C], A, UPWARD + 3),
        ([*COMMON, A - 1, A - 1, A - 2], A, DOWNWARD + 3),
        ([*COMMON, B, A - 1, C], A, UPWARD + 3),
        ([*COMMON, B, A - 1, A - 2], A, DOWNWARD + 3),
        # As many above as below.
        ([*COMMON, B, A - 1], A, UPWARD + 2),
        ([*COMMON, C, A - 2], A, UPWARD + 4),
        ([*COMMON, *COMMON, B, A - 1, A - 1], A, DOWNWARD + 2),
        # Of two equally frequent scales the smaller one, though the larger one has more neighbors.
        ([*COMMON, *[B] * 20, C, C], A, UPWARD + 3),
        ([*[B] * 20, C, C, *COMMON], A, UPWARD + 3),
        # They may differ by 7, and no more.
        ([*COMMON, *COMMON, A + 7], A, UPWARD + 13),
        ([*COMMON, *COMMON, A - 7], A, DOWNWARD + 13),
        ([*COMMON, *COMMON, B, B, A - 6], A, UPWARD + 12),
        ([*COMMON, *COMMON, A + 8], A, 4),
        ([*COMMON, *COMMON, A + 4, A - 4], A - 4, 4),
    ],
)
def test_an_encoder_takes_the_documented_form(name, scales, one, form):
    """By hand: the most frequent scale, the distance of the others, and the side on which most of
    them are.
    """
    data = written(name, scales)
    base = 2 if name == "uniform" else 1
    assert (int.from_bytes(data[:base], "little"), data[base]) == (one, form)
    assert (data, form) == documented(name, scales)


@UNHURRIED
@given(names_and_scales())
def test_every_encoder_takes_the_same_form(given_):
    """Values with these scales, each run of one magnitude: without coding, the scales are first in
    the frame.
    """
    name, scales = given_
    if name == "uniform":
        # Steps are 14 quarters of a power of two below the run's magnitude, which is below 2**120.
        scales = [min(scale, 991 - 14) for scale in scales]
        sizes = [
            math.ldexp(np.float32(2 ** ((scale + 14) % 4 / 4)), (scale + 14) // 4 - 128)
            for scale in scales
        ]
    else:
        largest = {"e4m3": 8, "e5m2": 15}[name]
        scales = [min(scale, RANGES[name][1] - 2) for scale in scales]
        sizes = [2.0 ** (scale + largest - 127) for scale in scales]
    values = np.repeat(np.array(sizes, np.float32), RUN)
    values[1::2] *= -1
    spec = CodecSpec(name, RUN, 16384, entropy=False)
    data = documented(name, scales)[0]
    for path in available():
        out = np.empty(bound(values.size, spec), np.uint8)
        size = implementation_named(path).encode_into(values, out, spec)
        frame = out[:size].tobytes()
        assert frame[28 + 8] == 2, "raw codes"
        assert frame[PAYLOAD : size - values.size] == data, path


@pytest.mark.parametrize("name", NAMES)
def test_unknown_forms_are_refused(name):
    """Everything except widths, and ranks up to 1 to 15, with the same text."""
    one = RANGES[name][0] + 50
    for form in range(256):
        data = in_form(name, one, form if form in forms_of(name) else 0, [0, 0, 0])
        data = bytearray(data)
        data[2 if name == "uniform" else 1] = form
        if form in forms_of(name):
            assert readings(name, bytes(data), 3) == same(scale_values(name, [one] * 3))
        else:
            assert readings(name, bytes(data), 3) == same(f"unknown form of scales {form}")


def test_the_unknown_forms_are_those_of_the_document():
    """The forms of the test above."""
    for name, widest in (("e4m3", 8), ("e5m2", 8), ("uniform", 10)):
        unknown = {*range(widest + 1, 65), *range(80, 129), *range(144, 256)}
        assert unknown == {*range(256)} - {*forms_of(name)}


@pytest.mark.parametrize(
    ("name", "one", "form", "numbers"),
    [
        ("e4m3", 247, UPWARD + 1, [0, 1]),
        ("e4m3", 240, UPWARD + 15, [0, 15]),
        ("e4m3", 10, UPWARD + 2, [0, 2]),
        ("e4m3", 247, DOWNWARD + 2, [0, 2]),
        ("e4m3", 10, DOWNWARD + 1, [0, 1]),
        ("e4m3", 17, DOWNWARD + 15, [0, 15]),
        ("e5m2", 240, UPWARD + 1, [0, 1]),
        ("e5m2", 17, DOWNWARD + 1, [1, 0]),
        # Below 0 and above 255.
        ("e4m3", 3, DOWNWARD + 15, [15, 15]),
        ("e4m3", 0, UPWARD + 2, [2, 2]),
        ("e5m2", 2, UPWARD + 14, [14, 14]),
        ("e4m3", 255, UPWARD + 15, [15, 15]),
        ("e5m2", 250, DOWNWARD + 14, [14, 14]),
        ("e4m3", 200, 8, [100, 100]),
        ("e5m2", 255, 8, [255, 40]),
        ("uniform", 992, UPWARD + 1, [0, 1]),
        ("uniform", 992, DOWNWARD + 2, [0, 2]),
        ("uniform", 8, DOWNWARD + 1, [0, 1]),
        ("uniform", 8, UPWARD + 2, [0, 2]),
        ("uniform", 985, UPWARD + 15, [15, 15]),
        ("uniform", 15, DOWNWARD + 15, [15, 15]),
        # Below 0, and beyond 16 bits with and without a sign.
        ("uniform", 3, DOWNWARD + 15, [15, 15]),
        ("uniform", 65535, UPWARD + 15, [15, 15]),
        ("uniform", 65535, 10, [500, 600]),
        ("uniform", 65535, 10, [1023, 1023]),
        ("uniform", 32767 + 512, UPWARD + 15, [15, 15]),
        ("uniform", 32768 + 512, DOWNWARD + 15, [0, 15]),
    ],
)
def test_scales_out_of_range_are_refused(name, one, form, numbers):
    """In either direction, also where the number's low byte or bytes would be a scale."""
    data = in_form(name, one, form, numbers)
    assert readings(name, data, len(numbers)) == same(out_of_range(name))


@pytest.mark.parametrize(
    ("name", "one", "form", "numbers"),
    [
        ("e4m3", 247, UPWARD + 15, [0, 2, 14, 0]),
        ("e4m3", 10, DOWNWARD + 15, [0, 2, 14, 0]),
        ("e5m2", 240, DOWNWARD + 15, [0, 1, 15, 0]),
        ("uniform", 992, UPWARD + 15, [0, 2, 14, 0]),
        ("uniform", 8, DOWNWARD + 15, [0, 2, 14, 0]),
        # The one is out of range, and no run has it.
        ("e4m3", 9, UPWARD + 1, [1, 1, 1]),
        ("e4m3", 248, DOWNWARD + 1, [1, 1, 1]),
        ("e4m3", 255, DOWNWARD + 15, [15, 15]),
        ("e5m2", 16, UPWARD + 3, [1, 3]),
        ("uniform", 0, UPWARD + 15, [15, 15]),
        ("uniform", 993, UPWARD + 2, [2, 2]),
        # Nor is it the smallest.
        ("e4m3", 9, 1, [1, 1, 1]),
        ("e4m3", 0, 8, [10, 247]),
        ("e5m2", 0, 8, [17, 240]),
        ("uniform", 7, 1, [1, 1, 1]),
        ("uniform", 0, 10, [8, 992]),
    ],
)
def test_only_scales_that_a_run_has_must_be_in_range(name, one, form, numbers):
    """A scale is refused, not the number it is computed from."""
    scales = meant(one, form, numbers)
    data = in_form(name, one, form, numbers)
    assert readings(name, data, len(numbers)) == same(scale_values(name, scales))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", [3, UPWARD + 1, UPWARD + 15, DOWNWARD + 4, DOWNWARD + 15])
@pytest.mark.parametrize("runs", [1, 8, 20, 200])
def test_scales_that_are_cut_short_are_refused(name, form, runs):
    """At any end of the payload, however many ranks are missing."""
    largest = 7 if form < UPWARD else form % 64
    numbers = np.random.default_rng(runs).integers(0, largest + 1, runs).tolist()
    data = in_form(name, sum(RANGES[name]) // 2, form, numbers)
    for size in range(len(data)):
        assert readings(name, data[:size], runs, b"") == same("payload ends too early")
    assert readings(name, data, runs) == same(
        scale_values(name, meant(sum(RANGES[name]) // 2, form, numbers))
    )


@pytest.mark.parametrize("form", [3, UPWARD + 5, DOWNWARD + 5])
@pytest.mark.parametrize("name", NAMES)
def test_padding_of_scales_is_ignored(name, form):
    """Bits after the last one may have any value."""
    one, numbers = sum(RANGES[name]) // 2, [0, 3, 1]
    data = bytearray(in_form(name, one, form, numbers))
    for at in range(len(data) - 3, len(data)) if form == 3 else [len(data) - 1]:
        data[at] |= 0xF8 if form == 3 else 0x80
    assert readings(name, bytes(data), 3) == same(scale_values(name, meant(one, form, numbers)))


@pytest.mark.parametrize(("run", "is_finite"), [(0, False), (1, True), (2, True)])
@pytest.mark.parametrize(
    ("one", "form", "numbers"),
    [
        (247, DOWNWARD + 1, [0, 1, 1]),
        (246, UPWARD + 1, [1, 0, 0]),
        (248, DOWNWARD + 3, [1, 3, 3]),
        (240, UPWARD + 13, [13, 0, 2]),
        (240, 3, [7, 0, 1]),
    ],
)
def test_a_value_beyond_fp32_is_found_under_ranks(run, is_finite, one, form, numbers):
    """The code of 256 is infinite under the highest scale, which may be the reference or not."""
    codes = bytearray([ONE["e4m3"]]) * (RUN * 3)
    codes[RUN * run] = 0x78
    data = in_form("e4m3", one, form, numbers)
    scales = meant(one, form, numbers)
    expected = scale_values("e4m3", scales)
    if is_finite:
        expected[run] *= 256
        assert readings("e4m3", data, 3, bytes(codes)) == same(expected)
    else:
        (found,) = set(readings("e4m3", data, 3, bytes(codes)).values())
        assert "NaN" in found
