"""Grouped codes of `uniform`: two or four consecutive ones are one symbol.

At steps from about one root mean square on, most codes are among a few around zero, and one code
word for each would cost at least a bit. A symbol has a digit for each code, the first code's in the
highest bits:

    group   digits    codes with a digit    the highest digit
    2       3 bits    125 to 131            of all others, which are listed
    4       2 bits    127 to 129            likewise

A last group that lacks codes is filled up with zeros. docs/WIRE.md has the rules.
"""

from typing import Final

import numpy as np

from .errors import FrameError
from .formats import ByteArray, WordArray
from .reader import Reader
from .uniform import ZERO_CODE

LIST_HEAD_BYTES: Final = 2
WRONG_LIST: Final = "the listed codes of a block are too few or too many"


def _digit_bits(group: int) -> int:
    return {2: 3, 4: 2}[group]


def _lowest(group: int) -> int:
    """The code whose digit is 0."""
    return ZERO_CODE + 1 - (1 << (_digit_bits(group) - 1))


def is_listed(codes: WordArray, group: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of the codes (n,) have no digit."""
    lowest = _lowest(group)
    return (codes < lowest) | (codes >= lowest + (1 << _digit_bits(group)) - 1)


def grouped(codes: WordArray, group: int) -> ByteArray:
    """The symbols (ceil(n / group),) of codes (n,)."""
    bits = _digit_bits(group)
    digits = np.where(
        is_listed(codes, group), (1 << bits) - 1, codes.astype(np.int64) - _lowest(group)
    )
    digits = np.append(digits, np.full(-codes.size % group, ZERO_CODE - _lowest(group)))
    places = 1 << (bits * np.arange(group)[::-1])
    symbols: ByteArray = (digits.reshape(-1, group) * places).sum(axis=1).astype(np.uint8)
    return symbols


def write_listed(codes: WordArray, group: int, pieces: list[bytes]) -> None:
    """Append the codes of an inner block that have no digit: their number, then one byte each."""
    listed = codes[is_listed(codes, group)].astype(np.uint8)
    pieces += [listed.size.to_bytes(LIST_HEAD_BYTES, "little"), listed.tobytes()]


def read_listed(reader: Reader, group: int, count: int) -> ByteArray:
    """What `write_listed` wrote of a block of `count` codes; FrameError for anything else."""
    size = reader.number(LIST_HEAD_BYTES)
    if size > count:
        raise FrameError(f"{size} listed codes among {count}")
    listed = reader.take(size)
    if not is_listed(listed, group).all():
        raise FrameError("a listed code has a digit")
    return listed


def ungrouped(
    symbols: ByteArray, group: int, count: int, listed: ByteArray
) -> tuple[ByteArray, int]:
    """The codes (count,) of symbols, and how many of the `listed` ones they take.

    FrameError if they are too few, or the last group is not filled up with zeros.
    """
    bits = _digit_bits(group)
    shifts = (bits * np.arange(group)[::-1]).astype(np.uint8)
    digits = (symbols[:, None] >> shifts & ((1 << bits) - 1)).reshape(-1)
    codes = (digits + np.uint8(_lowest(group))).astype(np.uint8)
    if (codes[count:] != ZERO_CODE).any():
        raise FrameError("a last group is not filled up with zeros")
    places = np.flatnonzero(digits[:count] == (1 << bits) - 1)
    if places.size > listed.size:
        raise FrameError(WRONG_LIST)
    codes[places] = listed[: places.size]
    return codes[:count], places.size
