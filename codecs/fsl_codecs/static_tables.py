"""Code tables that every peer has: a small tensor's own table would cost more than it saves.

Each is the own table of 2**22 values of a Gaussian or Laplace distribution in blocks of 128
(benchmarks/static_tables.py). They are part of the wire format and never change.
"""

from functools import cache
from typing import Final

import numpy as np

from .code_tables import CodeTable, read_table
from .reader import Reader

_WIDTH: Final = 6

# (format, number, packed table)
_TABLE: Final = (
    ("e4m3", 0, "1c3e27888888887877676656554554444443546508"),
    ("e4m3", 1, "183e278888888877776666555555554444445454668608"),
    ("e5m2", 2, "2a3d2888887767554434333384"),
    ("e5m2", 3, "283d288888676655444433335486"),
    ("uniform", 4, "172828886845333333547688"),
    ("uniform", 5, "162a288877564533324465768808"),
    ("uniform", 6, "1b2528683422338508"),
    ("uniform", 7, "1c24286824318508"),
)


@cache
def static_tables(format_name: str) -> tuple[tuple[int, CodeTable], ...]:
    """Number and table of each static table for that format's planes of 6 bits, in order."""
    return tuple(
        (number, read_table(Reader(np.frombuffer(bytes.fromhex(packed), np.uint8)), _WIDTH))
        for name, number, packed in _TABLE
        if name == format_name
    )
