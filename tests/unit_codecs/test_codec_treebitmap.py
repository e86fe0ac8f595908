"""The bit layout, against a reader that follows docs/WIRE.md one symbol at a time."""

from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_codecs import FrameError
from fsl_codecs.huffman import code_lengths
from fsl_codecs.treebitmap import (
    Reader,
    build_tree,
    read_block,
    read_planes,
    write_block,
    write_planes,
)

ESCAPE = 256
UNHURRIED = settings(deadline=None, max_examples=60)
SYMBOLS = st.lists(st.integers(0, 255) | st.integers(0, 3), min_size=2, max_size=600).filter(
    lambda symbols: len(set(symbols)) > 1
)


def canonical_codes(lengths, escape=0):
    """Symbol to code word, as a string of 0 and 1, by the textbook rule; the escape counts as symbol ESCAPE, the last of all."""
    code, previous, words = 0, 0, {}
    leaves = [*enumerate(lengths), (ESCAPE, escape)]
    for length, symbol in sorted((int(n), s) for s, n in leaves if n):
        code <<= length - previous
        words[symbol] = format(code, f"0{length}b")
        code, previous = code + 1, length
    return words


def layout(words, symbols, depth=0):
    """Bytes of a node and all below it; `words` are the code words that pass through it."""
    if not symbols or max(len(word) for word in words.values()) == depth:
        return b""
    if len({len(word) for word in words.values()}) == 1:
        depths = range(depth, len(next(iter(words.values()))))
        return b"".join(pack([words[s][d] for s in symbols]) for d in depths)
    parts = [pack([words[symbol][depth] for symbol in symbols])]
    for bit in "01":
        child = {symbol: word for symbol, word in words.items() if word[depth] == bit}
        parts.append(layout(child, [s for s in symbols if s in child], depth + 1))
    return b"".join(parts)


def pack(bits):
    text = "".join(bits) + "0" * (-len(bits) % 8)
    return bytes(int(text[at : at + 8][::-1], 2) for at in range(0, len(text), 8))


def coded(symbols, lengths, escape=0):
    pieces = []
    write_block(build_tree(bytes(lengths), escape), np.array(symbols, np.uint8), pieces)
    return b"".join(pieces)


def read(data, lengths, count, escape=0):
    """Symbols; no byte may be left."""
    reader = Reader(np.frombuffer(data, np.uint8))
    symbols = read_block(build_tree(bytes(lengths), escape), reader, count)
    reader.finish()
    return symbols.tolist()


@UNHURRIED
@given(SYMBOLS)
def test_layout_is_the_documented_one(symbols):
    """Native code is written from the document; this pins the document to the reference."""
    lengths = code_lengths(np.bincount(symbols, minlength=256))
    assert coded(symbols, lengths) == layout(canonical_codes(lengths), symbols)


@UNHURRIED
@given(SYMBOLS)
def test_blocks_survive(symbols):
    """Every symbol comes back in its place and no byte is left."""
    lengths = code_lengths(np.bincount(symbols, minlength=256))
    assert read(coded(symbols, lengths), lengths, len(symbols)) == symbols


@UNHURRIED
@given(SYMBOLS)
def test_size_is_that_of_the_code_plus_seven_bits_a_bitmap(symbols):
    """The plan's cost relies on this bound, and bound() on the plan's cost."""
    counts = np.bincount(symbols, minlength=256)
    lengths = code_lengths(counts)
    bits = int((counts * lengths).sum())
    assert bits <= 8 * len(coded(symbols, lengths)) <= bits + 7 * build_tree(bytes(lengths)).bitmaps


def test_a_code_may_hold_symbols_a_block_lacks():
    """A chunk has one codebook, its blocks have their own symbols, and some nodes stay empty."""
    lengths = code_lengths(np.array([50, 30, 9, 5, 3, 2, 1]))
    for symbols in ([0], [6], [1, 1, 1], [5, 0, 6]):
        assert read(coded(symbols, lengths), lengths, len(symbols)) == symbols


def test_truncation_is_noticed_at_every_byte():
    """Each node's size is known before it is read, so no cut can pass."""
    symbols = np.random.default_rng(3).geometric(0.4, 500).clip(1, 20)
    lengths = code_lengths(np.bincount(symbols, minlength=32))
    tree, data = build_tree(bytes(lengths)), np.frombuffer(coded(symbols, lengths), np.uint8)
    for size in range(data.size):
        with pytest.raises(FrameError, match="too early"):
            read_block(tree, Reader(data[:size]), symbols.size)


@UNHURRIED
@given(SYMBOLS, st.integers(0, 600), st.lists(st.integers(0, 255), max_size=40))
def test_symbols_without_a_code_take_the_escape(seen, weight, others):
    """They follow the bitmaps as they are; the escape ranks behind every symbol of its length, which decides the bitmaps."""
    counts = np.bincount(seen, minlength=256)
    lengths = code_lengths(np.append(counts, 0 if counts.all() else 1 + weight))
    lengths, escape = lengths[:-1].tolist(), int(lengths[-1])
    others = others if escape else []
    symbols = [
        symbol for pair in zip_longest(seen, others) for symbol in pair if symbol is not None
    ]
    leaves = [symbol if lengths[symbol] else ESCAPE for symbol in symbols]
    listed = bytes(symbol for symbol in symbols if not lengths[symbol])
    data = coded(symbols, lengths, escape)
    assert data == layout(canonical_codes(lengths, escape), leaves) + listed
    assert read(data, lengths, len(symbols), escape) == symbols


@pytest.mark.parametrize("escape", [1, 2, 3])
def test_the_escape_may_be_any_leaf(escape):
    """Also the first one, and one below a node whose leaves are equally deep."""
    lengths = {1: [2, 0, 2, 0], 2: [1, 0, 2, 0], 3: [1, 3, 2, 0]}[escape]
    for symbols in ([3, 0, 2, 3, 3, 0], [3] * 9, [0, 2], []):
        data = coded(symbols, lengths, escape)
        leaves = [symbol if lengths[symbol] else ESCAPE for symbol in symbols]
        listed = bytes(symbol for symbol in symbols if not lengths[symbol])
        assert data == layout(canonical_codes(lengths, escape), leaves) + listed
        assert read(data, lengths, len(symbols), escape) == symbols


def test_a_list_that_is_cut_short_is_noticed():
    """As many bytes follow as symbols were escaped."""
    lengths, symbols = [1, 2] + [0] * 14, [0, 1, 9, 12, 0, 9]
    data = coded(symbols, lengths, 2)
    assert data[-3:] == bytes([9, 12, 9])
    with pytest.raises(FrameError, match="too early"):
        read(data[:-1], lengths, 6, 2)
    with pytest.raises(FrameError, match="1 bytes too many"):
        read(data + b"\0", lengths, 6, 2)


@UNHURRIED
@given(st.lists(st.integers(0, 255), max_size=70), st.integers(0, 8))
def test_bit_planes_survive(symbols, width):
    """Raw planes and scales use them, at every width and length."""
    kept = [symbol & ((1 << width) - 1) for symbol in symbols]
    pieces = []
    write_planes(np.array(kept, np.uint8), width, pieces)
    data = b"".join(pieces)
    assert len(data) == width * ((len(symbols) + 7) // 8)
    assert read_planes(Reader(np.frombuffer(data, np.uint8)), len(symbols), width).tolist() == kept
