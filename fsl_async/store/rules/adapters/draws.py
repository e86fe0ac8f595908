"""Random numbers that are the same on every machine, and draws of the factor A. Pure.

Random bits are those of Philox4x64-10 (Salmon et al. 2011), whose streams NumPy promises to keep;
they become numbers here, because NumPy does not promise that for its distributions.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BITS = 24
"""Random bits of a number, as many as fp32 holds."""


def stream(seed: int, name: str) -> np.random.Philox:
    """Return the stream `name` of a seed, from its beginning. Its key is a hash of both."""
    digest = hashlib.sha256(f"fsl-counter-2/{seed}/{name}".encode()).digest()
    return np.random.Philox(key=np.frombuffer(digest, "<u8", 2).astype(np.uint64))


@frozen
class Draw:
    """Key of the random numbers of one module's factor.

    seed: the run's. version: the one that is made. module: its index among the adapted modules.
    """

    seed: int
    version: int
    module: int

    def a(self, rows: int, columns: int) -> NDArray[np.float32]:
        """Return A, float32 (rows, columns), uniform with a mean of 0 and variance 1/(3 columns).

        Its values lie between -1/sqrt(columns) and 1/sqrt(columns), as torch's linear layers start.
        """
        return drawn_a(self.seed % 2**64, self.version << 32 | self.module, rows, columns)


def drawn_a(first: int, second: int, rows: int, columns: int) -> NDArray[np.float32]:
    """Return a factor as `Draw.a` does, by the two words of a key."""
    key = np.array([first, second], np.uint64)
    words = np.random.Philox(key=key).random_raw(rows * columns)
    # The middle of one of 2^24 equal steps of (-1, 1): exact in float64, rounded once to fp32.
    places = (words >> np.uint64(64 - _BITS)).astype(np.float64)
    unit = (2.0 * places + 1.0) * 2.0**-_BITS - 1.0
    return (unit / math.sqrt(columns)).astype(np.float32).reshape(rows, columns)
