"""Bit planes: each bit of all symbols by itself, the top bit first, padded with zeros to whole bytes, the first symbol in the lowest bit."""

import numpy as np

from .formats import ByteArray
from .reader import Reader


def write_planes(symbols: ByteArray, width: int, pieces: list[bytes]) -> None:
    """Append the lowest `width` bits of each symbol (n,) as bit planes."""
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
