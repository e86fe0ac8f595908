"""Bit planes, and ranks for small numbers (docs/WIRE.md, "Bit planes and ranks")."""

import numpy as np

from .formats import ByteArray
from .reader import Reader


def write_planes(symbols: ByteArray, width: int, pieces: list[bytes]) -> None:
    """Append the lowest `width` bits of symbols (n,), the highest bit's plane first.

    The first symbol is in the lowest bit of a plane's first byte.
    """
    pieces.extend(
        np.packbits(symbols & np.uint8(1 << bit), bitorder="little").tobytes()
        for bit in reversed(range(width))
    )


def read_planes(reader: Reader, count: int, width: int) -> ByteArray:
    """Symbols (count,) from `width` bit planes."""
    symbols = np.zeros(count, dtype=np.uint8)
    for _ in range(width):
        symbols <<= np.uint8(1)
        symbols |= np.unpackbits(reader.take((count + 7) // 8), count=count, bitorder="little")
    return symbols


def write_ranks(ranks: ByteArray, last: int, pieces: list[bytes]) -> None:
    """Append ranks (n,) from 0 to `last`.

    For each rank but the last, each number of at least that rank gets a bit: 1 if it is higher.
    """
    bits = [np.zeros(0, dtype=np.bool_)]
    bits += [ranks[ranks >= rank] > rank for rank in range(last)]
    pieces.append(np.packbits(np.concatenate(bits), bitorder="little").tobytes())


def read_ranks(reader: Reader, count: int, last: int) -> ByteArray:
    """The ranks (count,) that `write_ranks` wrote."""
    ranks = np.zeros(count, dtype=np.uint8)
    bits = np.zeros(0, dtype=np.uint8)
    for rank in range(last):
        reached = np.flatnonzero(ranks == rank)
        missing = max(0, reached.size - bits.size)
        more = np.unpackbits(reader.take((missing + 7) // 8), bitorder="little")
        bits = np.append(bits, more)
        ranks[reached] += bits[: reached.size]
        bits = bits[reached.size :]
    return ranks
