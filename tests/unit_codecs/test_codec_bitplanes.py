"""Bit planes, which raw planes, scales and lists of symbols without a code use."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_codecs import FrameError
from fsl_codecs.bitplanes import read_planes, write_planes
from fsl_codecs.reader import Reader


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 255), max_size=70), st.integers(0, 8))
def test_bit_planes_survive(symbols, width):
    """At every width and length, in the documented order: top bit first, first symbol in the lowest bit."""
    kept = [symbol & ((1 << width) - 1) for symbol in symbols]
    pieces = []
    write_planes(np.array(kept, np.uint8), width, pieces)
    data = b"".join(pieces)
    expected = b""
    for bit in reversed(range(width)):
        plane = sum((symbol >> bit & 1) << at for at, symbol in enumerate(kept))
        expected += plane.to_bytes((len(kept) + 7) // 8, "little")
    assert data == expected
    assert read_planes(Reader(np.frombuffer(data, np.uint8)), len(symbols), width).tolist() == kept


def test_planes_that_are_cut_short_are_noticed():
    """A plane's size follows from the number of symbols."""
    with pytest.raises(FrameError, match="too early"):
        read_planes(Reader(np.zeros(5, np.uint8)), 17, 2)
