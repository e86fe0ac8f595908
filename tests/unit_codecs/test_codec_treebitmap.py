"""The bit layout, against a reader that follows docs/WIRE.md one symbol at a time."""

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

UNHURRIED = settings(deadline=None, max_examples=60)
SYMBOLS = st.lists(st.integers(0, 255) | st.integers(0, 3), min_size=2, max_size=600).filter(
    lambda symbols: len(set(symbols)) > 1
)


def canonical_codes(lengths):
    """Symbol to code word, as a string of 0 and 1, by the textbook rule."""
    code, previous, words = 0, 0, {}
    for length, symbol in sorted((int(n), s) for s, n in enumerate(lengths) if n):
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


def coded(symbols, lengths):
    pieces = []
    write_block(build_tree(lengths), np.array(symbols, np.uint8), pieces)
    return b"".join(pieces)


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
    reader = Reader(np.frombuffer(coded(symbols, lengths), np.uint8))
    assert read_block(build_tree(lengths), reader, len(symbols)).tolist() == symbols
    reader.finish()


@UNHURRIED
@given(SYMBOLS)
def test_size_is_that_of_the_code_plus_seven_bits_a_bitmap(symbols):
    """The plan's cost relies on this bound, and bound() on the plan's cost."""
    counts = np.bincount(symbols, minlength=256)
    lengths = code_lengths(counts)
    bits = int((counts * lengths).sum())
    assert bits <= 8 * len(coded(symbols, lengths)) <= bits + 7 * build_tree(lengths).bitmaps


def test_a_code_may_hold_symbols_a_block_lacks():
    """A chunk has one codebook, its blocks have their own symbols, and some nodes stay empty."""
    lengths = code_lengths(np.array([50, 30, 9, 5, 3, 2, 1]))
    for symbols in ([0], [6], [1, 1, 1], [5, 0, 6]):
        data = np.frombuffer(coded(symbols, lengths), np.uint8)
        assert read_block(build_tree(lengths), Reader(data), len(symbols)).tolist() == symbols


def test_truncation_is_noticed_at_every_byte():
    """Each node's size is known before it is read, so no cut can pass."""
    symbols = np.random.default_rng(3).geometric(0.4, 500).clip(1, 20)
    lengths = code_lengths(np.bincount(symbols, minlength=32))
    tree, data = build_tree(lengths), np.frombuffer(coded(symbols, lengths), np.uint8)
    for size in range(data.size):
        with pytest.raises(FrameError, match="too early"):
            read_block(tree, Reader(data[:size]), symbols.size)


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
