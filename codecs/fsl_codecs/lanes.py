"""Streams: a plane's symbols of a whole chunk, Huffman-coded on lanes that share one byte stream.

Symbol i belongs to lane i mod L. A lane holds v, an integer of 8 + p bits, p from 0 to 7, whose
highest bits start with its next code word. Decoding removes that word and, if fewer than 8 bits are
left, appends the stream's next byte below them. Encoding goes from the last symbol to the first and
reverses each step, so both sides handle the bytes in a known order. This is the arrangement of
Giesen ("Interleaved entropy coders", 2014), with Huffman's code instead of an arithmetic one.

    stream = the lowest byte of each lane's v, the rest of each lane's v + 2**p, the lanes' bytes

The last L symbols are not coded: they are the lanes' final states. So no step of a lane starts with
fewer than 8 bits, and a decoder that checks the end of the stream and of each lane accepts one
stream per sequence of symbols. A symbol without a code is the lowest such symbol in the stream,
with the code word of the escape leaf.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
from attrs import frozen

from .errors import FrameError
from .formats import ByteArray
from .huffman import LENGTH_LIMIT

_MANY_LANES: Final = 128
_FEW_LANES: Final = 16
MANY_LANES_FROM: Final = 16384
"""Number of symbols."""

Table = npt.NDArray[np.int64]


@frozen(eq=False)
class Code:
    """A canonical code as tables.

    words, lengths: each symbol's (symbols,) code word and its length; the escape leaf's for a
    symbol without a code.
    marks: the symbol that represents it in a stream: itself, or the lowest symbol without a code.
    marks_of_bits, lengths_of_bits: for 8 bits (256,) that start with a code word, its mark and its
    length.
    """

    words: Table
    lengths: Table
    marks: ByteArray
    marks_of_bits: ByteArray
    lengths_of_bits: Table


def lanes_of(count: int, many_from: int) -> int:
    """The number of lanes of `count` symbols."""
    return _MANY_LANES if count >= many_from else _FEW_LANES


def build_code(code_lengths: bytes, escape: int) -> Code:
    """Tables from complete code lengths (symbols,) and the escape leaf's; 0 stands for no code."""
    lengths = np.frombuffer(code_lengths + bytes((escape,)), np.uint8).astype(np.int64)
    leaves = np.flatnonzero(lengths)
    # The escape comes last among equals.
    leaves = leaves[np.argsort(lengths[leaves], kind="stable")]
    # The number of bytes, of 256, that start with each leaf's code word.
    spans = 1 << (LENGTH_LIMIT - lengths[leaves])
    words = np.zeros_like(lengths)
    words[leaves] = (np.cumsum(spans) - spans) // spans
    leaf_of_symbol = np.arange(lengths.size - 1)
    marks = np.arange(lengths.size, dtype=np.uint8)
    if escape:
        uncoded = np.flatnonzero(lengths == 0)
        leaf_of_symbol[uncoded] = lengths.size - 1
        marks[uncoded] = marks[-1] = uncoded[0]
    leaf_of_bits = np.repeat(leaves, spans)
    return Code(
        words[leaf_of_symbol],
        lengths[leaf_of_symbol],
        marks[:-1],
        marks[leaf_of_bits],
        lengths[leaf_of_bits],
    )


def write_stream(code: Code, symbols: ByteArray, many_from: int = MANY_LANES_FROM) -> bytes:
    """The stream of symbols (n,), which all have a code word or take the escape."""
    lanes = lanes_of(symbols.size, many_from)
    coded = max(0, symbols.size - lanes)
    v = np.zeros(lanes, dtype=np.int64)
    p = np.zeros(lanes, dtype=np.int64)
    v[np.arange(coded, symbols.size) % lanes] = code.marks[symbols[coded:]]
    words, lengths = code.words[symbols[:coded]], code.lengths[symbols[:coded]]
    taken = []
    for start in reversed(range(0, coded, lanes)):
        # Only the step made first, of the last symbols, may have fewer symbols than lanes.
        step = slice(start, min(start + lanes, coded))
        active = slice(step.stop - start)
        v[active] += words[step] << (p[active] + 8)
        p[active] += lengths[step]
        is_full = p >= 8
        taken.append(v[is_full].astype(np.uint8))
        gone = is_full * 8
        v >>= gone
        p -= gone
    taken += [((v >> 8) + (1 << p)).astype(np.uint8), v.astype(np.uint8)]
    return np.concatenate(taken[::-1]).tobytes()


class StreamReader:
    """Reads what `write_stream` wrote, piece by piece; FrameError if it cannot have written it."""

    def __init__(
        self,
        code: Code,
        stream: ByteArray,
        width: int,
        count: int,
        many_from: int = MANY_LANES_FROM,
    ) -> None:
        """The stream (n,) holds `count` symbols of `width` bits."""
        self._code, self._stream, self._width = code, stream, width
        self._lanes = lanes_of(count, many_from)
        self._coded = max(0, count - self._lanes)
        self._done = 0
        self._position = 2 * self._lanes
        if stream.size < self._position:
            raise FrameError("a stream ends before its symbols do")
        bits_and_one = stream[self._lanes : self._position].astype(np.int64)
        if not bits_and_one.all():
            raise FrameError("a lane holds no bits")
        self._p = _BIT_LENGTHS[bits_and_one] - 1
        self._v = stream[: self._lanes] + ((bits_and_one - (1 << self._p)) << 8)

    def read(self, count: int) -> ByteArray:
        """The next symbols (count,): a multiple of 128, or all that are left."""
        symbols = np.empty(count, dtype=np.uint8)
        first, self._done = self._done, self._done + count
        coded = min(count, max(0, self._coded - first))
        for start in range(0, coded, self._lanes):
            step = slice(start, min(start + self._lanes, coded))
            self._step(symbols[step])
        if first <= self._coded <= self._done:
            self._check_end()
        symbols[coded:] = self._v[np.arange(first + coded, self._done) % self._lanes]
        return symbols

    def _step(self, symbols: ByteArray) -> None:
        """Read one symbol (n,) from each of the first n lanes."""
        v, p, active = self._v, self._p, slice(symbols.size)
        bits = v[active] >> p[active]
        symbols[:] = self._code.marks_of_bits[bits]
        p[active] -= self._code.lengths_of_bits[bits]
        is_short = np.flatnonzero(p < 0)
        taken = self._stream[self._position : self._position + is_short.size]
        if taken.size < is_short.size:
            raise FrameError("a stream ends before its symbols do")
        self._position += taken.size
        v[is_short] = (v[is_short] << 8) + taken
        p[is_short] += 8
        v &= (256 << p) - 1

    def _check_end(self) -> None:
        """FrameError unless the stream ends after the last symbol that has a code word."""
        if self._position != self._stream.size:
            raise FrameError("a stream goes on after its symbols")
        if self._p.any():
            raise FrameError("a lane holds bits after its last code word")
        if (self._v >> self._width).any():
            raise FrameError(f"a lane ends with no symbol of a plane of {self._width} bits")


_BIT_LENGTHS: Final = np.array([number.bit_length() for number in range(256)])
