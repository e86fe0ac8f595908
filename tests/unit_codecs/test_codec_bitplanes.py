"""Bit planes (raw planes, scales, lists of symbols without a code) and ranks (scales, lists)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_codecs import FrameError
from fsl_codecs.bitplanes import read_planes, read_ranks, write_planes, write_ranks
from fsl_codecs.reader import Reader

UNHURRIED = settings(deadline=None, max_examples=60)
RANKS = st.integers(0, 15).flatmap(
    lambda last: st.tuples(st.lists(st.integers(0, last), max_size=70), st.just(last))
)


def reader(data):
    return Reader(np.frombuffer(data, np.uint8))


@UNHURRIED
@given(st.lists(st.integers(0, 255), max_size=70), st.integers(0, 8))
def test_bit_planes_survive(symbols, width):
    """Every width and length, in the documented order: top bit first, first symbol in the lowest
    bit.
    """
    kept = [symbol & ((1 << width) - 1) for symbol in symbols]
    pieces = []
    write_planes(np.array(kept, np.uint8), width, pieces)
    data = b"".join(pieces)
    expected = b""
    for bit in reversed(range(width)):
        plane = sum((symbol >> bit & 1) << at for at, symbol in enumerate(kept))
        expected += plane.to_bytes((len(kept) + 7) // 8, "little")
    assert data == expected
    assert read_planes(reader(data), len(symbols), width).tolist() == kept


def test_planes_that_are_cut_short_are_refused():
    """A plane's size follows from the number of symbols."""
    with pytest.raises(FrameError, match="too early"):
        read_planes(Reader(np.zeros(5, np.uint8)), 17, 2)


def written(ranks, last):
    pieces = []
    write_ranks(np.array(ranks, np.uint8), last, pieces)
    return b"".join(pieces)


def ranks_by_the_document(ranks, last):
    """Return all bits as one number, the first in the lowest, and their count."""
    bits = [rank > below for below in range(last) for rank in ranks if rank >= below]
    number = sum(bit << at for at, bit in enumerate(bits))
    return number.to_bytes((len(bits) + 7) // 8, "little"), len(bits)


@UNHURRIED
@given(RANKS)
def test_ranks_survive(given_):
    """With and without an end bit of the last; the bytes that follow are left to the caller."""
    ranks, last = given_
    data = written(ranks, last)
    assert data == ranks_by_the_document(ranks, last)[0]
    source = reader(data + b"next")
    assert read_ranks(source, len(ranks), last).tolist() == ranks
    assert source.take(4).tobytes() == b"next"
    source.finish()


@pytest.mark.parametrize("last", range(16))
def test_many_ranks_survive(last):
    """A complete inner block, with mostly small ranks, as in lists."""
    ranks = np.minimum(np.random.default_rng(last).geometric(0.6, 16384) - 1, last)
    data = written(ranks, last)
    assert data == ranks_by_the_document(ranks.tolist(), last)[0]
    assert read_ranks(reader(data), ranks.size, last).tolist() == ranks.tolist()


@pytest.mark.parametrize(
    ("ranks", "last", "data"),
    [
        ([], 15, ""),
        ([0, 0, 0], 0, ""),
        ([0, 1, 2], 2, "16"),
        ([1, 0, 3], 3, "35"),
        ([0] * 9, 1, "0000"),
        ([15], 15, "ff7f"),
    ],
)
def test_ranks_as_the_document_has_them(ranks, last, data):
    """By hand: one round of bits for each rank but the last, without padding between."""
    assert written(ranks, last).hex() == data


@UNHURRIED
@given(RANKS)
def test_ranks_that_are_cut_short_are_refused(given_):
    """Their size follows from their bits alone; each missing byte is too many."""
    ranks, last = given_
    data = written(ranks, last)
    for size in range(len(data)):
        with pytest.raises(FrameError, match="too early"):
            read_ranks(reader(data[:size]), len(ranks), last)


@UNHURRIED
@given(RANKS, st.integers(0, 255))
def test_padding_of_ranks_is_ignored(given_, padding):
    """Bits after the last one may have any value."""
    ranks, last = given_
    data, bits = ranks_by_the_document(ranks, last)
    if bits % 8:
        data = data[:-1] + bytes([data[-1] | padding << bits % 8 & 255])
    source = reader(data)
    assert read_ranks(source, len(ranks), last).tolist() == ranks
    source.finish()
