"""Streams, against a writer and a reader that follow docs/WIRE.md one symbol at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_codecs import FrameError
from fsl_codecs.code_tables import CodeTable
from fsl_codecs.huffman import code_lengths
from fsl_codecs.lanes import StreamReader, lanes_of, write_stream

ESCAPE = 256
UNHURRIED = settings(deadline=None, max_examples=60)
SYMBOLS = st.lists(st.integers(0, 255) | st.integers(0, 3), min_size=2, max_size=600).filter(
    lambda symbols: len(set(symbols)) > 1
)
# Around a lane more or less, a step more or less, the change from few lanes to many, and the usual
# chunk.
COUNTS = [0, 1, 2, 15, 16, 17, 31, 32, 33, 1000, 16_383, 16_384, 16_385]
# The last symbols may lie in two inner blocks, or be all of the last one.
COUNTS += [16_384 + more for more in (127, 128, 129, 639, 640, 641)] + [131_072]
MANY_LANES_FROM = 16_384
BLOCK = 16_384


def canonical_words(lengths, escape):
    """Return symbol -> code word, as a text of 0 and 1, by the textbook rule; the escape is symbol
    ESCAPE, the last.
    """
    code, previous, words = 0, 0, {}
    leaves = [*enumerate(lengths), (ESCAPE, escape)]
    for length, symbol in sorted((int(n), s) for s, n in leaves if n):
        code <<= length - previous
        words[symbol] = format(code, f"0{length}b")
        code, previous = code + 1, length
    return words


def documented_stream(symbols, lengths, escape=0):
    """Encode as the document: from the last symbol to the first, from the stream's end to its
    front.
    """
    words = canonical_words(lengths, escape)
    lanes = 128 if len(symbols) >= MANY_LANES_FROM else 16
    v, p, from_the_end = [0] * lanes, [0] * lanes, []
    for at in reversed(range(len(symbols))):
        symbol, lane = symbols[at], at % lanes
        if at >= len(symbols) - lanes:
            v[lane] = symbol if lengths[symbol] or not escape else list(lengths).index(0)
            continue
        word = words[symbol if lengths[symbol] else ESCAPE]
        v[lane] += int(word, 2) * 2 ** (8 + p[lane])
        p[lane] += len(word)
        if p[lane] >= 8:
            from_the_end.append(v[lane] % 256)
            v[lane] //= 256
            p[lane] -= 8
    front = [each % 256 for each in v]
    front += [each // 256 + 2**held for each, held in zip(v, p, strict=True)]
    return bytes(front + from_the_end[::-1])


def documented_symbols(stream, lengths, count, escape=0):
    """Decode as the document; a symbol without a code gives the lowest such."""
    symbol_of = {word: symbol for symbol, word in canonical_words(lengths, escape).items()}
    if escape:
        word = next(word for word, symbol in symbol_of.items() if symbol == ESCAPE)
        symbol_of[word] = list(lengths).index(0)
    lanes = 128 if count >= MANY_LANES_FROM else 16
    lowest, rest, stream = stream[:lanes], stream[lanes : 2 * lanes], iter(stream[2 * lanes :])
    held = [
        format(second, "b")[1:] + format(low, "08b")
        for low, second in zip(lowest, rest, strict=True)
    ]
    symbols = []
    for at in range(count - lanes):
        bits = held[at % lanes]
        word = next(bits[:n] for n in range(1, 9) if bits[:n] in symbol_of)
        symbols.append(symbol_of[word])
        bits = bits[len(word) :]
        if len(bits) < 8:
            bits += format(next(stream), "08b")
        held[at % lanes] = bits
    assert all(len(bits) == 8 for bits in held)
    assert not list(stream)
    return symbols + [int(held[at % lanes], 2) for at in range(max(0, count - lanes), count)]


def written(symbols, table):
    return write_stream(table.code, np.array(symbols, np.uint8))


def read(stream, table, count):
    reader = StreamReader(table.code, np.frombuffer(stream, np.uint8), table.width, count)
    blocks = [min(BLOCK, count - start) for start in range(0, max(1, count), BLOCK)]
    return [symbol for block in blocks for symbol in reader.read(block).tolist()]


def table_of(counts, escape=0):
    """Return Huffman's table of counts (2**width,), with an escape of this count."""
    lengths = code_lengths(np.append(counts, escape))
    width, escape = (len(counts) - 1).bit_length(), int(lengths[-1])
    # Streams do not depend on it: how the symbols without a code are listed.
    low_bits = width - 4 if escape and width > 4 else 0
    return CodeTable(width, escape, lengths[:-1].tobytes(), low_bits)


def assert_as_documented(symbols, table):
    stream = written(symbols, table)
    assert stream == documented_stream(symbols, table.lengths, table.escape)
    marked = documented_symbols(stream, table.lengths, len(symbols), table.escape)
    assert read(stream, table, len(symbols)) == marked
    lowest = table.lengths.index(0) if table.escape else None
    coded = [bool(table.lengths[symbol]) or not table.escape for symbol in symbols]
    assert marked == [s if c else lowest for s, c in zip(symbols, coded, strict=True)]
    return stream


def skewed(count, seed=3):
    """Return symbols (count,) of six bits, of which a few are frequent."""
    return np.minimum(np.random.default_rng(seed).geometric(0.3, count), 63)


SKEWED = table_of(np.bincount(skewed(20_000), minlength=64))
WITH_ESCAPE = CodeTable(6, 3, bytes([0, 2, 2, 3, 3] + [0] * 10 + [3] + [0] * 48), 2)
LONGEST = CodeTable(4, 0, bytes([1, 2, 3, 4, 5, 6, 7, 8, 8] + [0] * 7))
BYTES = CodeTable(8, 0, bytes([8] * 256))
TWO = CodeTable(1, 0, b"\1\1")


@UNHURRIED
@given(SYMBOLS)
def test_streams_are_the_documented_ones(symbols):
    """Native code is written from the document; this test ties the document to the reference."""
    assert_as_documented(symbols, table_of(np.bincount(symbols, minlength=256)))


@pytest.mark.parametrize("count", COUNTS)
def test_every_number_of_symbols_is_spread_as_documented(count):
    """Steps and lanes end at other places than the symbols."""
    symbols = skewed(count).tolist()
    for table in (SKEWED, WITH_ESCAPE):
        assert_as_documented([min(s, 12) for s in symbols] if table is SKEWED else symbols, table)


@pytest.mark.parametrize("count", [5, 100, 16_500])
@pytest.mark.parametrize("table", [LONGEST, BYTES, TWO], ids=["longest", "bytes", "two"])
def test_codes_at_their_limits(count, table):
    """Words of one bit and of eight: lanes that take a byte each time, and never twice."""
    coded = np.flatnonzero(np.frombuffer(table.lengths, np.uint8))
    assert_as_documented(np.random.default_rng(count).choice(coded, count).tolist(), table)


@UNHURRIED
@given(SYMBOLS, st.integers(0, 600), st.lists(st.integers(0, 255), max_size=40))
def test_symbols_without_a_code_take_the_escape(seen, weight, others):
    """The escape ranks after every symbol of its length; the lowest symbol without a code stands
    for all.
    """
    counts = np.bincount(seen, minlength=256)
    table = table_of(counts, 0 if counts.all() else 1 + weight)
    assert_as_documented(others + seen + others if table.escape else seen, table)


@pytest.mark.parametrize("escape", [1, 2, 3])
def test_the_escape_may_be_any_leaf(escape):
    """Also the first one, and one among equals."""
    table = CodeTable(2, escape, bytes({1: [2, 0, 2, 0], 2: [1, 0, 2, 0], 3: [1, 3, 2, 0]}[escape]))
    for symbols in ([3, 0, 2, 3, 3, 0], [3] * 90, [0, 2] * 30 + [3], []):
        assert_as_documented(symbols, table)


@UNHURRIED
@given(SYMBOLS)
def test_size_is_that_of_the_code_and_two_bytes_a_lane(symbols):
    """The plan's cost relies on it: lanes hold fewer bits at the end than at the start."""
    table = table_of(np.bincount(symbols, minlength=256))
    coded = symbols[: max(0, len(symbols) - 16)]
    bits = sum(table.lengths[symbol] for symbol in coded)
    assert 2 * 16 + bits // 8 - 14 <= len(written(symbols, table)) <= 2 * 16 + bits // 8


def test_many_lanes_begin_where_the_document_says():
    """A lane costs two bytes, so small planes have few."""
    assert [lanes_of(count) for count in (0, 16_383, 16_384, 1 << 20)] == [16, 16, 128, 128]


@pytest.mark.parametrize("count", [3, 16, 17, 500])
def test_a_stream_that_is_cut_short_is_refused_at_every_byte(count):
    """The lanes need bytes that are missing, at any cut."""
    stream = written(np.minimum(skewed(count), 12), SKEWED)
    for size in range(len(stream)):
        with pytest.raises(FrameError, match="a stream ends before its symbols do"):
            read(stream[:size], SKEWED, count)


@pytest.mark.parametrize("count", [0, 3, 16, 500, 16_400])
def test_a_stream_with_bytes_left_is_refused(count):
    """Bytes are left after the last symbol."""
    stream = written(np.minimum(skewed(count), 12), SKEWED)
    for more in (b"\0", b"\1\2\3"):
        with pytest.raises(FrameError, match="a stream goes on after its symbols"):
            read(stream + more, SKEWED, count)


@pytest.mark.parametrize("count", [0, 9, 16, 500])
@pytest.mark.parametrize("lane", [0, 7, 15])
def test_a_lane_that_holds_no_bits_is_refused(count, lane):
    """Its second byte has no marking bit; also where the lane has no symbol."""
    stream = bytearray(written(np.minimum(skewed(count), 12), SKEWED))
    stream[16 + lane] = 0
    with pytest.raises(FrameError, match="a lane holds no bits"):
        read(stream, SKEWED, count)


@pytest.mark.parametrize("count", [0, 9, 16, 33])
@pytest.mark.parametrize("lane", [0, 15])
@pytest.mark.parametrize("held", [2, 3, 255])
def test_bits_left_in_a_lane_are_refused(count, lane, held):
    """They would be a second encoding of the same symbols."""
    stream = bytearray(written(np.full(count, 1), BYTES))
    assert stream[16 + lane] == 1
    stream[16 + lane] = held
    with pytest.raises(FrameError, match="a lane holds bits after its last code word"):
        read(stream, BYTES, count)


@pytest.mark.parametrize("count", [0, 9, 16])
@pytest.mark.parametrize("last", [64, 128, 255])
def test_a_lane_that_ends_with_no_symbol_is_refused(count, last):
    """A byte can exceed a plane of 6 bits; also where the lane has no symbol."""
    for lane in (0, 8, 15):
        stream = bytearray(written(np.ones(count, np.uint8), SKEWED))
        stream[lane] = last
        with pytest.raises(FrameError, match="a lane ends with no symbol of a plane of 6 bits"):
            read(stream, SKEWED, count)


def test_a_last_symbol_beyond_the_plane_is_refused_behind_coded_ones():
    """The byte is at the front of its lane's code words, not of the stream."""
    wide = CodeTable(8, 0, SKEWED.lengths + bytes(192))
    stream = written([*([1, 2, 3] * 80), 200], wide)
    assert 200 not in stream[:16]
    with pytest.raises(FrameError, match="no symbol of a plane of 6 bits"):
        read(stream, SKEWED, 241)


@pytest.mark.parametrize("count", [40, 16_400])
def test_damaged_streams_are_refused_or_have_another_meaning(count):
    """Each sequence of symbols has one stream: what is read from another is written as that."""
    table = CodeTable(3, 0, bytes([1, 2, 4, 4, 5, 5, 5, 5]))
    symbols = np.random.default_rng(0).integers(0, 8, count)
    stream = written(symbols, table)
    generator = np.random.default_rng(1)
    refused = 0
    for _ in range(300 if count < 100 else 20):
        damaged = bytearray(stream)
        for _ in range(generator.integers(1, 4)):
            damaged[generator.integers(len(stream))] ^= 1 << generator.integers(8)
        try:
            found = read(damaged, table, count)
        except FrameError:
            refused += 1
        else:
            assert written(found, table) == bytes(damaged)
    assert refused


def test_a_lane_may_end_with_any_symbol_of_the_plane():
    """One without a code, which no encoder leaves there, has no second meaning."""
    stream = bytearray(written([1] * 9, WITH_ESCAPE))
    stream[4], stream[12] = 63, 5
    assert read(stream, WITH_ESCAPE, 9) == [1, 1, 1, 1, 63, 1, 1, 1, 1]
