"""Books that every peer has: for small tensors, whose own book would cost more than it saves.

They were made once, from 2**22 values of a Gaussian and of a Laplace distribution in blocks of 128; symbols rarer than 2**-16 have
no code, and the escape weighs 2**-13. They are part of the wire format and never change; new ones get new numbers.
"""

from functools import cache
from typing import Final

import numpy as np

from .books import Codebook, read_book
from .reader import Reader

_WIDTH: Final = 6

# (format, number, packed book)
_TABLE: Final = (
    ("e4m3", 0, "003f0cccccccccccccccccccccbbbbabaa9a99898878776666565545544444435465c8"),
    ("e4m3", 1, "003f0cccccccccccccccbcbbbb9aaa99998888777766665555555544444454546676b8"),
    ("e5m2", 2, "1e3d0cccccccccbcaa9a887866554434333384"),
    ("e5m2", 3, "1c3d0cccccccbcabaa8988676655444433335486"),
    ("uniform", 4, "142b0bbc9a7856343333436587a9cb"),
    ("uniform", 5, "0e310cccccbc9a89775645333244657688a9bbcccc"),
    ("uniform", 6, "1b24098a461253a7"),
    ("uniform", 7, "19260ccc8b46125397cb"),
)


@cache
def static_books(format_name: str) -> tuple[tuple[int, Codebook], ...]:
    """Number and book of each static book for that format's planes of 6 bits, in order of their numbers."""
    return tuple(
        (number, read_book(Reader(np.frombuffer(bytes.fromhex(packed), np.uint8)), _WIDTH))
        for name, number, packed in _TABLE
        if name == format_name
    )
