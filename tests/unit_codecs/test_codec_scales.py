"""Scales in every form of docs/WIRE.md are read alike by every implementation."""

import math

import numpy as np
import pytest
from forged_frames import forged
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_codecs import FrameError, available
from fsl_codecs.dispatch import implementation_named
from fsl_codecs.formats import FORMATS
from fsl_codecs.reader import Reader
from fsl_codecs.scales import read_scales

UNHURRIED = settings(deadline=None, max_examples=150)
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
