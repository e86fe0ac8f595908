"""Code tables: the Huffman codes of a plane's symbols, own or static, and their form on the wire.

A table may leave symbols without a code; they take its escape leaf, and each inner block lists them besides, by their number among the
plane's symbols without a code. Rare symbols are left out on purpose: they would need long codes, and need not be in a sample. As most lie near
the symbols with codes, those have the low numbers, and the number's bits above the lowest few go as ranks (Rice's code).
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
"""Of a number, above its low bits."""
_RAREST_WITH_A_CODE: Final = 768
"""A symbol has a code in a chunk's own table when it is at least one of so many."""


def _check(table: "CodeTable", _attribute: object, lengths: bytes) -> None:
    """Raise CodecUsageError unless the code lengths fill the code space exactly (Kraft equality)."""
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
    """Raise CodecUsageError for numbers that could take more ranks than there are, or have low bits without need."""
    highest = max(0, table.uncoded.size - 1)
    if not 0 <= low_bits <= highest.bit_length() or highest >> low_bits > _LAST_RANK:
        raise CodecUsageError(f"numbers up to {highest} with {low_bits} low bits")


@frozen
class CodeTable:
    """Code lengths of the 2**width symbols of a plane, 0 for those without a code, and of the escape leaf (0: there is none).

    CodecUsageError unless they are a complete code of 2 to 256 leaves and at most 8 bits, with an escape only where it is needed, and the
    numbers of symbols without a code are at most 15 above their low bits.
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
        """The symbols that take the escape, by number: from the nearest to those with codes on, the lower first; empty without an escape."""
        return _by_distance(np.frombuffer(self.lengths, np.uint8))[: None if self.escape else 0]

    @cached_property
    def last_rank(self) -> int:
        """The highest number without its low bits."""
        return max(0, self.uncoded.size - 1) >> self.low_bits

    @cached_property
    def packed(self) -> bytes:
        """First symbol, last symbol, length of the escape and low bits, then a nibble per symbol between them, low nibble first."""
        coded = np.flatnonzero(np.frombuffer(self.lengths, np.uint8))
        first, last = int(coded[0]), int(coded[-1])
        nibbles = np.frombuffer(self.lengths, np.uint8)[first : last + 1]
        if len(nibbles) % 2:
            nibbles = np.append(nibbles, np.uint8(0))
        packed = nibbles[0::2] | nibbles[1::2] << np.uint8(4)
        return bytes((first, last, self.escape | self.low_bits << 4)) + packed.tobytes()

    @cached_property
    def costs(self) -> Counts:
        """Bits of each symbol (2**width,), with its number in the list where it is escaped; 0 marks what cannot be coded."""
        costs = np.frombuffer(self.lengths, np.uint8).astype(np.int64)
        costs[self.uncoded] = self.escape + _number_bits(self.uncoded.size, self.low_bits)
        return costs


def _by_distance(lengths: ByteArray) -> ByteArray:
    """The symbols of length 0 in (2**width,): those between others first, then by their distance to these, the lower first."""
    coded, without = np.flatnonzero(lengths), np.flatnonzero(lengths == 0)
    first, last = (int(coded[0]), int(coded[-1])) if coded.size else (0, 0)
    distance = np.maximum(0, np.maximum(first - without, without - last))
    return without[np.lexsort((without, distance))].astype(np.uint8)


def _number_bits(count: int, low_bits: int) -> Counts:
    """Bits of the numbers (count,): low bits, and a bit for each rank up to their own, but none for the last."""
    ranks = np.arange(count, dtype=np.int64) >> low_bits
    bits: Counts = low_bits + np.minimum(ranks + 1, max(0, count - 1) >> low_bits)
    return bits


def _cheapest_low_bits(counts: Counts) -> int:
    """For symbols that occur `counts` (n,) times in a sample, by number. Each may occur besides, a little, where no sample was taken."""
    highest = max(0, counts.size - 1)
    weights = 16 * counts + 1
    allowed = (bits for bits in range(highest.bit_length() + 1) if highest >> bits <= _LAST_RANK)
    return min(allowed, key=lambda bits: int(weights @ _number_bits(counts.size, bits)))


def table_from_counts(counts: Counts, width: int, *, sampled: bool) -> CodeTable:
    """The table for symbols that occur `counts` (2**width,) times, at least two of them or `sampled`.

    Symbols that are rarer than one of 768 have no code, and neither has, in a sample, what does not occur: it may do so in the rest. The
    escape leaf weighs as much as all of them, but at least 1. No leaf weighs less than a 256th: it would be deeper than words may be long.
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
    """The table that `CodeTable.packed` wrote; FrameError for anything that it cannot have written."""
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
