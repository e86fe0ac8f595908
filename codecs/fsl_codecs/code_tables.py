"""Code tables: the Huffman codes of a plane's symbols, and their form on the wire.

Rare symbols have no code: it would be long, and a sample may miss them. They take the escape leaf,
and each inner block lists them by their number among the plane's symbols without a code. Symbols
near those with codes are the most frequent of them and have the low numbers, so a number's bits
above the lowest few are written as ranks (Rice's code).
"""

from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from .errors import CodecUsageError, FrameError
from .formats import ByteArray
from .huffman import LENGTH_LIMIT, code_lengths
from .lanes import Code, build_code
from .reader import Reader

Counts = npt.NDArray[np.int64]
_MAXIMUM_LEAVES: Final = 1 << LENGTH_LIMIT
_LAST_RANK: Final = 15
"""Highest rank of a number, which is the number without its low bits."""
_RAREST_WITH_A_CODE: Final = 768
"""A symbol gets a code if it is at least one in this many."""


def _check(table: "CodeTable", _attribute: object, lengths: bytes) -> None:
    """CodecUsageError unless the code lengths fill the code space exactly (Kraft equality)."""
    if not 1 <= table.width <= 8 or len(lengths) != 1 << table.width:
        raise CodecUsageError(f"{len(lengths)} code lengths for a plane of {table.width} bits")
    leaves = [length for length in (*lengths, table.escape) if length]
    if not 2 <= len(leaves) <= _MAXIMUM_LEAVES or max(leaves) > LENGTH_LIMIT:
        raise CodecUsageError(f"{len(leaves)} codes of up to {max(leaves, default=0)} bits")
    if sum(1 << (LENGTH_LIMIT - length) for length in leaves) != 1 << LENGTH_LIMIT:
        raise CodecUsageError("code lengths do not fill the code space exactly")
    if table.escape and all(lengths):
        raise CodecUsageError("an escape where every symbol has a code")


def _check_low_bits(table: "CodeTable", _attribute: object, low_bits: int) -> None:
    """Raise CodecUsageError if the numbers need more than 15 ranks, or fewer low bits would do."""
    highest = max(0, table.uncoded.size - 1)
    if not 0 <= low_bits <= highest.bit_length() or highest >> low_bits > _LAST_RANK:
        raise CodecUsageError(f"numbers up to {highest} with {low_bits} low bits")


@frozen
class CodeTable:
    """Code lengths of the 2**width symbols of a plane and of the escape leaf; 0 stands for no code.

    CodecUsageError unless the code is complete, with 2 to 256 leaves of at most 8 bits, has an
    escape only if some symbol has no code, and its low bits leave at most 15 ranks.
    """

    width: int
    escape: int
    lengths: bytes = field(validator=_check)
    low_bits: int = field(default=0, validator=_check_low_bits)

    @cached_property
    def code(self) -> Code:
        """The code as tables."""
        return build_code(self.lengths, self.escape)

    @cached_property
    def uncoded(self) -> ByteArray:
        """The symbols that take the escape, by number: nearest to those with codes first."""
        return _by_distance(np.frombuffer(self.lengths, np.uint8))[: None if self.escape else 0]

    @cached_property
    def last_rank(self) -> int:
        """The highest number without its low bits."""
        return max(0, self.uncoded.size - 1) >> self.low_bits

    @cached_property
    def packed(self) -> bytes:
        """The table's bytes: first symbol, last symbol, escape and low bits, lengths as nibbles."""
        coded = np.flatnonzero(np.frombuffer(self.lengths, np.uint8))
        first, last = int(coded[0]), int(coded[-1])
        nibbles = np.frombuffer(self.lengths, np.uint8)[first : last + 1]
        if len(nibbles) % 2:
            nibbles = np.append(nibbles, np.uint8(0))
        packed = nibbles[0::2] | nibbles[1::2] << np.uint8(4)
        return bytes((first, last, self.escape | self.low_bits << 4)) + packed.tobytes()

    @cached_property
    def costs(self) -> Counts:
        """Bits of each symbol (2**width,), including its number in a list."""
        costs = np.frombuffer(self.lengths, np.uint8).astype(np.int64)
        costs[self.uncoded] = self.escape + _number_bits(self.uncoded.size, self.low_bits)
        return costs


def _by_distance(lengths: ByteArray) -> ByteArray:
    """The symbols of length 0, in the order of their numbers.

    Those between symbols with codes come first, the others by distance from them, the lower first.
    """
    coded, without = np.flatnonzero(lengths), np.flatnonzero(lengths == 0)
    first, last = (int(coded[0]), int(coded[-1])) if coded.size else (0, 0)
    distance = np.maximum(0, np.maximum(first - without, without - last))
    return without[np.lexsort((without, distance))].astype(np.uint8)


def _number_bits(count: int, low_bits: int) -> Counts:
    """Bits of the numbers from 0 to count - 1: low bits, then a bit per rank up to their own.

    The last rank needs no bit of its own.
    """
    ranks = np.arange(count, dtype=np.int64) >> low_bits
    bits: Counts = low_bits + np.minimum(ranks + 1, max(0, count - 1) >> low_bits)
    return bits


def _cheapest_low_bits(counts: Counts) -> int:
    """The low bits that cost least for symbols that occur `counts` (n,) times, by number.

    Each symbol counts a sixteenth more than it was seen, because the sample may have missed some.
    """
    highest = max(0, counts.size - 1)
    weights = 16 * counts + 1
    allowed = (bits for bits in range(highest.bit_length() + 1) if highest >> bits <= _LAST_RANK)
    return min(allowed, key=lambda bits: int(weights @ _number_bits(counts.size, bits)))


def table_from_counts(counts: Counts, width: int, *, sampled: bool) -> CodeTable:
    """The table for symbols that occur `counts` (2**width,) times; two occur, or it is `sampled`.

    Symbols rarer than one in 768 have no code. In a sample, neither have symbols that do not occur;
    they may occur in the rest of the chunk. The escape leaf counts as often as all of these, and at
    least once. No leaf counts less than a 256th, because its word would be longer than 8 bits.
    """
    total = int(counts.sum())
    has_code = counts * _RAREST_WITH_A_CODE >= total
    kept = np.where(has_code, counts, 0)
    floor = total >> LENGTH_LIMIT
    escape = 0
    if not has_code.all() and (sampled or (counts[~has_code] > 0).any()):
        escape = max(1, floor, total - int(kept.sum()))
    kept[has_code] = np.maximum(kept[has_code], floor)
    lengths = code_lengths(np.append(kept, escape))
    low_bits = _cheapest_low_bits(counts[_by_distance(lengths[:-1])]) if escape else 0
    return CodeTable(width, int(lengths[-1]), lengths[:-1].tobytes(), low_bits)


def read_table(reader: Reader, width: int) -> CodeTable:
    """Read what `CodeTable.packed` wrote; FrameError for anything it cannot have written."""
    first, last, escape = reader.byte(), reader.byte(), reader.byte()
    if not first <= last < 1 << width:
        raise FrameError(f"code table covers symbols {first} to {last} of a plane of {width} bits")
    count = last - first + 1
    packed = reader.take((count + 1) // 2)
    nibbles = np.empty(2 * len(packed), dtype=np.uint8)
    nibbles[0::2] = packed & np.uint8(15)
    nibbles[1::2] = packed >> np.uint8(4)
    if nibbles[count:].any() or not nibbles[0] or not nibbles[count - 1]:
        raise FrameError("code table has stray or missing nibbles at its ends")
    lengths = np.zeros(1 << width, dtype=np.uint8)
    lengths[first : last + 1] = nibbles[:count]
    try:
        return CodeTable(width, escape & 15, lengths.tobytes(), escape >> 4)
    except CodecUsageError as error:
        raise FrameError(str(error)) from None
